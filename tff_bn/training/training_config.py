"""The settings and the results of training."""

from collections.abc import Sequence
import dataclasses
from typing import Any, Optional

from tff_bn.catalog import value_types
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.training import measures
from tff_bn.training import metrics_hook
from tff_bn.training import run_entries

# Settings that may change when a run is continued.
MAY_CHANGE = (
    'rounds',
    'checkpoint_every',
    'max_failed_rounds',
    'save_client_models',
    'export',
    'patience',
    'client_metrics_over_time',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
  """The settings of training.

  Attributes:
    rounds: The number of rounds.
    clients_per_round: The number of clients that are sampled, uniformly without
      replacement, for every round. Default: all.
    batch_size: The number of examples in a client's batch.
    centralized_batch_size: The number of examples in a batch with
      `train_on_union`. Default: `batch_size` times the number of clients in a
      round.
    local_steps: The number of batches on which a client trains in a round.
    local_epochs: The number of passes over a client's data in a round. Exactly
      one of `local_steps` and `local_epochs` is set.
    seed: The seed of the sampling of clients and of batches.
    evaluate_every: The number of rounds between two evaluations. The initial
      model and the model of the last round are always evaluated.
    checkpoint_every: The number of rounds between two checkpoints. The last
      round always has one.
    max_failed_rounds: The number of failed rounds in a row after which `train`
      raises an error. A round fails if all its clients were dropped, or if the
      server's new model was not finite.
    max_evaluation_clients: The largest number of clients in a mean over
      clients. If there are more, the seed determines a choice.
    save_client_models: The clients whose own models are saved as Keras files at
      the end: 'none', 'sampled' or 'all', see `run_entries.SAVE_CLIENT_MODELS`.
    export: Which inputs the saved Keras files take: 'raw', samples before their
      resizing and scaling, or 'training', see `run_entries.EXPORT`. Where raw
      samples are impossible, because the domains' values were divided by
      different numbers, the files take the inputs of the training.
    keep_best: `loss` or the name of a metric. The models of the round with the
      best mean over the clients' validation data are saved beside those of the
      last round, see `FederatedData.with_validation`. Default: they are not.
    patience: The number of evaluations in a row without a better value of
      `keep_best` after which the run ends. Default: it has all rounds.
    client_metrics_over_time: Whether `client_metrics.csv` has rows for each
      evaluated round, not only for the last one.
    evaluate_train_loss: Whether each evaluation also computes the loss of each
      client's model on all training data of the client, see `train`.
  """

  rounds: int
  batch_size: int
  centralized_batch_size: Optional[int] = None
  clients_per_round: Optional[int] = None
  local_steps: Optional[int] = None
  local_epochs: Optional[int] = None
  seed: int = 0
  evaluate_every: int = 10
  checkpoint_every: int = 10
  max_failed_rounds: int = 10
  max_evaluation_clients: int = measures.MAX_CLIENTS
  save_client_models: str = 'none'
  export: str = run_entries.RAW
  keep_best: Optional[str] = None
  patience: Optional[int] = None
  client_metrics_over_time: bool = False
  evaluate_train_loss: bool = False

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      is_number = field.type in (int, Optional[int]) and field.name != 'seed'
      if is_number and value is not None:
        value_types.POSITIVE_INTEGER.check(field.name, value)
    value_types.Choice(run_entries.SAVE_CLIENT_MODELS).check(
        'save_client_models', self.save_client_models
    )
    value_types.Choice(run_entries.EXPORT).check('export', self.export)
    value_types.SEED.check('seed', self.seed)
    for name in ('client_metrics_over_time', 'evaluate_train_loss'):
      value_types.BOOLEAN.check(name, getattr(self, name))
    if self.keep_best is not None:
      value_types.TEXT.check('keep_best', self.keep_best)
    elif self.patience is not None:
      raise ValueError(
          f'patience={self.patience} needs keep_best, the metric that it'
          ' watches.'
      )
    if (self.local_steps is None) == (self.local_epochs is None):
      raise ValueError(
          f'local_steps={self.local_steps} and'
          f' local_epochs={self.local_epochs}: exactly one of the two must be'
          ' given.'
      )

  def union_batch_size(self, num_clients: int) -> int:
    """Returns the size of a batch from the union of some clients' data."""
    return self.centralized_batch_size or self.batch_size * num_clients


class TrainingFailedError(RuntimeError):
  """The run has no usable model."""


class TooManyFailedRoundsError(TrainingFailedError):
  """Too many rounds in a row failed."""


class UnusableModelError(TrainingFailedError):
  """The final model or its loss is not finite, or no round changed it."""


@dataclasses.dataclass(frozen=True)
class TrainingResult:
  """The results of a run.

  Attributes:
    rows: The rows of `metrics.csv`, oldest first, as dictionaries by column.
      Empty cells are `None`. See `train` for the columns.
    state: The server's final state.
    model_weights: The weights of `model/model.keras`.
    resumed_from: The round after which this call continued the run; `None` if
      it started the run.
    best_round: The round of the models in `model/best/`; `None` without
      `keep_best`, or if its metric is not finite in any round.
  """

  rows: Sequence[metrics_hook.Row]
  state: Any
  model_weights: ModelWeights
  resumed_from: Optional[int]
  best_round: Optional[int] = None
