"""Batch normalization with the statistics of all clients' batches.

The layer-wise exchanges of FedTAN: Wang, Shi, Chang, Why Batch Normalization
Damage Federated Learning on Non-IID Data?, arXiv:2301.02982, section 5 and
algorithms 2 and 3.

With a layer's input x of K values a channel, the clients' mean m and variance
v, r = 1/√(v + ε), x̂ = (x − m)·r, scale γ and shift ζ, and the cotangent dy of
the output, the gradients with respect to the statistics have closed forms:

  ∂F/∂m = −γ·r·dζ  and  ∂F/∂v = −γ·r²·dγ/2,  with dζ = Σ dy and dγ = Σ dy·x̂.

So the clients send the layer's own dζ and dγ instead, and no pass over the data
is needed but those that Keras's fused kernels make. With the sums Dζ and Dγ
over all clients the cotangent of the input is

  dx = γ·r·(dy − q·(Dζ + x̂·Dγ)),

where q is the weight of one value in the statistics, divided by the client's
weight in the loss.
"""

import collections
import enum
from typing import NamedTuple, Optional, Protocol

import tensorflow as tf

from tff_bn import mixed_precision
from tff_bn import numerics
from tff_bn import stages
from tff_bn.aggregators import moments
from tff_bn.layers import discovery

# `tf.compat.v1.nn.fused_batch_norm`, which Keras calls, has at least this.
_SMALLEST_FUSED_EPSILON = 1.001e-5

# A client whose values are so large that the sum over this many clients like it
# overflows is left out: it would make the answer useless for all others.
_MOST_CLIENTS = 2.0**10

# With one of these, a subclass of a Keras layer is a layer of another kind.
_COMPUTING_METHODS = frozenset(
    [
        '__call__',
        'call',
        '_moments',
        '_calculate_mean_and_var',
        '_fused_batch_norm',
    ]
)


class Answer(enum.Enum):
  """What clients get for what they send."""

  SUM = 'the sum over all clients'
  POOLED_MOMENTS = 'the moments of all clients together'


class _Statistics(NamedTuple):
  """Statistics of all clients' values.

  Attributes:
    mean: The mean of each channel.
    variance: The biased variance of each channel.
    count: How many values of a channel there are.
    value_weight: The weight of one value of this client in them.
  """

  mean: tf.Tensor
  variance: tf.Tensor
  count: tf.Tensor
  value_weight: tf.Tensor


def check_model(model: tf.keras.Model) -> None:
  """Checks that batch normalization can be synchronized in a model.

  Args:
    model: The model.

  Raises:
    ValueError: If there is nothing to synchronize, or a layer can't be. The
      message names the layer and says what to do.
  """
  layers = discovery.batch_norm_layers(model)
  if not any(layer.trainable for layer in layers):
    found = 'none that is trained' if layers else 'none'
    raise ValueError(
        'FedTAN synchronizes batch normalization layers, but the model'
        f' {model.name!r} has {found}. Use a model with batch normalization, or'
        ' fedavg.'
    )
  for layer in layers:
    _check_layer(layer)
  for module in [model, *model.submodules]:
    if isinstance(module, tf.keras.layers.Layer):
      _check_container(module)
  if mixed_precision.computes_in_float16(model):
    raise ValueError(
        f'FedTAN cannot scale the loss of the model {model.name!r}, which'
        ' computes in float16, from one exchange to the next. Use'
        ' mixed_bfloat16 or float32.'
    )


def _check_layer(layer: tf.keras.layers.Layer):
  name = f'The batch normalization layer {layer.name!r}'
  for option in ('renorm', 'virtual_batch_size', 'adjustment'):
    if getattr(layer, option, None):
      raise ValueError(
          f'{name} has {option}={getattr(layer, option)}, with which FedTAN'
          ' cannot synchronize it. Use tf.keras.layers.BatchNormalization.'
      )
  for parent in type(layer).__mro__:
    if parent in discovery.BATCH_NORM_CLASSES:
      break
    own = sorted(_COMPUTING_METHODS & vars(parent).keys())
    if own:
      raise ValueError(
          f'{name} is a {type(layer).__name__}, which computes in its own way'
          f' ({own[0]}), so FedTAN does not know what to synchronize. Use'
          ' tf.keras.layers.BatchNormalization.'
      )
  if not layer.trainable and parent not in discovery.FREEZABLE_CLASSES:
    raise ValueError(
        f'{name} has trainable=False, but is of a class of TensorFlow 1 that'
        ' uses the statistics of its batch all the same. Use'
        ' tf.keras.layers.BatchNormalization.'
    )


