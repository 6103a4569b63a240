"""Connects this process to a Ray cluster, or starts one."""

from collections.abc import Iterator
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
from typing import Any, Optional

import ray
from ray._private import ray_constants

from tff_bn.runtime import ray_options

_LOOPBACK = '127.0.0.1'
# Not where TMPDIR says: the paths of Ray's sockets, which are far down in it,
# may have about a hundred characters.
_TEMPORARY_FOLDER = '/tmp'
# What is said to nobody else, and what the program says better.
_QUIET = dict(log_to_driver=False, logging_level=logging.ERROR)


@contextlib.contextmanager
def connected(options: ray_options.RayOptions) -> Iterator[None]:
  """Connects to the cluster for a `with` block.

  Args:
    options: What was asked for.

  Yields:
    Nothing.

  Raises:
    ValueError: If there is no such cluster, or it does not let this process in.
  """
  with contextlib.ExitStack() as stack:
    if ray.is_initialized():
      if options.address is not None:
        raise ValueError(
            f'address={options.address!r}: this process is connected to a Ray'
            ' cluster already. Leave the address out to use that one.'
        )
    elif options.address in (None, ray_options.LOCAL):
      stack.enter_context(_local_cluster(options))
    else:
      stack.enter_context(_other_cluster(options.address))
    yield


@contextlib.contextmanager
def _local_cluster(options: ray_options.RayOptions) -> Iterator[None]:
  """Starts a cluster of this machine, which nobody else can reach."""
  num_cpus = len(os.sched_getaffinity(0))
  if options.num_workers is not None:
    cpus = options.cpus_per_worker or ray_options.default_cpus_per_worker()
    # More workers than cores only take turns.
    num_cpus = max(num_cpus, options.num_workers * cpus)
  folder = tempfile.mkdtemp(prefix='tff_bn_', dir=_TEMPORARY_FOLDER)
  try:
    with _on_loopback_only(), _without_reports():
      _init(
          address='local',
          num_cpus=num_cpus,
          include_dashboard=False,
          _node_ip_address=_LOOPBACK,
          _temp_dir=folder,
      )
    try:
      yield
    finally:
      ray.shutdown()
  finally:
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _other_cluster(address: str) -> Iterator[None]:
  try:
    _init(address=address)
  # Of many kinds, none of them told apart by Ray.
  except Exception as error:  # pylint: disable=broad-exception-caught
    reason = ' '.join(str(error).split())
    raise ValueError(
        f'No Ray cluster can be used at {address}: {reason}'
    ) from error
  try:
    yield
  finally:
    ray.shutdown()


def _init(**arguments: Any) -> None:
  """Calls `ray.init`, and keeps the signal handler that it would replace."""
  is_main = threading.current_thread() is threading.main_thread()
  handler = signal.getsignal(signal.SIGTERM)
  try:
    ray.init(**arguments, **_QUIET)
  except BaseException:
    ray.shutdown()
    raise
  finally:
    if is_main:
      signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _on_loopback_only() -> Iterator[None]:
  """Lets Ray's processes that start in a `with` block listen on loopback.

  Ray takes loopback for the machine's other address, unless it believes that it
  is on a system for which it has no clusters.
  """
  previous = ray_constants.ENABLE_RAY_CLUSTER
  ray_constants.ENABLE_RAY_CLUSTER = False
  try:
    yield
  finally:
    ray_constants.ENABLE_RAY_CLUSTER = previous
  addresses = {node['NodeManagerAddress'] for node in ray.nodes()}
  if addresses != {_LOOPBACK}:
    ray.shutdown()
    raise RuntimeError(
        f'Ray {ray.__version__} listens on {", ".join(addresses)}, where others'
        ' can reach it, although it was told to use loopback. Use another'
        ' version of Ray, or start a cluster yourself and give its address.'
    )


@contextlib.contextmanager
def _without_reports() -> Iterator[None]:
  """Ray would report its use to its makers."""
  with _environment('RAY_USAGE_STATS_ENABLED', '0'):
    yield


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
  previous: Optional[str] = os.environ.get(name)
  os.environ[name] = value
  try:
    yield
  finally:
    if previous is None:
      del os.environ[name]
    else:
      os.environ[name] = previous
