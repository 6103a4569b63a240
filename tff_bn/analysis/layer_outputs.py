"""What layers of a model compute for many examples."""

from collections.abc import Iterable, Iterator
import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from tff_bn import layer_features

_BATCH_SIZE = 128


def batches(x: Any) -> Iterator[slice]:
  """Cuts examples into parts that a model can take at once.

  Args:
    x: The examples, an array or a tensor.

  Yields:
    Slices of `x` that cover it.

  Raises:
    ValueError: If there are no examples.
  """
  if not len(x):
    raise ValueError('x has no examples.')
  for start in range(0, len(x), _BATCH_SIZE):
    yield slice(start, start + _BATCH_SIZE)


def call(
    model: tf.keras.Model, layer_names: Iterable[str], x: Any
) -> tuple[list[tf.Tensor], Any]:
  """Calls a model in inference mode.

  Args:
    model: The model.
    layer_names: The names of layers; nested models are searched.
    x: A batch of examples.

  Returns:
    What the layers compute, of a layer that is called several times in the last
    call; and the model's outputs.

  Raises:
    ValueError: If there is no such layer or several, or it does not compute one
      tensor in a call of the model.
  """
  try:
    features = [
        layer_features.LayerFeatures(model, name) for name in layer_names
    ]
    with contextlib.ExitStack() as stack:
      for feature in features:
        stack.enter_context(feature.watched())
      outputs = model(x, training=False)
  except ValueError as error:
    # The class calls the name by that of its other users' argument.
    message = str(error).replace('feature_layer', 'layer_name')
    raise ValueError(message) from error
  return [feature.value for feature in features], outputs


def units_first(values: np.ndarray, axis: int, layer_name: str) -> np.ndarray:
  """Brings what a layer computes into a matrix.

  Args:
    values: The values, `[examples, ...]`.
    axis: The axis of the units.
    layer_name: The layer, for messages.

  Returns:
    The values, `[units, examples * positions]`.

  Raises:
    ValueError: If there is no such axis, or it is the one of the examples.
  """
  rank = values.ndim
  if not -rank <= axis < rank or axis % rank == 0:
    raise ValueError(
        f'axis={axis} is no axis of units of layer_name={layer_name!r}, whose'
        f' outputs have the shape {values.shape}; the first is the examples.'
    )
  return np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
