"""Replaces calls of layers, such as training calls of batch normalization."""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any, Optional

import keras
import tensorflow as tf

from tff_bn.layers import discovery

# Computes the output of a batch normalization layer in training, from the
# layer, its input in the layer's compute dtype, and its mask or `None`.
TrainingCall = Callable[
    [keras.layers.BatchNormalization, tf.Tensor, Optional[tf.Tensor]], tf.Tensor
]


@contextlib.contextmanager
def replaced_call(
    layer: keras.layers.Layer, call: Callable[..., Any]
) -> Iterator[None]:
  """Replaces the `call` method of one layer while the context lasts.

  Unlike a new functional model, this works inside nested and subclassed models
  and wrappers. Contexts can be nested: `call` may call what `layer.call` was
  before.
  """
  before = vars(layer).get('call')
  # An attribute of the object hides the method of its class. The layer's own
  # `__setattr__` would track the function.
  object.__setattr__(layer, 'call', call)
  try:
    yield
  finally:
    if before is None:
      object.__delattr__(layer, 'call')
    else:
      object.__setattr__(layer, 'call', before)


@contextlib.contextmanager
def replaced(
    model: keras.Model,
    training_call: TrainingCall,
    *,
    in_inference: bool = False,
) -> Iterator[None]:
  """Replaces the training calls of batch normalization layers in a context.

  Layers with `trainable=False`, which Keras always runs in inference mode, stay
  as they are.

  Args:
    model: The model. Nested models and wrappers are searched.
    training_call: The function that computes each layer instead.
    in_inference: Whether to replace calls in inference mode, too.
  """
  with contextlib.ExitStack() as stack:
    for layer in discovery.batch_norm_layers(model):
      call = _call(layer, training_call, in_inference)
      stack.enter_context(replaced_call(layer, call))
    yield


def _call(
    layer: keras.layers.BatchNormalization,
    training_call: TrainingCall,
    in_inference: bool,
) -> Callable[..., tf.Tensor]:
  original = layer.call

  @tf.autograph.experimental.do_not_convert
  def call(
      inputs: tf.Tensor, training: Any = None, mask: Optional[tf.Tensor] = None
  ) -> tf.Tensor:
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
