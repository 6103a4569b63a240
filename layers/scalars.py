"""Layers with a single number as weight, for Fixup-initialized networks."""

from typing import Any

import keras


class _Scalar(keras.layers.Layer):
  """A layer with one trainable number."""

  _NAME: str
  _INITIALIZER: str

  def __init__(self, **kwargs: Any):
    super().__init__(**kwargs)
    self.supports_masking = True

  def build(self, input_shape: Any) -> None:
    """Creates the weight."""
    del input_shape
    self.scalar = self.add_weight(
        shape=(), name=self._NAME, initializer=self._INITIALIZER
    )

  def compute_output_shape(self, input_shape: Any) -> Any:
    """Returns the input's shape."""
    return input_shape


@keras.saving.register_keras_serializable(package='tff_bn')
class ScalarBias(_Scalar):
  """Layer that adds a trainable number, initially 0, to all inputs.

  Args:
    **kwargs: The arguments `trainable`, `name` and `dtype` of Keras layers.

  Call arguments:
    inputs: Input tensor.

  Input shape:
    Arbitrary.

  Output shape:
    Same shape as input.

  Reference:
    - Zhang, Dauphin, Ma, Fixup Initialization: Residual Learning Without
      Normalization, ICLR 2019, arXiv:1901.09321.
  """

  _NAME, _INITIALIZER = 'bias', 'zeros'

  def call(self, inputs: Any) -> Any:
    """Adds the number."""
    return inputs + self.scalar


@keras.saving.register_keras_serializable(package='tff_bn')
class ScalarMultiplier(_Scalar):
  """Layer that multiplies all inputs by a trainable number, initially 1.

  Args:
    **kwargs: The arguments `trainable`, `name` and `dtype` of Keras layers.

  Call arguments:
    inputs: Input tensor.

  Input shape:
    Arbitrary.

  Output shape:
    Same shape as input.

  Reference:
    - Zhang, Dauphin, Ma, Fixup Initialization: Residual Learning Without
      Normalization, ICLR 2019, arXiv:1901.09321.
  """

  _NAME, _INITIALIZER = 'scale', 'ones'

  def call(self, inputs: Any) -> Any:
    """Multiplies by the number."""
    return inputs * self.scalar
