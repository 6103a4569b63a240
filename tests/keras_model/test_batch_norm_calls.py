"""Tests of replacing the calls of layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn.keras_model import batch_norm_calls
from tff_bn.layers import discovery

_X = np.random.default_rng(0).normal(5.0, 3.0, [8, 3]).astype(np.float32)


def _model():
  inner = keras.Sequential(
      [keras.Input([3]), keras.layers.BatchNormalization(name='inner')]
  )
  inputs = keras.Input([3])
  x = keras.layers.BatchNormalization(name='outer')(inputs)
  frozen = keras.layers.BatchNormalization(name='frozen', trainable=False)
  return keras.Model(inputs, frozen(inner(x)))


def _plus_one(calls):
  def call(layer, inputs, mask):
    del mask
    calls.append(layer.name)
    return inputs + 1

  return call


def test_training_calls_are_replaced():
  model = _model()
  calls = []
  with batch_norm_calls.replaced(model, _plus_one(calls)):
    trained = model(_X, training=True)
    evaluated = model(_X, training=False)
  assert calls == ['outer', 'inner']
  r = 1 / np.sqrt(1 + 1e-3)
  np.testing.assert_allclose(trained, (_X + 2) * r, rtol=1e-5)
  np.testing.assert_allclose(evaluated, _X * r**3, rtol=1e-5)
  for layer in discovery.batch_norm_layers(model):
    assert 'call' not in vars(layer)


def test_inference_calls_are_replaced_on_request():
  model = _model()
  calls = []
  with batch_norm_calls.replaced(model, _plus_one(calls), in_inference=True):
    tf.function(lambda x: model(x, training=False)).get_concrete_function(
        tf.TensorSpec([None, 3])
    )
  assert calls == ['outer', 'inner']


def test_a_tensor_for_training_is_an_error():
  layer = keras.layers.BatchNormalization(name='undecided')
  layer.build([None, 3])
  model = keras.Sequential([layer])

  def call(x, training):
    return layer(x, training=training)

  with (
      batch_norm_calls.replaced(model, _plus_one([])),
      pytest.raises(ValueError, match="'undecided'.*tensor for `training`"),
  ):
    tf.function(call).get_concrete_function(
        tf.TensorSpec([None, 3]), tf.TensorSpec([], tf.bool)
    )


def test_nested_contexts_restore_the_call_before():
  layer = keras.layers.ReLU()
  with batch_norm_calls.replaced_call(layer, lambda x: 2 * x):
    doubling = layer.call
    with (
        pytest.raises(ZeroDivisionError),
        batch_norm_calls.replaced_call(layer, lambda x: 3 * x),
    ):
      raise ZeroDivisionError
    np.testing.assert_array_equal(layer(_X), 2 * _X)
    with batch_norm_calls.replaced_call(layer, lambda x: doubling(x) + 1):
      np.testing.assert_array_equal(layer(_X), 2 * _X + 1)
    np.testing.assert_array_equal(layer(_X), 2 * _X)
  np.testing.assert_array_equal(layer(_X), np.maximum(_X, 0))
  assert 'call' not in vars(layer)