def _check_container(container: tf.keras.layers.Layer):
  if discovery.is_batch_norm(container):
    return
  inside = [
      layer
      for layer in discovery.batch_norm_layers(container)
      if layer.trainable
  ]
  if not inside:
    return
  functional = tf.keras.Sequential.__base__
  if isinstance(container, tf.keras.Model) and type(container).call not in (
      functional.call,
      tf.keras.Sequential.call,
  ):
    raise ValueError(
        f'The model {container.name!r} ({type(container).__name__}), with the'
        f' batch normalization layer {inside[0].name!r}, is a subclass of'
        ' tf.keras.Model with its own `call`, which FedTAN cannot split. Build'
        ' it as a functional model, tf.keras.Model(inputs, outputs), or a'
        ' tf.keras.Sequential.'
    )
  if isinstance(container, (tf.keras.layers.Wrapper, tf.keras.layers.RNN)):
    raise _inside_of_control_flow(container, inside[0])


def _inside_of_control_flow(
    container: tf.keras.layers.Layer, layer: tf.keras.layers.Layer
) -> ValueError:
  return ValueError(
      f'The batch normalization layer {layer.name!r} is inside of the layer'
      f' {container.name!r} ({type(container).__name__}), which may call it in'
      ' a loop, a condition or a function of its own, where FedTAN cannot stop'
      ' for an exchange. Call the layer in the functional model itself.'
  )


