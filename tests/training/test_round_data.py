"""Tests that a client's data is the same in every process."""

import dataclasses
import pickle

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import data as tff_bn_data
from tff_bn import runtime
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import federated
from tff_bn.runtime.on_ray import transport
from tff_bn.training import round_data

_DRAW = dict(seed=3, round_num=2, batch_size=4, local_steps=5)


def _data(recipe=None, dtype=np.float32, shift=0, num_samples=30):
  rng = np.random.default_rng(0)
  dataset = dataset_lib.Dataset(
      name='test',
      x_train=(rng.random((num_samples, 2, 3)) * 200 + shift).astype(dtype),
      y_train=np.arange(num_samples, dtype=np.int32) % 3,
      x_test=np.zeros((3, 2, 3), dtype),
      y_test=np.arange(3, dtype=np.int32),
      num_classes=3,
  )
  indices = {'a': np.arange(0, 30, 2), 'b': np.arange(29, 0, -2)}
  none = {'a': np.arange(0), 'b': np.arange(0)}
  return federated.FederatedData(dataset, indices, none, recipe)


@dataclasses.dataclass(frozen=True)
class _Recipe:
  """Loads data and records it."""

  name: str
  shift: int = 0

  def __call__(self):
    _made.append(self)
    return _data(self, shift=self.shift)


_made = []


@pytest.fixture
def made():
  """The recipes that were used."""
  _made.clear()
  round_data._load.cache_clear()
  return _made


class _Context(runtime.RayContext):
  """A context whose only worker is this process."""

  def __init__(self):
    self.checked = []

  def check_workers(self, what, question, expected):
    self.checked.append(
        (what, pickle.loads(pickle.dumps(question))(), expected)
    )


@pytest.fixture
def context():
  """A Ray runtime."""
  previous = tff.framework.get_context_stack().current
  context = _Context()
  tff.framework.set_default_context(context)
  yield context
  tff.framework.set_default_context(previous)


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
def test_batches_equal_the_client_dataset(dtype, client_ids, draw):
  data = _data(dtype=dtype)
  dataset = round_data.RoundDataset(data, client_ids, **draw)
  expected = _expected(data, client_ids, draw)

  assert dataset.element_spec == data.element_spec
  assert _batches(dataset.build(), data) == expected
  there = pickle.loads(pickle.dumps(dataset))
  assert there.element_spec == data.element_spec
  assert _batches(there.build(), data) == expected


@pytest.mark.parametrize('augmentation', ['flip_crop', 'flip_rotate'])
@pytest.mark.parametrize('augment', [True, False])
def test_augmented_and_scaled_batches_are_the_same(augmentation, augment):
  dataset = tff_bn_data.load_dataset('generated:6x5x2:3:30')
  data = tff_bn_data.split_dataset(dataset, 'iid', 2, 0)
  data = dataclasses.replace(
      data.scaled('standardized'), augmentation=augmentation
  )
  draw = dict(_DRAW, augment=augment)
  own = round_data.RoundDataset(data, ['client_1'], **draw)
  expected = _expected(data, ['client_1'], draw)
  there = pickle.loads(pickle.dumps(own))
  assert _batches(own.build(), data) == expected
  assert _batches(there.build(), data) == expected
  plain = dataclasses.replace(data, augmentation='none')
  assert (expected == _expected(plain, ['client_1'])) == (not augment)


@pytest.mark.parametrize('client_ids', [['a'], ['b', 'a']])
def test_small_batches_are_not_optimized(client_ids):
  data = _data()
  variant = round_data.RoundDataset(data, client_ids, **_DRAW).build()
  for dataset in (
      tf.data.experimental.from_variant(variant, data.element_spec),
      data.client_dataset(client_ids, **_DRAW),
  ):
    options = dataset.options()
    assert (
        options.experimental_optimization.apply_default_optimizations is False
    )
    assert options.autotune.enabled is False


def test_data_of_a_recipe_is_loaded_once_and_not_sent(made):
  data = _data(_Recipe('mine'))
  for round_num in range(3):
    draw = {**_DRAW, 'round_num': round_num}
    dataset = round_data.RoundDataset(data, ['b'], **draw)
    text = pickle.dumps(dataset)
    assert data.dataset.x_train.tobytes()[:60] not in text
    assert _batches(pickle.loads(text).build(), data) == _expected(
        data, ['b'], draw
    )
  assert made == [_Recipe('mine')]


def test_samples_without_a_recipe_are_stored_once():
  # 12 kB of samples.
  data = _data(num_samples=500)
  stored = []
  sender = transport.Sender(lambda array: stored.append(array) or len(stored))
  for round_num in range(3):
    for client_id in ('a', 'b'):
      draw = {**_DRAW, 'round_num': round_num}
      dataset = round_data.RoundDataset(data, [client_id], **draw)
      parcel = sender.pack(dataset)
      assert len(parcel.data) < 4000
      there = transport.unpack(
          parcel, lambda numbers: [stored[n - 1] for n in numbers]
      )
      assert _batches(there.build(), data) == _expected(data, [client_id], draw)
  (array,) = stored
  assert array is data.dataset.x_train


def test_workers_must_load_the_same_data_from_a_recipe(made, context):
  round_data.check_workers(_data())
  assert not context.checked  # The workers get this data.
  data = _data(_Recipe('mine'))
  round_data.check_workers(data)
  other = _data(_Recipe('other', shift=1))
  expected = data.fingerprint()
  what = "the fingerprint of the data 'test'"
  assert context.checked == [(what, expected, expected)]
  assert other.recipe().fingerprint() != expected
  assert made == [_Recipe('mine'), _Recipe('other', 1)]


def test_without_workers_nothing_is_loaded(made):
  round_data.check_workers(_data(_Recipe('mine')))
  assert not made
