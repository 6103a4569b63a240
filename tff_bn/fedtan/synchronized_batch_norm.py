"""Batch normalization with the statistics of all clients' batches.

The layer-wise exchanges of FedTAN: Wang, Shi, Chang, Why Batch Normalization
Damage Federated Learning on Non-IID Data?, arXiv:2301.02982, section 5 and
algorithms 2 and 3.

With a layer's input x of K values a channel, the clients' mean m and variance
v, r = 1/√(v + ε), x̂ = (x − m)·r, scale γ and shift ζ, and the cotangent dy of
the output, the gradients with respect to the statistics have closed forms:

  ∂F/∂m = −γ·r·dζ  and  ∂F/∂v = −γ·r²·dγ/2,  with dζ = Σ dy and dγ = Σ dy·x̂.

So the clients send the layer's own dζ and dγ instead, and no pass over the data
is needed but the passes of TensorFlow's fused operations. With the sums Dζ and
Dγ over all clients the cotangent of the input is

  dx = γ·r·(dy − q·(Dζ + x̂·Dγ)),

where q is the weight of one value in the statistics, divided by the client's
weight in the loss.
"""

import collections
import enum
from typing import NamedTuple, Optional, Protocol

import keras
import tensorflow as tf

from tff_bn.aggregators import moments
from tff_bn.common import numerics
from tff_bn.fedtan import stages
from tff_bn.keras_model import convert
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model import mixed_precision
from tff_bn.layers import discovery

# A client whose values are so large that the sum over this many clients like it
# overflows is left out: it would make the answer useless for all others.
_MOST_CLIENTS = 2.0**10

