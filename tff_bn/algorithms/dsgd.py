"""DSGD: the mean of the clients' gradients, one step in each round.

Bertsekas, Tsitsiklis, Parallel and Distributed Computation, 2015; as FBN's
paper uses it: Guerraoui et al., arXiv:2405.14670, appendix B, algorithm 3, with
the clients' momentum of table 2. With the clients' momentums in place of the
gradients, it is Robust DSGD: Farhadkhani et al., Byzantine Machine Learning
Made Easy by Resilient Averaging of Momentums, ICML 2022.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.algorithms import fed_avg
from tff_bn.catalog import algorithms
from tff_bn.catalog import options as options_lib
from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.clients.local_step import warmup_factor
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import optimizers
from tff_bn.keras_model import shared_weights
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.constraints import Constraints
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import requirements
from tff_bn.processes.stateful_process import Process

__all__ = ['build_dsgd']


def build_dsgd(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    momentum: Optional[float] = None,
    build_process: Callable[..., Process] = fed_avg.build_fed_avg,
    client_learning_rate_schedule: Optional[Callable[[tf.Tensor], Any]] = None,
    client_warmup_rounds: int = 0,
    client_warmup_steps: int = 0,
    **options: Any,
) -> Process:
  """Builds DSGD, which makes one step with the mean gradient in each round.

  In each round, every client computes the gradient g_i of its first batch, and
  `client_optimizer` makes one step with the mean of the gradients at the
  server. Unlike in FedAvg, the optimizer's state lasts from round to round.
  Constraints of the model's variables are applied after this step.

  With `momentum` μ, every client keeps a momentum, which starts from 0, and
  sends it in place of the gradient:

      m_i ← μ m_i + (1-μ) g_i.

  This is for a robust `model_aggregator`, which then receives momentums: their
  noise is smaller than the noise of gradients, so attackers can hide less. A
  client that does not take part in a round, has no data, or is dropped, keeps
  its momentum. FBN's paper uses the learning rate 0.1 and μ = 0.99:
  ```
  build_dsgd(
      model,
      tff.learning.optimizers.build_sgdm(0.1),
      momentum=0.99,
      build_process=tff_bn.algorithms.build_fbn,
      client_weighting='uniform',
      model_aggregator=tff_bn.aggregators.CoordinateMedian(),
  )
  ```

  With the mean as aggregator, equal weights, and all clients in each round,
  momentum at the server is the same, and clients keep no state: the mean of the
  clients' momentums is the momentum of the mean gradient. TFF's SGD accumulates
  gradients, `v ← μ v + g`, so its learning rate is 1-μ times that of a momentum
  that averages them. The example then has `build_sgdm(0.001, 0.99)`.
  Centralized training with this momentum is
  `build_centralized(..., momentum=0.99)`.

  Args:
    model: The model.
    client_optimizer: The optimizer that makes the steps, with the aggregate of
      the gradients or of the clients' momentums.
    momentum: μ of the clients' momentums, at least 0 and less than 1. Default
      `None`: clients send their gradients.
    build_process: The builder that says how batch normalization is treated:
      one of `tff_bn.algorithms` that shares all variables, such as
      `build_fbn`. Default: `build_fed_avg`, in which clients normalize with the
      statistics of their batches.
    client_learning_rate_schedule: Maps the number of finished steps (an int32
      scalar tensor) to the learning rate. A round counts as a step unless no
      client is left in it. Default: the rate of `client_optimizer`.
    client_warmup_rounds: The number of rounds at the start of the training over
      which the learning rate rises linearly.
    client_warmup_steps: The same, because a round is a step. If both are given,
      the learning rate is multiplied by both factors.
    **options: See `tff_bn.algorithms.Options`; and arguments of
      `build_process`. `local_steps` and `local_epochs` are 1, and
      `server_optimizer` and `drift_correction` must not be given.
      `client_gradient_clip_norm` clips each client's gradient, and
      `client_weight_decay` is added to it, before it enters the momentum.

  Returns:
    A `tff.learning.templates.LearningProcess`; a `StatefulLearningProcess` if
    clients keep a momentum, or the model has personal position encodings.

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
        f'drift_correction has no effect in DSGD: {algorithms.ONE_STEP}.'
    )
  requirements.check_model(model)
  requirements.check_no_shuffles('DSGD', options)
  if momentum is not None:
    options['drift_correction'] = _ClientMomentum(momentum)
  # Checks the arguments that do not reach local training.
  LocalTrainingConfig(
      client_optimizer,
      client_learning_rate_schedule=client_learning_rate_schedule,
      client_warmup_rounds=client_warmup_rounds,
      client_warmup_steps=client_warmup_steps,
  )
  warmups = [n for n in (client_warmup_rounds, client_warmup_steps) if n]
  if client_learning_rate_schedule is not None or warmups:
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
      for warmup in warmups:
        rate *= warmup_factor(num_steps, warmup, dtype)
      return rate

    client_optimizer = tff.learning.optimizers.schedule_learning_rate(
        client_optimizer, learning_rate
    )
  if model.constraints.positions:
    client_optimizer = _ConstrainedOptimizer(
        client_optimizer, model.constraints
    )
  return build_process(
      # The server makes the steps.
      model.without_constraints(),
      # With learning rate 1, a client's update is its gradient.
      tff.learning.optimizers.build_sgdm(1.0),
      server_optimizer=client_optimizer,
      local_steps=1,
      **options,
  )


