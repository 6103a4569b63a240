"""Batch normalization with the statistics of all clients' batches.

The layer-wise exchanges of FedTAN: Wang, Shi, Chang, Why Batch Normalization
Damage Federated Learning on Non-IID Data?, arXiv:2301.02982, section 5 and
algorithms 2 and 3.

Let x be a layer's input, m and v the mean and variance over all clients,
r = 1/√(v + ε), x̂ = (x − m)·r, γ the scale, ζ the shift, and dy the cotangent
of the output. The gradients with respect to the statistics have closed forms:

  ∂F/∂m = −γ·r·dζ  and  ∂F/∂v = −γ·r²·dγ/2,  with dζ = Σ dy and dγ = Σ dy·x̂.

So the clients send dζ and dγ, the gradients of the layer's own variables, and
TensorFlow's fused operations make the only passes over the data. With the sums
Dζ and Dγ over all clients, the cotangent of the input is

  dx = γ·r·(dy − q·(Dζ + x̂·Dγ)),

where q is the weight of one value in the statistics, divided by the client's
weight in the loss.
"""

import collections
import enum
from typing import Optional

import keras
import tensorflow as tf

from tff_bn.aggregators.relative_statistics import RelativeStatistics
from tff_bn.aggregators.summed_update import RoundSums
from tff_bn.common import numerics
from tff_bn.fedtan import model_checks
from tff_bn.fedtan import staged_function
from tff_bn.fedtan.batch_norm_kernels import Kernels
from tff_bn.fedtan.batch_norm_kernels import Statistics
from tff_bn.keras_model import fused_batch_norm
from tff_bn.layers import discovery
from tff_bn.layers.batch_moments import Moments

# A client is left out if the sum over this many clients with its values would
# overflow, because the answer would be useless for all others.
_MOST_CLIENTS = 2.0**10


class Answer(enum.Enum):
  """The kinds of questions: how the server combines the clients' values."""

  SUM = 'the sum over all clients'
  MEAN = 'a mean over all clients that gives them the same weight'
  POOLED_MOMENTS = 'the moments of all clients together'


