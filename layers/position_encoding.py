"""Position-aware neurons: position encodings for the units of a layer.

Li, Xu, Song, Li, Wang, Shao, Federated Learning with Position-Aware Neurons,
CVPR 2022.
"""

import math
from typing import Any, Optional

import numpy as np
import tensorflow as tf

MODES = ('add', 'multiply')
# The paper's choices (appendix C).
DEFAULT_AMPLITUDE = {'add': 0.05, 'multiply': 0.1}


@tf.keras.saving.register_keras_serializable(package='tff_bn')
class PositionEncoding(tf.keras.layers.Layer):
  """Layer that adds to each unit, or multiplies it by, a value of its position.

  With J units along `axis`, unit j of 0 to J - 1 becomes (equations 2 to 5 of
  the paper, without the activation)

  - `mode='add'`: `x_j + amplitude * sin(2π period (j + offset) / J)`
  - `mode='multiply'`: `x_j * (1 + amplitude * sin(2π period (j + offset) / J))`

  Nothing of it is trained. A network of position-aware neurons is not the same
  after its units have been permuted, so that clients of federated learning do
  not permute theirs. It belongs after the normalization of a hidden layer and
  before its activation, see `tff_bn.add_position_encodings`.

  With `amplitude=0` or `period=0` the layer is off: outputs are its inputs, and
  so are gradients, to the bit.

  Args:
    mode: `'add'` or `'multiply'`.
    amplitude: A, at least 0. Default: the paper's, 0.05 to add and 0.1 to
      multiply. From 1 on, units can vanish in mode `'multiply'`.
    period: T, how many periods of the sine the units span; at least 0.
    axis: The axis of the units or channels, as in
      `tf.keras.layers.BatchNormalization`.
    offset: By how many units the encodings are moved.
    **kwargs: Other arguments of a layer, such as `name` and `dtype`.

  Input shape: Any shape whose `axis` has a static size.

  Output shape: The input's.

  Raises:
    ValueError: If an argument is not allowed. The message names it.
  """

  def __init__(
      self,
      mode: str = 'add',
      amplitude: Optional[float] = None,
      period: float = 1.0,
      axis: int = -1,
      offset: float = 0.0,
      **kwargs: Any,
  ):
    super().__init__(**kwargs)
    if mode not in MODES:
      raise ValueError(
          f'mode={mode!r} must be one of {", ".join(map(repr, MODES))}.'
      )
    if amplitude is None:
      amplitude = DEFAULT_AMPLITUDE[mode]
    if not 0 <= amplitude < math.inf or (mode == 'multiply' and amplitude >= 1):
      raise ValueError(
          f'amplitude={amplitude} must be a number, at least 0'
          + (
              ", and less than 1 with mode='multiply'."
              if mode == 'multiply'
              else '.'
          )
      )
    if not 0 <= period < math.inf:
      raise ValueError(f'period={period} must be a number, at least 0.')
    if not isinstance(axis, (int, np.integer)):
      raise ValueError(f'axis={axis!r} must be one whole number.')
    if not math.isfinite(offset):
      raise ValueError(f'offset={offset} must be a number.')
    self.mode = mode
    self.amplitude = float(amplitude)
    self.period = float(period)
    self.axis = int(axis)
    self.offset = float(offset)
    self.supports_masking = True

  @property
  def is_on(self) -> bool:
    """Whether units at different positions get different values."""
    return self.amplitude > 0 and self.period > 0

  def encodings(self, num_units: int) -> np.ndarray:
    """What units are added to or multiplied by.

    Args:
      num_units: J.

    Returns:
      A float64 vector e of J elements.
    """
    positions = np.arange(num_units) + self.offset
    sine = np.sin(2 * np.pi * self.period * positions / num_units)
    return (self.mode == 'multiply') + self.amplitude * sine

  def build(self, input_shape: Any) -> None:
    """Checks the axis.

    Args:
      input_shape: The input's shape.

    Raises:
      ValueError: If there is no such axis, or its size is unknown.
    """
    shape = tf.TensorShape(input_shape)
    if not -shape.rank <= self.axis < shape.rank:
      raise ValueError(
          f'axis={self.axis} of the layer {self.name!r} is none of inputs of'
          f' shape {shape}.'
      )
    if shape[self.axis] is None:
      raise ValueError(
          f'The layer {self.name!r} needs a static number of units, but'
          f' axis={self.axis} of inputs of shape {shape} has none.'
      )
    super().build(input_shape)

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    """Adds or multiplies the encodings.

    Args:
      inputs: The inputs.

    Returns:
      The outputs, of the same shape and dtype.
    """
    if not self.is_on:
      return inputs
    shape = [1] * inputs.shape.rank
    num_units = inputs.shape[self.axis]
    shape[self.axis] = num_units
    encodings = tf.constant(
        self.encodings(num_units).reshape(shape), inputs.dtype
    )
    return inputs + encodings if self.mode == 'add' else inputs * encodings

  def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
    """The input's shape."""
    return tf.TensorShape(input_shape)

  def get_config(self) -> dict[str, Any]:
    """The arguments from which `from_config` makes the same layer."""
    return {
        **super().get_config(),
        'mode': self.mode,
        'amplitude': self.amplitude,
        'period': self.period,
        'axis': self.axis,
        'offset': self.offset,
    }
