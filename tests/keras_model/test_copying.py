"""Tests of copies of Keras models with their weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn import BatchNormModel
from tff_bn import copy_model

_LAYERS = keras.layers


def _pretrained():
  """A model with whatever a clone with the same weights lacks."""
  normalization = _LAYERS.Normalization()
  normalization.adapt(np.random.default_rng(0).normal(2, 3, (20, 4)))
  frozen = keras.Sequential(
      [keras.Input((4,)), _LAYERS.Dense(3), _LAYERS.BatchNormalization()],
      name='backbone',
  )
  frozen.layers[1].moving_variance.assign([0.1, 2, 3])
  frozen.trainable = False
  lora = _LAYERS.Dense(5)
  norm = _LAYERS.BatchNormalization()
  inputs = keras.Input((4,))
  x = norm(lora(frozen(normalization(inputs))))
  model = keras.Model(inputs, _LAYERS.Dense(2)(x))
  lora.enable_lora(2)
  lora.lora_kernel_b.assign(np.ones((2, 5)))
  norm.gamma.trainable = False
  return model


class _Subclassed(keras.Model):

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.frozen = _LAYERS.Dense(3, trainable=False)
    self.logits = _LAYERS.Dense(2)

  def call(self, x):
    return self.logits(self.frozen(x))


@pytest.mark.parametrize('build', [_pretrained, _Subclassed])
def test_a_copy_computes_and_trains_the_same(build):
  x = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
  model = build()
  expected = model(x)
  copy = copy_model(model)

  np.testing.assert_array_equal(copy(x), expected)
  assert not {id(v) for v in copy.weights} & {id(v) for v in model.weights}
  for a, b in zip(copy.weights, model.weights, strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.trainable == b.trainable
  a, b = (
      [v.path.split('/')[-1] for v in each.trainable_weights]
      for each in (copy, model)
  )
  assert a == b
  for variable in copy.weights:
    variable.assign(tf.ones_like(variable))
  np.testing.assert_array_equal(model(x), expected)


def test_a_given_model_keeps_its_frozen_weights():
  """The way that the error about a model instead of a function names."""
  pretrained = _pretrained()
  spec = (tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int32))
  with pytest.raises(
      TypeError, match=r'use lambda: tff_bn.copy_model\(model\)'
  ):
    BatchNormModel(pretrained, spec, keras.losses.SparseCategoricalCrossentropy)
  model = BatchNormModel(
      lambda: copy_model(pretrained),
      spec,
      keras.losses.SparseCategoricalCrossentropy,
  )
  x = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
  np.testing.assert_array_equal(model.to_keras()(x), pretrained(x))
  names = [pretrained.weights[p].path.split('/')[-1] for p in model.constants]
  assert sorted(names) == sorted(
      [
          *('mean', 'variance', 'count', 'kernel', 'bias', 'gamma', 'beta'),
          *('moving_mean', 'moving_variance', 'kernel', 'gamma'),
      ]
  )


def test_only_models_are_copied():
  with pytest.raises(TypeError, match='model must be a keras.Model, but is a'):
    copy_model(_LAYERS.Dense(2))
