"""The settings of local training."""

from collections.abc import Callable
import dataclasses
from typing import Any, Optional, TypedDict

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.catalog import local_training
from tff_bn.catalog import options
from tff_bn.common import checks
from tff_bn.common import client_batches
from tff_bn.common import optimizers


class LocalTrainingOptions(TypedDict, total=False):
  """The options about local training as keyword arguments of builders."""

  local_steps: Optional[int]
  local_epochs: int
  client_weight_decay: float
  client_learning_rate_schedule: Optional[Callable[[tf.Tensor], Any]]
  client_warmup_rounds: int
  client_warmup_steps: int
  client_gradient_clip_norm: Optional[float]
  shuffle_times: float
  shuffle_probability: float
  seed: int
  jit_compile: bool


@dataclasses.dataclass(frozen=True)
class LocalTrainingConfig:
  """How a client trains.

  Attributes:
    client_optimizer: The optimizer. Its state starts afresh in each round.
    others: See `tff_bn.algorithms.Options`.
  """

  client_optimizer: tff.learning.optimizers.Optimizer
  local_steps: Optional[int] = None
  local_epochs: int = 1
  client_weight_decay: float = local_training.CLIENT_WEIGHT_DECAY.default
  client_learning_rate_schedule: Optional[Callable[[tf.Tensor], Any]] = None
  client_warmup_rounds: int = local_training.CLIENT_WARMUP_ROUNDS.default
  client_warmup_steps: int = local_training.CLIENT_WARMUP_STEPS.default
  client_gradient_clip_norm: Optional[float] = None
  shuffle_times: float = local_training.SHUFFLE_TIMES.default
  shuffle_probability: float = local_training.SHUFFLE_PROBABILITY.default
  client_weighting: str = 'num_examples'
  seed: int = 0
  jit_compile: bool = local_training.JIT_COMPILE.default

  def batches(self, dataset: client_batches.Data) -> client_batches.Data:
    """Returns the batches of a client's dataset on which it trains."""
    dataset = dataset.repeat(self.local_epochs)
    if self.local_steps is not None:
      dataset = dataset.take(self.local_steps)
    return dataset

  def num_steps(self, num_batches: np.ndarray) -> np.ndarray:
    """Returns the numbers of steps for datasets with numbers of batches."""
    num_steps: np.ndarray = num_batches * self.local_epochs
    if self.local_steps is not None:
      num_steps = np.minimum(num_steps, self.local_steps)
    return num_steps

  def __post_init__(self):
    checks.check_type(
        'client_optimizer',
        self.client_optimizer,
        tff.learning.optimizers.Optimizer,
        'be a tff.learning.optimizers.Optimizer, such as'
        ' tff.learning.optimizers.build_sgdm(0.1)',
    )
    options.check_fields(self, local_training.OPTIONS)
    local_training.LOCAL_EPOCHS.check(self.local_epochs)
    if self.local_steps is not None and self.local_epochs > 1:
      raise ValueError(
          options.exclusion(
              f'local_steps={self.local_steps}',
              f'local_epochs={self.local_epochs}',
          )
          + ' For more steps than a dataset has batches, repeat the dataset'
          ' (dataset.repeat()).'
      )
    local_training.check_shuffles(self.local_steps, self.shuffle_times)
    checks.check_integer('seed', self.seed)
    if self.client_learning_rate_schedule is not None:
      checks.check_function(
          'client_learning_rate_schedule',
          self.client_learning_rate_schedule,
          'maps the number of finished rounds to a learning rate',
      )
    hyperparameters = optimizers.default_hyperparameters(self.client_optimizer)
    for name in (
        'client_learning_rate_schedule',
        'client_warmup_rounds',
        'client_warmup_steps',
    ):
      if (
          getattr(self, name)
          and optimizers.LEARNING_RATE not in hyperparameters
      ):
        raise ValueError(
            f'{name} needs a client_optimizer with the hyperparameter'
            f' {optimizers.LEARNING_RATE!r}; this'
            f' {type(self.client_optimizer).__name__} has'
            f' {list(hyperparameters)}.'
        )
