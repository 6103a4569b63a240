"""Tests of slow clients, missing workers and the end of the cluster on Ray."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import contexts
import pytest
import ray_contexts
import ray_example

from tff_bn import runtime

pytestmark = pytest.mark.slow


def test_slow_client_is_computed_elsewhere(fed_bn, expected, trap):
  context = ray_contexts.make(client_timeout=2.0)
  with contexts.default(context):
    ray_example.rounds(fed_bn, ray_example.traps())  # Traces everything.
    began = time.monotonic()
    datasets = ray_example.traps(trap, seconds=600)
    found = ray_example.rounds(fed_bn, datasets)
    seconds = time.monotonic() - began
    # The sleeping worker still exists, but gets no clients.
    assert len(ray_contexts.pids(context)) == 2
    assert ray_example.rounds(fed_bn, ray_example.traps()) == expected
  context.close()
  assert found == expected
  assert seconds < 60


def test_round_without_workers_ends(fed_bn):
  context = ray_contexts.make(num_workers=1)
  workers = context._workers
  workers._options = dataclasses.replace(workers._options, worker_timeout=0.5)
  with contexts.default(context):
    os.kill(ray_contexts.pids(context)[0], signal.SIGKILL)
    with pytest.raises(
        runtime.WorkersLostError, match="worker_timeout=0.5 seconds"
    ):
      ray_example.rounds(fed_bn, ray_example.traps())
  context.close()


# Ray would end the test process.
_PROGRAM = """
import time

import psutil
import ray_example
from tff_bn import runtime

with runtime.ray_runtime('local', num_workers=1):
  assert ray_example.num_examples([ray_example.Trap(0)]) == 20
  for process in psutil.Process().children(recursive=True):
    if process.name() == 'raylet':
      process.kill()
  time.sleep(1)
  try:
    ray_example.num_examples([ray_example.Trap(0)])
  except runtime.WorkersLostError as error:
    print(error, flush=True)
"""


def test_end_of_the_cluster_is_an_error():
  result = subprocess.run(
      [sys.executable, "-c", _PROGRAM],
      cwd=os.path.dirname(__file__),
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
  )
  assert "Ray's process on this machine has ended." in result.stderr
  # Ray prints a message, too.
  assert "has ended, and with it the connection" in result.stdout
