"""Position-aware neurons: position encodings for the units of a layer.

Li, Xu, Song, Li, Wang, Shao, Federated Learning with Position-Aware Neurons,
CVPR 2022.
"""

import math
import numbers
from typing import Any, Optional

import keras
from keras import ops
import numpy as np

from tff_bn.catalog import models

MODES = tuple(name for name in models.PANS if name != models.NO_ENCODINGS)


@keras.saving.register_keras_serializable(package='tff_bn')
class PositionEncoding(keras.layers.Layer):
  """Layer that adds a value to each unit, or multiplies it, by its position.

  With J units along `axis`, unit j of 0 to J - 1 becomes (equations 2 to 5 of
  the paper, without the activation)

  - `mode='add'`: `x_j + amplitude * sin(2π period (j + offset) / J)`
  - `mode='multiply'`: `x_j * (1 + amplitude * sin(2π period (j + offset) / J))`

  The encodings are not trained. Permuting the units of a network of
  position-aware neurons changes its function, which keeps the clients of
  federated learning from permuting their units. The layer belongs after the
  normalization of a hidden layer and before its activation; see
  `tff_bn.add_position_encodings`.

  With `amplitude=0` or `period=0` the layer is off: it returns its inputs and
  passes gradients through unchanged.

  Clients can have personal encodings for some or all units. For the last
  `personal_share` of the units, the sine is
  `sin(2π (period (j + offset) / J + personal_phase))`. The phase is a
  non-trainable float32 scalar weight, initially 0. The algorithms of `tff_bn`
  keep it on the client; see `tff_bn.StatefulLearningProcess.personalize`.

  Args:
    mode: `'add'` or `'multiply'`.
    amplitude: A, at least 0, and less than 1 with `mode='multiply'`. Default:
      0.05 to add and 0.1 to multiply, as in the paper.
    period: T, the number of periods of the sine over all units, at least 0.
    axis: The axis of the units or channels, as in
      `keras.layers.BatchNormalization`.
    offset: The number of units by which the encodings are shifted.
    personal_share: The share of units with personal encodings, from 0 to 1: the
      last `round(personal_share * J)` units. If there are none, or the layer is
      off, the layer has no weight.
    **kwargs: Other arguments of a layer, such as `name` and `dtype`.

  Input shape: Any shape whose `axis` has a static size.

  Output shape: The input's.

  Raises:
    TypeError: If a number is none.
    ValueError: If an argument is not allowed.
  """

  def __init__(
      self,
      mode: str = 'add',
      amplitude: Optional[float] = None,
      period: float = 1.0,
      axis: int = -1,
      offset: float = 0.0,
      personal_share: float = 0.0,
      **kwargs: Any,
  ):
    super().__init__(**kwargs)
    if mode not in MODES:
      raise ValueError(
          f'mode={mode!r} must be one of {", ".join(map(repr, MODES))}.'
      )
    if amplitude is None:
      amplitude = models.PANS[mode].amplitude
    for name, value in (
        ('amplitude', amplitude),
        ('period', period),
        ('offset', offset),
        ('personal_share', personal_share),
    ):
      if not isinstance(value, numbers.Real):
        raise TypeError(f'{name} must be a number, but is {value!r}.')
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
    if not 0 <= personal_share <= 1:
      raise ValueError(
          f'personal_share={personal_share} must be a number from 0 to 1.'
      )
    self.mode = mode
    self.amplitude = float(amplitude)
    self.period = float(period)
    self.axis = int(axis)
    self.offset = float(offset)
    self.personal_share = float(personal_share)
    self.personal_phase: Optional[keras.Variable] = None
    self.supports_masking = True

  @property
  def is_on(self) -> bool:
    """Whether the layer changes its inputs."""
    return self.amplitude > 0 and self.period > 0

  def num_personal(self, num_units: int) -> int:
    """Returns the number of personal units among J; 0 if the layer is off."""
    return round(self.personal_share * num_units) if self.is_on else 0

  def encodings(
      self, num_units: int, personal_phase: float = 0.0
  ) -> np.ndarray:
    """Returns the values that are added to or multiply the units.

    Args:
      num_units: J.
      personal_phase: The phase of the personal encodings, in turns.

    Returns:
      A float64 vector of J elements.
    """
    angles = self._angles(num_units)
    first_personal = num_units - self.num_personal(num_units)
    angles[first_personal:] += 2 * np.pi * float(personal_phase)
    return (self.mode == 'multiply') + self.amplitude * np.sin(angles)

  def _angles(self, num_units: int) -> np.ndarray:
    """Returns the angles of the encodings without a personal phase."""
    positions = np.arange(num_units) + self.offset
    return 2 * np.pi * self.period * positions / num_units

  def build(self, input_shape: Any) -> None:
    """Checks the axis and creates the personal phase if needed."""
    rank = len(input_shape)
    if not -rank <= self.axis < rank:
      raise ValueError(
          f'axis={self.axis} of the layer {self.name!r} does not fit inputs of'
          f' shape {tuple(input_shape)}; use an axis from {-rank} to'
          f' {rank - 1}.'
      )
    num_units = input_shape[self.axis]
    if num_units is None:
      raise ValueError(
          f'The layer {self.name!r} needs a static number of units, but'
          f' axis={self.axis} of inputs of shape {tuple(input_shape)} has none.'
      )
    if self.num_personal(num_units):
      # 16 bits would be too inaccurate, for any compute dtype.
      self.personal_phase = self.add_weight(
          shape=(),
          initializer='zeros',
          dtype='float32',
          trainable=False,
          autocast=False,
          name='personal_phase',
      )
    super().build(input_shape)

  def call(self, inputs: Any) -> Any:
    """Adds or multiplies the encodings."""
    if not self.is_on:
      return inputs
    shape = [1] * len(inputs.shape)
    shape[self.axis] = num_units = inputs.shape[self.axis]
    encodings = ops.reshape(
        ops.cast(self._own_encodings(num_units), inputs.dtype), shape
    )
    return inputs + encodings if self.mode == 'add' else inputs * encodings

  def _own_encodings(self, num_units: int) -> Any:
    """Returns a tensor of the J encodings with the personal phase.

    It is in float64 if the backend supports it (JAX only with
    `jax_enable_x64`).
    """
    shared = ops.convert_to_tensor(self.encodings(num_units))
    if self.personal_phase is None:
      return shared
    # sin(a + b) = sin(a) + sin(a) (cos(b) - 1) + cos(a) sin(b). With phase 0,
    # and for units that are not personal, this equals the shared encodings
    # exactly.
    angles = self._angles(num_units)
    is_personal = np.arange(num_units) >= (
        num_units - self.num_personal(num_units)
    )
    amplitudes = self.amplitude * is_personal
    turn = 2 * np.pi * ops.cast(self.personal_phase, shared.dtype)
    sine, cosine = (
        ops.convert_to_tensor(amplitudes * f(angles)) for f in (np.sin, np.cos)
    )
    return shared + (sine * (ops.cos(turn) - 1) + cosine * ops.sin(turn))

  def compute_output_shape(self, input_shape: Any) -> Any:
    """Returns the input's shape."""
    return input_shape

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments for `from_config`."""
    return {
        **super().get_config(),
        'mode': self.mode,
        'amplitude': self.amplitude,
        'period': self.period,
        'axis': self.axis,
        'offset': self.offset,
        'personal_share': self.personal_share,
    }
