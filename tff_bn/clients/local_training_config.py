"""The settings of local training."""

from collections.abc import Callable
import dataclasses
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import checks
from tff_bn.common import optimizers


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
  client_weight_decay: float = 0.0
  client_learning_rate_schedule: Optional[Callable[[tf.Tensor], Any]] = None
  client_warmup_rounds: int = 0
  client_warmup_steps: int = 0
  client_gradient_clip_norm: Optional[float] = None
  shuffle_times: float = 0.0
  shuffle_probability: float = 0.1
  client_weighting: str = 'num_examples'
  seed: int = 0
  jit_compile: bool = False

  def batches(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
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
    if self.local_steps is not None:
      checks.check_whole_number('local_steps', self.local_steps)
    checks.check_whole_number('local_epochs', self.local_epochs)
    if self.local_steps is not None and self.local_epochs > 1:
      raise ValueError(
          f'local_steps={self.local_steps} and local_epochs={self.local_epochs}'
          ' exclude each other: give only one of them. For more steps than a'
          ' dataset has batches, repeat the dataset (dataset.repeat()).'
      )
    for name in ('client_warmup_rounds', 'client_warmup_steps'):
      checks.check_whole_number(name, getattr(self, name), least=0)
    for name in (
        'client_weight_decay',
        'client_gradient_clip_norm',
        'shuffle_times',
        'shuffle_probability',
    ):
      if getattr(self, name) is not None:
        checks.check_number(name, getattr(self, name))
    checks.check_integer('seed', self.seed)
    if self.client_learning_rate_schedule is not None:
      checks.check_function(
          'client_learning_rate_schedule',
          self.client_learning_rate_schedule,
          'maps the number of finished rounds to a learning rate',
      )
    if not self.client_weight_decay >= 0:
      raise ValueError(
          f'client_weight_decay={self.client_weight_decay} must be at least 0.'
      )
    clip_norm = self.client_gradient_clip_norm
    if clip_norm is not None and not clip_norm > 0:
      raise ValueError(
          f'client_gradient_clip_norm={clip_norm} must be greater than 0.'
      )
    self._check_shuffles()
    if self.client_weighting not in ('num_examples', 'uniform'):
      raise ValueError(
          f'client_weighting={self.client_weighting!r} must be one of'
          " 'num_examples', 'uniform'."
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

  def _check_shuffles(self):
    """Checks how often units are permuted."""
    if not 0 <= self.shuffle_times < float('inf'):
      raise ValueError(
          f'shuffle_times={self.shuffle_times} must be a number, at least 0.'
      )
    if self.local_steps is not None and self.shuffle_times > self.local_steps:
      raise ValueError(
          f'shuffle_times={self.shuffle_times:g} must be at most'
          f' local_steps={self.local_steps}: a step permutes the units at most'
          ' once.'
      )
    if not 0 <= self.shuffle_probability <= 1:
      raise ValueError(
          f'shuffle_probability={self.shuffle_probability} must be between 0'
          ' and 1.'
      )