class _ConstrainedOptimizer(tff.learning.optimizers.Optimizer):
  """Applies constraints of the variables after each step of an optimizer."""

  def __init__(
      self,
      optimizer: tff.learning.optimizers.Optimizer,
      constraints: Constraints,
  ):
    self._optimizer = optimizer
    self._constraints = constraints

  def initialize(self, specs: Any) -> Any:
    """See the base class."""
    return self._optimizer.initialize(specs)

  def next(self, state: Any, weights: Any, gradients: Any) -> tuple[Any, Any]:
    """See the base class."""
    new_state, new_weights = self._optimizer.next(state, weights, gradients)
    values = self._constraints.apply(shared_weights.part_values(new_weights))
    if isinstance(new_weights, Mapping):
      return new_state, collections.OrderedDict(
          zip(new_weights, values, strict=True)
      )
    return new_state, type(new_weights)(values)

  def get_hparams(self, state: Any) -> Any:
    """See the base class."""
    return self._optimizer.get_hparams(state)

  def set_hparams(self, state: Any, hparams: Any) -> Any:
    """See the base class."""
    return self._optimizer.set_hparams(state, hparams)


@dataclasses.dataclass(frozen=True)
class _ClientMomentum(drift_correction.DriftCorrection):
  """Replaces each gradient by the client's momentum, see `build_dsgd`."""

  momentum: float

  def __post_init__(self):
    options_lib.check_fields(self, algorithms.OPTIONS)

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> drift_correction.BoundCorrection:
    """See the base class."""
    del weights, client_optimizer
    return _BoundMomentum(model, self.momentum)


class _BoundMomentum(drift_correction.BoundCorrection):
  """The momentum of a client."""

  def __init__(self, model: BatchNormModel, momentum: float):
    trainable = model.keras_model.trainable_weights
    name_of = {
        id(variable): info.name
        for variable, info in zip(
            model.keras_model.weights, model.variables, strict=True
        )
    }
    self._momentum = momentum
    self._names = [f'momentum_{name_of[id(v)]}' for v in trainable]
    self.variables = self.collecting = [
        tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
        for v in trainable
    ]

  def initial_client_state(self, values: Tensors) -> State:
    """Returns the momentum 0."""
    del values
    return collections.OrderedDict(
        (name, tf.zeros(v.shape, v.dtype))
        for name, v in zip(self._names, self.variables, strict=True)
    )

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns the client's momentum."""
    del before, server_state
    return [client_state[name] for name in self._names]

  def correct(
      self, gradients: tuple[tf.Tensor, ...], learning_rate: Optional[Any]
  ) -> tuple[tf.Tensor, ...]:
    """Returns the new momentum."""
    del learning_rate
    for variable, gradient in zip(self.variables, gradients, strict=True):
      variable.assign(optimizers.averaged(variable, gradient, self._momentum))
    return tuple(tf.convert_to_tensor(v) for v in self.variables)

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns the new momentum, which the client keeps."""
    del started, before, after, client_state
    kept = collections.OrderedDict(zip(self._names, collected, strict=True))
    return kept, collections.OrderedDict()
