"""A Ray cluster of several nodes on this machine, in a separate process.

Ray's test cluster must not start in a process in which TensorFlow has threads.
The process reads commands from its standard input, one a line, and answers each
with a line of JSON:

*   `add NUM_CPUS` starts a node; the answer is the cluster's address and the id
    of the node's raylet, the parent process of its workers.
*   `remove N` kills node N.

The cluster ends with the standard input.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys


class Nodes:
  """The cluster, as tests see it."""

  def __init__(self):
    # Ray notices the loss of a node sooner.
    quick = {
        'RAY_health_check_initial_delay_ms': '0',
        'RAY_health_check_period_ms': '500',
        'RAY_health_check_timeout_ms': '1000',
        'RAY_health_check_failure_threshold': '4',
        'RAY_USAGE_STATS_ENABLED': '0',
    }
    self._process = subprocess.Popen(
        [sys.executable, str(pathlib.Path(__file__))],
        env={**os.environ, **quick, 'PYTHONPATH': os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    self.address = None
    self.raylets = []

  def add(self, num_cpus):
    """Starts a node; the first one is the head."""
    self.address, raylet = self._ask(f'add {num_cpus}')
    self.raylets.append(raylet)

  def remove(self, number):
    """Kills a node."""
    self._ask(f'remove {number}')

  def _ask(self, command):
    self._process.stdin.write(f'{command}\n')
    self._process.stdin.flush()
    return json.loads(self._process.stdout.readline())

  def close(self):
    """Ends all nodes."""
    self._process.stdin.close()
    self._process.wait(60)
    self._process.stdout.close()


@contextlib.contextmanager
def started(*num_cpus):
  """Starts a cluster with a node for each number of CPUs."""
  nodes = Nodes()
  try:
    for number in num_cpus:
      nodes.add(number)
    yield nodes
  finally:
    nodes.close()


def _main():
  from ray import cluster_utils

  cluster = cluster_utils.Cluster()
  nodes = []
  for line in sys.stdin:
    command, number = line.split()
    if command == 'add':
      nodes.append(
          cluster.add_node(
              num_cpus=int(number),
              num_gpus=0,
              include_dashboard=False,
              object_store_memory=100 * 2**20,
          )
      )
      (raylet,) = nodes[-1].all_processes['raylet']
      answer = [cluster.address, raylet.process.pid]
    else:
      cluster.remove_node(nodes[int(number)], allow_graceful=False)
      answer = None
    print(json.dumps(answer), flush=True)
  cluster.shutdown()


if __name__ == '__main__':
  _main()
