"""Tests of pure functions from functions that use variables."""

import keras
import numpy as np
import pytest
import random_layers
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.keras_model.stateless_function import StatelessFunction
from tff_bn.keras_model.stateless_function import fingerprint

pytestmark = pytest.mark.usefixtures('native_runtime')

_VECTOR = tf.TensorSpec([2], tf.float32)


def _accumulator():
  variable = tf.Variable([1.0, 2.0])

  def add(x):
    variable.assign_add(x)
    return tf.identity(variable)

  return variable, StatelessFunction(add, [variable], _VECTOR)


def test_computes_with_the_given_values_and_changes_nothing():
  variable, add = _accumulator()

  @tff.tensorflow.computation(np.float32)
  def compute(start):
    value = tf.stack([start, 2 * start])
    # Two calls in one graph have separate variables.
    return add([value], tf.constant([10.0, 20.0])), add([value], value)

  first, second = compute(3.0)
  np.testing.assert_array_equal(first, [13, 26])
  np.testing.assert_array_equal(second, [6, 12])
  np.testing.assert_array_equal(compute(5.0)[0], [15, 30])
  np.testing.assert_array_equal(variable, [1, 2])


def test_other_variables_start_every_call_with_their_traced_values():
  metric = keras.metrics.Mean()
  metric.update_state([4.0])

  def update(x):
    metric.update_state(x)
    return metric.result()

  fn = StatelessFunction(update, [], _VECTOR)

  @tff.tensorflow.computation
  def compute():
    x = tf.constant([1.0, 1.0])
    return fn([], x), fn([], x)

  assert compute() == (2.0, 2.0)


def test_captured_constants_and_nested_results():
  constant = tf.constant(np.arange(2.0, dtype=np.float32))

  fn = StatelessFunction(
      lambda x: {'sum': [x + constant], 'product': x * constant}, [], _VECTOR
  )

  @tff.tensorflow.computation
  def compute():
    return fn([], tf.constant([3.0, 4.0]))

  result = compute()
  np.testing.assert_array_equal(result['sum'][0], [3, 5])
  np.testing.assert_array_equal(result['product'], [0, 4])


@pytest.mark.parametrize('new_layer', random_layers.KINDS)
def test_random_layers_depend_on_the_seed_alone(new_layer):
  dropouts = [new_layer() for _ in range(2)]
  fn = StatelessFunction(
      lambda x: [dropout(x, training=True) for dropout in dropouts],
      [],
      tf.TensorSpec([200], tf.float32),
  )
  assert fn.is_random
  assert not _accumulator()[1].is_random

  @tff.tensorflow.computation(np.int64, np.int64)
  def compute(a, b):
    return fn([], tf.ones([200]), seed=tf.stack([a, b]))

  first, second = compute(1, 2)
  for a, b in zip(compute(1, 2), (first, second)):
    np.testing.assert_array_equal(a, b)
  for other in (second, compute(1, 7)[0], compute(7, 2)[0]):
    assert 50 < np.sum(first != other) < 150
  assert set(np.unique(first)) == {0.0, 2.0}


def test_lookup_tables_are_an_error():
  lookup = keras.layers.StringLookup(vocabulary=['a', 'b'])
  with pytest.raises(ValueError, match='apply it in the dataset instead'):
    StatelessFunction(lookup, [], tf.TensorSpec([None], tf.string))


def test_fingerprint_depends_on_every_value_and_its_place():
  base = [np.zeros((2, 2), np.float32), np.zeros(3, np.int32)]
  changed = [np.zeros((2, 2), np.float32), np.array([0, 0, 1], np.int32)]
  moved = [np.zeros((2, 2), np.float32), np.array([0, 1, 0], np.int32)]
  prints = {int(fingerprint(x)) for x in (base, changed, moved)}
  assert len(prints) == 3
  assert int(fingerprint(base)) == int(fingerprint([x.copy() for x in base]))
