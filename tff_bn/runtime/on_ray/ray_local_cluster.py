"""A program that runs a Ray cluster on this machine.

`ray_cluster` runs this file in a separate process: Ray can't start a cluster
safely from a process in which TensorFlow or gRPC have threads, and its
processes would survive if that process is killed. This program ends the cluster
and removes its files when its standard input is closed.
"""

import logging
import shutil
import sys
import tempfile

import ray

_LOOPBACK = '127.0.0.1'
# Not TMPDIR: the paths of Ray's sockets, deep inside of this folder, must have
# at most about a hundred characters.
_TEMPORARY_FOLDER = '/tmp'


def serve(num_cpus: int) -> None:
  """Runs a cluster until the standard input ends."""
  folder = tempfile.mkdtemp(prefix='tff_bn_', dir=_TEMPORARY_FOLDER)
  try:
    try:
      ray.init(
          address='local',
          num_cpus=num_cpus,
          include_dashboard=False,
          log_to_driver=False,
          logging_level=logging.ERROR,
          _node_ip_address=_LOOPBACK,
          _temp_dir=folder,
      )
      addresses = {node['NodeManagerAddress'] for node in ray.nodes()}
      if addresses != {_LOOPBACK}:
        raise RuntimeError(
            f'Ray {ray.__version__} listens on {", ".join(addresses)}, where'
            ' other machines can reach it, although it should use loopback'
            ' only. Use another version of Ray, or start a cluster yourself.'
        )
      print(ray.get_runtime_context().gcs_address, flush=True)
      sys.stdin.read()
    finally:
      ray.shutdown()
  finally:
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == '__main__':
  serve(int(sys.argv[1]))