# Layers that may call others in a loop.
_LOOPS = (keras.layers.Wrapper, keras.layers.Bidirectional, keras.layers.RNN)


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
    deficit: By how much the weights of all values fall short of 1; `None` if
      they don't.
  """

  mean: tf.Tensor
  variance: tf.Tensor
  count: tf.Tensor
  value_weight: tf.Tensor
  deficit: Optional[tf.Tensor] = None


def check_model(model: keras.Model) -> None:
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
  for layer in discovery.all_layers(model):
    _check_container(layer)
  if mixed_precision.computes_in_float16(model):
    raise ValueError(
        f'FedTAN cannot scale the loss of the model {model.name!r}, which'
        ' computes in float16, from one exchange to the next. Use'
        ' mixed_bfloat16 or float32.'
    )


def _check_layer(layer: keras.layers.Layer):
  name = f'The batch normalization layer {layer.name!r}'
  if layer.renorm:
    raise ValueError(
        f'{name} has renorm=True, with which FedTAN cannot synchronize it. Use'
        ' keras.layers.BatchNormalization with renorm=False.'
    )
  own = fused_batch_norm.own_method(layer)
  if own:
    raise ValueError(
        f'{name} is a {type(layer).__name__}, which computes in its own way'
        f' ({own}), so FedTAN does not know what to synchronize. Use'
        ' keras.layers.BatchNormalization.'
    )


def _check_container(container: keras.layers.Layer):
  if discovery.is_batch_norm(container):
    return
  inside = [
      layer
      for layer in discovery.batch_norm_layers(container)
      if layer.trainable
  ]
  if not inside:
    return
  if isinstance(container, keras.Model) and not convert.is_functional(
      container
  ):
    raise ValueError(
        f'The model {container.name!r} ({type(container).__name__}), with the'
        f' batch normalization layer {inside[0].name!r}, is a subclass of'
        ' keras.Model with its own `call`, which FedTAN cannot split. Build'
        ' it as a functional model, keras.Model(inputs, outputs), or a'
        ' keras.Sequential.'
    )
  if isinstance(container, _LOOPS):
    raise _inside_of_control_flow(container, inside[0])


def _inside_of_control_flow(
    container: keras.layers.Layer, layer: keras.layers.Layer
) -> ValueError:
  return ValueError(
      f'The batch normalization layer {layer.name!r} is inside of the layer'
      f' {container.name!r} ({type(container).__name__}), which may call it in'
      ' a loop, a condition or a function of its own, where FedTAN cannot stop'
      ' for an exchange. Call the layer in the functional model itself.'
  )


class SynchronizedBatchNorm:
  """Computes batch normalization layers by asking all clients.

  An object is a `tff_bn.keras_model.batch_norm_calls.TrainingCall`.

  Attributes:
    squared_norm: The sum over all calls and channels of the second moments of
      the client's own values, a float32 scalar.
  """

  def __init__(
      self,
      model: keras.Model,
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
      layer: keras.layers.Layer,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
  ) -> tf.Tensor:
    """Computes a layer and updates its running statistics."""
    if tf.compat.v1.get_default_graph() is not self._graph:
      containers = [
          container
          for container in discovery.all_layers(self._model)
          if container is not layer
          and any(x is layer for x in discovery.all_layers(container))
      ]
      raise _inside_of_control_flow(containers[-1], layer)
    kernels = _kernels_for(layer, inputs, mask)
    statistics = self._statistics(kernels)
    _update_moving_statistics(layer, statistics)
    output = self._normalize(
        kernels, statistics, *fused_batch_norm.affine_weights(layer)
    )
    output.set_shape(inputs.shape)
    return tf.cast(output, layer.compute_dtype)

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
      return kernels.as_keras(
          _Statistics(
              pooled['mean'],
              pooled['variance'],
              pooled['count'],
              tf.math.reciprocal_no_nan(pooled['count']),
          )
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
    return kernels.as_keras(
        _Statistics(
            global_mean,
            tf.math.divide_no_nan(sum_of_deviations, total['weight']),
            total['count'],
            tf.math.divide_no_nan(weight, total['weight'] * count),
        )
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
        r = tf.math.rsqrt(statistics.variance + kernels.epsilon)
        if statistics.deficit is not None:
          # The deviations from such a mean don't add up to 0.
          shift_sum -= r * statistics.mean * statistics.deficit * scale_sum
        factor *= -gamma * r
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


def _update_moving_statistics(
    layer: keras.layers.Layer, statistics: _Statistics
) -> None:
  """Updates the moving mean and variance as Keras does, if there are values."""
  for variable, value in (
      (layer.moving_mean, statistics.mean),
      (layer.moving_variance, statistics.variance),
  ):
    old = tf.convert_to_tensor(variable)
    new = old * layer.momentum + tf.cast(value, old.dtype) * (
        1.0 - layer.momentum
    )
    variable.assign(tf.where(statistics.count > 0, new, old))


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

  def as_keras(self, statistics: _Statistics) -> _Statistics:
    """Returns the statistics as Keras computes them of the same values."""

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
    layer: keras.layers.Layer,
    inputs: tf.Tensor,
    mask: Optional[tf.Tensor],
) -> _Kernels:
  if fused_batch_norm.applies(layer, inputs, mask):
    return _FusedKernels(layer, inputs)
  return _PlainKernels(layer, inputs, mask)


class _FusedKernels:
  """TensorFlow's fused operations, for images with the channels last."""

  def __init__(self, layer: keras.layers.Layer, inputs: tf.Tensor):
    self.inputs = inputs
    self.epsilon = layer.epsilon
    self.count = tf.cast(tf.reduce_prod(tf.shape(inputs)[:3]), tf.float32)

  def moments(self):
    return fused_batch_norm.moments(self.inputs)

  def as_keras(self, statistics):
    return statistics

  def normalize(self, gamma, beta, statistics):
    return fused_batch_norm.normalize_by(
        self.inputs,
        gamma,
        beta,
        statistics.mean,
        statistics.variance,
        self.epsilon,
    )

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
      layer: keras.layers.Layer,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
  ):
    self._dtype = tf.as_dtype(layer.variable_dtype)
    self._shape = layer.moving_mean.shape
    # In 16 bits the squares would overflow; Keras computes in float32, too.
    self.inputs = tf.cast(inputs, self._dtype)
    self.epsilon = layer.epsilon
    rank = inputs.shape.rank
    axis = layer.axis % rank
    self._reduced = [i for i in range(rank) if i != axis]
    # The shape in which a value for each channel goes with the input.
    self._broadcast = [1] * rank
    self._broadcast[axis] = inputs.shape[axis]
    size = tf.cast(tf.size(inputs), self._dtype)
    self._mask = None
    if mask is not None:
      self._mask = tf.broadcast_to(
          tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(inputs)
      )
      size = tf.reduce_sum(tf.cast(self._mask, self._dtype))
    self.count = size / self._shape.num_elements()

  def _spread(self, value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(value, self._broadcast)

  def _sum(self, values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.reduce_sum(values, self._reduced), self._shape)

  def _masked(self, values: tf.Tensor) -> tf.Tensor:
    if self._mask is None:
      return values
    return tf.where(self._mask, values, tf.zeros_like(values))

  def moments(self):
    mean = tf.math.divide_no_nan(
        self._sum(self._masked(self.inputs)), self.count
    )
    squares = tf.math.square(self.inputs - self._spread(mean))
    variance = tf.math.divide_no_nan(
        self._sum(self._masked(squares)), self.count
    )
    return self.count, mean, variance

  def as_keras(self, statistics):
    if self._mask is None:
      return statistics
    # So that it never divides by 0, it divides by slightly more.
    divisor = statistics.count + keras.config.epsilon()
    share = statistics.count / divisor
    mean = statistics.mean * share
    difference = tf.math.square(statistics.mean - mean)
    return _Statistics(
        mean,
        (statistics.variance + difference) * share,
        statistics.count,
        statistics.value_weight * share,
        1 - share,
    )

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
