"""Normalization of each example's features to the same length."""

import math
from typing import Any

import keras
from keras import ops

# Features with a smaller squared length are treated as zero.
_SMALLEST = 1e-30


@keras.saving.register_keras_serializable(package='tff_bn')
class FeatureNormalization(keras.layers.Layer):
  """Layer that scales each example's features to the length `sqrt(d)`.

  For `d` features, the layer returns
  `sqrt(d) * inputs / sqrt(sum(inputs**2))`, with the sum over the features of
  one example. It has no weights and is the same during training and inference.
  The zero vector stays zero and gets no gradient. The layer belongs between the
  last hidden layer and the dense layer that computes the logits. There, it
  keeps clients that lack some classes from growing the features of the others.

  The length is computed in float64 for float64 inputs, otherwise in float32.
  The layer works with every backend of Keras.

  Args:
    axis: Integer, the axis of the features.
    **kwargs: The arguments `name` and `dtype` of Keras layers.

  Call arguments:
    inputs: Input tensor.

  Input shape:
    Arbitrary, with a static size of `axis`.

  Output shape:
    Same shape as input.

  Reference:
    - Zhang, Beitollahi, Bie, Chen, Understanding the Role of Layer
      Normalization in Label-Skewed Federated Learning, TMLR 2024,
      arXiv:2308.09565.
  """

  def __init__(self, axis: int = -1, **kwargs: Any):
    super().__init__(**kwargs)
    self.axis = axis
    self.supports_masking = True

  def call(self, inputs: Any) -> Any:
    """Scales the features."""
    # A sum of squares would overflow in float16.
    values = ops.cast(
        inputs, keras.backend.result_type(inputs.dtype, 'float32')
    )
    squares = ops.sum(ops.square(values), axis=self.axis, keepdims=True)
    is_zero = squares < _SMALLEST
    length = ops.sqrt(ops.where(is_zero, ops.ones_like(squares), squares))
    scale = math.sqrt(inputs.shape[self.axis]) / length
    outputs = ops.where(is_zero, ops.zeros_like(values), values * scale)
    return ops.cast(outputs, self.compute_dtype)

  def compute_output_shape(self, input_shape: Any) -> Any:
    """Returns the input's shape."""
    return input_shape

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments for `from_config`."""
    return {**super().get_config(), 'axis': self.axis}
