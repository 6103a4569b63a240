"""FedTAN with a robust rule in its exchanges."""

import functools

import keras
import numpy as np
import pytest
import small_models
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_layers = keras.layers
_SGD = tff.learning.optimizers.build_sgdm(0.5)
_MEAN = aggregators.Mean()


def _keras_model():
  inputs = keras.Input([4])
  x = _layers.BatchNormalization()(_layers.Dense(6)(inputs))
  # Two layers that share an exchange.
  x = _layers.ReLU()(x)
  x = _layers.Add()(
      [_layers.BatchNormalization()(_layers.Dense(n)(x)) for n in (5, 5)]
  )
  return keras.Model(inputs, _layers.Dense(3)(x))


@functools.cache
def _model():
  keras.utils.set_random_seed(0)
  return small_models.classifier(_keras_model, (4,))


def _datasets(num_clients=5):
  datasets = []
  for client in range(num_clients):
    rng = np.random.default_rng(client)
    x = rng.normal(client % 3 - 1, 1 + client % 2, (8, 4)).astype(np.float32)
    y = rng.integers(0, 3, 8, np.int32)
    datasets.append(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))
  return datasets


def _weights(process, num_rounds=2, datasets=None):
  state = process.initialize()
  for _ in range(num_rounds):
    state = process.next(state, datasets or _datasets()).state
  return process.get_model_weights(state)


@functools.cache
def _build(**options):
  return algorithms.build_fedtan(
      _model(), _SGD, moments='fused', local_steps=1, **options
  )


def _assert_equal(a, b, atol=2e-6):
  for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol)


def _distance(a, b):
  return max(
      np.abs(np.asarray(x) - y).max()
      for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
  )


@pytest.mark.slow
def test_the_rule_mean_is_plain_fedtan():
  """Also with a client without data, which abstains."""
  empty = _datasets(1)[0].take(0)
  for datasets in (_datasets(), [empty, *_datasets()]):
    plain = _weights(_build(), datasets=datasets)
    robust = _weights(_build(exchange_aggregator=_MEAN), datasets=datasets)
    _assert_equal(robust, plain)


@pytest.mark.slow
def test_attackers_in_the_exchanges_and_a_rule_against_them():
  """Two of seven attack, and the others have the same data."""
  (honest,) = _datasets(1)
  datasets = [honest] * 7
  attack = aggregators.FallOfEmpires(3.0)
  plain = _weights(_build(), datasets=datasets)
  attacked, robust = (
      _weights(
          _build(exchange_aggregator=aggregators.Attacked(rule, attack, 2)),
          datasets=datasets,
      )
      for rule in (_MEAN, aggregators.TrimmedMean(2))
  )
  _assert_equal(robust, plain)
  assert _distance(attacked, plain) > 0.1


@pytest.mark.slow
def test_fedtan_ii_takes_a_rule_too():
  process = algorithms.build_fedtan_ii(
      _model(),
      _SGD,
      sync_rounds=1,
      moments='fused',
      local_steps=1,
      exchange_aggregator=_MEAN,
  )
  after_one = _weights(_build(exchange_aggregator=_MEAN), 1)
  _assert_equal(_weights(process, 1), after_one)
  # The second phase has no exchanges.
  after_two = _weights(process, 2)
  assert 0 < _distance(after_two, after_one) < 1


def test_wrong_arguments():
  median = aggregators.CoordinateMedian(1)
  with pytest.raises(ValueError, match="moments='two_pass' .*CoordinateMedian"):
    algorithms.build_fedtan(_model(), _SGD, exchange_aggregator=median)
  with pytest.raises(
      TypeError, match='exchange_aggregator must be .* is a str'
  ):
    _build(exchange_aggregator='median')
  with pytest.raises(
      ValueError, match='exchange_aggregator and sum_aggregator'
  ):
    _build(
        exchange_aggregator=median,
        sum_aggregator=tff.aggregators.SumFactory(),
    )
