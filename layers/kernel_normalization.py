"""Normalization of units of the size of a convolution's kernel."""

from collections.abc import Sequence
from typing import Any, Optional, Union

import keras
from keras import ops

_PADDINGS = ('valid', 'same')
_INFERENCE_SEED = 0


@keras.saving.register_keras_serializable(package='tff_bn')
class KernelNormalization(keras.layers.Layer):
  """Layer that normalizes the windows which a convolution reads.

  A *unit* is what a kernel reads at one position: a window of the image with
  all its channels. The layer returns `(unit - mean(x)) / sqrt(var(x) +
  epsilon)` for each unit, where `var` is the biased variance. `x` is the unit
  after dropout, and the unit itself is never dropped. **During training**, the
  statistics are noisy. **During inference**, values are dropped, too, as in the
  authors' code, but at the same places in all examples and calls, so that
  predictions are not random. The layer has no weights, and examples do not
  depend on each other.

  Without dropout during inference, what follows would get inputs that it never
  saw in training: where all values of a unit are alike, its variance would be
  0, while dropped values give it a large variance in training.

  The normalized units lie side by side in the output, so it is larger than the
  input if the units overlap. A convolution with the same kernel size whose
  strides are the kernel size reads each unit once. It gives the sizes that the
  convolution with the kernel size, strides and padding of this layer would
  give:

  ```
  x = KernelNormalization(3, padding='same')(x)
  x = keras.layers.Conv2D(16, 3, strides=3)(x)
  ```

  With a kernel of one pixel, the layer normalizes each pixel over its channels,
  and the output has the shape of the input. With `strides=kernel_size`, units
  do not overlap, and the output has the shape of the input if the kernel size
  divides its height and width. A vector is one unit.

  The statistics are computed in float64 for float64 inputs, otherwise in
  float32. The layer works with every backend of Keras.

  Args:
    kernel_size: Integer, or one for each axis of the window. It has no effect
      on vectors.
    strides: The distance of units, in the same form.
    padding: `'valid'`, or `'same'`, which pads with zeros as convolutions do.
      These zeros count in the statistics.
    dropout_rate: The probability that a value does not count in the statistics:
      it becomes 0, and the others are divided by `1 - dropout_rate`.
    epsilon: Small float added to the variance to avoid dividing by zero.
    seed: Integer, or a `keras.random.SeedGenerator`, for the dropout during
      training.
    **kwargs: The arguments `name` and `dtype` of Keras layers.

  Call arguments:
    inputs: Input tensor.
    training: Whether the dropped values differ between examples and calls.

  Input shape:
    Images `[batch, height, width, channels]`, series `[batch, steps, channels]`
    or vectors `[batch, channels]`. With `padding='same'` and strides greater
    than 1, the sizes of images and series are static.

  Output shape:
    Each axis of the window has the number of units times the kernel size.

  Raises:
    ValueError: If an argument is out of range, the inputs have another rank, or
      an image is smaller than the kernel.

  Reference:
    - Nasirigerdeh, Torkzadehmahani, Rueckert, Kaissis, Kernel Normalized
      Convolutional Networks, TMLR 2024, arXiv:2205.10089.
  """

  def __init__(
      self,
      kernel_size: Union[int, Sequence[int]] = 1,
      strides: Union[int, Sequence[int]] = 1,
      padding: str = 'valid',
      dropout_rate: float = 0.1,
      epsilon: float = 1e-5,
      seed: Union[int, keras.random.SeedGenerator, None] = None,
      **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.kernel_size = _sizes('kernel_size', kernel_size)
    self.strides = _sizes('strides', strides)
    if padding not in _PADDINGS:
      raise ValueError(
          f'padding={padding!r} must be {" or ".join(map(repr, _PADDINGS))}.'
      )
    if not 0 <= dropout_rate < 1:
      raise ValueError(
          f'dropout_rate={dropout_rate} must be at least 0 and less than 1.'
      )
    self.padding = padding
    self.dropout_rate = dropout_rate
    self.epsilon = epsilon
    self.seed = seed
    if dropout_rate > 0:
      self.seed_generator = keras.random.SeedGenerator(seed)

  def call(self, inputs: Any, training: bool = False) -> Any:
    """Normalizes the units."""
    x = ops.cast(inputs, keras.backend.result_type(inputs.dtype, 'float32'))
    windows = self._windows(inputs.shape)
    padding = [self._padding(*window) for window in windows]
    x = ops.pad(x, [(0, 0), *padding, (0, 0)])
    # The last axis comes first: each step adds an axis after its own.
    for number in reversed(range(len(windows))):
      _, size, stride = windows[number]
      x = _units(x, 1 + number, size, stride)
    seen = x
    if self.dropout_rate > 0:
      drawn = (
          dict(seed=self.seed_generator)
          if training
          else dict(
              seed=_INFERENCE_SEED,
              noise_shape=(1, *[None] * (len(x.shape) - 1)),
          )
      )
      seen = keras.random.dropout(x, self.dropout_rate, **drawn)
    axes = [*range(2, len(x.shape) - 1, 2), len(x.shape) - 1]
    mean, variance = ops.moments(seen, axes, keepdims=True)
    x = (x - mean) * ops.rsqrt(variance + self.epsilon)
    # [batch, units, size, units, size, channels] becomes
    # [batch, units * size, units * size, channels].
    sizes = [
        -1 if units is None else units
        for units in self.compute_output_shape(inputs.shape)[1:]
    ]
    if sizes.count(-1) > 1:
      sizes = _joined_sizes(x)
    outputs = ops.reshape(x, [ops.shape(x)[0], *sizes])
    return ops.cast(outputs, self.compute_dtype)

  def _windows(self, shape: Any) -> list[tuple[Optional[int], int, int]]:
    """Returns the length, the kernel size and the stride of each axis."""
    rank = len(shape) - 2
    if not 0 <= rank <= 2:
      raise ValueError(
          'Kernel normalization is for images, series and vectors, but the'
          f' inputs have the shape {tuple(shape)}.'
      )
    lengths = shape[1:-1]
    given: list[Sequence[int]] = []
    for name in ('kernel_size', 'strides'):
      values = getattr(self, name)
      if len(values) not in (1, rank) and rank:
        raise ValueError(
            f'{name}={values} has {len(values)} numbers, but the inputs of'
            f' shape {tuple(shape)} have {rank} axes between the examples and'
            ' the channels.'
        )
      given.append(values if len(values) == rank else values[:1] * rank)
    sizes, strides = given
    for length, size in zip(lengths, sizes):
      if self.padding == 'valid' and length is not None and length < size:
        raise ValueError(
            f'kernel_size={self.kernel_size} is larger than the inputs of shape'
            f" {tuple(shape)}; use padding='same', or a smaller kernel."
        )
    return list(zip(lengths, sizes, strides))

  def _padding(
      self, length: Optional[int], size: int, stride: int
  ) -> tuple[int, int]:
    """Returns how many zeros come before and after an axis."""
    if self.padding == 'valid':
      return 0, 0
    if stride == 1:
      total = size - 1
    elif length is None:
      raise ValueError(
          f"padding='same' with strides={self.strides} needs inputs of a known"
          ' size.'
      )
    else:
      total = max((-(-length // stride) - 1) * stride + size - length, 0)
    return total // 2, total - total // 2

  def compute_output_shape(self, input_shape: Any) -> Any:
    """Returns the shape of the units side by side."""

    def joined(length: Optional[int], size: int, stride: int) -> Optional[int]:
      padding = self._padding(length, size, stride)
      if length is None:
        return None
      padded = length + sum(padding)
      return ((padded - size) // stride + 1) * size

    axes = [joined(*window) for window in self._windows(input_shape)]
    return (input_shape[0], *axes, input_shape[-1])

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments for `from_config`."""
    return {
        **super().get_config(),
        'kernel_size': self.kernel_size,
        'strides': self.strides,
        'padding': self.padding,
        'dropout_rate': self.dropout_rate,
        'epsilon': self.epsilon,
        'seed': self.seed,
    }


def _sizes(name: str, values: Union[int, Sequence[int]]) -> tuple[int, ...]:
  """Returns positive integers, one or one for each axis."""
  sizes = (values,) if isinstance(values, int) else tuple(values)
  if not sizes or any(not isinstance(v, int) or v < 1 for v in sizes):
    raise ValueError(
        f'{name}={values!r} must be a positive integer, or one for each axis.'
    )
  return sizes


def _units(x: Any, axis: int, size: int, stride: int) -> Any:
  """Splits an axis into windows: `[..., number, size, ...]`."""
  slices = []
  for start in range(size):
    stop = start + 1 - size or None
    index = [slice(None)] * axis + [slice(start, stop, stride)]
    slices.append(x[tuple(index)])
  return ops.stack(slices, axis=axis + 1)


def _joined_sizes(x: Any) -> list[Any]:
  """Returns the sizes of the output, if several are not static."""
  shape = ops.shape(x)
  pairs = range(1, len(x.shape) - 1, 2)
  return [*(shape[n] * shape[n + 1] for n in pairs), shape[-1]]
