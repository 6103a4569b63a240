"""Aggregation of each part of an update with its own aggregator."""

import collections

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn import aggregators

pytestmark = pytest.mark.usefixtures('in_process_runtime')


def _update(trainable, mean, variance, other, count):
  return collections.OrderedDict(
      trainable=[np.array(trainable)],
      statistics=[
          aggregators.layer_moments(
              float(count), np.array([mean]), np.array([variance])
          )
      ],
      other_state=[np.float64(other)],
  )


_TYPE = tff.to_type(
    collections.OrderedDict(
        trainable=[tff.TensorType(np.float64, [2])],
        statistics=[aggregators.layer_moments_type(1, np.float64)],
        other_state=[tff.TensorType(np.float64)],
    )
)
_CLIENTS = [
    _update([1.0, 2.0], 0.0, 1.0, 10.0, count=1),
    _update([5.0, 6.0], 4.0, 1.0, 30.0, count=3),
]


def _process(model, value_type=_TYPE):
  return aggregators.ModelUpdateFactory(
      model, aggregators.PooledMomentsFactory()
  ).create(value_type, tff.TensorType(np.float32))


@pytest.fixture(scope='module')
def mean():
  return _process(tff.aggregators.MeanFactory(no_nan_division=True))


@pytest.fixture(scope='module')
def median():
  return _process(aggregators.CoordinateMedian(1))


def test_default_parts(mean):
  assert mean.is_weighted

  output = mean.next(mean.initialize(), _CLIENTS, [1.0, 3.0])

  np.testing.assert_allclose(output.result['trainable'][0], [4, 5])
  np.testing.assert_allclose(output.result['statistics'][0].mean, [3])
  np.testing.assert_allclose(output.result['statistics'][0].variance, [4])
  np.testing.assert_allclose(output.result['other_state'][0], 25)
  assert list(output.measurements) == ['trainable', 'statistics', 'other_state']
  assert output.result['num_participants'] == 2


def test_unweighted_aggregator_ignores_weights_and_keeps_its_state():
  clipping = tff.aggregators.clipping_factory(
      tff.aggregators.PrivateQuantileEstimationProcess.no_noise(1.0, 0.5, 0.5),
      tff.aggregators.UnweightedMeanFactory(),
  )
  process = _process(clipping)
  state = process.initialize()
  output = process.next(state, _CLIENTS, [1.0, 3.0])

  # Both are clipped to length 1, then averaged.
  expected = (
      np.array([1, 2]) / np.sqrt(5) + np.array([5, 6]) / np.sqrt(61)
  ) / 2
  np.testing.assert_allclose(output.result['trainable'][0], expected)
  assert output.measurements['trainable']['clipped_count'] == 2
  again = process.next(output.state, _CLIENTS, [1.0, 3.0])
  assert (
      again.measurements['trainable']['clipping_norm']
      > output.measurements['trainable']['clipping_norm']
  )


def test_all_weights_zero_gives_zero(mean):
  output = mean.next(mean.initialize(), _CLIENTS, [0.0, 0.0])
  np.testing.assert_array_equal(output.result['trainable'][0], [0, 0])
  np.testing.assert_array_equal(output.result['other_state'][0], 0)
  assert output.result['num_participants'] == 0


def test_missing_parts_are_left_out():
  trainable = collections.OrderedDict(
      trainable=[tff.TensorType(np.float64, [2])]
  )
  for value_type in (trainable, collections.OrderedDict()):
    process = _process(
        tff.aggregators.MeanFactory(), value_type=tff.to_type(value_type)
    )
    result = process.next.type_signature.result.result.member
    assert list(tff.structure.name_list(result)) == [
        *value_type,
        'num_participants',
        'num_dropped',
    ]


def test_dropped_client_with_weight_nan(mean, median):
  """A mean ignores it; a rule counts it as one of the attackers."""
  bad = _update([9.0, 9.0], 9.0, 9.0, 9.0, count=np.nan)
  output = mean.next(mean.initialize(), [*_CLIENTS, bad], [1.0, 3.0, np.nan])
  np.testing.assert_allclose(output.result['trainable'][0], [4, 5])
  np.testing.assert_allclose(output.result['statistics'][0].mean, [3])
  np.testing.assert_allclose(output.result['other_state'][0], 25)
  assert output.result['num_participants'] == 2

  output = median.next(
      median.initialize(), [*_CLIENTS, bad], [1.0, 1.0, np.nan]
  )
  # The dropped client is the tolerated attacker, so two clients are enough.
  assert output.measurements['trainable']['num_dropped'] == 1
  np.testing.assert_allclose(output.result['trainable'][0], [3, 4])


def test_a_rule_also_aggregates_the_other_state(median):
  attacker = _update([1e30, -1e30], 0.0, 1.0, 1e30, count=1)
  output = median.next(median.initialize(), [*_CLIENTS, attacker], [1.0] * 3)
  np.testing.assert_allclose(output.result['trainable'][0], [5, 2])
  np.testing.assert_allclose(output.result['other_state'][0], 30)


def test_a_rule_leaves_out_clients_with_weight_0(median):
  empty = _update([9.0, 9.0], 9.0, 9.0, 9.0, count=0)
  output = median.next(
      median.initialize(), [empty, *_CLIENTS, empty], [0.0, 1.0, 1.0, 0.0]
  )
  assert output.measurements['trainable']['num_dropped'] == 0
  np.testing.assert_allclose(output.result['trainable'][0], [3, 4])
  assert output.result['num_participants'] == 2
