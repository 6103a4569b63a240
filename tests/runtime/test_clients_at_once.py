"""Tests of clients that one function computes: the same bits as one by one."""

import gc
import json
import os
import subprocess
import sys
import weakref

import array_data
import comparison
import keras
import logical_cpus_example
import numpy as np
import pytest
import rounds_at_once
import small_models
import tensorflow as tf
import tensorflow_federated as tff
import toy_problem

from tff_bn import algorithms
from tff_bn import runtime
from tff_bn.common import cores
from tff_bn.runtime import client_part
from tff_bn.runtime import client_portions
from tff_bn.runtime import devices
from tff_bn.runtime import portioning

# Their clients do different things.
_COMPILED = (
    *('build_fed_avg', 'build_fed_bn', 'build_scaffold', 'build_fbn'),
    *('build_hbn', 'build_moon', 'build_ditto', 'build_fixbn'),
    'build_fedtan',
)
_SGD = tff.learning.optimizers.build_sgdm


class _AtOnce:
  """How many clients each call computed at once.

  `ordinary` has the calls without XLA, and `compiled` those with XLA.
  """

  def __init__(self):
    self.ordinary, self.compiled = [], []


@pytest.fixture(name='at_once')
def _at_once(monkeypatch):
  """Returns an `_AtOnce`.

  From the second round on, all clients are computed at once that can be, and
  none is compiled.
  """
  monkeypatch.setattr(portioning, '_MIN_CLIENTS_SEEN', 0.1)
  monkeypatch.setattr(portioning, '_MAX_SECONDS', np.inf)
  found = _AtOnce()
  initialize = client_portions.SeveralClients.__init__

  def count(self, plan, portion, *args):
    is_compiled = portion.bulk.is_compiled
    numbers = found.compiled if is_compiled else found.ordinary
    numbers.append(len(portion.clients))
    initialize(self, plan, portion, *args)

  monkeypatch.setattr(client_portions.SeveralClients, '__init__', count)
  return found


@pytest.fixture(name='compiling')
def _compiling(monkeypatch):
  """Lets XLA compile from two clients on, two at once."""
  monkeypatch.setattr(portioning, '_MIN_COMPILED_CLIENTS', 2)
  monkeypatch.setattr(portioning, '_COMPILED_CLIENTS', 2)


def _check(process, clients, at_once, num_portions=2, num_rounds=2):
  """Computes rounds one by one, then again, the last ones at once."""
  expected, found = _both(process, clients, at_once, num_portions)
  assert not at_once.compiled
  size = -(-len(clients) // num_portions)
  assert set(at_once.ordinary) <= {size, len(clients) % size}
  assert sum(at_once.ordinary) == num_rounds * len(clients)
  comparison.assert_equal(found, expected, same_leaf_types=True)
  return found


def _both(process, clients, at_once, num_portions=2):
  """Returns the outputs one by one, and those at once where possible."""
  with runtime.in_process_runtime(max_concurrent_clients=num_portions):
    datasets = [array_data.dataset(client) for client in clients]
    expected = rounds_at_once.outputs(process, datasets)
  assert not at_once.ordinary and not at_once.compiled
  with runtime.in_process_runtime(max_concurrent_clients=num_portions):
    return expected, rounds_at_once.outputs(process, clients)


@pytest.mark.slow
@pytest.mark.parametrize('name', rounds_at_once.BUILDERS)
def test_all_kinds_of_clients(name, at_once):
  problem = toy_problem.Toy('float32', (6, 6, 1))
  model = problem.model_for(name)
  process = rounds_at_once.process(name, model, local_epochs=2)
  clients = rounds_at_once.clients_for(name, problem)
  found = _check(
      process, clients, at_once, num_rounds=rounds_at_once.num_rounds(name)
  )
  metrics = found[-1].metrics
  assert metrics['client_work']['num_dropped_clients'] == 1
  assert np.isfinite(metrics['client_work']['train']['loss'])


@pytest.mark.slow
@pytest.mark.parametrize('name', ['build_fed_avg', 'build_hbn'])
def test_number_of_steps(name, at_once):
  problem = toy_problem.Toy('float32', (6, 6, 1))
  process = rounds_at_once.process(name, problem.model_for(name), local_steps=2)
  _check(process, rounds_at_once.clients_of_all_kinds(problem), at_once)


@pytest.mark.usefixtures('compiling')
@pytest.mark.parametrize(
    'name',
    [
        n if n == 'build_fed_avg' else pytest.param(n, marks=pytest.mark.slow)
        for n in _COMPILED
    ],
)
def test_compiled_clients(name, at_once):
  problem = toy_problem.Toy('float32', (6, 6, 1))
  process = rounds_at_once.process(
      name, problem.model_for(name), local_epochs=2
  )
  clients = rounds_at_once.equal_clients(problem)
  expected, found = _both(process, clients, at_once)
  assert set(at_once.compiled) == {2}
  assert sum(at_once.compiled) >= rounds_at_once.NUM_ROUNDS * len(clients)
  assert not at_once.ordinary
  comparison.assert_equal(found, expected, rtol=1e-4, same_leaf_types=True)
  assert found[-1].metrics['client_work']['num_dropped_clients'] == 1


@pytest.mark.slow
@pytest.mark.usefixtures('compiling')
@pytest.mark.parametrize('name', ['build_fed_avg', 'build_fedtan'])
def test_operations_that_xla_does_not_know(name, at_once):
  """FedTAN's first passes don't have the operation."""
  problem = toy_problem.Toy('float32')
  model = rounds_at_once.model_that_xla_does_not_know(problem)
  process = rounds_at_once.process(name, model)
  clients = rounds_at_once.equal_clients(problem, nan=False)
  expected, found = _both(process, clients, at_once)
  # The first round finds out that XLA can't, and begins again without it.
  assert at_once.compiled in ([2], [2, 2])
  num_later = (rounds_at_once.NUM_ROUNDS - 1) * len(clients)
  assert sum(at_once.ordinary) == num_later
  comparison.assert_equal(found, expected, same_leaf_types=True)


@pytest.mark.usefixtures('compiling')
@pytest.mark.parametrize(
    'name, options',
    [
        pytest.param('build_fed_avg', {}, marks=pytest.mark.slow),
        ('build_fedtan', {'local_steps': 1}),
    ],
)
def test_random_layers_have_the_same_seeds(name, options, at_once):
  """XLA has no operation for these seeds, so it does not compile."""
  problem = toy_problem.Toy('float32')

  def keras_model():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8)(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5)(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))

  process = rounds_at_once.process(name, problem.model(keras_model), **options)
  _check(process, rounds_at_once.clients_for(name, problem), at_once)


