"""Checks that FedTAN can train a model."""

import keras

from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model import keras_copy
from tff_bn.keras_model import mixed_precision
from tff_bn.layers import discovery

# Layers that may call other layers in a loop.
_LOOPS = (keras.layers.Wrapper, keras.layers.Bidirectional, keras.layers.RNN)


def check_model(model: keras.Model) -> None:
  """Checks that FedTAN can synchronize batch normalization in a model.

  Args:
    model: The model.

  Raises:
    ValueError: If no layer is trainable batch normalization, or a layer can't
      be synchronized. The message names the layer and gives advice.
  """
  layers = discovery.batch_norm_layers(model)
  if not any(layer.trainable for layer in layers):
    found = 'no trainable one' if layers else 'none'
    raise ValueError(
        'FedTAN synchronizes batch normalization layers, but the model'
        f' {model.name!r} has {found}. Use a model with batch normalization, or'
        ' fedavg.'
    )
  for layer in layers:
    _check_layer(layer)
  for layer in discovery.all_layers(model):
    _check_container(layer)
  if mixed_precision.computes_in_float16(model):
    raise ValueError(
        f'FedTAN cannot train the model {model.name!r}, which computes in'
        ' float16, because it cannot scale the loss across exchanges. Use'
        ' mixed_bfloat16 or float32.'
    )


def _check_layer(layer: keras.layers.BatchNormalization) -> None:
  name = f'The batch normalization layer {layer.name!r}'
  if layer.renorm:
    raise ValueError(
        f'{name} has renorm=True, which FedTAN cannot synchronize. Use'
        ' keras.layers.BatchNormalization with renorm=False.'
    )
  own = fused_batch_norm.own_method(layer)
  if own:
    raise ValueError(
        f'{name} is a {type(layer).__name__}, whose method {own} may change the'
        ' computation, so FedTAN cannot synchronize it. Use'
        ' keras.layers.BatchNormalization.'
    )


def _check_container(container: keras.layers.Layer) -> None:
  if discovery.is_batch_norm(container):
    return
  inside = [
      layer
      for layer in discovery.batch_norm_layers(container)
      if layer.trainable
  ]
  if not inside:
    return
  if isinstance(container, keras.Model) and not keras_copy.is_functional(
      container
  ):
    raise ValueError(
        f'The model {container.name!r} ({type(container).__name__}), with the'
        f' batch normalization layer {inside[0].name!r}, is a subclass of'
        ' keras.Model with its own `call`, which FedTAN cannot split. Build'
        ' it as a functional model, keras.Model(inputs, outputs), or a'
        ' keras.Sequential.'
    )
  if isinstance(container, _LOOPS):
    raise inside_of_control_flow(container, inside[0])


def inside_of_control_flow(
    container: keras.layers.Layer, layer: keras.layers.Layer
) -> ValueError:
  """Returns the error for a layer that another layer may call in a loop."""
  return ValueError(
      f'The batch normalization layer {layer.name!r} is inside the layer'
      f' {container.name!r} ({type(container).__name__}), which may call it in'
      ' a loop, a condition or a function, where FedTAN cannot stop for an'
      ' exchange. Call the layer in the functional model itself.'
  )
