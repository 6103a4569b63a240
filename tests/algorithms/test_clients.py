"""Tests of centralized training, and of unusual models at clients."""

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm


def test_centralized_refuses_more_than_one_dataset(toy):
  _, process = client_rounds.toy_process('build_centralized')
  state = process.initialize()
  with pytest.raises(Exception, match='exactly one dataset'):
    process.next(state, [toy.dataset(8, 0), toy.dataset(8, 1)])


def test_centralized_can_start_from_other_weights(toy):
  model, process = client_rounds.toy_process('build_centralized')
  weights = model.from_keras(toy.keras_model())
  state = process.set_model_weights(process.initialize(), weights)
  client_rounds.assert_same(
      process.get_model_weights(state).trainable, weights.trainable
  )


class _Counter(keras.layers.Layer):
  """Counts its training calls, in an integer and in a float."""

  def build(self, shape):
    self.calls = self.add_weight(
        (), 'zeros', 'int64', trainable=False, name='calls'
    )
    self.level = self.add_weight(
        (), 'zeros', 'float64', trainable=False, name='level'
    )

  def call(self, x, training=None):
    if training:
      self.calls.assign_add(1)
      self.level.assign_add(1.0)
    return x


def _counting_model():
  return keras.Sequential(
      [
          keras.Input((4,), dtype='float64'),
          _Counter(name='counter'),
          keras.layers.Dense(3, dtype='float64'),
      ]
  )


def test_counters_exclude_differential_privacy(toy):
  with pytest.raises(ValueError, match="integers.*norm.*layer 'counter'"):
    algorithms.build_fed_avg(
        toy.model(_counting_model),
        _SGD(0.1),
        client_weighting='uniform',
        sum_aggregator=aggregators.DpSums(1.0, num_clients=2),
    )


def test_other_state_is_averaged_and_counters_stay_whole(toy):
  model = toy.model(_counting_model)
  process = algorithms.build_fed_avg(
      model, _SGD(0.1), client_weighting='uniform'
  )
  state = process.initialize()
  # 1, 1 and 3 batches: a mean of 5/3.
  data = [toy.dataset(8, 0), toy.dataset(8, 1), toy.dataset(24, 2)]
  state = process.next(state, data).state
  calls, level = process.get_model_weights(state).non_trainable
  assert calls == 2
  np.testing.assert_allclose(level, 5 / 3)


def _with_dropout(toy):
  def keras_model_fn():
    return keras.Sequential(
        [
            keras.Input((4,), dtype='float64'),
            keras.layers.Dropout(0.5, dtype='float64'),
            keras.layers.Dense(3, dtype='float64'),
        ]
    )

  return toy.model(keras_model_fn)


def test_dropout_depends_only_on_seed_round_and_data(toy):
  model = _with_dropout(toy)

  def losses(seed):
    process = algorithms.build_fed_avg(model, _SGD(0.0), seed=seed)
    state = process.initialize()
    found = []
    for _ in range(2):
      output = process.next(state, [toy.dataset(16, 0)])
      state = output.state
      found.append(output.metrics['client_work']['train']['loss'])
    return found

  first = losses(seed=0)
  assert losses(seed=0) == first
  assert len({*first, *losses(seed=1)}) == 4


def test_clients_with_other_data_drop_other_units(toy):
  def keras_model_fn():
    return keras.Sequential(
        [
            keras.Input((4,), dtype='float64'),
            # The loss depends on the dropped units, but not on the data.
            keras.layers.Lambda(tf.ones_like, dtype='float64'),
            keras.layers.Dropout(0.5, dtype='float64'),
            keras.layers.Dense(3, dtype='float64'),
        ]
    )

  process = algorithms.build_fed_avg(toy.model(keras_model_fn), _SGD(0.0))
  state = process.initialize()

  def loss(x):
    data = (np.full((8, 4), x), np.zeros(8, np.int32))
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(8)
    output = process.next(state, [dataset])
    return output.metrics['client_work']['train']['loss']

  assert loss(1.0) == loss(1.0)
  assert loss(1.0) != loss(2.0)


def test_regularization_is_part_of_the_loss(toy):
  model = toy.model(
      lambda: keras.Sequential(
          [
              keras.Input((4,), dtype='float64'),
              keras.layers.Dense(
                  3,
                  kernel_regularizer=keras.regularizers.L2(0.25),
                  dtype='float64',
                  use_bias=False,
              ),
          ]
      )
  )
  (kernel,) = model.initial_weights.trainable
  x, y = toy.arrays(8, 0)
  shares = np.exp(x @ kernel)
  shares /= shares.sum(axis=1, keepdims=True)
  gradient = x.T @ (shares - np.eye(3)[y]) / 8 + 2 * 0.25 * kernel
  process = algorithms.build_fed_avg(model, _SGD(0.1))
  training = client_rounds.run(process, [toy.dataset(8, 0)], 1)
  client_rounds.assert_close(
      training.weights(model), [kernel - 0.1 * gradient], rtol=1e-6
  )
