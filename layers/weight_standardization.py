"""Convolutions and dense layers with scaled weight standardization."""

import math
from typing import Any

import keras
from keras import ops

# The factor that keeps the variance of normally distributed values in a ReLU
# that follows: sqrt(2 / (1 - 1/π)).
RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))
# The smallest sum of squared deviations by which a kernel is divided.
_EPSILON = 1e-4


class _Standardized(keras.layers.Layer):
  """Adds the gain and the standardization to a layer with a kernel."""

  def __init__(self, *args: Any, gain_initializer: Any = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.gain_initializer = (
        keras.initializers.Constant(RELU_GAIN)
        if gain_initializer is None
        else keras.initializers.get(gain_initializer)
    )

  def add_weight(self, *args: Any, **kwargs: Any) -> keras.Variable:
    """Creates a weight; see the base class."""
    # Statistics of a kernel in 16 bits would be too inaccurate.
    if kwargs.get('name') in ('kernel', 'gain'):
      kwargs['autocast'] = False
    return super().add_weight(*args, **kwargs)

  def build(self, input_shape: Any) -> None:
    """Creates the weights."""
    super().build(input_shape)
    shape = self.kernel.shape
    if math.prod(shape[:-1]) < 2:
      raise ValueError(
          f'The layer {self.name!r} needs at least 2 weights for each output,'
          f' but its kernel has the shape {tuple(shape)}: a single weight minus'
          ' its mean is 0.'
      )
    self.gain = self.add_weight(
        shape=(shape[-1],), name='gain', initializer=self.gain_initializer
    )

  def standardized_kernel(self) -> Any:
    """Returns the kernel that the layer applies, in float32 or float64."""
    dtype = keras.backend.result_type(self.kernel.dtype, 'float32')
    kernel, gain = (ops.cast(w, dtype) for w in (self.kernel, self.gain))
    axes = list(range(len(kernel.shape) - 1))
    deviations = kernel - ops.mean(kernel, axis=axes, keepdims=True)
    squares = ops.sum(ops.square(deviations), axis=axes, keepdims=True)
    return deviations * gain / ops.sqrt(ops.maximum(squares, _EPSILON))

  def save_own_variables(self, store: Any) -> None:
    """Saves the weights; Keras's method would leave out the gain."""
    keras.layers.Layer.save_own_variables(self, store)

  def load_own_variables(self, store: Any) -> None:
    """Loads the weights; Keras's method would leave out the gain."""
    keras.layers.Layer.load_own_variables(self, store)

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments for `from_config`."""
    return {
        **super().get_config(),
        'gain_initializer': keras.initializers.serialize(self.gain_initializer),
    }


@keras.saving.register_keras_serializable(package='tff_bn')
class WeightStandardizedConv2D(_Standardized, keras.layers.Conv2D):
  """Convolution with scaled weight standardization.

  A layer like `keras.layers.Conv2D` that replaces the convolution and the
  normalization layer after it. For each output channel, it applies the kernel
  `gain * (kernel - mean(kernel)) / sqrt(var(kernel) * fan_in)`, where the mean
  and the biased variance are computed over the `fan_in = height * width *
  input_channels / groups` weights of this channel. If the inputs have mean 0
  and variance 1, the outputs have the variance `gain**2`, with any kernel. No
  statistic of the data is needed.

  `gain` is a trainable weight with one number for each output channel. It
  starts as `sqrt(2 / (1 - 1/π))`: a ReLU after the layer then gives values of
  variance 1. A constant kernel gives outputs of 0.

  The kernel is standardized in float64 for float64 weights, otherwise in
  float32. The layer works with every backend of Keras.

  Args:
    *args: The arguments of `keras.layers.Conv2D`.
    gain_initializer: Initializer for the gain. Default: see above.
    **kwargs: The arguments of `keras.layers.Conv2D`.

  Call arguments:
    inputs: Input tensor.

  Input shape:
    As for `keras.layers.Conv2D`.

  Output shape:
    As for `keras.layers.Conv2D`.

  Raises:
    ValueError: If the kernel has a single weight for each output channel.

  Reference:
    - Zhuang, Lyu, FedWon: Triumphing Multi-domain Federated Learning Without
      Normalization, ICLR 2024, arXiv:2306.05879.
    - Brock, De, Smith, Characterizing Signal Propagation to Close the
      Performance Gap in Unnormalized ResNets, ICLR 2021, arXiv:2101.08692.
  """

  def convolution_op(self, inputs: Any, kernel: Any) -> Any:
    """Convolves with the standardized kernel in place of `kernel`."""
    del kernel
    return super().convolution_op(
        inputs, ops.cast(self.standardized_kernel(), inputs.dtype)
    )


@keras.saving.register_keras_serializable(package='tff_bn')
class WeightStandardizedConv1D(_Standardized, keras.layers.Conv1D):
  """Convolution over one axis with scaled weight standardization.

  A layer like `keras.layers.Conv1D` that replaces the convolution and the
  normalization layer after it. For each output channel, it applies the kernel
  `gain * (kernel - mean(kernel)) / sqrt(var(kernel) * fan_in)`, where the mean
  and the biased variance are computed over the `fan_in = steps *
  input_channels / groups` weights of this channel; see
  `WeightStandardizedConv2D`.

  Args:
    *args: The arguments of `keras.layers.Conv1D`.
    gain_initializer: Initializer for the gain. Default: see
      `WeightStandardizedConv2D`.
    **kwargs: The arguments of `keras.layers.Conv1D`.

  Call arguments:
    inputs: Input tensor.

  Input shape:
    As for `keras.layers.Conv1D`.

  Output shape:
    As for `keras.layers.Conv1D`.

  Raises:
    ValueError: If the kernel has a single weight for each output channel.

  Reference:
    - Zhuang, Lyu, FedWon: Triumphing Multi-domain Federated Learning Without
      Normalization, ICLR 2024, arXiv:2306.05879.
  """

  def convolution_op(self, inputs: Any, kernel: Any) -> Any:
    """Convolves with the standardized kernel in place of `kernel`."""
    del kernel
    padding = self.padding
    if padding == 'causal':
      steps = [self.dilation_rate[0] * (self.kernel_size[0] - 1), 0]
      is_last = self.data_format == 'channels_last'
      axes = [steps, [0, 0]] if is_last else [[0, 0], steps]
      inputs = ops.pad(inputs, [[0, 0], *axes])
      padding = 'valid'
    return ops.conv(
        inputs,
        ops.cast(self.standardized_kernel(), inputs.dtype),
        strides=list(self.strides),
        padding=padding,
        dilation_rate=self.dilation_rate,
        data_format=self.data_format,
    )

  def call(self, inputs: Any) -> Any:
    """Applies the standardized kernel."""
    # The method of `Conv1D` itself does not use `convolution_op`.
    return super(keras.layers.Conv1D, self).call(inputs)


@keras.saving.register_keras_serializable(package='tff_bn')
class WeightStandardizedDense(_Standardized, keras.layers.Dense):
  """Dense layer with scaled weight standardization.

  A layer like `keras.layers.Dense` that replaces the dense layer and the
  normalization layer after it. For each output unit, it applies the kernel
  `gain * (kernel - mean(kernel)) / sqrt(var(kernel) * fan_in)`, where the mean
  and the biased variance are computed over the `fan_in` weights of this unit;
  see `WeightStandardizedConv2D`.

  Args:
    *args: The arguments of `keras.layers.Dense`.
    gain_initializer: Initializer for the gain. Default: see
      `WeightStandardizedConv2D`.
    **kwargs: The arguments of `keras.layers.Dense`.

  Call arguments:
    inputs: Input tensor.

  Input shape:
    As for `keras.layers.Dense`.

  Output shape:
    As for `keras.layers.Dense`.

  Raises:
    ValueError: If the kernel has a single weight for each output unit.

  Reference:
    - Zhuang, Lyu, FedWon: Triumphing Multi-domain Federated Learning Without
      Normalization, ICLR 2024, arXiv:2306.05879.
  """

  def call(self, inputs: Any) -> Any:
    """Applies the standardized kernel."""
    kernel = ops.cast(self.standardized_kernel(), inputs.dtype)
    outputs = ops.matmul(inputs, kernel)
    if self.use_bias:
      outputs = outputs + self.bias
    return self.activation(outputs)
