"""Batch normalization without running statistics."""

from typing import Any, Optional

import keras
from keras import ops

from tff_bn.layers import batch_moments


@keras.saving.register_keras_serializable(package='tff_bn')
class StaticBatchNormalization(keras.layers.Layer):
  """Layer that always normalizes its inputs by the statistics of the batch.

  It has no moving statistics, so clients have none to send. **During training
  and during inference**, the layer returns
  `gamma * (batch - mean(batch)) / sqrt(var(batch) + epsilon) + beta`, where
  `var` is the biased variance. Gradients flow through the statistics.

  So the output for one example depends on the other examples of its batch, also
  during inference: use batches as large as in training, with a similar mix of
  examples. HeteroFL computes running statistics from the clients' data after
  training; this layer does not.

  The layer is not a `keras.layers.BatchNormalization`. For the algorithms of
  `tff_bn`, `gamma` and `beta` are ordinary weights. FedBN, FBN, FedTAN and
  others, which treat batch normalization in a special way, refuse a model
  without other batch normalization layers.

  Statistics are computed in float64 for float64 inputs, otherwise in float32.
  The layer works with every backend of Keras.

  Args:
    axis: Integer, the axis that should be normalized (typically the features
      axis). For instance, after a `Conv2D` layer with
      `data_format="channels_first"`, set `axis=1`.
    epsilon: Small float added to the variance to avoid dividing by zero.
    **kwargs: The arguments `trainable`, `name` and `dtype` of Keras layers.

  Call arguments:
    inputs: Input tensor.
    mask: Binary tensor that, with an axis appended, can be broadcast to the
      inputs, such as `[batch, time]` for inputs `[batch, time, channels]`. The
      statistics are computed from the positions where it is true. All positions
      are normalized.

  Input shape:
    Arbitrary.

  Output shape:
    Same shape as input.

  Reference:
    - Diao, Ding, Tarokh, HeteroFL: Computation and Communication Efficient
      Federated Learning for Heterogeneous Clients, ICLR 2021, arXiv:2010.01264.
  """

  def __init__(self, axis: int = -1, epsilon: float = 1e-3, **kwargs: Any):
    super().__init__(**kwargs)
    self.axis = axis
    self.epsilon = epsilon
    self.supports_masking = True

  def build(self, input_shape: Any) -> None:
    """Creates the weights."""
    self.gamma, self.beta = (
        self.add_weight(
            shape=(input_shape[self.axis],),
            name=name,
            initializer=initializer,
            autocast=False,
        )
        for name, initializer in (('gamma', 'ones'), ('beta', 'zeros'))
    )

  def call(self, inputs: Any, mask: Optional[Any] = None) -> Any:
    """Normalizes by the statistics of the batch."""
    dtype = keras.backend.result_type(inputs.dtype, 'float32')
    inputs = ops.cast(inputs, dtype)
    batch = batch_moments.batch_moments(
        inputs, self.axis, mask, differentiable=True
    )
    outputs = ops.batch_normalization(
        inputs,
        batch.mean,
        batch.variance,
        axis=self.axis,
        offset=ops.cast(self.beta, dtype),
        scale=ops.cast(self.gamma, dtype),
        epsilon=self.epsilon,
    )
    return ops.cast(outputs, self.compute_dtype)

  def compute_output_shape(self, input_shape: Any) -> Any:
    """Returns the input's shape."""
    return input_shape

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments for `from_config`."""
    return {**super().get_config(), 'axis': self.axis, 'epsilon': self.epsilon}
