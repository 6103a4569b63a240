"""Calls of batch normalization layers, replaced while a model is traced."""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any, Optional

import keras
import tensorflow as tf

from tff_bn.layers import discovery

# What computes a layer in training: the layer, its input and its mask.
TrainingCall = Callable[
    [keras.layers.Layer, tf.Tensor, Optional[tf.Tensor]], tf.Tensor
]


@contextlib.contextmanager
def replaced(
    model: keras.Model,
    training_call: TrainingCall,
    *,
    in_inference: bool = False,
) -> Iterator[None]:
  """Replaces what the batch normalization layers of a model do in training.

  Layers with `trainable=False`, which Keras always runs in inference mode, stay
  as they are.

  Args:
    model: The model. Nested models and wrappers are searched.
    training_call: Returns a layer's output, given the layer, its input in the
      layer's compute dtype and the mask or `None`.
    in_inference: Whether to replace calls in inference mode too.

  Yields:
    Nothing; while the context lasts, the calls are replaced.
  """
  layers = discovery.batch_norm_layers(model)
  for layer in layers:
    # Keras looks the method up in the object; its own `__setattr__` would track
    # the function.
    object.__setattr__(layer, 'call', _call(layer, training_call, in_inference))
  try:
    yield
  finally:
    for layer in layers:
      object.__delattr__(layer, 'call')


def _call(
    layer: keras.layers.Layer, training_call: TrainingCall, in_inference: bool
) -> Callable[..., tf.Tensor]:
  original = layer.call

  @tf.autograph.experimental.do_not_convert
  def call(inputs: tf.Tensor, training: Any = None, mask: Any = None):
    is_training = tf.get_static_value(training)
    if is_training is None and training is not None:
      raise ValueError(
          f'The batch normalization layer {layer.name!r} is called with a'
          ' tensor for `training`; give True, False or nothing.'
      )
    if not layer.trainable or not (is_training or in_inference):
      return original(inputs, training=training, mask=mask)
    return training_call(layer, inputs, mask)

  return call
