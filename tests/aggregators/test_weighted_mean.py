"""The weighted mean against NumPy, also where sums would overflow."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_WEIGHT = tff.TensorType(np.float32)


@functools.cache
def _process(value_type, weight_type):
  return aggregators.WeightedMeanFactory().create(value_type, weight_type)


def _mean(values, weights, weight_type=_WEIGHT):
  value_type = tff.TensorType(values[0].dtype, values[0].shape)
  process = _process(value_type, weight_type)
  output = process.next(process.initialize(), values, weights)
  assert output.state == output.measurements == ()
  return output.result


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
@pytest.mark.parametrize('num_clients', [1, 2, 7, 40])
def test_equals_numpy(dtype, num_clients):
  rng = np.random.default_rng(num_clients)
  values = rng.normal(1, 3, (num_clients, 4, 2)).astype(dtype)
  weights = rng.integers(1, 100, num_clients).astype(np.float32)
  found = _mean(list(values), list(weights))
  assert found.dtype == dtype
  np.testing.assert_allclose(
      found,
      np.average(values.astype(np.float64), axis=0, weights=weights),
      rtol=2e-6 if dtype is np.float32 else 1e-14,
      atol=2e-6 if dtype is np.float32 else 1e-14,
  )
  if num_clients == 1:
    np.testing.assert_array_equal(found, values[0])


@pytest.mark.parametrize(
    'value_type',
    [
        tff.to_type([(np.float32, [2]), np.float32]),
        tff.to_type([('b', np.float32), ('a', (np.float32, [2]))]),
        tff.learning.models.ModelWeights([np.float32], [(np.float32, [2])]),
    ],
)
def test_structures(value_type):
  value_type = tff.to_type(value_type)

  @tff.tensorflow.computation(np.float32)
  def make(x):
    return tff.types.structure_from_tensor_type_tree(
        lambda t: tf.fill(t.shape, x), value_type
    )

  process = _process(value_type, _WEIGHT)
  assert process.is_weighted
  result_type = process.next.type_signature.result.result.member
  assert result_type.is_equivalent_to(value_type)

  output = process.next(
      process.initialize(), [make(3.0), make(5.0)], [1.0, 3.0]
  )
  leaves = tff.structure.flatten(
      tff.structure.from_container(output.result, recursive=True)
  )
  assert len(leaves) == 2
  for leaf in leaves:
    np.testing.assert_allclose(leaf, np.full_like(leaf, 4.5))


@pytest.mark.parametrize(
    ('dtype', 'large'), [(np.float32, 3e38), (np.float64, 1.6e308)]
)
def test_the_mean_of_large_values_does_not_overflow(dtype, large):
  values = np.array([[1, -1, 1], [1, 1, -1], [1, 1, 1]]) * large
  found = _mean(
      list(values.astype(dtype)), [np.float32(w) for w in (1000, 1, 9)]
  )
  weights = np.array([1000, 1, 9]) / 1010
  expected = (values / large * weights[:, np.newaxis]).sum(axis=0)
  np.testing.assert_allclose(found / dtype(large), expected, rtol=1e-5)


@pytest.mark.parametrize('weight', [0, -3, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('value', [2.0, np.nan, np.inf])
def test_clients_without_a_valid_weight_are_ignored(weight, value):
  values = [np.float32([v]) for v in (value, 1, value, 5, value)]
  weights = [np.float32(w) for w in (weight, 3, weight, 1, weight)]
  np.testing.assert_allclose(_mean(values, weights), [2])
  np.testing.assert_array_equal(_mean(values[:1], weights[:1]), [0])


def test_weights_of_other_types():
  values = [np.float32(1), np.float32(4)]
  weights = [np.int32(2), np.int32(1)]
  found = _mean(values, weights, tff.TensorType(np.int32))
  np.testing.assert_allclose(found, 2)
