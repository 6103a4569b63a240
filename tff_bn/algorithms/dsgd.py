"""DSGD: the mean of the clients' gradients, one step in each round.

Bertsekas, Tsitsiklis, Parallel and Distributed Computation, 2015; as FBN's
paper uses it: Guerraoui et al., arXiv:2405.14670, appendix B, algorithm 3.
"""

from collections.abc import Callable
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.algorithms import fed_avg
from tff_bn.clients.local_step import warmup_factor
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import optimizers
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.processes.stateful_process import Process

__all__ = ['build_dsgd']


def build_dsgd(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    build_process: Callable[..., Process] = fed_avg.build_fed_avg,
    client_learning_rate_schedule: Optional[Callable[[tf.Tensor], Any]] = None,
    client_warmup_steps: int = 0,
    **options: Any,
) -> Process:
  """Builds DSGD, which makes one step with the mean gradient in each round.

  In each round, every client computes the gradient of its first batch, and
  `client_optimizer` makes one step with the mean of the gradients at the
  server. Unlike in FedAvg, the optimizer's state lasts from round to round. If
  all clients take part in each round, this equals momentum at each client,
  because the mean of the clients' momentums is the momentum of the mean
  gradient. So clients keep no state. A robust `model_aggregator` receives
  gradients.

  TFF's SGD accumulates gradients, `v ← μ v + g`. A momentum that averages them,
  `v ← μ v + (1-μ) g`, is the same with the learning rate times 1-μ. FBN's
  paper, with 0.1 and μ = 0.99, uses `build_sgdm(0.001, 0.99)`.

  Args:
    model: The model.
    client_optimizer: The optimizer that makes the steps.
    build_process: The builder that says how batch normalization is treated:
      one of `tff_bn.algorithms` that shares all variables, such as
      `build_fbn`. Default: `build_fed_avg`, in which clients normalize with the
      statistics of their batches.
    client_learning_rate_schedule: Maps the number of finished steps (an int32
      scalar tensor) to the learning rate. A round counts as a step unless no
      client is left in it. Default: the rate of `client_optimizer`.
    client_warmup_steps: The number of steps at the start of the training over
      which the learning rate rises linearly.
    **options: See `tff_bn.algorithms.Options`; and arguments of
      `build_process`. `local_steps` and `local_epochs` are 1, and
      `server_optimizer` and `drift_correction` must not be given.
      `client_gradient_clip_norm` clips each client's gradient.

  Returns:
    A `tff.learning.templates.LearningProcess`; a `StatefulLearningProcess` if
    the model has personal position encodings.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, or would make it
      another algorithm.
  """
  if options.pop('local_steps', 1) not in (None, 1):
    raise ValueError('local_steps must be 1: DSGD makes one step in a round.')
  for name in ('local_epochs', 'server_optimizer'):
    if options.pop(name, None) not in (None, 1):
      raise ValueError(
          f'{name} must not be given: in DSGD client_optimizer makes one step'
          ' in a round, with the mean of the gradients.'
      )
  if options.pop('drift_correction', None) is not None:
    raise ValueError(
        'drift_correction has no effect in DSGD: clients make one step in a'
        ' round, from the same model, so they do not drift apart.'
    )
  # Checks the arguments that do not reach local training.
  LocalTrainingConfig(
      client_optimizer,
      client_learning_rate_schedule=client_learning_rate_schedule,
      client_warmup_steps=client_warmup_steps,
  )
  if client_learning_rate_schedule is not None or client_warmup_steps:
    dtype = model.keras_model.trainable_weights[0].dtype
    constant_rate = optimizers.default_hyperparameters(client_optimizer)[
        optimizers.LEARNING_RATE
    ]

    def learning_rate(num_steps):
      if client_learning_rate_schedule is None:
        rate = constant_rate
      else:
        rate = client_learning_rate_schedule(num_steps)
      rate = tf.cast(rate, dtype)
      if client_warmup_steps:
        rate *= warmup_factor(num_steps, client_warmup_steps, dtype)
      return rate

    client_optimizer = tff.learning.optimizers.schedule_learning_rate(
        client_optimizer, learning_rate
    )
  return build_process(
      model,
      # A step with learning rate 1 is a gradient.
      tff.learning.optimizers.build_sgdm(1.0),
      server_optimizer=client_optimizer,
      local_steps=1,
      **options,
  )
