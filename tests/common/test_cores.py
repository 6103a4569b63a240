"""Tests of how operations and clients share the CPU's cores."""

import os
import subprocess
import sys
import types

import pytest
import tensorflow as tf

from tff_bn import runtime
from tff_bn.common import cores

_NUM_THREADS = 'TF_NUM_INTRAOP_THREADS'


@pytest.fixture
def machine(monkeypatch):
  """A machine with 8 cores, on which TensorFlow has not been used."""
  machine = types.SimpleNamespace(num_cores=8, num_threads=0, gpus=[])
  monkeypatch.delenv(_NUM_THREADS, raising=False)
  monkeypatch.setattr(
      os, 'sched_getaffinity', lambda _: set(range(machine.num_cores))
  )
  monkeypatch.setattr(
      tf.config.threading,
      'get_intra_op_parallelism_threads',
      lambda: machine.num_threads,
  )
  monkeypatch.setattr(
      tf.config.threading,
      'set_intra_op_parallelism_threads',
      lambda number: setattr(machine, 'num_threads', number),
  )
  monkeypatch.setattr(
      tf.config, 'list_physical_devices', lambda _: machine.gpus
  )
  return machine


@pytest.mark.parametrize(
    ('num_cores', 'num_clients', 'num_threads', 'num_concurrent'),
    [
        (8, 1, 8, 1),
        (8, 2, 4, 2),
        (8, 3, 2, 4),
        (8, 8, 1, 8),
        (8, 100, 1, 8),
        (2, 10, 1, 2),
        (1, 1, 1, 1),
        # At most 16 clients need memory at a time.
        (64, 100, 4, 16),
        (64, 2, 32, 2),
    ],
)
def test_divide(machine, num_cores, num_clients, num_threads, num_concurrent):
  machine.num_cores = num_cores
  assert runtime.divide_cores(num_clients) == num_threads
  assert machine.num_threads == num_threads
  assert cores.per_operation() == num_threads
  assert cores.num_concurrent() == num_concurrent


def test_without_division_an_operation_uses_all_cores(machine):
  assert cores.num_cores() == cores.per_operation() == machine.num_cores
  assert cores.num_concurrent() == 1


def test_what_is_chosen_stays(machine, monkeypatch):
  machine.gpus = ['GPU:0']
  assert runtime.divide_cores(100) == 8
  assert not machine.num_threads
  machine.gpus = []
  machine.num_threads = 5
  assert runtime.divide_cores(100) == machine.num_threads == 5
  machine.num_threads = 0
  monkeypatch.setenv(_NUM_THREADS, '3')
  assert runtime.divide_cores(100) == 3
  assert not machine.num_threads
  assert cores.num_concurrent() == 3


@pytest.mark.usefixtures('machine')
def test_no_clients():
  with pytest.raises(ValueError, match='num_clients=0 must be at least'):
    runtime.divide_cores(0)


def test_too_late(monkeypatch):
  tf.constant(0)
  monkeypatch.delenv(_NUM_THREADS, raising=False)
  with pytest.raises(RuntimeError, match='cannot be modified'):
    runtime.divide_cores(1000)


@pytest.mark.slow
def test_tensorflow_obeys():
  program = """
import tensorflow as tf
from tff_bn.common import cores

cores.divide(1000)
tf.constant(0)
print(tf.config.threading.get_intra_op_parallelism_threads())
"""
  environment = dict(os.environ, CUDA_VISIBLE_DEVICES='')
  environment.pop(_NUM_THREADS, None)
  completed = subprocess.run(
      [sys.executable, '-c', program],
      env=environment,
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
  )
  assert completed.returncode == 0, completed.stderr
  assert int(completed.stdout) == max(1, cores.num_cores() // 16)
