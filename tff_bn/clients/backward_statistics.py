"""Running averages of the means in batch normalization's backward pass.

FBN normalizes by running statistics and so loses both means in the backward
pass of batch normalization. Running averages at the server take their place,
see `tff_bn.algorithms.build_fbn` for the equations.

Batch normalization needs no force that keeps the scale of a layer's inputs, but
here, the running statistics follow with a delay, and the averages take away the
gradient that FBN has in this direction. So the averages of a channel can
restart from 0 after a round in which the statistics did not describe the
values, which then are drawn back to them.

For one machine, Yan et al., Towards Stabilizing Batch Statistics in Backward
Propagation of Batch Normalization, ICLR 2020, and Chiley et al., Online
Normalization for Training Neural Networks, NeurIPS 2019, use such averages.
"""

import collections
from collections.abc import Sequence
import contextlib
import dataclasses
from typing import Any, Optional

import keras
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.common import numerics
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model import shared_weights
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights

_PART = 'backward_sums'


@dataclasses.dataclass(frozen=True)
class BackwardStatistics(drift_correction.DriftCorrection):
  """Corrects the gradients through the layers of batch normalization.

  The server sets G0 ← (1-β) G0 + β Σ w_i dζ_i, with the clients' weights w_i,
  and G1 in the same way. If a client makes several steps, dζ_i and dγ_i are
  means over its steps, weighted by their numbers of values, as if each step had
  been made by another client.

  Attributes:
    layers: The layers.
    kind: `'mean'` uses G0 only, `'running'` uses G0 and G1.
    sends: Whether clients send dζ_i and dγ_i. Otherwise the server computes
      them from the update of the model, which must then be the gradient times
      the learning rate.
    restart: See `backward_restart` of `build_fbn`.
  """

  layers: Sequence[keras.layers.BatchNormalization]
  kind: str
  sends: bool
  restart: Optional[float] = None

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> 'BoundBackwardStatistics':
    """See the base class."""
    del client_optimizer
    return BoundBackwardStatistics(model, weights, self)


def is_in_update(
    model: BatchNormModel, layers: Sequence[keras.layers.BatchNormalization]
) -> bool:
  """Whether the changes of γ and ζ of all layers are the gradients dγ and dζ.

  Layers may lack γ or ζ, or have constraints, and γ or ζ may be frozen.
  """
  unconstrained = {
      id(variable)
      for position, variable in enumerate(model.keras_model.trainable_weights)
      if position not in model.constraints.positions
  }
  return all(
      id(variable) in unconstrained
      for layer in layers
      for variable in (layer.gamma, layer.beta)
  )


