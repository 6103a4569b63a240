"""Tests of what happens on Ray when clients or workers take too long."""

import dataclasses
import os
import signal
import time

import pytest
import ray_contexts
import ray_example

from tff_bn import runtime

pytestmark = pytest.mark.slow


def test_client_that_takes_too_long_is_computed_elsewhere(
    fed_bn, expected, trap
):
  context = ray_contexts.make(client_timeout=2.0)
  with ray_contexts.default(context):
    ray_example.rounds(fed_bn, ray_example.traps())  # Traces everything.
    began = time.monotonic()
    datasets = ray_example.traps(trap, seconds=600)
    found = ray_example.rounds(fed_bn, datasets)
    seconds = time.monotonic() - began
    # The worker that sleeps lives, and gets nothing to do.
    assert len(ray_contexts.pids(context)) == 2
    assert ray_example.rounds(fed_bn, ray_example.traps()) == expected
  context.close()
  assert found == expected
  assert seconds < 60


def test_without_any_worker_the_round_ends_after_a_while(fed_bn):
  context = ray_contexts.make(num_workers=1)
  workers = context._workers
  workers._options = dataclasses.replace(workers._options, worker_timeout=0.5)
  with ray_contexts.default(context):
    os.kill(ray_contexts.pids(context)[0], signal.SIGKILL)
    with pytest.raises(
        runtime.WorkersLostError, match='worker_timeout=0.5 seconds'
    ):
      ray_example.rounds(fed_bn, ray_example.traps())
  context.close()
