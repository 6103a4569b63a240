"""SCAFFOLD: control variates against the clients' drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning, ICML 2020, algorithm 1 with option II.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.algorithms import fed_avg
from tff_bn.algorithms import scaffold_short_rounds
from tff_bn.catalog import value_types
from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.common import optimizers
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['Scaffold', 'build_scaffold']

_NAME = 'SCAFFOLD'


def build_scaffold(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    num_clients: Optional[int] = None,
    build_process: Callable[..., Process] = fed_avg.build_fed_avg,
    **options: Any,
) -> StatefulLearningProcess:
  """Builds SCAFFOLD, which corrects gradients by control variates.

  Args:
    model: The model.
    client_optimizer: The optimizer of local training, SGD without momentum.
    num_clients: N, the number of all clients, see `Scaffold`.
    build_process: The builder that says how batch normalization is treated,
      such as `tff_bn.algorithms.build_fbn`. Default: `build_fed_avg`.
    **options: See `tff_bn.algorithms.Options`; and arguments of
      `build_process`. `server_optimizer=build_sgdm(η_g)` is the paper's global
      learning rate. Unlike in other builders, `client_weighting` is `'uniform'`
      by default, as in the paper. `drift_correction` must not be given.

  Returns:
    A process whose client state holds the client's control variates. Where
    rounds without sending them are possible, see `Scaffold`, its `next` chooses
    between two computations, see `tff_bn.processes.short_rounds`.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, the client
      optimizer is not plain SGD, or `build_process` cannot be combined with
      SCAFFOLD.
  """
  options.setdefault('client_weighting', 'uniform')
  return averaging.build_corrected(
      build_process,
      model,
      client_optimizer,
      Scaffold(num_clients),
      **options,
  )


@dataclasses.dataclass(frozen=True)
class Scaffold(drift_correction.DriftCorrection):
  """Corrects each gradient by the server's and the client's control variates.

  A client's steps are y ← y - η (g(y) - c_i + c). After K steps from x, it sets

      c_i' = c_i - c + (x - y) / (K η)

  (option II). With the clients S of the round, the server sets
  c ← c + |S|/N · mean_S(c_i' - c_i). If the learning rate changes within a
  round, K η is the sum of the rates. All control variates start from 0. A
  client without data, or that is dropped, keeps its control variate.

  mean_S is `model_aggregator` with the weights of the model's update, so that c
  stays the mean of all c_i. With `client_weighting='uniform'` it is the paper's
  mean. With weights by the number of examples, c is exact if all clients take
  part or have the same number of examples. With an aggregator that takes no
  weights and is no `tff_bn.aggregators.Rule`, c is exact if no client is
  dropped or without data.

  Only shared trainable variables have control variates, because local variables
  cannot drift apart. Constraints of variables are a part of the steps: x - y is
  the change with them.

  Control variates double the traffic. Rounds in which clients can derive c from
  the models do without them, see `tff_bn.algorithms.scaffold_short_rounds`; the
  results are the same but for rounding errors.

  Attributes:
    num_clients: N, the number of all clients. Default: the number of clients of
      the round.
  """

  num_clients: Optional[int] = None

  def __post_init__(self):
    if self.num_clients is not None:
      value_types.POSITIVE_INTEGER.check('num_clients', self.num_clients)

  def round_variants(self) -> Optional[drift_correction.RoundVariants]:
    """See the base class."""
    return scaffold_short_rounds.round_variants(self)

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> 'ControlVariates':
    """See the base class."""
    check_optimizer(_NAME, client_optimizer)
    return ControlVariates(model, weights, self.num_clients)


def check_optimizer(
    name: str, client_optimizer: tff.learning.optimizers.Optimizer
) -> None:
  """Raises a `ValueError` with the algorithm's name unless it is plain SGD."""
  hparams = optimizers.default_hyperparameters(client_optimizer)
  if list(hparams) != [optimizers.LEARNING_RATE]:
    raise ValueError(
        f'{name} computes the mean gradient of a client from the change of its'
        ' model, so client_optimizer must be plain SGD,'
        ' tff.learning.optimizers.build_sgdm(learning_rate), but is a'
        f' {type(client_optimizer).__name__} with the hyperparameters'
        f' {list(hparams)}. (client_learning_rate_schedule sets a schedule.)'
    )


class ControlVariates(drift_correction.BoundCorrection):
  """The control variates of a model, which are sent in every round.

  Attributes:
    num_clients: N; `None`: the number of clients of the round.
    positions: The positions of the variables with control variates.
    names: The names of the control variates in the states.
    rate_sum: The sum of the learning rates in a round.
    part: The name of the clients' changes in their updates.
    algorithm: The algorithm's name in errors.
  """

  part = 'control_variates'
  algorithm = _NAME

  def __init__(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      num_clients: Optional[int],
  ):
    drift_correction.check_shares(model, weights, self.algorithm)
    self.num_clients = num_clients
    self.positions = weights.trainable
    self.names = [
        f'control_variate_{model.variables[p].name}' for p in self.positions
    ]
    variables = model.keras_model.weights
    self._trained = [id(variables[p]) for p in self.positions]
    self._trainable = [id(v) for v in model.keras_model.trainable_weights]
    self._corrections = [
        tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
        for v in (variables[p] for p in self.positions)
    ]
    self.rate_sum = tf.Variable(
        tf.zeros([], self._corrections[0].dtype), trainable=False
    )
    self.variables = [self.rate_sum, *self._corrections]
    self.collecting = [self.rate_sum]

  def zeros(self) -> list[tf.Tensor]:
    """Returns a zero for each control variate."""
    return [tf.zeros(v.shape, v.dtype) for v in self._corrections]

  def named(self, values: Sequence[Any]) -> collections.OrderedDict[str, Any]:
    """Returns values of the control variates by name."""
    return collections.OrderedDict(zip(self.names, values, strict=True))

  def initial_client_state(self, values: Tensors) -> State:
    """Returns c_i = 0."""
    del values
    return self.named(self.zeros())

  def initial_server_state(self) -> State:
    """Returns c = 0."""
    return self.named(self.zeros())

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns the sum of the learning rates so far, 0, and c - c_i."""
    del before
    return [
        tf.zeros([], self.rate_sum.dtype),
        *(server_state[name] - client_state[name] for name in self.names),
    ]

  def correct(
      self, gradients: tuple[tf.Tensor, ...], learning_rate: Optional[Any]
  ) -> tuple[tf.Tensor, ...]:
    """Returns g - c_i + c."""
    self.rate_sum.assign_add(tf.cast(learning_rate, self.rate_sum.dtype))
    correction_of = dict(zip(self._trained, self._corrections))
    return tuple(
        gradient + correction_of[variable]
        if variable in correction_of
        else gradient
        for variable, gradient in zip(self._trainable, gradients, strict=True)
    )

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns c_i', which the client keeps, and c_i' - c_i, which it sends."""
    (rate_sum,) = collected
    _, *corrections = started
    kept, sent = [], []
    for position, name, correction in zip(
        self.positions, self.names, corrections, strict=True
    ):
      old = client_state[name]
      mean_gradient = (before[position] - after[position]) / tf.cast(
          rate_sum, old.dtype
      )
      # With learning rate 0, the change does not show the gradient.
      new = tf.where(rate_sum > 0, mean_gradient - correction, old)
      kept.append(new)
      sent.append(new - old)
    return self.named(kept), collections.OrderedDict({self.part: sent})

  def next_server_state(
      self,
      server_state: State,
      total: State,
      aggregated: State,
      learning_rate: Optional[tf.Tensor],
  ) -> State:
    """Returns c + |S|/N · mean_S(c_i' - c_i)."""
    del learning_rate
    share = tf.math.divide_no_nan(
        tf.cast(total['num_participants'], tf.float64),
        tf.cast(self.num_all_clients(total), tf.float64),
    )
    return self.named(
        [
            server_state[name] + tf.cast(share, change.dtype) * change
            for name, change in zip(
                self.names, aggregated[self.part], strict=True
            )
        ]
    )

  def num_all_clients(self, total: State) -> tf.Tensor:
    """Returns N, and checks that the round has at most N clients.

    Args:
      total: See `next_server_state`.
    """
    return drift_correction.num_all_clients(
        self.algorithm, self.num_clients, total['num_clients']
    )
