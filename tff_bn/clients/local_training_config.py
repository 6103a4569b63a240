"""How clients train."""

from collections.abc import Callable
import dataclasses
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import optimizers


@dataclasses.dataclass(frozen=True)
class LocalTrainingConfig:
  """How a client trains.

  Attributes:
    client_optimizer: The optimizer. It starts anew in each round.
    local_steps: How many batches to take from the front of the client's
      dataset, after it was repeated `local_epochs` times. `None`: all.
    local_epochs: How many times to go through the client's dataset.
    client_weight_decay: λ of the coupled L2 decay: λ times the variable is
      added to the gradient of every trainable variable.
    client_learning_rate_schedule: Maps the number of finished rounds (an int32
      scalar tensor) to the learning rate. `None`: the optimizer's own.
    client_warmup_steps: Over how many of its first steps the optimizer's
      learning rate rises linearly: in step n, counted from 1, it is multiplied
      by min(1, n / client_warmup_steps). As the optimizer, it starts anew in
      each round. 0: no warm-up.
    client_gradient_clip_norm: The largest global norm of a batch's gradient; a
      longer one is scaled down to it, before weight decay. `None`: any.
    seed: Determines dropout and other random layers, together with the round
      and the client's first batch.
    jit_compile: Whether XLA compiles the step. Results then differ in the last
      bits. TFF's native runtime has no XLA compiler and ignores it.
  """

  client_optimizer: tff.learning.optimizers.Optimizer
  local_steps: Optional[int] = None
  local_epochs: int = 1
  client_weight_decay: float = 0.0
  client_learning_rate_schedule: Optional[Callable[[tf.Tensor], Any]] = None
  client_warmup_steps: int = 0
  client_gradient_clip_norm: Optional[float] = None
  seed: int = 0
  jit_compile: bool = False

  def __post_init__(self):
    if not isinstance(self.client_optimizer, tff.learning.optimizers.Optimizer):
      raise TypeError(
          'client_optimizer must be a tff.learning.optimizers.Optimizer, such'
          ' as tff.learning.optimizers.build_sgdm(0.1), but is a'
          f' {type(self.client_optimizer).__name__}.'
      )
    for name, minimum in (
        ('local_steps', 1),
        ('local_epochs', 1),
        ('client_warmup_steps', 0),
    ):
      value = getattr(self, name)
      if name == 'local_steps' and value is None:
        continue
      if not isinstance(value, (int, np.integer)) or value < minimum:
        raise ValueError(
            f'{name}={value} must be a whole number, at least {minimum}.'
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
    hyperparameters = optimizers.default_hyperparameters(self.client_optimizer)
    for name in ('client_learning_rate_schedule', 'client_warmup_steps'):
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
