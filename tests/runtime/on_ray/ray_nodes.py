"""A Ray cluster of several nodes on this machine, in a process of its own.

Ray's own test cluster must not be started where TensorFlow has threads. A line
of the standard input is a command, whose answer is one line of JSON:

*   `add NUM_CPUS`: starts a node; the answer is the address and the ids of its
    processes, the raylet first. Workers are children of the raylet.
*   `remove N`: ends the Nth node at once, without a farewell.

The cluster ends with the standard input.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys


class Nodes:
  """The cluster, for tests."""

  def __init__(self):
    # Ray notices sooner that a node is gone.
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
    self.address, self._latest = self._ask(f'add {num_cpus}')
    self.raylets.append(self._latest[0])

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
      processes = nodes[-1].all_processes
      answer = [
          cluster.address,
          [
              info[0].process.pid
              for kind, info in sorted(
                  processes.items(), key=lambda item: item[0] != 'raylet'
              )
          ],
      ]
    else:
      cluster.remove_node(nodes[int(number)], allow_graceful=False)
      answer = None
    print(json.dumps(answer), flush=True)
  cluster.shutdown()


if __name__ == '__main__':
  _main()
