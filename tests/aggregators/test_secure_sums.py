"""Tests of secure sums against plain ones, and of their bounds."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators

pytestmark = [
    pytest.mark.usefixtures('in_process_runtime'),
    pytest.mark.filterwarnings('ignore:Secure aggregation:UserWarning'),
]


def _message(rng, scale=1.0):
  def values(size):
    return np.float32(scale * rng.uniform(-1, 1, size))

  return collections.OrderedDict(
      weight=np.float32(rng.uniform(0, 7)),
      update=collections.OrderedDict(
          trainable=[values(3), values((2, 2))],
          other_state=[np.float64(scale)],
      ),
      statistics=collections.OrderedDict(
          float32=collections.OrderedDict(
              count=np.float32([3, 50]), mean=values(4), variance=values(4)
          )
      ),
  )


def _type(value):
  return tff.types.tensorflow_to_type(
      tf.nest.map_structure(
          lambda v: tf.TensorSpec(np.shape(v), np.asarray(v).dtype), value
      )
  )


def _sums(**bounds):
  return aggregators.SecureSums(
      **{
          'weight_bound': 8.0,
          'count_bound': 100.0,
          'update_bound': 2.0,
          'statistics_bound': 3.0,
          **bounds,
      }
  )


def _sum(factory, values):
  process = factory.create(_type(values[0]))
  return process.next(process.initialize(), values)


def test_sums_are_plain_ones_up_to_the_rounding():
  rng = np.random.default_rng(0)
  values = [_message(rng) for _ in range(5)]

  output = _sum(_sums(), values)

  expected = tf.nest.map_structure(lambda *v: np.sum(v, axis=0), *values)
  tf.nest.assert_same_structure(output.result, expected)
  # n · bound / 2³² and float32's rounding.
  bounds = {'weight': 8, 'trainable': 16, 'count': 100, 'mean': 300}
  for name, bound in bounds.items():
    found, exact = (
        value[name]
        if name == 'weight'
        else value['update'][name][0]
        if name == 'trainable'
        else value['statistics']['float32'][name]
        for value in (output.result, expected)
    )
    np.testing.assert_allclose(
        found, exact, rtol=3e-7, atol=5 * bound / 2**32, err_msg=name
    )
  np.testing.assert_allclose(
      output.result['update']['other_state'], [5], atol=1e-7
  )
  counts = _clipped(output)
  assert set(counts) == {
      *('weight_float32', 'update_float32', 'update_float64'),
      *('count_float32', 'statistics_float32'),
  }
  assert set(counts.values()) == {0}


def _clipped(output):
  return {
      kind: int(
          m['secure_upper_clipped_count'] + m['secure_lower_clipped_count']
      )
      for kind, m in output.measurements.items()
  }


def test_values_out_of_bounds_are_clipped_and_counted():
  rng = np.random.default_rng(1)
  values = [_message(rng), _message(rng)]
  values[0]['update']['trainable'][0] = np.float32([30, -40, 0.5])
  values[1]['statistics']['float32']['mean'] = np.float32([1e6, 0, 0, 0])
  values[1]['weight'] = np.float32(9)
  values[0]['weight'] = np.float32(1)

  output = _sum(_sums(), values)

  other = values[1]['update']['trainable'][0]
  np.testing.assert_allclose(
      output.result['update']['trainable'][0],
      np.array([16, -16, 0.5]) + other,
      rtol=1e-6,
  )
  np.testing.assert_allclose(output.result['weight'], 9, rtol=1e-6)
  np.testing.assert_allclose(
      output.result['statistics']['float32']['mean'][0],
      300 + values[0]['statistics']['float32']['mean'][0],
      rtol=1e-6,
  )
  assert _clipped(output) == {
      'weight_float32': 1,
      'update_float32': 2,
      'update_float64': 0,
      'count_float32': 0,
      'statistics_float32': 1,
  }


@pytest.mark.parametrize(
    ('names', 'bounds'),
    [
        # Means, or sums of gradients, weighted by W.
        (('mean', 'weight'), {'exchange': 24, 'weight': 8}),
        # Fused moments are weighted by counts.
        (('mean', 'count'), {'statistics': 300, 'count': 100}),
    ],
)
def test_bounds_of_exchanges(names, bounds):
  value = collections.OrderedDict(
      exchange=collections.OrderedDict(
          SUM=[collections.OrderedDict((n, np.float32(1)) for n in names)]
      )
  )
  measurements = _sum(_sums(), [value]).measurements
  assert {
      kind.removesuffix('_float32'): m['secure_upper_threshold']
      for kind, m in measurements.items()
  } == bounds


@pytest.mark.parametrize('name', ['weight_bound', 'update_bound'])
def test_bounds_must_be_positive(name):
  with pytest.raises(ValueError, match=f'{name}.*0'):
    _sums(**{name: 0.0})
