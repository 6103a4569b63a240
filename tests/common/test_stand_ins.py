"""Tests of the stand-ins for TensorFlow computations."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common.stand_ins import StandIns

_SIZE = 1000
_VECTOR = tff.TensorType(np.float32, [_SIZE])


def _proto_size(computation):
  return tff.framework.ConcreteComputation.get_proto(computation).ByteSize()


def _shift(seed):
  """Adds a constant."""
  constant = np.random.default_rng(seed).normal(size=_SIZE).astype(np.float32)

  @tff.tensorflow.computation(_VECTOR)
  def shift(x):
    return collections.OrderedDict(b=x + constant, a=[tf.reduce_sum(x)])

  return shift


def _composed(first, second):
  """Calls two computations at several depths."""

  @tff.federated_computation(_VECTOR)
  def inner(x):
    return first(x)['b']

  @tff.federated_computation(
      tff.FederatedType(_VECTOR, tff.SERVER),
      tff.FederatedType(_VECTOR, tff.CLIENTS),
  )
  def composed(server, clients):
    mapped = tff.federated_map(second, clients)
    return collections.OrderedDict(
        z=tff.federated_map(inner, server),
        a=[tff.federated_sum(mapped['b']), tff.federated_map(first, server)],
    )

  return composed


@pytest.mark.usefixtures('in_process_runtime')
def test_the_result_is_that_of_the_originals():
  first, second = _shift(0), _shift(1)
  stand_ins = StandIns()
  light = _composed(stand_ins.of(first), stand_ins.of(second))
  assert _proto_size(light) < 4 * _SIZE
  expected = _composed(first, second)
  found = stand_ins.replaced(light)
  assert found == expected
  assert found.type_signature.is_identical_to(expected.type_signature)
  assert _proto_size(light) < 4 * _SIZE
  vectors = np.ones([3, _SIZE], np.float32)
  result, other = (c(vectors[0], list(vectors[1:])) for c in (found, expected))
  assert list(result) == ['z', 'a']
  tf.nest.map_structure(np.testing.assert_array_equal, result, other)


def test_types_keep_their_containers():
  original = _shift(0)
  light = StandIns().of(original)
  assert light.type_signature.is_identical_to(original.type_signature)
  result = light.type_signature.result
  assert result.python_container is collections.OrderedDict
  assert _proto_size(light) < _SIZE
