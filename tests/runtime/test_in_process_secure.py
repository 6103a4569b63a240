"""Tests of secure sums, which are simulated by plain sums with a warning."""

import threading
import warnings

import cases
import comparison
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import secure_intrinsics

_INT = tff.TensorType(np.int32)
_VECTOR = tff.TensorType(np.float32, [3])
_VALUES = [
    np.float32([1, -2, 0.5]),
    np.float32([0.25, 3, 1]),
    np.float32([-4, 0, 2]),
]

pytestmark = pytest.mark.filterwarnings('ignore:Secure aggregation:UserWarning')


def _invoke_native(context, comp, *args):
  """Simulates secure sums as TFF's own test runtime does."""
  simulated = tff.backends.test.replace_secure_intrinsics_with_bodies(comp)
  return comparison.invoke(context, simulated, *args)


def test_sums(in_process_context, native_context):
  @tff.federated_computation(cases.clients(_INT))
  def comp(x):
    return (
        tff.federated_secure_sum(x, 10),
        tff.federated_secure_sum_bitwidth(x, 4),
    )

  found = comparison.invoke(in_process_context, comp, [1, 10, 3])
  assert found == (14, 14)
  expected = _invoke_native(native_context, comp, [1, 10, 3])
  comparison.assert_equal(found, expected, same_leaf_types=True)


def test_sums_in_the_worker_process(native_context, monkeypatch):
  monkeypatch.setattr(secure_intrinsics, '_warned', threading.Event())
  process = tff.aggregators.SecureSumFactory(4.0).create(_VECTOR)

  def check():
    output = comparison.invoke(native_context, process.next, (), _VALUES)
    np.testing.assert_allclose(output.result, sum(_VALUES), atol=1e-6)

  (message,) = _messages(check)
  assert 'without cryptography' in message


def test_too_large_numbers_are_refused(in_process_context):
  @tff.federated_computation(cases.clients(_INT))
  def comp(x):
    return tff.federated_secure_sum(x, 10)

  with pytest.raises(tf.errors.InvalidArgumentError, match='client value'):
    comparison.invoke(in_process_context, comp, [1, 11])


def test_select(in_process_context):
  table_type = tff.TensorType(np.float32, [4])

  @tff.tensorflow.computation(table_type, _INT)
  def look_up(table, key):
    return tf.gather(table, key)

  @tff.federated_computation(
      cases.clients(tff.TensorType(np.int32, [2])),
      tff.FederatedType(_INT, tff.SERVER),
      tff.FederatedType(table_type, tff.SERVER),
  )
  def comp(keys, max_key, table):
    return tff.federated_secure_select(keys, max_key, table, look_up)

  found = comparison.invoke(
      in_process_context, comp, [[0, 1], [3, 2]], 4, [0.5, 1.5, 2.5, 3.5]
  )
  assert comparison.as_plain(found) == [[0.5, 1.5], [3.5, 2.5]]


_FACTORIES = {
    'modular': (
        lambda: tff.aggregators.SecureModularSumFactory(8),
        _INT,
        [7, 6, 5],
        2,
        0.0,
    ),
    'symmetric': (
        lambda: tff.aggregators.SecureModularSumFactory(
            8, symmetric_range=True
        ),
        _INT,
        [-3, -2, 4],
        -1,
        0.0,
    ),
    'clipped': (
        lambda: tff.aggregators.SecureSumFactory(1.0, -1.0),
        _VECTOR,
        _VALUES,
        sum(np.clip(v, -1, 1) for v in _VALUES),
        1e-5,
    ),
    'adaptive': (
        lambda: tff.aggregators.SecureSumFactory(
            tff.aggregators.PrivateQuantileEstimationProcess.no_noise(
                5.0, 0.95, 1.0
            )
        ),
        _VECTOR,
        _VALUES,
        sum(_VALUES),
        1e-5,
    ),
}


@pytest.mark.parametrize('name', _FACTORIES)
def test_factories(name, in_process_context, native_context):
  make, member, values, expected, rtol = _FACTORIES[name]
  process = make().create(member)
  state = comparison.invoke(in_process_context, process.initialize)
  for _ in range(2 if name == 'adaptive' else 1):
    found = comparison.invoke(in_process_context, process.next, state, values)
    native = _invoke_native(native_context, process.next, state, values)
    np.testing.assert_allclose(found.result, expected, rtol=rtol, atol=rtol)
    comparison.assert_equal(
        *map(comparison.leaves, (found, native)), same_leaf_types=True
    )
    state = found.state


def _messages(function):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    function()
  return [str(w.message) for w in caught if 'Secure' in str(w.message)]


def test_one_warning(in_process_context, monkeypatch):
  monkeypatch.setattr(secure_intrinsics, '_warned', threading.Event())

  def build(intrinsic):
    return tff.federated_computation(
        lambda x: intrinsic(x, 10), cases.clients(_INT)
    )

  plain = tff.federated_computation(tff.federated_sum, cases.clients(_INT))
  first = build(tff.federated_secure_sum)
  second = build(tff.federated_secure_sum_bitwidth)

  def call(comp):
    return _messages(lambda: comparison.invoke(in_process_context, comp, [1]))

  assert not call(plain)
  (message,) = call(first)
  assert 'without cryptography' in message
  assert not call(first)
  assert not call(second)
