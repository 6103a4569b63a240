"""Tests of FBN: it equals training on the union of the data."""

import functools

import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow_federated as tff
import toy_problem

from tff_bn import BatchNormModel
from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn import analysis
from tff_bn.layers import FederatedBatchNormalization

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_BETA = 0.25  # The toy model's.


@functools.cache
def _model():
  return toy_problem.Toy().model()


@functools.cache
def _process(pooled=True, local_steps=1):
  return algorithms.build_fbn(
      _model(), _SGD(0.1), local_steps=local_steps, pooled=pooled
  )


def _initial_weights():
  return _model().from_model_weights(_model().initial_weights)


def _train(process, rounds, model=None):
  """Returns the weights after rounds, each a list of the clients' datasets."""
  state = process.initialize()
  for data in rounds:
    state = process.next(state, data).state
  weights = process.get_model_weights(state)
  return (model or _model()).from_model_weights(weights)


def _client_statistics(weights, batches):
  """Returns r_i and s_i of each client, lines 5 and 6 of algorithm 2."""
  n = sum(len(x) for x, _ in batches)
  means, variances = [], []
  for x, y in batches:
    _, _, mean, variance = reference.gradients(weights, x, y, fixed=True)
    means.append((1 - _BETA) * weights[reference.MEAN] + _BETA * mean)
    variances.append(
        (1 - _BETA) * weights[reference.VARIANCE]
        + _BETA * _unbiased(n) * variance
    )
  return np.array(means), np.array(variances), n


def _unbiased(n):
  return n / (n - 1)


def _step(weights, x, y, learning_rate=0.1):
  """Makes a step of centralized training with FBN's normalization."""
  _, grads, mean, variance = reference.gradients(weights, x, y, fixed=True)
  new = [
      w if g is None else w - learning_rate * g for w, g in zip(weights, grads)
  ]
  new[reference.MEAN] = (1 - _BETA) * weights[reference.MEAN] + _BETA * mean
  new[reference.VARIANCE] = (1 - _BETA) * weights[
      reference.VARIANCE
  ] + _BETA * _unbiased(len(x)) * variance
  return new


def _assert_equal(found, expected, rtol=1e-12, atol=1e-12):
  for value, truth in zip(found, expected, strict=True):
    np.testing.assert_allclose(value, truth, rtol=rtol, atol=atol)


def test_rounds_equal_centralized_training_on_the_union(toy):
  """Weights, and running statistics to 1e-12, also with unequal batches."""
  sizes = (8, 3, 7, 1)
  expected = _initial_weights()
  rounds = []
  for round_num in range(20):
    seeds = [len(sizes) * round_num + i for i in range(len(sizes))]
    rounds.append([toy.dataset(n, seed) for n, seed in zip(sizes, seeds)])
    arrays = [toy.arrays(n, seed) for n, seed in zip(sizes, seeds)]
    union = [np.concatenate(parts) for parts in zip(*arrays)]
    expected = _step(expected, *union)

  _assert_equal(_train(_process(), rounds), expected)


def test_without_pooling_clients_have_equal_weights(toy):
  """Algorithm 2 of the paper, line by line, with unequal sizes."""
  sizes = (8, 3, 5)
  means, variances, n = _client_statistics(
      _initial_weights(), [toy.arrays(n, seed) for seed, n in enumerate(sizes)]
  )
  mean = np.mean(means, axis=0)
  variance = np.mean(variances, axis=0) + _unbiased(n) / _BETA * np.mean(
      (means - mean) ** 2, axis=0
  )
  data = [toy.dataset(size, seed) for seed, size in enumerate(sizes)]
  found = _train(_process(pooled=False), [data])
  np.testing.assert_allclose(found[reference.MEAN], mean, rtol=1e-12)
  np.testing.assert_allclose(found[reference.VARIANCE], variance, rtol=1e-12)
  # With equal sizes, it is the step on the union.
  arrays = [toy.arrays(8, seed) for seed in range(3)]
  expected = _step(
      _initial_weights(), *(np.concatenate(parts) for parts in zip(*arrays))
  )
  data = [toy.dataset(8, seed) for seed in range(3)]
  _assert_equal(_train(_process(pooled=False), [data]), expected)


