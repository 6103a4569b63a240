"""A Ray cluster of this machine, started by a process of its own.

`ray_cluster` runs this file as a program. Ray can't start a cluster safely from
a process in which TensorFlow or gRPC have threads, and the processes that it
would start there outlive a program that is killed. This one ends the cluster,
and removes its files, as soon as its standard input is closed, for whatever
reason.
"""

import json
import logging
import shutil
import sys
import tempfile
from typing import Any

import ray

_LOOPBACK = '127.0.0.1'
# Not where TMPDIR says: the paths of Ray's sockets, which are far down in it,
# may have about a hundred characters.
_TEMPORARY_FOLDER = '/tmp'


def serve(options: dict[str, Any]) -> None:
  """Serves until the standard input ends.

  Args:
    options: Arguments of `ray.init`.

  Raises:
    RuntimeError: If the cluster would not listen on loopback only.
  """
  folder = tempfile.mkdtemp(prefix='tff_bn_', dir=_TEMPORARY_FOLDER)
  try:
    try:
      ray.init(
          address='local',
          include_dashboard=False,
          log_to_driver=False,
          logging_level=logging.ERROR,
          _node_ip_address=_LOOPBACK,
          _temp_dir=folder,
          **options,
      )
      addresses = {node['NodeManagerAddress'] for node in ray.nodes()}
      if addresses != {_LOOPBACK}:
        raise RuntimeError(
            f'Ray {ray.__version__} listens on {", ".join(addresses)}, where'
            ' others can reach it, although it was told to use loopback. Use'
            ' another version of Ray, or start a cluster yourself.'
        )
      print(ray.get_runtime_context().gcs_address, flush=True)
      sys.stdin.read()
    finally:
      ray.shutdown()
  finally:
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == '__main__':
  serve(json.loads(sys.argv[1]))
