"""Tests of random permutations of hidden units during local training."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn import position_aware
from tff_bn.clients import local_training
from tff_bn.clients import local_training_config
from tff_bn.clients import unit_shuffle
from tff_bn.position_aware import position_encodings

_SGD = tff.learning.optimizers.build_sgdm


def _draw(num_units, probability, seed):
  return unit_shuffle.random_permutation(num_units, probability, seed).numpy()


def test_permutations_keep_as_many_units_as_in_numpy():
  drawn = tf.function(
      lambda seed: unit_shuffle.random_permutation(1024, 0.1, seed)
  )
  shares = []
  for number in range(40):
    found = drawn(tf.constant([3, number])).numpy()
    shares.append(position_aware.kept_share(found))  # Checks it, too.
  expected = position_aware.mean_kept_share(1024, 0.1, repeats=100)
  assert np.mean(shares) == pytest.approx(expected, abs=0.006)
  assert len(set(shares)) > 20


def test_every_unit_can_go_to_every_later_position():
  """With P_sf = 1, each row is swapped with one below: a cycle."""
  counts = collections.Counter(
      tuple(_draw(3, 1.0, [0, seed])) for seed in range(200)
  )
  # The first row is swapped with either of two, the second with the last.
  assert counts.keys() == {(1, 2, 0), (2, 0, 1)}
  assert min(counts.values()) > 70
  np.testing.assert_array_equal(_draw(5, 0.0, [1, 2]), range(5))
  np.testing.assert_array_equal(_draw(1, 1.0, [1, 2]), [0])
  np.testing.assert_array_equal(_draw(50, 0.5, [1, 2]), _draw(50, 0.5, [1, 2]))


def _keras_model(pan=None):
  layers = keras.layers
  inputs = keras.Input((6, 6, 1), dtype='float64')
  x = layers.Conv2D(6, 3, padding='same', dtype='float64', name='conv')(inputs)
  x = layers.BatchNormalization(momentum=0.75, dtype='float64', name='norm')(x)
  x = layers.ReLU(dtype='float64')(x)
  y = layers.Conv2D(6, 3, padding='same', dtype='float64', name='more')(x)
  x = layers.Add(dtype='float64')([x, y])
  x = layers.Flatten(dtype='float64')(x)
  x = layers.Dense(7, activation='tanh', dtype='float64', name='hidden')(x)
  outputs = layers.Dense(3, dtype='float64', name='logits')(x)
  model = keras.Model(inputs, outputs)
  if pan:
    model = position_encodings.add_position_encodings(model, pan, 0.5)
  return model


@functools.cache
def _model(keras_model_fn=_keras_model):
  keras.utils.set_random_seed(0)
  return BatchNormModel(
      keras_model_fn,
      (
          tf.TensorSpec((None, 6, 6, 1), tf.float64),
          tf.TensorSpec((None,), tf.int32),
      ),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True, dtype='float64'
      ),
  )


def _dataset(num_examples, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(seed, 1, (num_examples, 6, 6, 1))
  y = rng.integers(0, 3, num_examples).astype(np.int32)
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


_MOMENTUM = _SGD(0.1, 0.9)


@functools.cache
def _training(model, optimizer=_MOMENTUM, **options):
  return local_training.LocalTraining(
      model, local_training_config.LocalTrainingConfig(optimizer, **options)
  )


def _train(training, model, dataset, round_num=0):
  values = model.from_model_weights(model.initial_weights)

  @tf.function(autograph=False)
  def train():
    return training.train(
        [tf.constant(value) for value in values],
        dataset,
        training.initial_optimizer_state(),
        tf.constant(round_num),
    )._asdict()

  return tf.nest.map_structure(lambda tensor: tensor.numpy(), train())


def _outputs(model, values, x):
  return model.to_keras(model.to_model_weights(values))(x).numpy()


def _permuted(plain, shuffled):
  """Whether a hidden unit is elsewhere: biases differ, but not their set."""
  np.testing.assert_allclose(np.sort(plain), np.sort(shuffled), rtol=1e-7)
  return np.abs(plain - shuffled).max() > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    'optimizer',
    [_MOMENTUM, tff.learning.optimizers.build_adam(0.01)],
    ids=['momentum', 'adam'],
)
def test_without_encodings_training_is_the_same_function(optimizer):
  model, dataset = _model(), _dataset(20)
  plain = _train(_training(model, optimizer), model, dataset)
  training = _training(
      model, optimizer, shuffle_times=5, shuffle_probability=0.5
  )
  found = _train(training, model, dataset)
  x = np.random.default_rng(9).normal(size=(8, 6, 6, 1))
  expected = _outputs(model, plain['values'], x)
  np.testing.assert_allclose(
      _outputs(model, found['values'], x), expected, rtol=1e-7, atol=1e-9
  )
  np.testing.assert_allclose(found['loss_sum'], plain['loss_sum'], rtol=1e-9)
  paths = [v.path for v in model.keras_model.weights]
  for path in ('norm/beta', 'norm/moving_mean', 'hidden/bias'):
    position = paths.index(path)
    assert _permuted(plain['values'][position], found['values'][position])


def test_encodings_stay_so_the_function_changes():
  model = _model(lambda: _keras_model('multiply'))
  dataset = _dataset(20)
  plain = _train(_training(model), model, dataset)
  training = _training(model, shuffle_times=5, shuffle_probability=0.5)
  found = _train(training, model, dataset)
  x = np.random.default_rng(9).normal(size=(8, 6, 6, 1))
  expected = _outputs(model, plain['values'], x)
  assert np.abs(_outputs(model, found['values'], x) - expected).max() > 1e-2


@pytest.mark.slow
def test_without_permutations_training_is_the_same_to_the_bit():
  model, dataset = _model(), _dataset(20)
  training = _training(model, shuffle_times=5, shuffle_probability=0.0)
  tf.nest.map_structure(
      np.testing.assert_array_equal,
      _train(training, model, dataset),
      _train(_training(model), model, dataset),
  )


@pytest.mark.slow
def test_seed_round_and_client_decide_and_nothing_else():
  model = _model()
  # With learning rate 0, only the permutations change the weights.
  first, second = (
      _training(
          model, _SGD(0.0), shuffle_times=2, shuffle_probability=1.0, seed=seed
      )
      for seed in (0, 1)
  )

  def run(training=first, client=0, round_num=0):
    found = _train(training, model, _dataset(8, client), round_num)
    return found['values'][0].tobytes()

  assert run() == run()
  assert len({run(), run(client=1), run(second), run(round_num=1)}) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ('num_batches', 'options', 'num_steps'),
    [
        pytest.param(6, dict(local_steps=4), 4, marks=pytest.mark.slow),
        (3, dict(local_epochs=2), 6),
    ],
)
def test_mean_number_of_permutations(num_batches, options, num_steps):
  """P_sf = 1 with 2 units: each permutation swaps them."""
  model = _model(lambda: _flat(keras.layers.Dense(2, dtype='float64')))
  training = _training(
      model, _SGD(0.0), shuffle_times=1.5, shuffle_probability=1.0, **options
  )
  values = model.from_model_weights(model.initial_weights)
  x, y = next(iter(_dataset(1)))
  # Empty batches are no steps.
  dataset = tf.data.Dataset.from_tensors((x, y)).repeat(num_batches)
  dataset = dataset.concatenate(tf.data.Dataset.from_tensors((x[:0], y[:0])))

  @tf.function(autograph=False)
  def is_swapped(round_num):
    result = training.train(
        [tf.constant(value) for value in values],
        dataset,
        training.initial_optimizer_state(),
        round_num,
    )
    return tf.reduce_any(result.values[0] != values[0])

  swapped = [bool(is_swapped(tf.constant(r))) for r in range(120)]
  # An odd number of steps with probability p each.
  p = 1.5 / num_steps
  expected = (1 - (1 - 2 * p) ** num_steps) / 2
  assert np.mean(swapped) == pytest.approx(expected, abs=0.14)


def _partly_frozen(*names):
  model = _keras_model()
  for name in names:
    model.get_layer(name).trainable = False
  return model


@pytest.mark.slow
def test_units_with_frozen_weights_keep_their_places():
  """The other units are permuted, so the function is the same."""
  model = _model(lambda: _partly_frozen('conv'))
  dataset = _dataset(16)
  plain = _train(_training(model), model, dataset)
  training = _training(model, shuffle_times=4, shuffle_probability=1.0)
  found = _train(training, model, dataset)
  positions = {v.layer: p for p, v in reversed([*enumerate(model.variables)])}
  # `conv`, `norm` and `more` have the same units.
  for position in range(positions['hidden']):
    np.testing.assert_allclose(
        found['values'][position], plain['values'][position], rtol=1e-7
    )
  assert sorted(model.constants) == [0, 1]
  initial = model.from_model_weights(model.initial_weights)
  for position in model.constants:
    np.testing.assert_array_equal(found['values'][position], initial[position])
  bias = positions['hidden'] + 1
  assert _permuted(plain['values'][bias], found['values'][bias])
  x = np.random.default_rng(0).normal(size=(3, 6, 6, 1))
  np.testing.assert_allclose(
      *(_outputs(model, r['values'], x) for r in (plain, found)), rtol=1e-6
  )


def _flat(make_hidden=lambda x: x):
  """Returns a model of flat inputs, with hidden layers from a function."""
  inputs = keras.Input((6, 6, 1), dtype='float64')
  x = make_hidden(keras.layers.Flatten(dtype='float64')(inputs))
  return keras.Model(inputs, keras.layers.Dense(3, dtype='float64')(x))


def _with_reshape():
  def hidden(x):
    x = keras.layers.Dense(4, dtype='float64')(x)
    x = keras.layers.Reshape((2, 2), name='square', dtype='float64')(x)
    return keras.layers.Flatten(dtype='float64')(x)

  return _flat(hidden)


@pytest.mark.slow
@pytest.mark.usefixtures('in_process_runtime')
def test_clients_are_permuted_independently_and_again_if_continued():
  model = _model(lambda: _flat(keras.layers.Dense(9, dtype='float64')))
  data = [_dataset(8, client) for client in range(2)]
  process, continued = (
      algorithms.build_fed_avg(
          model, _SGD(1e-9), shuffle_times=2.0, shuffle_probability=1.0, seed=3
      )
      for _ in range(2)
  )
  state = process.next(process.initialize(), data).state
  kernel = process.get_model_weights(state).trainable[0]
  initial = model.initial_weights.trainable[0]
  # The mean of two permutations of nearly the same kernel is another kernel.
  assert np.abs(kernel - initial).max() > 0.01
  np.testing.assert_allclose(kernel.sum(), initial.sum(), 1e-6)

  expected, found = (
      each.get_model_weights(each.next(state, data).state)
      for each in (process, continued)
  )
  tf.nest.map_structure(
      np.testing.assert_array_equal, found.trainable, expected.trainable
  )


@pytest.mark.parametrize(
    ('keras_model_fn', 'message'),
    [
        (_with_reshape, "shuffle_times=1 is impossible: .* layer 'square'"),
        (_flat, 'shuffle_times=1 is impossible: .* no hidden units'),
        (
            lambda: _partly_frozen('norm', 'hidden'),
            r'no hidden units .* \(Units of frozen layers keep their places',
        ),
    ],
)
def test_models_that_are_refused(keras_model_fn, message):
  with pytest.raises(ValueError, match=message):
    algorithms.build_fed_avg(_model(keras_model_fn), _SGD(0.1), shuffle_times=1)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(shuffle_times=float('nan')), 'shuffle_times=nan must be'),
        (
            dict(shuffle_times=3.5, local_steps=3),
            'shuffle_times=3.5 must be at most local_steps=3',
        ),
        (dict(shuffle_probability=1.5), 'shuffle_probability=1.5 must be'),
    ],
)
def test_values_that_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    algorithms.build_fed_avg(_model(), _SGD(0.1), **options)


@pytest.mark.parametrize(
    ('build', 'name'),
    [(algorithms.build_fedtan, 'FedTAN'), (algorithms.build_dsgd, 'DSGD')],
)
def test_algorithms_that_are_refused(build, name):
  with pytest.raises(
      ValueError, match=f'shuffle_times=0.5 is impossible with {name}'
  ):
    build(_model(), _SGD(0.1), shuffle_times=0.5)