class BoundBackwardStatistics(drift_correction.BoundCorrection):
  """The averages of a model's layers."""

  def __init__(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      settings: BackwardStatistics,
  ):
    self._weights = weights
    self._layers = settings.layers
    self._sends = settings.sends
    self._restart = settings.restart
    self._num_averages = 1 if settings.kind == 'mean' else 2
    self._numbers = {id(layer): i for i, layer in enumerate(self._layers)}
    if not self._sends:
      position_of = {id(v): i for i, v in enumerate(model.keras_model.weights)}
      # The positions of the gradients in the trainable part of an update.
      place = {p: i for i, p in enumerate(weights.trainable)}
      self._places = [
          [
              place[position_of[id(v)]]
              for v in (layer.beta, layer.gamma)[: self._num_averages]
          ]
          for layer in self._layers
      ]
    self._averages = self._variables_for_each_layer()
    self.variables = [v for layer in self._averages for v in layer]
    if self._sends:
      self._sums = self._variables_for_each_layer()
      self._totals = [
          tf.Variable(tf.zeros([], layer.moving_mean.dtype), trainable=False)
          for layer in self._layers
      ]
      self.collecting = [
          *self._totals,
          *(v for layer in self._sums for v in layer),
      ]
      self.variables += self.collecting
    # The number of values of each call of a layer in the step that is traced.
    self._counts: list[list[tf.Tensor]] = []

  def _variables_for_each_layer(self) -> list[list[tf.Variable]]:
    return [
        [
            tf.Variable(
                tf.zeros(layer.moving_mean.shape, layer.moving_mean.dtype),
                trainable=False,
            )
            for _ in range(self._num_averages)
        ]
        for layer in self._layers
    ]

  def _num_values(self, number: int) -> tf.Tensor:
    """Returns the number of values of a layer in the step that is traced.

    A layer that is called several times shares its averages between the calls.
    """
    dtype = self._averages[number][0].dtype
    return tf.cast(tf.add_n(self._counts[number]), dtype)

  @contextlib.contextmanager
  def watching(self):
    """Counts the values of each layer in a step."""
    self._counts = [[] for _ in self._layers]
    yield

  def correct_gradient(
      self,
      layer: keras.layers.BatchNormalization,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
      count: tf.Tensor,
  ) -> tf.Tensor:
    """See `tff_bn.clients.moments_collector.CorrectGradient`."""
    number = self._numbers[id(layer)]
    averages = self._averages[number]
    self._counts[number].append(count)

    @tf.custom_gradient
    def corrected(values):
      def gradient(upstream):
        num_values = self._num_values(number)
        gamma, _ = fused_batch_norm.affine_weights(layer)
        variance = tf.convert_to_tensor(layer.moving_variance)
        inverse = tf.math.rsqrt(variance + layer.epsilon)
        scale = tf.math.divide_no_nan(gamma * inverse, num_values)
        offset = _channels(layer, values, scale * averages[0])
        if len(averages) > 1:
          offset += _normalized(layer, values) * _channels(
              layer, values, scale * averages[1]
          )
        offset = tf.broadcast_to(offset, tf.shape(values))
        if mask is not None:
          included = tf.expand_dims(tf.cast(mask, tf.bool), -1)
          offset = tf.where(included, offset, tf.zeros_like(offset))
        return upstream - tf.cast(offset, upstream.dtype)

      return tf.identity(values), gradient

    return corrected(inputs)

  def collect(
      self,
      layer: keras.layers.BatchNormalization,
      inputs: tf.Tensor,
      outputs: tf.Tensor,
  ) -> tf.Tensor:
    """Returns a layer's output, whose gradient is collected to be sent."""
    if not self._sends:
      return outputs
    number = self._numbers[id(layer)]
    sums = self._sums[number]
    rank = outputs.shape.rank
    axes = [axis for axis in range(rank) if axis != layer.axis % rank]
    values = tf.stop_gradient(inputs)

    @tf.custom_gradient
    def collected(y):
      def gradient(upstream):
        terms = self._num_values(number) * tf.cast(upstream, sums[0].dtype)
        sums[0].assign_add(tf.reduce_sum(terms, axes))
        if len(sums) > 1:
          sums[1].assign_add(
              tf.reduce_sum(terms * _normalized(layer, values), axes)
          )
        return upstream

      return tf.identity(y), gradient

    return collected(outputs)

  def correct(
      self, gradients: tuple[tf.Tensor, ...], learning_rate: Optional[Any]
  ) -> tuple[tf.Tensor, ...]:
    """Counts the values of a step; the gradients are corrected already."""
    del learning_rate
    if self._sends:
      for number, total in enumerate(self._totals):
        total.assign_add(self._num_values(number))
    return gradients

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns the averages, and zeros for the collected sums."""
    del before, client_state
    averages = [v for layer in server_state['averages'] for v in layer]
    return averages + [tf.zeros(v.shape, v.dtype) for v in self.collecting]

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns dζ_i and dγ_i, if they are sent."""
    del started, before, after, client_state
    sent: collections.OrderedDict[str, Any] = collections.OrderedDict()
    if self._sends:
      sums = iter(collected[len(self._totals) :])
      sent[_PART] = [
          tf.math.divide_no_nan(next(sums), total)
          for total in collected[: len(self._totals)]
          for _ in range(self._num_averages)
      ]
    return collections.OrderedDict(), sent

  def initial_server_state(self) -> State:
    """Returns the averages 0."""
    return collections.OrderedDict(
        averages=[
            [tf.zeros(v.shape, v.dtype) for v in layer]
            for layer in self._averages
        ]
    )

  def next_server_state(
      self,
      server_state: State,
      total: State,
      aggregated: State,
      learning_rate: Optional[tf.Tensor],
  ) -> State:
    """Returns the averages, moved by the rate β of each layer."""
    # Without participants, there are no gradients.
    is_known = total['num_participants'] > 0
    if self._sends:
      sums = iter(aggregated[_PART])
      new = [[next(sums) for _ in layer] for layer in self._averages]
    else:
      rate: Any = learning_rate  # Plain SGD has one.
      is_known = tf.logical_and(is_known, rate > 0)
      changes = shared_weights.part_values(aggregated['trainable'])
      new = [
          [
              tf.math.divide_no_nan(
                  changes[place], tf.cast(rate, changes[place].dtype)
              )
              for place in places
          ]
          for places in self._places
      ]
    averages = [
        [
            old + (1 - layer.momentum) * (now - old)
            for old, now in zip(olds, nows)
        ]
        for layer, olds, nows in zip(
            self._layers, server_state['averages'], new, strict=True
        )
    ]
    if self._restart is not None:
      described = self._described(aggregated, self._restart)
      averages = [
          [tf.where(channels, value, tf.zeros_like(value)) for value in values]
          for channels, values in zip(described, averages, strict=True)
      ]
    return collections.OrderedDict(
        averages=numerics.where(is_known, averages, server_state['averages'])
    )

  def _described(self, aggregated: State, restart: float) -> list[tf.Tensor]:
    """Returns for each layer which channels the new statistics describe."""
    described = []
    for layer, (mean, variance), (new_mean, new_variance) in zip(
        self._layers,
        self._weights.running_statistics(aggregated['weights_before']),
        self._weights.running_statistics(aggregated['weights_after']),
        strict=True,
    ):
      # The mean and the unbiased variance of the round's values, from the step
      # of the statistics.
      rate = tf.constant(1 - layer.momentum, mean.dtype)
      round_mean = mean + tf.math.divide_no_nan(new_mean - mean, rate)
      round_variance = variance + tf.math.divide_no_nan(
          new_variance - variance, rate
      )
      mean_square = (round_variance + tf.square(round_mean - new_mean)) / (
          new_variance + layer.epsilon
      )
      described.append(
          tf.logical_and(mean_square < restart, mean_square > 1 / restart)
      )
    return described


def _channels(
    layer: keras.layers.BatchNormalization, values: tf.Tensor, vector: Any
) -> tf.Tensor:
  """Reshapes a vector of channels so that it broadcasts to a layer's values."""
  shape = [1] * values.shape.rank
  shape[layer.axis] = -1
  return tf.reshape(vector, shape)


def _normalized(
    layer: keras.layers.BatchNormalization, values: tf.Tensor
) -> tf.Tensor:
  """Computes x̂ by the running statistics, in their dtype."""
  mean = tf.convert_to_tensor(layer.moving_mean)
  variance = tf.convert_to_tensor(layer.moving_variance)
  inverse = tf.math.rsqrt(variance + layer.epsilon)
  return (tf.cast(values, mean.dtype) - _channels(layer, values, mean)) * (
      _channels(layer, values, inverse)
  )