@pytest.mark.usefixtures('compiling')
def test_compiled_moments_keep_their_digits(at_once):
  """E[x²] − E[x]² would lose all of them."""
  problem = toy_problem.Toy('float32', (6, 6, 1))

  def keras_model():
    inputs = keras.Input((6, 6, 1))
    x = keras.layers.BatchNormalization(momentum=0.0)(inputs)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))

  model = problem.model(keras_model)
  process = algorithms.build_fed_avg(model, _SGD(0.1), local_steps=1)
  clients = rounds_at_once.equal_clients(problem, number=2, nan=False)
  for client in clients:
    client.samples[0] += 1e4
  with runtime.in_process_runtime():
    output = process.next(process.initialize(), clients)
  assert at_once.compiled == [2]
  mean, variance = process.get_model_weights(output.state).non_trainable
  x = [client.samples[0][:4].astype(np.float64) for client in clients]
  np.testing.assert_allclose(mean, np.mean([a.mean() for a in x]), rtol=1e-6)
  np.testing.assert_allclose(variance, np.mean([a.var() for a in x]), rtol=1e-3)


def _with_large_constants():
  """Returns a process with large frozen layers, and its problem."""
  problem = toy_problem.Toy('float32')

  def keras_model():
    inputs = keras.Input((4,))
    x = inputs
    for units in (200, 200):
      x = keras.layers.Dense(units, trainable=False)(x)
    x = keras.layers.BatchNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))

  model = problem.model(keras_model)
  return rounds_at_once.process('build_fed_bn', model), problem


def test_large_constants(at_once):
  process, problem = _with_large_constants()
  _check(process, rounds_at_once.clients_of_all_kinds(problem), at_once)


@pytest.mark.slow
@pytest.mark.usefixtures('compiling')
def test_large_constants_with_xla(at_once):
  process, problem = _with_large_constants()
  clients = rounds_at_once.equal_clients(problem)
  expected, found = _both(process, clients, at_once)
  assert at_once.compiled
  comparison.assert_equal(found, expected, rtol=1e-4, same_leaf_types=True)


class _Portions:
  """The portions of a plan, as numbers of clients."""

  def __init__(self, process, clients, **options):
    self._process, self.clients = process, clients
    self.context = runtime.InProcessContext(**options)

  def __enter__(self):
    self._previous = tff.framework.get_context_stack().current
    tff.framework.set_default_context(self.context)
    self._state = self._process.initialize()
    return self

  def __exit__(self, *_):
    tff.framework.set_default_context(self._previous)
    self.context.close()

  def next(self, clients=None):
    self._process.next(self._state, clients or self.clients)