class SynchronizedBatchNorm:
  """Computes batch normalization layers with the statistics of all clients.

  An object is a `tff_bn.keras_model.batch_norm_calls.TrainingCall`.

  Attributes:
    squared_norm: The sum of the second moments of the client's own values over
      all calls and channels, a float32 scalar.
  """

  def __init__(
      self,
      model: keras.Model,
      ask: staged_function.Ask,
      client_weight: tf.Tensor,
      *,
      fused_moments: bool,
      synchronize_backward: bool,
      sums: Optional[RoundSums] = None,
      equal_weights: bool = False,
  ):
    """Initializes the calls.

    Args:
      model: The model, for error messages.
      ask: Asks a question whose kind is an `Answer`. It must replace the values
        of a client by zeros if the client has no data, or from its first
        unsound question on.
      client_weight: The client's weight in the loss, a float scalar.
      fused_moments: If true, one exchange combines means and variances,
        weighted by the numbers of values. If false, a first exchange averages
        the means, and a second one the variances about this average, both
        weighted by `client_weight`.
      synchronize_backward: If true, the gradients with respect to the
        statistics are sums over all clients. If false, each client uses its
        own.
      sums: If given, all questions are `Answer.SUM`, and statistics are sent
        relative to the layer's running ones, see
        `tff_bn.aggregators.relative_statistics`. With a fixed number of
        clients, neither weights nor counts are sent, and `client_weight` must
        be 1 or 0.
      equal_weights: If true, the answers give all clients the same weight, as
        robust rules do: the answer to `Answer.POOLED_MOMENTS` does, and
        gradients are averaged by `Answer.MEAN` instead of summed. It needs
        `fused_moments`.
    """
    self.squared_norm = tf.zeros([], tf.float32)
    self._model = model
    self._graph = tf.compat.v1.get_default_graph()
    self._ask = ask
    self._client_weight = client_weight
    self._fused_moments = fused_moments
    self._synchronize_backward = synchronize_backward
    self._round_sums = sums
    self._equal_weights = equal_weights

  def __call__(
      self,
      layer: keras.layers.BatchNormalization,
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
      raise model_checks.inside_of_control_flow(containers[-1], layer)
    kernels = Kernels(layer, inputs, mask)
    statistics = self._statistics(kernels, layer)
    fused_batch_norm.move_statistics(
        layer,
        Moments(statistics.count, statistics.mean, statistics.variance),
    )
    output = self._normalize(
        kernels, statistics, *fused_batch_norm.affine_weights(layer)
    )
    output.set_shape(inputs.shape)
    return tf.cast(output, layer.compute_dtype)

  def _statistics(
      self, kernels: Kernels, layer: keras.layers.BatchNormalization
  ) -> Statistics:
    """Exchanges the statistics of all clients, as the paper's algorithm 2."""
    seen = kernels.moments()
    count, mean, variance = seen
    weight = tf.cast(self._client_weight, mean.dtype)
    second_moment = variance + tf.math.square(mean)
    self.squared_norm += tf.cast(tf.reduce_sum(second_moment), tf.float32)
    sound = _can_be_summed(tf.maximum(weight, count) * second_moment)
    if self._round_sums is not None:
      return kernels.as_keras(
          self._from_sums(self._round_sums, seen, weight, sound, layer)
      )
    if self._fused_moments:
      pooled = self._ask(Answer.POOLED_MOMENTS, seen, sound)
      return kernels.as_keras(
          Statistics(
              pooled.mean,
              pooled.variance,
              pooled.count,
              # With equal weights, times the number of clients, by which the
              # answer to `Answer.MEAN` is smaller than a sum.
              tf.math.reciprocal_no_nan(
                  count if self._equal_weights else pooled.count
              ),
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
        Statistics(
            global_mean,
            tf.math.divide_no_nan(sum_of_deviations, total['weight']),
            total['count'],
            tf.math.divide_no_nan(weight, total['weight'] * count),
        )
    )

  def _from_sums(
      self,
      sums: RoundSums,
      seen: Moments,
      weight: tf.Tensor,
      sound: tf.Tensor,
      layer: keras.layers.BatchNormalization,
  ) -> Statistics:
    """Exchanges the statistics as sums of relative ones."""
    count, mean, variance = seen
    relative = RelativeStatistics(
        *(
            tf.cast(variable, mean.dtype)
            for variable in (layer.moving_mean, layer.moving_variance)
        )
    )
    if self._fused_moments and sums.num_clients is None:
      weight = count
    own_mean = relative.of_mean(mean)
    sent = collections.OrderedDict(mean=weight * own_mean)
    weight_name = 'count' if self._fused_moments else 'weight'
    if sums.num_clients is None:
      sent[weight_name] = weight
    if self._fused_moments:
      sent['variance'] = weight * relative.of_variance(variance)
      sent['square'] = weight * tf.math.square(own_mean)
    answer = self._ask(Answer.SUM, sent, sound)
    total = (
        tf.constant(sums.num_clients, mean.dtype)
        if sums.num_clients is not None
        else tf.maximum(answer[weight_name], 0)
    )
    relative_mean = tf.math.divide_no_nan(answer['mean'], total)
    global_mean = relative.to_mean(relative_mean)
    if self._fused_moments:
      global_variance = relative.to_variance(
          tf.math.divide_no_nan(answer['variance'], total)
      ) + relative.spread(
          relative_mean, tf.math.divide_no_nan(answer['square'], total)
      )
    else:
      deviation = weight * relative.of_variance(
          variance + tf.math.square(mean - global_mean)
      )
      global_variance = relative.to_variance(
          tf.math.divide_no_nan(
              self._ask(Answer.SUM, deviation, _can_be_summed(deviation)), total
          )
      )
    return Statistics(
        global_mean,
        # Rounding can make it negative, too.
        tf.maximum(
            relative.at_least(global_variance, sums.smallest_variance), 0
        ),
        total,
        tf.math.divide_no_nan(weight, total * count),
    )

  def _normalize(
      self,
      kernels: Kernels,
      statistics: Statistics,
      gamma: tf.Tensor,
      beta: tf.Tensor,
  ) -> tf.Tensor:
    """Normalizes with the gradient of the paper's algorithm 3."""

    @tf.custom_gradient
    def normalize(inputs, gamma, beta):
      del inputs  # An argument only to get a gradient.

      def gradient(cotangent):
        direct, scale_gradient, shift_gradient = kernels.gradients(
            cotangent, gamma, statistics
        )
        scale_sum, shift_sum, factor = self._sums(
            kernels, scale_gradient, shift_gradient, statistics
        )
        r = tf.math.rsqrt(statistics.variance + kernels.epsilon)
        if statistics.deficit is not None:
          # The deviations from this mean don't add up to 0.
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
      kernels: Kernels,
      scale_gradient: tf.Tensor,
      shift_gradient: tf.Tensor,
      statistics: Statistics,
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns Dγ, Dζ and q."""
    if not self._synchronize_backward:
      # The gradient as if the statistics were those of the client's batch.
      return (
          scale_gradient,
          shift_gradient,
          tf.math.reciprocal_no_nan(kernels.count),
      )
    weight = tf.cast(self._client_weight, shift_gradient.dtype)
    kind = Answer.SUM
    if self._equal_weights:
      weight, kind = tf.ones_like(weight), Answer.MEAN
    sent = collections.OrderedDict(
        scale=weight * scale_gradient, shift=weight * shift_gradient
    )
    sums = self._ask(kind, sent, _can_be_summed(*sent.values()))
    return (
        sums['scale'],
        sums['shift'],
        tf.math.divide_no_nan(statistics.value_weight, weight),
    )


def _can_be_summed(*values: tf.Tensor) -> tf.Tensor:
  """Whether values are finite and small enough to be summed over clients."""
  return numerics.all_finite([value * _MOST_CLIENTS for value in values])
