"""Tests of clients that are left out of a round, with float32 models.

A round with a client that has no data, or data that are not finite, must equal
the round without it. In float32, TensorFlow fuses convolutions, batch
normalization and ReLU, and the fused ReLU turns NaN into 0.
"""

import functools

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import models
from tff_bn.keras_model.batch_norm_model import BatchNormModel

_SGD = tff.learning.optimizers.build_sgdm
_SHAPE = (8, 8, 1)
_NUM_CLASSES = 4
# These algorithms read a client's data in different ways.
_BUILDERS = {
    'fed_avg': algorithms.build_fed_avg,
    'fed_bn': algorithms.build_fed_bn,
    'fedtan': algorithms.build_fedtan,
    'fedtan_fused': functools.partial(algorithms.build_fedtan, moments='fused'),
    'fedtan_forward': functools.partial(
        algorithms.build_fedtan, synchronize='forward'
    ),
    # In their second round, these two normalize with fixed statistics.
    'fedtan_ii': functools.partial(algorithms.build_fedtan_ii, sync_rounds=1),
    'fixbn': functools.partial(algorithms.build_fixbn, fixbn_rounds=1),
    'fbn': algorithms.build_fbn,
    # The default counts clients that are left out, too.
    'scaffold': functools.partial(algorithms.build_scaffold, num_clients=4),
    'bn_scaffold': functools.partial(
        algorithms.build_bn_scaffold, num_clients=4
    ),
    'moon': algorithms.build_moon,
    'greg': algorithms.build_greg,
    'fed_nova': algorithms.build_fed_nova,
    'fed_dyn': functools.partial(algorithms.build_fed_dyn, num_clients=4),
    'fed_bs': functools.partial(algorithms.build_fed_bs, epsilon=1e-9),
    # These two train twice in a round.
    'fed_rep': algorithms.build_fed_rep,
    'ditto': algorithms.build_ditto,
    'dsgd_momentum': functools.partial(algorithms.build_dsgd, momentum=0.5),
}
_KINDS = ('nan', 'all_nan', 'inf', 'empty', 'empty_batch')


def _model(name):
  keras.utils.set_random_seed(3)
  return BatchNormModel(
      models.build_model_fn(name, _SHAPE, _NUM_CLASSES),
      (tf.TensorSpec((None, *_SHAPE)), tf.TensorSpec((None,), tf.int32)),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [],
  )


@functools.lru_cache(maxsize=8)
def _model_and_process(name, model_name='small_cnn', learning_rate=0.05):
  model = _model(model_name)
  return model, _BUILDERS[name](model, _SGD(learning_rate), local_steps=None)


def _arrays(seed, size):
  rng = np.random.default_rng(seed)
  x = rng.normal(seed % 3, 1 + seed % 2, (size, *_SHAPE))
  y = rng.integers(_NUM_CLASSES, size=size)
  return x.astype(np.float32), y.astype(np.int32)


def _dataset(x, y, batch_size=4):
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)


def _left_out(kind):
  """Returns the dataset of a client that must be left out."""
  x, y = _arrays(7, 8)
  match kind:
    case 'nan':
      x[1, 3, 2] = np.nan
    case 'all_nan':
      x[:] = np.nan
    case 'inf':
      x[2, 0, 0] = -np.inf
    case 'empty':
      return _dataset(x, y).take(0)
    case 'empty_batch':
      return tf.data.Dataset.from_tensors((x[:0], y[:0]))
  return _dataset(x, y)


def _values(training, model):
  """Returns everything that two trainings are compared by."""
  return tf.nest.flatten([training.weights(model), training.clients])


def _assert_close(found, expected, message=''):
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=message)


def _check(name, *arguments):
  """Compares two rounds with and without clients that must be left out."""
  model, process = _model_and_process(name, *arguments)
  # The last client has a single example.
  good = [_dataset(*_arrays(seed, n)) for seed, n in enumerate((8, 6, 1))]
  expected = client_rounds.run(process, good, 2)
  initial = client_rounds.Training(process, 3)
  assert any(
      np.any(a != b)
      for a, b in zip(_values(expected, model), _values(initial, model))
  )
  for kind in _KINDS:
    bad = _left_out(kind)
    found = client_rounds.Training(process, 4)
    for _ in range(2):
      metrics = found.next_round([good[0], bad, *good[1:]])
      work = metrics['client_work']
      assert work['num_clients'] == 4
      assert work['num_dropped_clients'] == ('empty' not in kind), kind
    if found.clients:
      kept = tf.nest.flatten(found.clients.pop(1))
      for a, b in zip(kept, tf.nest.flatten(initial.clients[1]), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=kind)
    _assert_close(_values(found, model), _values(expected, model), kind)


# The others take longer, or train their clients as one of these does.
_QUICK = ('fed_avg', 'fed_bn', 'fbn')