@pytest.fixture(name='fed_avg', scope='module')
def _fed_avg():
  problem = toy_problem.Toy('float32')
  return problem, algorithms.build_fed_avg(problem.model(), _SGD(0.1))


def test_clients_are_computed_at_once_after_some(fed_avg, at_once, monkeypatch):
  problem, process = fed_avg
  monkeypatch.setattr(portioning, '_MIN_CLIENTS_SEEN', 8)
  clients = rounds_at_once.equal_clients(problem)
  with _Portions(process, clients, max_concurrent_clients=1) as rounds:
    rounds.next()
    rounds.next()
    assert not at_once.ordinary
    rounds.next()
    assert at_once.ordinary == [4]
    # A single client is no several clients.
    rounds.next(clients[:1])
    assert at_once.ordinary == [4]
    # The runtime can't tell what a dataset of TensorFlow will yield.
    rounds.next([*clients[:3], array_data.dataset(clients[3])])
    assert at_once.ordinary == [4]
    # The values of all clients at once would take too much memory.
    monkeypatch.setattr(portioning, '_MAX_BYTES', 700)
    rounds.next()
    assert len(at_once.ordinary) > 2
    assert sum(at_once.ordinary) == 8


def test_datasets_of_arrays(fed_avg, at_once):
  problem, process = fed_avg
  datasets = [
      tf.data.Dataset.from_tensor_slices(problem.arrays(10, seed)).batch(4)
      for seed in range(4)
  ]
  with _Portions(process, datasets) as rounds:
    rounds.next()
    rounds.next()
  assert sum(at_once.ordinary) == 4


@pytest.mark.slow
def test_each_exchange_takes_time_to_trace(at_once, monkeypatch):
  problem = toy_problem.Toy('float32')
  process = algorithms.build_fedtan(problem.model(), _SGD(0.1))
  monkeypatch.setattr(portioning, '_MIN_CLIENTS_SEEN', 2)
  clients = [array_data.client(problem, [4], seed) for seed in range(2)]
  with _Portions(process, clients, max_concurrent_clients=1) as rounds:
    # A client computes before, between and after three exchanges.
    for _ in range(4):
      rounds.next()
    assert not at_once.ordinary
    rounds.next()
  assert at_once.ordinary == [2]


def test_series_of_different_lengths(at_once):
  """One array can't hold the series of two clients."""

  def keras_model():
    inputs = keras.Input((None, 2))
    x = keras.layers.GlobalAveragePooling1D()(inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(x))

  spec = tf.TensorSpec((None, None, 2)), tf.TensorSpec((None,), tf.int32)
  model = small_models.classifier(keras_model, spec)
  process = algorithms.build_fed_avg(model, _SGD(0.1))
  series = [
      tf.data.Dataset.from_tensor_slices(
          (np.ones([4, length, 2], np.float32), np.zeros(4, np.int32))
      ).batch(2)
      for length in (3, 5)
  ]
  with _Portions(process, series) as rounds:
    rounds.next()
    rounds.next()
  assert not at_once.ordinary


def test_slow_clients_are_computed_one_by_one(fed_avg, at_once, monkeypatch):
  problem, process = fed_avg
  monkeypatch.setattr(portioning, '_MAX_SECONDS', 0.0)
  with _Portions(process, rounds_at_once.equal_clients(problem)) as rounds:
    for _ in range(3):
      rounds.next()
  assert not at_once.ordinary


def test_gpus_compute_clients_one_by_one(fed_avg, at_once, monkeypatch):
  problem, process = fed_avg
  monkeypatch.setattr(portioning, '_MIN_COMPILED_CLIENTS', 2)
  with _Portions(process, rounds_at_once.equal_clients(problem)) as rounds:
    for device in rounds.context._devices:
      monkeypatch.setattr(device, 'is_cpu', False)
    rounds.next()
    rounds.next()
  assert not at_once.ordinary and not at_once.compiled


@pytest.mark.parametrize(
    'change', ['few clients', 'unequal', 'empty', 'large steps']
)
def test_what_xla_does_not_compile(fed_avg, at_once, monkeypatch, change):
  problem, process = fed_avg
  monkeypatch.setattr(portioning, '_MIN_COMPILED_CLIENTS', 4)
  clients = rounds_at_once.equal_clients(problem)
  match change:
    case 'few clients':
      del clients[3]
    case 'unequal':
      clients[2] = array_data.client(problem, [4, 3], 2)
    case 'empty':
      clients[2] = array_data.client(problem, [], 2)
    case 'large steps':
      # A dense layer costs two operations for each weight and sample.
      flops = 3 * 4 * 2 * (4 * 5 + 5 * 3)
      monkeypatch.setattr(portioning, '_MAX_COMPILED_FLOPS', flops - 1)
  with _Portions(process, clients, max_concurrent_clients=1) as rounds:
    rounds.next()
    rounds.next()
  assert not at_once.compiled
  assert at_once.ordinary == [len(clients)]


