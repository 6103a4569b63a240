"""Tests of replacing the training calls of batch normalization."""

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


def test_inference_calls_are_replaced_on_request():
  model = _model()
  calls = []
  with batch_norm_calls.replaced(model, _plus_one(calls), in_inference=True):
    model(_X, training=False)
  assert calls == ['outer', 'inner']


def test_calls_in_a_tf_function_are_replaced():
  model = _model()
  calls = []
  with batch_norm_calls.replaced(model, _plus_one(calls)):
    tf.function(lambda x: model(x, training=True)).get_concrete_function(
        tf.TensorSpec([None, 3])
    )
  assert calls == ['outer', 'inner']


def test_calls_are_restored():
  model = _model()
  calls = []
  with batch_norm_calls.replaced(model, _plus_one(calls)):
    pass
  model(_X, training=True)
  assert not calls
  for layer in discovery.batch_norm_layers(model):
    assert 'call' not in vars(layer)


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
