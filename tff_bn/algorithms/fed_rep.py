"""FedRep: the head and the representation are trained in turn.

Collins, Hassani, Mokhtari, Shakkottai, Exploiting Shared Representations for
Personalized Federated Learning, ICML 2021, algorithm 1.
"""

from collections.abc import Collection, Sequence
import dataclasses
import functools
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.catalog import algorithms
from tff_bn.clients import client_work
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_training import LocalTraining
from tff_bn.clients.local_training import LocalTrainingWork
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import client_batches
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import Partition
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes import head_layers as head_lib
from tff_bn.processes import requirements
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_fed_rep']


def build_fed_rep(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    head_layers: Optional[str] = None,
    head_steps: Optional[int] = None,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds FedRep, which keeps the head of the model local.

  A client trains in two phases in each round. First it trains the head while
  all other variables are fixed. Then it trains the other variables, which are
  called the representation, while the head is fixed, and sends them. A phase
  changes no variable of the other part, not even the running statistics of
  batch normalization. The representation, batch normalization included, is
  averaged as in FedAvg.

  `local_steps` and `local_epochs` set the length of the second phase. The
  number of examples, which can be the client's weight, and the training metrics
  come from the second phase, too. Each phase starts with a new state of the
  optimizer.

  Args:
    model: The model, with or without batch normalization.
    client_optimizer: The optimizer of local training.
    head_layers: The head: a regular expression for whole names or paths of
      layers, see `tff_bn.partition.Partition`. Default: the last layer with a
      kernel.
    head_steps: The number of steps of the first phase, which repeats the
      client's dataset as often as needed. Default: as many as in the second
      phase.
    **options: See `tff_bn.algorithms.Options`. A `drift_correction` corrects
      the second phase. `shuffle_times` must be 0.

  Returns:
    A process whose client state holds the client's head.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If an option has a value that is not allowed, or the head is
      none of the model's layers, or all of them.
  """
  head = head_lib.find(model, head_layers)
  if head_steps is not None:
    algorithms.HEAD_STEPS.check(head_steps)
  requirements.check_fixed_units('FedRep', options)
  return averaging.build_partitioned(
      model,
      Partition('fedrep', frozenset(), local_layers=head),
      client_optimizer,
      build_work=functools.partial(
          _TwoPhases,
          head=head_lib.positions(model, head),
          head_steps=head_steps,
      ),
      **options,
  )


class _TwoPhases(LocalTrainingWork):
  """Training of the head, then of the representation."""

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: Optional[BoundCorrection],
      *,
      head: Collection[int],
      head_steps: Optional[int],
  ):
    super().__init__(model, config, weights, correction, untrained=head)
    self._head = head
    self._repeats = head_steps is not None
    if head_steps is not None:
      config = dataclasses.replace(
          config, local_steps=head_steps, local_epochs=1
      )
    self._head_training = LocalTraining(
        model, config, untrained=set(range(len(model.variables))) - set(head)
    )

  def _train(
      self,
      start: client_work.RoundStart,
      dataset: client_batches.Data,
      num_steps: Any,
  ) -> LocalResult:
    """Makes the steps of both phases."""
    head_phase = self._head_training.train(
        start.values,
        dataset.repeat() if self._repeats else dataset,
        start.optimizer_state,
        start.work_state['round_num'],
    )
    values = self._with_head(start.values, head_phase.values)
    result = super()._train(start._replace(values=values), dataset, num_steps)
    return result._replace(
        values=self._with_head(result.values, head_phase.values)
    )

  def _with_head(
      self, values: Sequence[tf.Tensor], head_values: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Returns the first values with the head of the second ones."""
    return [
        with_head if position in self._head else value
        for position, (value, with_head) in enumerate(
            zip(values, head_values, strict=True)
        )
    ]
