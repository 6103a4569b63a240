"""Keras models that prepare raw samples themselves.

A saved model is used far from the code that trained it. If it takes raw
samples, nobody has to repeat the resizing and scaling of the training.
"""

from collections.abc import Sequence
import dataclasses
from typing import Optional

import keras
import numpy as np

# The name of a model by `wrap`; its last layer is the model alone.
NAME = 'raw_inputs'
_RESIZING = 'raw_resizing'
_CENTERING = 'raw_centering'
_SCALING = 'raw_scaling'


@dataclasses.dataclass(frozen=True)
class Preparation:
  """What happens to a raw sample before it enters a model, in this order.

  Attributes:
    shape: The shape of a sample that enters the model.
    image_size: The height and width to which pictures are resized; None: not.
    rounds: Whether resized values are rounded, as values of type uint8 are.
    divisor: The number by which the values are divided.
    mean: Is subtracted from the channels, or features; None: nothing is.
    deviation: Divides them then; None: they are not divided.
  """

  shape: tuple[int, ...]
  image_size: Optional[tuple[int, int]] = None
  rounds: bool = False
  divisor: float = 1
  mean: Optional[Sequence[float]] = None
  deviation: Optional[Sequence[float]] = None

  @property
  def is_identity(self) -> bool:
    """Whether raw samples enter the model as they are."""
    return self.image_size is None and self.divisor == 1 and self.mean is None


def wrap(model: keras.Model, preparation: Preparation) -> keras.Model:
  """Returns a model that takes raw samples, and shares the model's weights.

  It consists of layers and operations of Keras and the model, whose weights
  have the same positions in its `weights`. Pictures that are resized may have
  any size.

  Args:
    model: A model with one input.
    preparation: What happens to the samples.

  Returns:
    The new model; `model` itself if nothing happens to the samples.
  """
  if preparation.is_identity:
    return model
  shape: tuple[Optional[int], ...] = preparation.shape
  if preparation.image_size is not None:
    shape = (None, None, shape[-1])
  inputs = x = keras.Input(shape, name='raw_input')
  # Whatever the precision of the model is, its inputs are float32.
  exact = dict(dtype='float32')
  if preparation.image_size is not None:
    x = keras.layers.Resizing(
        *preparation.image_size,
        antialias=True,
        data_format='channels_last',
        name=_RESIZING,
        **exact,
        # By default, the layer would switch the model to training.
    )(x, training=False)
    if preparation.rounds:
      x = keras.ops.round(x)
  mean, deviation = preparation.mean, preparation.deviation
  if preparation.divisor != 1 or mean is not None:
    offset = 0.0 if mean is None else _floats(-np.asarray(mean, np.float32))
    x = keras.layers.Rescaling(
        1 / preparation.divisor, offset, name=_CENTERING, **exact
    )(x)
  if deviation is not None:
    # `keras.layers.Normalization` would square the deviations and compare their
    # roots with an epsilon, which is wrong for features near 0.
    x = keras.layers.Rescaling(
        _floats(1 / np.asarray(deviation, np.float64)), name=_SCALING, **exact
    )(x)
  return keras.Model(inputs, model(x), name=NAME)


def unwrap(model: keras.Model) -> keras.Model:
  """Returns the model alone, given a model by `wrap` or any other one."""
  if not is_wrapped(model):
    return model
  return model.layers[-1]


def is_wrapped(model: keras.Model) -> bool:
  """Whether a model, possibly from a file, was made by `wrap`."""
  return (
      model.name == NAME
      and len(model.layers) > 1
      and isinstance(model.layers[-1], keras.Model)
  )


def scales_as(
    model: keras.Model,
    mean: Optional[Sequence[float]],
    deviation: Optional[Sequence[float]],
) -> bool:
  """Whether a model by `wrap` subtracts this mean, and divides by this."""
  layers = {layer.name: layer for layer in model.layers}
  offset = layers[_CENTERING].offset if _CENTERING in layers else 0.0
  scale = layers[_SCALING].scale if _SCALING in layers else 1.0
  if mean is None or deviation is None:
    mean, deviation = (0,), (1,)
  return all(
      np.ndim(found) == 0
      or np.size(found) == np.size(expected)
      or np.size(expected) == 1
      for found, expected in ((offset, mean), (scale, deviation))
  ) and bool(
      np.allclose(offset, -np.asarray(mean), rtol=1e-5, atol=1e-6)
      and np.allclose(scale, 1 / np.asarray(deviation, float), rtol=1e-5)
  )


def _floats(values: np.ndarray) -> list[float]:
  """Returns the float32 numbers in an array, as JSON can hold them."""
  return np.asarray(values, np.float32).astype(float).tolist()
