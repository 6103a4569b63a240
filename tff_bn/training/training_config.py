"""How long and on what to train, and how it may end."""

from collections.abc import Sequence
import dataclasses
from typing import Any, Optional

from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.training import metrics_log

# Settings with which a run may be continued, whatever they were before.
MAY_CHANGE = ('rounds', 'checkpoint_every', 'max_failed_rounds')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
  """How long and on what to train.

  Attributes:
    rounds: The number of rounds.
    clients_per_round: The number of clients that are sampled, uniformly without
      replacement, for every round. Default: all.
    batch_size: The number of examples in a client's batch.
    local_steps: The number of batches on which a client trains in a round.
    local_epochs: The number of passes over its data instead; exactly one of the
      two is set.
    seed: What the sampling of clients and of batches depends on.
    evaluate_every: The number of rounds between two evaluations. The initial
      model and the last round's are evaluated in any case.
    checkpoint_every: The number of rounds between two checkpoints. The last
      round has one in any case.
    max_failed_rounds: After this number of rounds in a row that changed nothing
      `train` raises an error: clients were dropped and none was left, or the
      server's new model was not finite.
    max_evaluation_clients: The most clients whose own models, or on whose own
      data, models are evaluated. If there are more, these are chosen by the
      seed.
  """

  rounds: int
  batch_size: int
  clients_per_round: Optional[int] = None
  local_steps: Optional[int] = None
  local_epochs: Optional[int] = None
  seed: int = 0
  evaluate_every: int = 10
  checkpoint_every: int = 10
  max_failed_rounds: int = 10
  max_evaluation_clients: int = 20

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name != 'seed' and value is not None and value < 1:
        raise ValueError(
            f'{field.name}={value} is not allowed; it must be at least 1.'
        )
    if not 0 <= self.seed < 2**32:
      raise ValueError(
          f'seed={self.seed} is not allowed; it must be from 0 to 2^32 - 1.'
      )
    if (self.local_steps is None) == (self.local_epochs is None):
      raise ValueError(
          f'local_steps={self.local_steps} and'
          f' local_epochs={self.local_epochs}: exactly one of the two must be'
          ' given.'
      )


class TrainingFailedError(RuntimeError):
  """The run has not come to a model that can be used."""


class TooManyFailedRoundsError(TrainingFailedError):
  """Some rounds in a row have changed nothing."""


class UnusableModelError(TrainingFailedError):
  """The final model, or its loss, is not finite."""


@dataclasses.dataclass(frozen=True)
class TrainingResult:
  """What a run ends with.

  Attributes:
    rows: The rows of `metrics.csv`, oldest first, as dictionaries by column.
      Empty cells are `None`. See `train` for the columns.
    state: The server's final state.
    model_weights: The weights of `model/model.keras`.
    resumed_from: The round after which this call continued the run; `None` if
      it started it.
  """

  rows: Sequence[metrics_log.Row]
  state: Any
  model_weights: ModelWeights
  resumed_from: Optional[int]
