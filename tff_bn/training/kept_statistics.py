"""Finds runs that leave the running statistics near their initial values.

A move of running statistics with the momentum m keeps the share m of their old
values, so m^k of the initial values is left after k moves. Training does not
show it, because clients normalize with the statistics of their batches. But
predictions use the running statistics.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Optional
import warnings

import keras
import numpy as np
import tensorflow as tf

from tff_bn.catalog import local_training
from tff_bn.clients.client_work import Moves
from tff_bn.clients.client_work import MovingStatistics
from tff_bn.data import federated
from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.layers import discovery
from tff_bn.layers.hybrid_batch_normalization import HybridBatchNormalization
from tff_bn.processes import phased_process
from tff_bn.processes.short_rounds import ShortRounds
from tff_bn.processes.stateful_process import Process
from tff_bn.training.training_config import TrainingConfig

# A larger share of the initial values is worth a warning.
_LIMIT = 0.5


class KeptStatisticsWarning(UserWarning):
  """The running statistics stay near their initial values."""


@dataclasses.dataclass(frozen=True)
class KeptStatistics:
  """The initial running statistics that are left at the end of a run.

  Attributes:
    share: The share of the initial values in the final ones, in the layer that
      keeps the largest one. If clients have their own statistics, it is the
      expected mean over the clients that took part.
    momentum: The momentum of this layer.
    num_rounds: The number of rounds that move the statistics.
  """

  share: float
  momentum: float
  num_rounds: int

  @property
  def is_much(self) -> bool:
    """Whether more than half is left."""
    return self.share > _LIMIT

  def describe(self, momentum_name: str, remedy: str) -> str:
    """Returns one sentence on the problem, and one on the remedies.

    Args:
      momentum_name: What the user calls the momentum.
      remedy: How the user computes the statistics again.
    """
    return (
        f'{momentum_name}={self.momentum:g} leaves {100 * self.share:.0f} % of'
        ' the initial moving mean and variance of batch normalization after'
        f' {self.num_rounds} round{"s" if self.num_rounds > 1 else ""}, so the'
        ' model can predict much worse than in training. Use a smaller'
        f' {momentum_name} or more rounds, or compute the statistics again:'
        f' {remedy}.'
    )


def find(
    process: Process,
    model: BatchNormModel,
    data: federated.FederatedData,
    config: TrainingConfig,
    *,
    train_on_union: bool = False,
) -> Optional[KeptStatistics]:
  """Computes how much is left of the initial running statistics.

  The initial values are those of `model`. Rounds that fail are not known before
  the training. See `train` for the arguments.

  Returns:
    What is left in the layer that keeps the largest share. `None` if no
    momentum moves statistics of trainable layers, or if it is unknown how they
    are moved, as with the processes of other packages.
  """
  layers = [
      layer
      for layer in discovery.batch_norm_layers(model.keras_model)
      if layer.trainable and not isinstance(layer, HybridBatchNormalization)
  ]
  phases = _moving_phases(process, config.rounds)
  rounds = _Rounds.of(data, config, train_on_union)
  if not layers or not phases or rounds is None:
    return None

  def largest(
      num_calls: Mapping[keras.layers.Layer, int],
  ) -> Optional[KeptStatistics]:
    found = [
        KeptStatistics(
            rounds.share(phases, layer.momentum, num_calls[layer]),
            layer.momentum,
            sum(num_rounds for _, num_rounds in phases),
        )
        for layer in layers
        if num_calls[layer]
    ]
    return max(found, key=lambda kept: kept.share, default=None)

  found = largest(dict.fromkeys(layers, 1))
  # Counting calls takes time, and more of them leave less.
  if found is not None and found.is_much:
    found = largest(_num_calls(model))
  return found


@dataclasses.dataclass(frozen=True)
class _Rounds:
  """The clients in the rounds of a run.

  Attributes:
    num_batches: The number of batches of each client, or of all clients if they
      have the same number.
    num_examples: The number of examples of the same clients.
    sampled: The share of the clients that are sampled for a round.
  """

  num_batches: np.ndarray
  num_examples: np.ndarray
  sampled: float

  @classmethod
  def of(
      cls,
      data: federated.FederatedData,
      config: TrainingConfig,
      train_on_union: bool,
  ) -> 'Optional[_Rounds]':
    """Returns the clients of a run; `None` if their batches are unknown."""
    sampled = 1.0
    if config.clients_per_round is not None and not train_on_union:
      sampled = config.clients_per_round / len(data.client_ids)
    if config.local_steps is not None:
      return cls(np.array([config.local_steps]), np.ones(1), sampled)
    if not isinstance(data, federated.FederatedData):
      return None  # Data of the same form.
    num_examples = np.array(list(map(len, data.train_indices.values())))
    batch_size = config.batch_size
    if train_on_union:
      num_clients = config.clients_per_round or len(num_examples)
      num_examples = num_clients * np.mean(num_examples, keepdims=True)
      batch_size = config.union_batch_size(num_clients)
    num_batches = np.ceil(num_examples / batch_size)
    return cls(config.local_epochs * num_batches, num_examples, sampled)

  def share(
      self,
      phases: Sequence[tuple[MovingStatistics, int]],
      momentum: float,
      num_calls: int,
  ) -> float:
    """Returns the share of a layer's initial statistics that is left.

    `phases` says how the rounds move them, and how many rounds do. The layer is
    called `num_calls` times in a step.
    """
    # An entry for each client, or one for all of them.
    kept, never_sampled = np.ones(1), 1.0
    for statistics, num_rounds in phases:
      in_round = momentum ** statistics.num_moves(self.num_batches, num_calls)
      if statistics.are_local:
        in_round = 1 - self.sampled + self.sampled * in_round
        never_sampled *= (1 - self.sampled) ** num_rounds
      else:
        is_weighted = (
            statistics.config.client_weighting != local_training.UNIFORM
        )
        in_round = np.average(
            in_round, weights=self.num_examples if is_weighted else None
        )
        never_sampled = 0.0
      kept = kept * in_round**num_rounds
    return float(np.mean((kept - never_sampled) / (1 - never_sampled)))


def _num_calls(model: BatchNormModel) -> collections.Counter:
  """Counts the calls that move a layer's statistics in a step.

  A model can call layers several times, or in inference mode.
  """
  calls: collections.Counter = collections.Counter()

  def count(
      layer: keras.layers.Layer, inputs: tf.Tensor, mask: Optional[tf.Tensor]
  ) -> tf.Tensor:
    calls[layer] += 1
    return fused_batch_norm.inference(layer, inputs, mask)

  @tf.function(autograph=False)
  def forward(x: Any) -> None:
    calls.clear()  # TensorFlow may trace the function twice.
    model.keras_model(x, training=True)

  with batch_norm_calls.replaced(model.keras_model, count):
    forward.get_concrete_function(model.input_spec[0])
  return calls


def _moving_phases(
    process: Process, num_rounds: int
) -> list[tuple[MovingStatistics, int]]:
  """Returns how phases move the statistics, and the numbers of their rounds.

  Phases that do not move them are left out; all phases, if one is unknown.
  """
  phased = phased_process.phases_of(process)
  found = []
  for phase, length in zip(
      phased.phases, phased.rounds_of_phases(num_rounds), strict=True
  ):
    computation: Any = phase.computation
    if isinstance(computation, ShortRounds):
      computation = computation.full
    statistics = getattr(computation, 'statistics', None)
    if statistics is None:
      return []
    if length and statistics.moves is not Moves.NEVER:
      found.append((statistics, length))
  return found


def warn(kept: Optional[KeptStatistics]) -> None:
  """Warns if much is left of the initial statistics."""
  if kept is not None and kept.is_much:
    warnings.warn(
        kept.describe(
            'momentum', 'tff_bn.evaluation.reestimate_batch_norm_statistics'
        ),
        KeptStatisticsWarning,
        stacklevel=3,
    )
