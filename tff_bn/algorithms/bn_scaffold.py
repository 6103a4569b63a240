"""BN-SCAFFOLD: SCAFFOLD with control variates for the batch statistics.

Quintana, Vancamberg, Jugnon, Mougeot, Desolneux, BN-SCAFFOLD: Controlling the
Drift of Batch Normalization Statistics in Federated Learning, arXiv:2410.03281.
"""

import collections
import dataclasses
from typing import Optional

import keras
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.algorithms import scaffold
from tff_bn.catalog import algorithms
from tff_bn.clients import drift_correction
from tff_bn.clients import moments_collector
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.clients.local_training import LocalTrainingWork
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.layers import batch_moments
from tff_bn.layers.batch_moments import Moments
from tff_bn.processes import averaging
from tff_bn.processes import requirements
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_bn_scaffold']

_NAME = 'BN-SCAFFOLD'
_PART = 'batch_statistics'


def build_bn_scaffold(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    num_clients: Optional[int] = None,
    variate_deviation: str = 'pooled',
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds BN-SCAFFOLD: control variates for gradients and batch statistics.

  Gradients are corrected as in SCAFFOLD, see `tff_bn.algorithms.Scaffold`. In
  training, each layer of batch normalization uses the mean and the deviation

      S̃ = S_i(batch) - s_i + s

  in place of those of the batch, S_i(batch), of which the deviation is
  √(variance + ε). s_i describes all values of the layer in the client's last
  round, and s those of all clients that took part so far. Gradients flow
  through S_i(batch). The deviation is at least √ε. A client that takes part for
  the first time normalizes with S_i(batch). The running statistics, for
  evaluation, follow S̃.

  As for gradients, the server gets the changes s_i' - s_i, so a round has the
  exchange of SCAFFOLD and two more vectors for each layer. All clients have
  the same weight in s, if `client_weighting` is `'uniform'`.

  With `variate_deviation='mean'`, s has the means of the clients' means and of
  their deviations, as in the paper's equation. With `'pooled'`, its deviation
  is that of all clients' values, by the law of total variance. It is larger if
  the clients' means differ, as they do if their labels differ.

  Of the paper, only the abstract and this equation were available, so details
  can differ: when s_i is computed, and what a new client does.

  Args:
    model: The model, with batch normalization.
    client_optimizer: The optimizer of local training, SGD without momentum.
    num_clients: N, the number of all clients, see `tff_bn.algorithms.Scaffold`.
    variate_deviation: `'pooled'` or `'mean'`, see above.
    **options: See `tff_bn.algorithms.Options`. Unlike in other builders,
      `client_weighting` is `'uniform'` by default. `drift_correction` must not
      be given.

  Returns:
    A process whose client state holds the client's control variates.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, the client
      optimizer is not plain SGD, or the model has no trainable batch
      normalization layer, one with `renorm=True`, or one of a class with its
      own computation.
  """
  requirements.check_replaceable(
      _NAME,
      model,
      requirements.trained_batch_norm_layers(_NAME, model),
      'it corrects the statistics of the batch',
  )
  algorithms.VARIATE_DEVIATION.check(variate_deviation)
  options.setdefault('client_weighting', 'uniform')
  return averaging.build_corrected(
      averaging.build_shared,
      model,
      client_optimizer,
      _BnScaffold(num_clients, variate_deviation == 'pooled'),
      build_work=_BnScaffoldWork,
      **options,
  )


@dataclasses.dataclass(frozen=True)
class _BnScaffold(scaffold.Scaffold):
  """Corrects gradients and batch statistics, see `build_bn_scaffold`.

  Attributes:
    is_pooled: Whether the deviation in s is that of all clients' values.
  """

  is_pooled: bool = True

  def round_variants(self) -> Optional[drift_correction.RoundVariants]:
    """Returns none: the statistics are sent in every round."""
    return None

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> 'BoundBnScaffold':
    """See the base class."""
    scaffold.check_optimizer(_NAME, client_optimizer)
    return BoundBnScaffold(model, weights, self.num_clients, self.is_pooled)


class BoundBnScaffold(scaffold.ControlVariates):
  """The control variates of a model.

  The state of clients and server has two vectors for each layer: the mean, and
  the deviation or, if it is pooled, the mean square. They are in float64,
  because the pooled variance is a difference of them.
  """

  algorithm = _NAME

  def __init__(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      num_clients: Optional[int],
      is_pooled: bool,
  ):
    super().__init__(model, weights, num_clients)
    self._layers = requirements.trained_batch_norm_layers(_NAME, model)
    self._is_pooled = is_pooled
    self._numbers = {id(layer): i for i, layer in enumerate(self._layers)}
    self._state_names = [
        (f'batch_mean_{i}', f'batch_spread_{i}')
        for i in range(len(self._layers))
    ]
    # s - s_i.
    self._offsets = [self._vectors(layer) for layer in self._layers]
    self._collector = moments_collector.MomentsCollector(
        [layer.moving_mean for layer in self._layers]
    )
    self.variables = [
        *self.variables,
        *(v for pair in self._offsets for v in pair),
        *self._collector.variables,
    ]
    self.collecting = [*self.collecting, *self._collector.variables]

  def _dtype(self, layer: keras.layers.BatchNormalization) -> tf.DType:
    return tf.as_dtype(layer.moving_mean.dtype)

  def _vectors(
      self, layer: keras.layers.BatchNormalization
  ) -> list[tf.Variable]:
    return [
        tf.Variable(
            tf.zeros(layer.moving_mean.shape, self._dtype(layer)),
            trainable=False,
        )
        for _ in range(2)
    ]

  def normalize(
      self,
      layer: keras.layers.BatchNormalization,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
  ) -> tf.Tensor:
    """Computes a layer in training; a `batch_norm_calls.TrainingCall`."""
    number = self._numbers[id(layer)]
    seen = batch_moments.batch_moments(
        inputs, layer.axis, mask, differentiable=True
    )
    seen = Moments(*(tf.cast(part, self._dtype(layer)) for part in seen))
    self._collector.add(layer, seen)
    mean_offset, deviation_offset = self._offsets[number]
    mean = seen.mean + mean_offset
    deviation = tf.maximum(
        tf.sqrt(seen.variance + layer.epsilon) + deviation_offset,
        tf.sqrt(tf.constant(layer.epsilon, seen.mean.dtype)),
    )
    fused_batch_norm.move_statistics(
        layer, Moments(seen.count, mean, tf.square(deviation) - layer.epsilon)
    )
    gamma, beta = fused_batch_norm.affine_weights(layer)
    shape = [1] * inputs.shape.rank
    shape[layer.axis] = -1
    centered = tf.cast(inputs, mean.dtype) - tf.reshape(mean, shape)
    outputs = centered * tf.reshape(gamma / deviation, shape)
    return tf.cast(outputs + tf.reshape(beta, shape), layer.compute_dtype)

  def _described(
      self, layer: keras.layers.BatchNormalization, moments: Moments
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the two vectors of the state for the values of a layer."""
    mean = tf.cast(moments.mean, tf.float64)
    square = tf.cast(moments.variance, tf.float64) + layer.epsilon
    if self._is_pooled:
      return mean, square + tf.square(mean)
    return mean, tf.sqrt(square)

  def _deviation(
      self,
      layer: keras.layers.BatchNormalization,
      mean: tf.Tensor,
      spread: tf.Tensor,
  ) -> tf.Tensor:
    """Returns the deviation from the two vectors of the state."""
    if not self._is_pooled:
      return spread
    return tf.sqrt(tf.maximum(spread - tf.square(mean), layer.epsilon))

  def _no_statistics(self) -> State:
    """Returns zeros for the two vectors of each layer, by name."""
    return collections.OrderedDict(
        (name, tf.zeros(layer.moving_mean.shape, tf.float64))
        for layer, names in zip(self._layers, self._state_names, strict=True)
        for name in names
    )

  def initial_client_state(self, values: Tensors) -> State:
    """Returns control variates that are 0 or unknown."""
    return collections.OrderedDict(
        super().initial_client_state(values),
        **self._no_statistics(),
        has_statistics=tf.constant(False),
    )

  def initial_server_state(self) -> State:
    """Returns control variates that are 0 or unknown."""
    return collections.OrderedDict(
        super().initial_server_state(),
        **self._no_statistics(),
        # It is a sum of means over the clients.
        num_known=tf.zeros([], tf.float64),
    )

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """See the base class; then s - s_i, and zeros for what is collected."""
    is_known = tf.logical_and(
        client_state['has_statistics'], server_state['num_known'] > 0
    )
    offsets: list[tf.Tensor] = []
    for layer, names in zip(self._layers, self._state_names, strict=True):
      (mean, spread), (own_mean, own_spread) = (
          [state[name] for name in names]
          for state in (server_state, client_state)
      )
      for offset in (
          mean - own_mean,
          self._deviation(layer, mean, spread)
          - self._deviation(layer, own_mean, own_spread),
      ):
        offset = tf.where(is_known, offset, tf.zeros_like(offset))
        offsets.append(tf.cast(offset, self._dtype(layer)))
    return [
        *super().start(before, server_state, client_state),
        *offsets,
        *(tf.zeros(v.shape, v.dtype) for v in self._collector.variables),
    ]

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns the new control variates, and their changes, which are sent."""
    kept, sent = super().finish(
        started[: 1 + len(self.names)],
        before,
        after,
        collected[:1],
        client_state,
    )
    kept, sent = collections.OrderedDict(kept), collections.OrderedDict(sent)
    changes = []
    for number, (layer, names) in enumerate(
        zip(self._layers, self._state_names, strict=True)
    ):
      moments = self._collector.moments(number, collected[1:])
      for name, new in zip(names, self._described(layer, moments), strict=True):
        # Without values, as under a mask, nothing new is known.
        kept[name] = tf.where(moments.count > 0, new, client_state[name])
        changes.append(kept[name] - client_state[name])
    is_new = tf.logical_not(client_state['has_statistics'])
    kept['has_statistics'] = tf.constant(True)
    sent[_PART] = [tf.cast(is_new, tf.float64), *changes]
    return kept, sent

  def next_server_state(
      self,
      server_state: State,
      total: State,
      aggregated: State,
      learning_rate: Optional[tf.Tensor],
  ) -> State:
    """Returns c of SCAFFOLD, and the mean of s_i over the known clients."""
    state = collections.OrderedDict(
        super().next_server_state(
            server_state, total, aggregated, learning_rate
        )
    )
    number = tf.cast(total['num_participants'], tf.float64)
    new, *changes = aggregated[_PART]
    known = server_state['num_known']
    state_names = [name for names in self._state_names for name in names]
    state['num_known'] = known + number * new
    for name, change in zip(state_names, changes, strict=True):
      state[name] = tf.math.divide_no_nan(
          known * server_state[name] + number * change, state['num_known']
      )
    return collections.OrderedDict((name, state[name]) for name in server_state)


class _BnScaffoldWork(LocalTrainingWork):
  """Local training with corrected batch statistics."""

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: Optional[BoundCorrection],
  ):
    """See the base class."""
    assert isinstance(correction, BoundBnScaffold)
    super().__init__(
        model,
        config,
        weights,
        correction,
        batch_norm_call=correction.normalize,
    )
