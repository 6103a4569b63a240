"""Tests that a client's data is the same wherever it is made."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tff_bn import round_data
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import federated
from tff_bn.runtime import server

_DRAW = dict(seed=3, round_num=2, batch_size=4, local_steps=5)


def _data(recipe=None, dtype=np.float32, shift=0):
  rng = np.random.default_rng(0)
  dataset = dataset_lib.Dataset(
      name='test',
      x_train=(rng.random((30, 2, 3)) * 200 + shift).astype(dtype),
      y_train=np.arange(30, dtype=np.int32) % 3,
      x_test=np.zeros((3, 2, 3), dtype),
      y_test=np.arange(3, dtype=np.int32),
      num_classes=3,
  )
  indices = {'a': np.arange(0, 30, 2), 'b': np.arange(29, 0, -2)}
  none = {'a': np.arange(0), 'b': np.arange(0)}
  return federated.FederatedData(dataset, indices, none, recipe)


class _Worker:
  """A worker in this process."""

  address = 'host:1'
  host_device = '/device:CPU:0'

  def __init__(self, functions=None):
    self._functions = functions
    self._kept = {}
    self.num_made = 0

  def keep(self, key, make):
    if key not in self._kept:
      self.num_made += 1
      self._kept[key] = make()
    return self._kept[key]

  def call(self, text, dtypes):
    """Stands in for `server.call`."""

    def function(text):
      name, request = json.loads(text)
      return list(self._functions[name](request))

    return tf.numpy_function(function, [text], list(dtypes))

  def ask(self, name, request):
    (answer,) = self._functions[name](request)
    return answer.decode()


class _Context:

  def __init__(self, *workers):
    self.workers = workers


def _batches(variant, data):
  dataset = tf.data.experimental.from_variant(variant, data.element_spec)
  return [(x.tobytes(), y.tobytes()) for x, y in dataset.as_numpy_iterator()]


def _expected(data, client_ids, draw=_DRAW):
  return [
      (x.tobytes(), y.tobytes())
      for x, y in data.client_dataset(client_ids, **draw).as_numpy_iterator()
  ]


@pytest.mark.parametrize('dtype', [np.float32, np.uint8])
@pytest.mark.parametrize('client_ids', [['a'], ['b'], ['b', 'a']])
@pytest.mark.parametrize(
    'draw', [_DRAW, dict(seed=3, round_num=2, batch_size=4, local_epochs=2)]
)
def test_batches_are_those_of_the_data(dtype, client_ids, draw):
  data = _data(dtype=dtype)
  dataset = round_data.RoundDataset(data, client_ids, **draw)
  expected = _expected(data, client_ids, draw)

  assert dataset.element_spec == data.element_spec
  assert _batches(dataset.build(None), data) == expected
  assert _batches(dataset.build(_Worker()), data) == expected


@pytest.mark.parametrize('client_ids', [['a'], ['b', 'a']])
def test_small_batches_are_not_optimized(client_ids):
  data = _data()
  variant = round_data.RoundDataset(data, client_ids, **_DRAW).build(None)
  for dataset in (
      tf.data.experimental.from_variant(variant, data.element_spec),
      data.client_dataset(client_ids, **_DRAW),
  ):
    options = dataset.options()
    assert (
        options.experimental_optimization.apply_default_optimizations is False
    )
    assert options.autotune.enabled is False


def test_worker_makes_the_batches_of_a_recipe(monkeypatch):
  data = _data(recipe='mine')
  made = []

  def make_data(recipe):
    made.append(recipe)
    return _data(recipe)

  worker = _Worker(round_data.worker_functions(make_data))
  monkeypatch.setattr(server, 'call', worker.call)
  monkeypatch.setattr(round_data, '_samples', None)  # Nothing is sent.
  for round_num in range(3):
    draw = {**_DRAW, 'round_num': round_num}
    dataset = round_data.RoundDataset(data, ['b'], **draw)
    assert _batches(dataset.build(worker), data) == _expected(data, ['b'], draw)
  assert made == ['mine']
  # One function, traced once.
  assert worker.num_made == 1


def test_samples_without_a_recipe_are_sent_once_for_each_client():
  data = _data()
  worker = _Worker()
  for round_num in range(3):
    for client_id in ('a', 'b'):
      draw = {**_DRAW, 'round_num': round_num}
      dataset = round_data.RoundDataset(data, [client_id], **draw)
      assert _batches(dataset.build(worker), data) == _expected(
          data, [client_id], draw
      )
  # Two clients and a function.
  assert worker.num_made == 3


def test_clients_whose_samples_are_sent_have_a_home():
  data = _data()
  homes = [round_data.RoundDataset(data, [c], **_DRAW).home for c in ('a', 'b')]
  assert homes == [0, 1]
  named = round_data.RoundDataset(_data(recipe='mine'), ['b'], **_DRAW)
  assert named.home is None


def test_local_function_is_traced_once():
  data = _data()
  round_data.RoundDataset(data, ['a'], **_DRAW).build(None)
  traced = round_data._local_gather.cache_info().misses
  for client_id in ('a', 'b'):
    round_data.RoundDataset(data, [client_id], **_DRAW).build(None)
  assert round_data._local_gather.cache_info().misses == traced


def test_workers_with_the_same_data_are_accepted():
  data = _data(recipe='mine')
  worker = _Worker(round_data.worker_functions(lambda recipe: data))
  round_data.check_workers(_Context(worker, worker), data)
  # Without a recipe they are not asked.
  round_data.check_workers(_Context(_Worker()), _data())


def test_worker_with_other_data_is_refused():
  data = _data(recipe='mine')
  other = _Worker(round_data.worker_functions(lambda recipe: _data(shift=1)))
  with pytest.raises(ValueError, match='host:1 has other data.*--dataset=test'):
    round_data.check_workers(_Context(other), data)


def test_worker_that_can_not_make_the_data_is_refused(monkeypatch):
  worker = _Worker()

  def fail(name, request):
    raise RuntimeError('The worker host:1 failed: no such file.')

  monkeypatch.setattr(worker, 'ask', fail)
  with pytest.raises(ValueError, match='host:1 failed: no such file'):
    round_data.check_workers(_Context(worker), _data(recipe='mine'))


def test_fingerprint_depends_on_samples_and_clients():
  data = _data()
  assert data.fingerprint() == _data(recipe='mine').fingerprint()
  assert data.fingerprint() != _data(shift=1).fingerprint()
  swapped = dict(a=data.train_indices['b'], b=data.train_indices['a'])
  other = federated.FederatedData(data.dataset, swapped, data.test_indices)
  assert data.fingerprint() != other.fingerprint()
