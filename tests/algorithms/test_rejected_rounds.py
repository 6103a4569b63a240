"""Tests that the server rejects a result that is not finite."""

import functools

import client_rounds
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_BUILDERS = {
    'fed_avg': algorithms.build_fed_avg,
    'fed_bn': algorithms.build_fed_bn,
    'fedtan': algorithms.build_fedtan,
    'scaffold': algorithms.build_scaffold,
    # Its builder takes only means.
    'fed_dyn': functools.partial(
        algorithms.build_fed_avg, drift_correction=algorithms.FedDyn(0.01)
    ),
    'fed_bs': functools.partial(algorithms.build_fed_bs, epsilon=1e-9),
}


def _server_values(training):
  """Returns the model and the optimizer's state at the server."""
  state = training.state
  return tf.nest.flatten(
      [state.global_model_weights, state.finalizer['optimizer']]
  )


def _assert_same(found, expected):
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a, b)


class _Overflowing(tff.aggregators.WeightedAggregationFactory):
  """A mean that is infinite in the given rounds."""

  def __init__(self, rounds):
    self._rounds = rounds

  def create(self, value_type, weight_type):
    inner = aggregators.WeightedMeanFactory().create(value_type, weight_type)

    @tff.tensorflow.computation(value_type, tf.int32)
    def spoil(value, round_num):
      is_bad = tf.reduce_any(tf.equal(round_num, self._rounds))
      return tf.nest.map_structure(
          lambda v: tf.where(is_bad, tf.constant(np.inf, v.dtype), v), value
      )

    @tff.tensorflow.computation(tf.int32)
    def next_round(round_num):
      return round_num + 1

    @tff.federated_computation
    def initialize():
      return tff.federated_value(1, tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      result = inner.next(inner.initialize(), value, weight).result
      return tff.templates.MeasuredProcessOutput(
          tff.federated_map(next_round, state),
          tff.federated_map(spoil, (result, state)),
          tff.federated_value((), tff.SERVER),
      )

    return tff.templates.AggregationProcess(initialize, next_fn)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        n if n == 'fed_avg' else pytest.param(n, marks=pytest.mark.slow)
        for n in _BUILDERS
    ],
)
def test_the_server_keeps_what_it_has(toy, name):
  model = toy.model()
  data = client_rounds.datasets(toy, (16, 9, 20))
  process = _BUILDERS[name](
      model, _SGD(0.1), model_aggregator=_Overflowing([2, 3, 5])
  )
  training = client_rounds.Training(process, len(data))
  counts = []
  for number in range(1, 6):
    before = _server_values(training)
    metrics = training.next_round(data)
    counts.append(tuple(metrics['finalizer'].values()))
    assert metrics['client_work']['num_dropped_clients'] == 0
    after = _server_values(training)
    if number in (2, 3, 5):
      _assert_same(after, before)
    else:
      assert any(np.any(a != b) for a, b in zip(after, before))
    assert all(
        np.all(np.isfinite(leaf)) for leaf in tf.nest.flatten(training.state)
    )
  assert counts == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3)]
  assert list(metrics['finalizer']) == ['failed_rounds', 'rejected_rounds']


def test_a_server_optimizer_that_overflows_changes_nothing(toy_images):
  model = toy_images.model()
  data = client_rounds.datasets(toy_images, (16, 9))
  process = algorithms.build_fed_avg(
      model, _SGD(50.0), local_steps=1, server_optimizer=_SGD(3e38, 0.9)
  )
  training = client_rounds.Training(process, len(data))
  before = _server_values(training)
  metrics = training.next_round(data)
  assert metrics['finalizer'] == dict(failed_rounds=1, rejected_rounds=1)
  assert metrics['client_work']['num_dropped_clients'] == 0
  _assert_same(_server_values(training), before)


@pytest.mark.parametrize('optimizer', ['client_optimizer', 'server_optimizer'])
def test_a_learning_rate_that_is_not_finite_is_refused(toy_images, optimizer):
  optimizers = dict(client_optimizer=_SGD(0.1), server_optimizer=_SGD(0.1))
  optimizers[optimizer] = _SGD(1e300)
  with pytest.raises(
      ValueError, match=f'{optimizer} has learning_rate=1e.300, .* in float32'
  ):
    algorithms.build_fed_avg(toy_images.model(), **optimizers)


def test_a_mean_that_is_finite_is_adopted(toy_images):
  # Each update is finite, but not its product with the number of examples.
  model = toy_images.model()
  data = client_rounds.datasets(toy_images, (200, 150))
  process = algorithms.build_fed_avg(
      model, _SGD(1e37), client_gradient_clip_norm=1.0, local_steps=1
  )
  training = client_rounds.Training(process, len(data))
  metrics = training.next_round(data)
  assert metrics['client_work']['num_dropped_clients'] == 0
  assert metrics['finalizer']['rejected_rounds'] == 0
  kernel = training.weights(model)[0]
  assert np.all(np.isfinite(kernel)) and np.abs(kernel).max() > 1e35


@pytest.mark.slow
def test_scaffold_keeps_control_variates_that_are_finite(toy_images):
  # A mean gradient of a step of 1e-40 is not finite in float32.
  model = toy_images.model()
  data = client_rounds.datasets(toy_images, (16, 9))
  process = algorithms.build_scaffold(
      model,
      _SGD(0.1),
      client_learning_rate_schedule=lambda n: tf.where(n < 1, 1e-44, 0.1),
  )
  training = client_rounds.Training(process, len(data))
  for _ in range(2):
    metrics = training.next_round(data)
    for leaf in tf.nest.flatten([training.state, training.clients]):
      assert np.all(np.isfinite(leaf))
  assert metrics['client_work']['num_dropped_clients'] == 0