def test_statistics_of_several_steps_are_pooled_and_move_once(toy):
  before = _initial_weights()
  sizes = (16, 11)  # Batches of 8, and 8 and 3.
  values, results = [], []
  for seed, size in enumerate(sizes):
    weights = before
    for x, y in reference.split(*toy.arrays(size, seed)):
      values.append(x @ weights[0] + weights[1])
      _, grads, _, _ = reference.gradients(weights, x, y, fixed=True)
      weights = [
          w if g is None else w - 0.1 * g for w, g in zip(weights, grads)
      ]
    results.append(weights)
  expected = [
      reference.average(both, sizes) for both in zip(*results, strict=True)
  ]
  values = np.concatenate(values)
  for i, seen in (
      (reference.MEAN, values.mean(0)),
      (reference.VARIANCE, values.var(0, ddof=1)),
  ):
    expected[i] = (1 - _BETA) * before[i] + _BETA * seen
  data = [toy.dataset(size, seed) for seed, size in enumerate(sizes)]
  _assert_equal(_train(_process(local_steps=2), [data]), expected)


@pytest.mark.parametrize(
    'images', [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_one_client_equals_the_keras_layer(images, toy, toy_images):
  """A Keras model with `FederatedBatchNormalization`, trained by Keras."""
  problem = toy_images if images else toy
  model = problem.model()
  keras_model = model.to_keras()

  def federated(layer):
    if isinstance(layer, keras.layers.BatchNormalization):
      return FederatedBatchNormalization.from_config(layer.get_config())
    return layer.__class__.from_config(layer.get_config())

  keras_model = keras.models.clone_model(keras_model, clone_function=federated)
  keras_model.set_weights(model.to_keras().get_weights())
  # Keras's learning rate is float32 for all weights.
  keras_model.compile(keras.optimizers.SGD(0.125), loss=model.loss_fn())
  data = [problem.dataset(8, seed) for seed in range(5)]
  for dataset in data:
    keras_model.fit(dataset, shuffle=False, verbose=0)

  process = algorithms.build_fbn(model, _SGD(0.125), local_steps=1)
  found = _train(process, [[dataset] for dataset in data], model)
  tolerance = 1e-5 if problem.dtype == 'float32' else 1e-8
  _assert_equal(found, keras_model.get_weights(), tolerance, tolerance)


def test_batch_normalization_of_either_class_is_trained_alike(toy):
  def with_federated_layers():
    return keras.models.clone_model(
        toy.model().to_keras(),
        clone_function=lambda layer: (
            FederatedBatchNormalization
            if isinstance(layer, keras.layers.BatchNormalization)
            else type(layer)
        ).from_config(layer.get_config()),
    )

  model = _model()
  federated = BatchNormModel(
      with_federated_layers, model.input_spec, model.loss_fn
  )
  process = algorithms.build_fbn(federated, _SGD(0.1), local_steps=2)
  state = process.set_model_weights(process.initialize(), model.initial_weights)
  data = [toy.dataset(16, 0), toy.dataset(9, 1)]
  state = process.next(state, data).state
  found = federated.from_model_weights(process.get_model_weights(state))
  expected = _train(_process(local_steps=2), [data])
  _assert_equal(found, expected, rtol=0, atol=0)


def test_a_rule_replaces_the_means_of_the_statistics(toy):
  """R' = Agg(r), S' = Agg(s) + N/((N-1) β) Agg((r - R')²)."""
  process = algorithms.build_fbn(
      _model(),
      _SGD(0.1),
      local_steps=1,
      statistics_aggregator=aggregators.CoordinateMedian(),
  )
  means, variances, n = _client_statistics(
      _initial_weights(), [toy.arrays(8, seed) for seed in range(5)]
  )
  mean = np.median(means, axis=0)
  variance = np.median(variances, axis=0) + _unbiased(n) / _BETA * np.median(
      (means - mean) ** 2, axis=0
  )
  found = _train(process, [[toy.dataset(8, s) for s in range(5)]])
  np.testing.assert_allclose(found[reference.MEAN], mean, rtol=1e-12)
  np.testing.assert_allclose(found[reference.VARIANCE], variance, rtol=1e-12)


def test_a_round_has_the_exchange_of_fedavg():
  fed_avg = algorithms.build_fed_avg(_model(), _SGD(0.1), local_steps=1)
  traffic = [
      analysis.ProcessTraffic(process).until(round_num=3, num_clients=4)
      for process in (_process(), fed_avg)
  ]
  assert traffic[0] == traffic[1]


def test_a_model_without_batch_normalization_is_refused(toy):
  model = BatchNormModel(
      lambda: keras.Sequential(
          [keras.Input((4,)), keras.layers.Dense(3, name='only')]
      ),
      toy.model().input_spec,
      toy.model().loss_fn,
  )
  with pytest.raises(ValueError, match='FBN .* batch normalization'):
    algorithms.build_fbn(model, _SGD(0.1))


def test_other_statistics_aggregators_are_refused():
  with pytest.raises(TypeError, match='FBN must be a tff_bn.aggregators.Rule'):
    algorithms.build_fbn(
        _model(),
        _SGD(0.1),
        statistics_aggregator=aggregators.NaiveMomentsFactory(),
    )