class SynchronizedBatchNorm:
  """Computes batch normalization layers by asking all clients.

  An object is a `tff_bn.batch_norm_calls.TrainingCall`.

  Attributes:
    squared_norm: The sum over all calls and channels of the second moments of
      the client's own values, a float32 scalar.
  """

  def __init__(
      self,
      model: tf.keras.Model,
      ask: stages.Ask,
      client_weight: tf.Tensor,
      *,
      fused_moments: bool,
      synchronize_backward: bool,
  ):
    """Initializes the calls.

    Args:
      model: The model, for error messages.
      ask: Asks a question of a kind of `Answer`. It must replace the values of
        a client without data by zeros, and from the first question that is not
        sound on those of the client that asked it.
      client_weight: float scalar, the client's weight in the loss.
      fused_moments: Whether mean and variance go together, weighted by the
        number of values; else the mean goes first and then the variance about
        the answer, weighted by `client_weight`.
      synchronize_backward: Whether the gradients with respect to the statistics
        are those of all clients; else each client takes its own.
    """
    self.squared_norm = tf.zeros([], tf.float32)
    self._model = model
    self._graph = tf.compat.v1.get_default_graph()
    self._ask = ask
    self._client_weight = client_weight
    self._fused_moments = fused_moments
    self._synchronize_backward = synchronize_backward

  def __call__(
      self,
      layer: tf.keras.layers.Layer,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
  ) -> tf.Tensor:
    """Computes a layer and updates its running statistics."""
    if tf.compat.v1.get_default_graph() is not self._graph:
      containers = [
          module
          for module in self._model.submodules
          if isinstance(module, tf.keras.layers.Layer)
          and module is not layer
          and layer in module.submodules
      ]
      raise _inside_of_control_flow((containers or [self._model])[-1], layer)
    kernels = _kernels_for(layer, inputs, mask)
    statistics = self._statistics(kernels)
    _update_running_statistics(layer, statistics)
    shape = layer.moving_mean.shape
    dtype = layer.moving_mean.dtype
    gamma = tf.ones(shape, dtype) if layer.gamma is None else layer.gamma
    beta = tf.zeros(shape, dtype) if layer.beta is None else layer.beta
    output = self._normalize(
        kernels, statistics, tf.identity(gamma), tf.identity(beta)
    )
    output.set_shape(inputs.shape)
    return tf.cast(output, inputs.dtype)

  def _statistics(self, kernels: '_Kernels') -> _Statistics:
    """The statistics of all clients, in the paper's algorithm 2.

    Args:
      kernels: The layer's input.

    Returns:
      The statistics.
    """
    count, mean, variance = kernels.moments()
    weight = tf.cast(self._client_weight, mean.dtype)
    second_moment = variance + tf.math.square(mean)
    self.squared_norm += tf.cast(tf.reduce_sum(second_moment), tf.float32)
    sound = _can_be_summed(tf.maximum(weight, count) * second_moment)
    if self._fused_moments:
      pooled = self._ask(
          Answer.POOLED_MOMENTS,
          moments.layer_moments(count, mean, variance),
          sound,
      )
      return _Statistics(
          pooled['mean'],
          pooled['variance'],
          pooled['count'],
          tf.math.reciprocal_no_nan(pooled['count']),
      )
    total = self._ask(
        Answer.SUM,
        collections.OrderedDict(weight=weight, count=count, mean=weight * mean),
        sound,
    )
    global_mean = tf.math.divide_no_nan(total['mean'], total['weight'])
    # The mean of (x − m)² over the client's values, without a pass over them.
    deviation = variance + tf.math.square(mean - global_mean)
    sum_of_deviations = self._ask(
        Answer.SUM, weight * deviation, _can_be_summed(weight * deviation)
    )
    return _Statistics(
        global_mean,
        tf.math.divide_no_nan(sum_of_deviations, total['weight']),
        total['count'],
        tf.math.divide_no_nan(weight, total['weight'] * count),
    )

  def _normalize(
      self,
      kernels: '_Kernels',
      statistics: _Statistics,
      gamma: tf.Tensor,
      beta: tf.Tensor,
  ) -> tf.Tensor:
    """Normalizes; the gradient is that of the paper's algorithm 3."""

    @tf.custom_gradient
    def normalize(inputs, gamma, beta):
      del inputs  # Only so that it gets a gradient.

      def gradient(cotangent):
        direct, scale_gradient, shift_gradient = kernels.gradients(
            cotangent, gamma, statistics
        )
        scale_sum, shift_sum, factor = self._sums(
            kernels, scale_gradient, shift_gradient, statistics
        )
        factor *= -gamma * tf.math.rsqrt(statistics.variance + kernels.epsilon)
        return (
            direct
            + kernels.affine(
                factor * scale_sum, factor * shift_sum, statistics
            ),
            scale_gradient,
            shift_gradient,
        )

      return kernels.normalize(gamma, beta, statistics), gradient

    return normalize(kernels.inputs, gamma, beta)

  def _sums(
      self,
      kernels: '_Kernels',
      scale_gradient: tf.Tensor,
      shift_gradient: tf.Tensor,
      statistics: _Statistics,
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Dγ, Dζ and q."""
    if not self._synchronize_backward:
      # As if the client's own values made the statistics.
      return (
          scale_gradient,
          shift_gradient,
          tf.math.reciprocal_no_nan(kernels.count),
      )
    weight = tf.cast(self._client_weight, shift_gradient.dtype)
    sent = collections.OrderedDict(
        scale=weight * scale_gradient, shift=weight * shift_gradient
    )
    sums = self._ask(Answer.SUM, sent, _can_be_summed(*sent.values()))
    return (
        sums['scale'],
        sums['shift'],
        tf.math.divide_no_nan(statistics.value_weight, weight),
    )


def _can_be_summed(*values: tf.Tensor) -> tf.Tensor:
  """Whether values are finite, and their sums over clients, too."""
  return numerics.all_finite([value * _MOST_CLIENTS for value in values])


def _update_running_statistics(
    layer: tf.keras.layers.Layer, statistics: _Statistics
):
  """Updates the moving mean and variance as Keras does."""
  variance = statistics.variance
  if layer.fused:
    # Keras's fused kernel stores the unbiased variance.
    one = tf.ones_like(statistics.count)
    variance *= statistics.count / tf.maximum(statistics.count - one, one)
  # Keras rounds it to float32, whatever the dtype.
  rate = tf.constant(1 - layer.momentum, tf.float32)
  for variable, value in (
      (layer.moving_mean, statistics.mean),
      (layer.moving_variance, variance),
  ):
    change = tf.cast(value, variable.dtype) - variable
    change *= tf.cast(rate, variable.dtype)
    # Without any data there is nothing to learn.
    change = tf.where(statistics.count > 0, change, tf.zeros_like(change))
    variable.assign_add(change)


class _Kernels(Protocol):
  """How a layer's input is normalized.

  Attributes:
    inputs: The input, in the dtype of the computation.
    count: The number of values of a channel, a scalar in the statistics' dtype.
    epsilon: What is added to the variance.
  """

  inputs: tf.Tensor
  count: tf.Tensor
  epsilon: float

  def moments(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the count, the mean and the biased variance of the input."""

  def normalize(
      self, gamma: tf.Tensor, beta: tf.Tensor, statistics: _Statistics
  ) -> tf.Tensor:
    """Returns γ·x̂ + β."""

  def gradients(
      self, cotangent: tf.Tensor, gamma: tf.Tensor, statistics: _Statistics
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns γ·r·dy, dγ and dζ."""

  def affine(
      self, scale: tf.Tensor, shift: tf.Tensor, statistics: _Statistics
  ) -> tf.Tensor:
    """Returns scale·x̂ + shift, and 0 where a mask excludes a value."""


def _kernels_for(
    layer: tf.keras.layers.Layer,
    inputs: tf.Tensor,
    mask: Optional[tf.Tensor],
) -> _Kernels:
  if layer.fused and inputs.shape.rank == 4 and list(layer.axis) == [3]:
    return _FusedKernels(layer, inputs)
  return _PlainKernels(layer, inputs, None if layer.fused else mask)


def _epsilon(layer: tf.keras.layers.Layer) -> float:
  if layer.fused:
    return max(layer.epsilon, _SMALLEST_FUSED_EPSILON)
  return layer.epsilon


class _FusedKernels:
  """TensorFlow's fused operations, for images with the channels last."""

  def __init__(self, layer: tf.keras.layers.Layer, inputs: tf.Tensor):
    self.inputs = inputs
    self.epsilon = _epsilon(layer)
    self._dtype = layer.moving_mean.dtype
    self._shape = layer.moving_mean.shape
    self.count = tf.cast(tf.reduce_prod(tf.shape(inputs)[:3]), self._dtype)

  def _forward(self, scale, shift, mean, variance, is_training):
    return tf.raw_ops.FusedBatchNormV3(
        x=self.inputs,
        scale=scale,
        offset=shift,
        mean=mean,
        variance=variance,
        epsilon=self.epsilon,
        is_training=is_training,
    )

  def moments(self):
    one, zero = tf.ones(self._shape), tf.zeros(self._shape)
    result = self._forward(one, zero, zero, one, is_training=True)
    # The operation returns the unbiased variance.
    bias = tf.math.divide_no_nan(
        tf.maximum(self.count - 1, tf.ones_like(self.count)), self.count
    )
    return self.count, result.batch_mean, result.batch_variance * bias

  def normalize(self, gamma, beta, statistics):
    return self._forward(
        gamma, beta, statistics.mean, statistics.variance, is_training=False
    ).y

  def gradients(self, cotangent, gamma, statistics):
    result = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=cotangent,
        x=self.inputs,
        scale=gamma,
        reserve_space_1=statistics.mean,
        reserve_space_2=statistics.variance,
        reserve_space_3=tf.zeros([0]),
        epsilon=self.epsilon,
        is_training=False,
    )
    return result.x_backprop, result.scale_backprop, result.offset_backprop

  def affine(self, scale, shift, statistics):
    return self.normalize(scale, shift, statistics)


class _PlainKernels:
  """Ordinary operations, for inputs of any rank, axes, dtype and mask."""

  def __init__(
      self,
      layer: tf.keras.layers.Layer,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
  ):
    self._dtype = layer.moving_mean.dtype
    self._shape = layer.moving_mean.shape
    # In 16 bits the squares would overflow; Keras computes in float32, too.
    self.inputs = tf.cast(inputs, self._dtype)
    self.epsilon = _epsilon(layer)
    rank = inputs.shape.rank
    self._reduced = [i for i in range(rank) if i not in layer.axis]
    # The shape in which a value for each channel goes with the input.
    self._broadcast = [
        inputs.shape[i] if i in layer.axis else 1 for i in range(rank)
    ]
    size = tf.cast(tf.size(inputs), self._dtype)
    self._mask = None
    if mask is not None:
      self._mask = tf.expand_dims(tf.cast(mask, self._dtype), -1)
      size = tf.reduce_sum(tf.broadcast_to(self._mask, tf.shape(inputs)))
    self.count = size / self._shape.num_elements()

  def _spread(self, value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(value, self._broadcast)

  def _sum(self, values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.reduce_sum(values, self._reduced), self._shape)

  def _masked(self, values: tf.Tensor) -> tf.Tensor:
    return values if self._mask is None else values * self._mask

  def moments(self):
    mean = tf.math.divide_no_nan(
        self._sum(self._masked(self.inputs)), self.count
    )
    squares = tf.math.square(self.inputs - self._spread(mean))
    variance = tf.math.divide_no_nan(
        self._sum(self._masked(squares)), self.count
    )
    return self.count, mean, variance

  def normalize(self, gamma, beta, statistics):
    r = tf.math.rsqrt(statistics.variance + self.epsilon)
    return (self.inputs - self._spread(statistics.mean)) * self._spread(
        gamma * r
    ) + self._spread(beta)

  def gradients(self, cotangent, gamma, statistics):
    r = tf.math.rsqrt(statistics.variance + self.epsilon)
    normalized = (self.inputs - self._spread(statistics.mean)) * self._spread(r)
    return (
        cotangent * self._spread(gamma * r),
        self._sum(cotangent * normalized),
        self._sum(cotangent),
    )

  def affine(self, scale, shift, statistics):
    return self._masked(self.normalize(scale, shift, statistics))