@pytest.mark.usefixtures('in_process_runtime')
@pytest.mark.parametrize(
    'name',
    [
        n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow)
        for n in _BUILDERS
    ],
)
def test_a_round_with_such_a_client_is_the_round_without(name):
  _check(name)


@pytest.mark.slow
@pytest.mark.usefixtures('in_process_runtime')
@pytest.mark.parametrize(
    ('name', 'model_name'),
    [
        ('fedtan_ii', 'digits_cnn'),
        ('fbn', 'resnet20'),
    ],
)
def test_with_deeper_models(name, model_name):
  # FBN, which starts with the statistics 0 and 1, diverges with large steps.
  _check(name, model_name, 1e-4)


# In this runtime, only the kind of the state differs between algorithms.
@pytest.mark.slow
@pytest.mark.usefixtures('native_runtime')
@pytest.mark.parametrize('name', ['fed_avg', 'fedtan', 'scaffold', 'fed_dyn'])
def test_in_the_native_runtime(name):
  _check(name)


@pytest.mark.usefixtures('in_process_runtime')
@pytest.mark.parametrize(
    'name', ['fedtan_fused', pytest.param('fbn', marks=pytest.mark.slow)]
)
def test_an_empty_batch_between_others_changes_nothing(name):
  model, process = _model_and_process(name)
  x, y = _arrays(0, 8)
  parts = [_dataset(x[:4], y[:4]), _dataset(x[4:], y[4:])]
  empty = tf.data.Dataset.from_tensors((x[:0], y[:0]))
  found = client_rounds.run(
      process, [parts[0].concatenate(empty).concatenate(parts[1])], 1
  )
  expected = client_rounds.run(process, [parts[0].concatenate(parts[1])], 1)
  for a, b in zip(found.weights(model), expected.weights(model), strict=True):
    np.testing.assert_array_equal(a, b)


# A model with two inputs, each with batch normalization.

_TWO_INPUTS_SPEC = (
    (tf.TensorSpec((None, 6, 6, 1)), tf.TensorSpec((None, 5))),
    tf.TensorSpec((None,)),
)


def _two_inputs_model():
  layers = keras.layers

  def keras_model_fn():
    images, vectors = keras.Input((6, 6, 1)), keras.Input((5,))
    x = layers.Conv2D(4, 3)(images)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.5)(x))
    x = layers.GlobalAveragePooling2D()(x)
    v = layers.Dense(4)(vectors)
    v = layers.ReLU()(layers.BatchNormalization(momentum=0.5)(v))
    output = layers.Dense(1)(layers.Concatenate()([x, v]))
    return keras.Model([images, vectors], layers.Flatten()(output)[:, 0])

  keras.utils.set_random_seed(1)
  return BatchNormModel(
      keras_model_fn,
      _TWO_INPUTS_SPEC,
      loss_fn=keras.losses.MeanSquaredError,
      metrics_fn=lambda: [],
  )


def _two_inputs(seed):
  rng = np.random.default_rng(seed)
  return [
      np.float32(rng.normal(seed, 1 + seed, shape))
      for shape in ((6, 6, 6, 1), (6, 5), (6,))
  ]


@pytest.mark.usefixtures('in_process_runtime')
def test_fedtan_leaves_a_client_out_of_the_exchanges_of_all_branches():
  model = _two_inputs_model()
  process = algorithms.build_fedtan(model, _SGD(0.05), moments='fused')

  def dataset(images, vectors, labels):
    return tf.data.Dataset.from_tensors(((images, vectors), labels))

  good = [dataset(*_two_inputs(seed)) for seed in range(3)]
  expected = client_rounds.run(process, good, 1).weights(model)
  for spoilt in range(3):  # The images, the vectors, the labels.
    for value in (np.nan, np.inf):
      arrays = _two_inputs(5)
      arrays[spoilt].flat[7 % arrays[spoilt].size] = value
      found = client_rounds.Training(process, 4)
      metrics = found.next_round([good[0], dataset(*arrays), *good[1:]])
      assert metrics['client_work']['num_dropped_clients'] == 1
      _assert_close(found.weights(model), expected)


@pytest.mark.usefixtures('in_process_runtime')
@pytest.mark.parametrize(
    'name', ['fedtan', pytest.param('fedtan_fused', marks=pytest.mark.slow)]
)
def test_fedtan_leaves_out_a_client_whose_numbers_are_too_large(name):
  model, process = _model_and_process(name)
  good = [_dataset(*_arrays(seed, 8)) for seed in range(3)]
  expected = client_rounds.run(process, good, 1).weights(model)
  x, y = _arrays(7, 8)
  for scale in (1e18, 3e19, 1e30):
    found = client_rounds.Training(process, 4)
    metrics = found.next_round(
        [good[0], _dataset(x * np.float32(scale), y), *good[1:]]
    )
    assert metrics['client_work']['num_dropped_clients'] == 1
    _assert_close(found.weights(model), expected, f'{scale}')
