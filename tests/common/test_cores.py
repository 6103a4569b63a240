"""Tests of how operations and clients share the CPU's cores."""

import json
import os
import subprocess
import sys
import types

import pytest
import tensorflow as tf

from tff_bn import runtime
from tff_bn.common import cores

_NUM_THREADS = 'TF_NUM_INTRAOP_THREADS'
_OWN_THREADS = 'TF_OVERRIDE_GLOBAL_THREADPOOL'


@pytest.fixture
def machine(monkeypatch):
  """A machine with 8 cores, on which TensorFlow has not been used."""
  machine = types.SimpleNamespace(
      num_cores=8, num_threads=0, gpus=[], cpus=['CPU:0'], have_own_threads=None
  )
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
  devices = {'GPU': lambda: machine.gpus, 'CPU': lambda: ['CPU:0']}
  monkeypatch.setattr(
      tf.config, 'get_visible_devices', lambda kind: devices[kind]()
  )
  monkeypatch.setattr(
      tf.config,
      'get_logical_device_configuration',
      lambda cpu: machine.cpus[1:],
  )
  monkeypatch.setattr(
      tf.config,
      'set_logical_device_configuration',
      lambda cpu, parts: setattr(machine, 'cpus', [cpu] * len(parts)),
  )
  monkeypatch.setattr(
      tf.config,
      'list_logical_devices',
      lambda: setattr(
          machine, 'have_own_threads', os.environ.get(_OWN_THREADS)
      ),
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


@pytest.mark.parametrize(
    ('num_cores', 'num_clients', 'jit_compile', 'num_cpus'),
    [
        (8, 100, False, 8),
        (8, 1000, False, 8),
        (64, 100, False, 16),
        (8, 99, False, 1),
        (8, 99, True, 8),
        (8, 2, True, 2),
        (8, 1, True, 1),
        (1, 100, True, 1),
    ],
)
@pytest.mark.parametrize('own_value', [None, 'false'])
def test_cpus_with_own_threads(
    machine,
    monkeypatch,
    num_cores,
    num_clients,
    jit_compile,
    num_cpus,
    own_value,
):
  machine.num_cores = num_cores
  if own_value:
    monkeypatch.setenv(_OWN_THREADS, own_value)
  runtime.divide_cores(num_clients, jit_compile=jit_compile)
  assert machine.cpus == ['CPU:0'] * num_cpus
  assert machine.have_own_threads == ('true' if num_cpus > 1 else None)
  # Child processes are as before.
  assert os.environ.get(_OWN_THREADS) == own_value


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
  assert len(machine.cpus) == 1


def test_chosen_cpus_stay(machine):
  machine.cpus = ['CPU:0'] * 3
  assert runtime.divide_cores(100) == 1
  assert len(machine.cpus) == 3
  assert not machine.have_own_threads


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
import json
import os
import threading
import time

os.sched_getaffinity = lambda _: {0, 1}
import tensorflow as tf
from tff_bn.common import cores

cores.divide(100)
matrices = [tf.fill([64, 64], 0.001 * i) for i in range(12)]


# XLA lets the threads for operations share the products.
@tf.function(jit_compile=True)
def multiply(x, num_times):
  return tf.while_loop(
      lambda i, _: i < num_times,
      lambda i, x: (i + 1, tf.add_n([tf.matmul(x, m) for m in matrices])),
      (0, x),
  )


def run(number, num_times):
  with tf.device(f'CPU:{number}'):
    multiply(tf.eye(64), tf.constant(num_times))


run(0, 1)
run(1, 1)
slow = threading.Thread(target=run, args=(0, 10000))
slow.start()
time.sleep(0.2)
run(1, 1)
print(json.dumps({
    'threads': tf.config.threading.get_intra_op_parallelism_threads(),
    'cpus': len(tf.config.list_logical_devices('CPU')),
    'is_slow_still_running': slow.is_alive(),
}))
slow.join()
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
  assert json.loads(completed.stdout) == {
      'threads': 1,
      'cpus': 2,
      'is_slow_still_running': True,
  }