def test_compiling_does_not_depend_on_earlier_rounds(
    fed_avg, at_once, monkeypatch
):
  """Otherwise, a run that is resumed would have other last digits."""
  problem, process = fed_avg
  monkeypatch.setattr(portioning, '_MIN_COMPILED_CLIENTS', 4)
  monkeypatch.setattr(portioning, '_COMPILED_CLIENTS', 3)
  monkeypatch.setattr(portioning, '_MIN_CLIENTS_SEEN', 10**9)
  with _Portions(process, rounds_at_once.equal_clients(problem)) as rounds:
    rounds.next()
    rounds.next()
  # The function is compiled for three clients; the fourth is by itself.
  assert at_once.compiled == [3, 3]
  assert not at_once.ordinary


@pytest.mark.slow
def test_rest_of_the_compiled_clients(fed_avg, at_once, monkeypatch):
  problem, process = fed_avg
  monkeypatch.setattr(portioning, '_MIN_COMPILED_CLIENTS', 4)
  monkeypatch.setattr(portioning, '_COMPILED_CLIENTS', 2)
  clients = rounds_at_once.equal_clients(problem, number=7)
  with _Portions(process, clients, max_concurrent_clients=2) as rounds:
    rounds.next()
    assert at_once.compiled == [2, 2, 2]
    rounds.next()
  assert at_once.compiled == [2] * 6
  assert at_once.ordinary == [1]


@pytest.mark.usefixtures('at_once', 'compiling')
def test_all_cpus_compute_when_it_pays_to_compile_again(fed_avg, monkeypatch):
  problem, process = fed_avg
  # For each round, the clients' total time in seconds and the number of CPUs.
  rounds_to_come = [(10, 1), (4, 1), (6, 1), (1, 2)]
  seconds = iter([s for s, _ in rounds_to_come])
  saw = portioning.Portioning.saw
  monkeypatch.setattr(
      portioning.Portioning,
      'saw',
      lambda self, _: saw(self, [next(seconds) / 4] * 4),
  )
  used = set()
  call = client_part.ClientPart.call

  def noting_call(self, *args):
    used.add(self.device)
    return call(self, *args)

  monkeypatch.setattr(client_part.ClientPart, 'call', noting_call)
  with _Portions(process, rounds_at_once.equal_clients(problem)) as rounds:
    (device,) = rounds.context._devices
    # Two names of this process's only CPU.
    device.all_names = [devices.HOST, '/device:CPU:0']
    for _, num_cpus in rounds_to_come:
      used.clear()
      rounds.next()
      assert used == set(device.all_names[:num_cpus])


@pytest.mark.slow
def test_all_cpus_compute_the_same_bits():
  environment = dict(
      os.environ,
      CUDA_VISIBLE_DEVICES='',
      PYTHONPATH=os.pathsep.join(sys.path),
  )
  # Otherwise, the cores are divided already.
  environment.pop(cores.ENVIRONMENT_VARIABLE, None)
  done = subprocess.run(
      [sys.executable, logical_cpus_example.__file__],
      env=environment,
      capture_output=True,
      text=True,
      check=False,
      timeout=300,
  )
  assert done.returncode == 0, done.stderr
  (expected, one), (found, all_cpus) = json.loads(done.stdout)
  assert found == expected
  assert (one, all_cpus) == (['CPU:0'], ['CPU:0', 'CPU:1'])


def test_time_is_divided_by_the_number_of_batches(fed_avg, at_once):
  problem, process = fed_avg
  clients = [
      array_data.client(problem, sizes, seed=0) for sizes in ([4] * 8, [], [4])
  ]
  with runtime.in_process_runtime(max_concurrent_clients=1) as context:
    state = process.initialize()
    process.next(state, clients)
    process.next(state, clients)
    seconds = context.client_seconds
  assert at_once.ordinary == [3]
  np.testing.assert_allclose(np.divide(seconds, seconds[1]), [9, 1, 2])


def test_plan_ends_with_its_computation(at_once):
  problem = toy_problem.Toy('float32')
  process = algorithms.build_fed_avg(problem.model(), _SGD(0.1))
  with runtime.in_process_runtime() as context:
    state = process.initialize()
    for _ in range(2):
      process.next(state, rounds_at_once.equal_clients(problem))
    assert at_once.ordinary
    plan = weakref.ref(context.plan(process.next))
    del process, state
    gc.collect()
    assert plan() is None
