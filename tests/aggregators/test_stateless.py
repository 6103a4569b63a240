"""Tests of aggregation processes without a state."""

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn.aggregators import stateless

_VALUE = tff.TensorType(np.float32, [2])
_WEIGHT = tff.TensorType(np.int32)


def _next(state, value, weight):
  return tff.templates.MeasuredProcessOutput(
      state, tff.federated_sum(value), tff.federated_sum(weight)
  )


def test_types():
  process = stateless.build(_next, _VALUE, _WEIGHT)
  assert process.is_weighted
  state, value, weight = process.next.type_signature.parameter
  assert state == process.initialize.type_signature.result
  assert not state.member
  assert value == tff.FederatedType(_VALUE, tff.CLIENTS)
  assert weight == tff.FederatedType(_WEIGHT, tff.CLIENTS)


@pytest.mark.usefixtures('in_process_runtime')
def test_the_function_makes_the_output():
  process = stateless.build(_next, _VALUE, _WEIGHT)
  values = [np.float32([1, 2]), np.float32([3, 5])]
  output = process.next(process.initialize(), values, [1, 3])
  np.testing.assert_array_equal(output.result, [4, 7])
  assert output.measurements == 4
  assert output.state == ()
