"""SCAFFOLD: control variates against the clients' drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning, ICML 2020, algorithm 1 with option II.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.algorithms import fed_avg
from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.common import checks
from tff_bn.common import numerics
from tff_bn.common import optimizers
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['Scaffold', 'build_scaffold']

_PART = 'control_variates'


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

  Control variates double the traffic, but rounds that do not need them do
  without: if all clients made K steps in the last round and the server took the
  mean y of their models as the new model, then

      c = (x - y) / (K η),

  so a client computes c from the models that it got in this round and in the
  last one. The server computes c in the same way, from the mean change of the
  models. Such a round sends what FedAvg sends, and its result is the same but
  for rounding errors. Control variates are sent

  *   in all rounds, with another `server_optimizer` than SGD with learning rate
      1, with `server_clip_norm`, or with another `model_aggregator` than the
      default mean;
  *   in a round with fewer than `num_clients` clients;
  *   in a round after one in which a client was dropped or without data, the
      clients made different numbers of steps, or the server rejected the model;
      without `num_clients`, also after one with other clients than before;
  *   in a round in which it turns out that the clients made different numbers
      of steps, that a client took no part in the round before, or that the
      server's model was changed after that round. This round is computed twice,
      first without control variates.

  The metric `full_rounds` is the number of rounds so far in which they were
  sent, and `repeated_rounds` the number of these that were computed twice.

  Attributes:
    num_clients: N, the number of all clients. Default: the number of clients of
      the round.
  """

  num_clients: Optional[int] = None

  def round_variants(self) -> drift_correction.RoundVariants:
    """See the base class."""
    return drift_correction.RoundVariants(
        _Variant(self.num_clients, _DerivedVariates),
        _Variant(self.num_clients, _RememberedVariates),
        self.num_clients,
    )

  def __post_init__(self):
    if self.num_clients is not None:
      checks.check_whole_number('num_clients', self.num_clients)

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> drift_correction.BoundCorrection:
    """See the base class."""
    variant = _Variant(self.num_clients, _ControlVariates)
    return variant.bind(model, weights, client_optimizer)


@dataclasses.dataclass(frozen=True)
class _Variant(drift_correction.DriftCorrection):
  """SCAFFOLD in one kind of round."""

  num_clients: Optional[int]
  bound_class: 'type[_ControlVariates]'

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> drift_correction.BoundCorrection:
    """See the base class."""
    hparams = optimizers.default_hyperparameters(client_optimizer)
    if list(hparams) != [optimizers.LEARNING_RATE]:
      raise ValueError(
          'SCAFFOLD computes the mean gradient of a client from the change of'
          ' its model, so client_optimizer must be plain SGD,'
          ' tff.learning.optimizers.build_sgdm(learning_rate), but is a'
          f' {type(client_optimizer).__name__} with the hyperparameters'
          f' {list(hparams)}. (client_learning_rate_schedule sets a schedule.)'
      )
    return self.bound_class(model, weights, self.num_clients)


class _ControlVariates(drift_correction.BoundCorrection):
  """The control variates of a model, which are sent in every round."""

  def __init__(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      num_clients: Optional[int],
  ):
    drift_correction.check_shares(model, weights, 'SCAFFOLD')
    self._num_clients = num_clients
    self._positions = weights.trainable
    self._names = [
        f'control_variate_{model.variables[p].name}' for p in self._positions
    ]
    variables = model.keras_model.weights
    self._trained = [id(variables[p]) for p in self._positions]
    self._trainable = [id(v) for v in model.keras_model.trainable_weights]
    self._corrections = [
        tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
        for v in (variables[p] for p in self._positions)
    ]
    self._rate_sum = tf.Variable(
        tf.zeros([], self._corrections[0].dtype), trainable=False
    )
    self.variables = [self._rate_sum, *self._corrections]
    self.collecting = [self._rate_sum]

  def _zeros(self) -> list[tf.Tensor]:
    return [tf.zeros(v.shape, v.dtype) for v in self._corrections]

  def _named(self, values: Sequence[Any]) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict(zip(self._names, values, strict=True))

  def initial_client_state(self, values: Tensors) -> State:
    """Returns c_i = 0."""
    del values
    return self._named(self._zeros())

  def initial_server_state(self) -> State:
    """Returns c = 0."""
    return self._named(self._zeros())

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns the sum of the learning rates so far, 0, and c - c_i."""
    del before
    return [
        tf.zeros([], self._rate_sum.dtype),
        *(server_state[name] - client_state[name] for name in self._names),
    ]

  def correct(
      self, gradients: tuple[tf.Tensor, ...], learning_rate: Optional[Any]
  ) -> tuple[tf.Tensor, ...]:
    """Returns g - c_i + c."""
    self._rate_sum.assign_add(tf.cast(learning_rate, self._rate_sum.dtype))
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
        self._positions, self._names, corrections, strict=True
    ):
      old = client_state[name]
      mean_gradient = (before[position] - after[position]) / tf.cast(
          rate_sum, old.dtype
      )
      # Steps with learning rate 0 say nothing about the gradient.
      new = tf.where(rate_sum > 0, mean_gradient - correction, old)
      kept.append(new)
      sent.append(new - old)
    return self._named(kept), collections.OrderedDict({_PART: sent})

  def next_server_state(
      self,
      server_state: State,
      total: State,
      aggregated: State,
      learning_rate: Optional[tf.Tensor],
  ) -> State:
    """Returns the new c."""
    del learning_rate
    return self._moved(server_state, total, aggregated[_PART])

  def _moved(
      self, server_state: State, total: State, changes: Sequence[tf.Tensor]
  ) -> collections.OrderedDict[str, Any]:
    """Returns c + |S|/N · mean_S(c_i' - c_i)."""
    share = tf.math.divide_no_nan(
        tf.cast(total['num_participants'], tf.float64),
        tf.cast(self._num_all_clients(total), tf.float64),
    )
    return self._named(
        [
            server_state[name] + tf.cast(share, change.dtype) * change
            for name, change in zip(self._names, changes, strict=True)
        ]
    )

  def _num_all_clients(self, total: State) -> tf.Tensor:
    """Returns N."""
    num_clients = total['num_clients']
    if self._num_clients is None:
      return num_clients
    check = tf.debugging.assert_less_equal(
        num_clients,
        self._num_clients,
        message=(
            f'SCAFFOLD got num_clients={self._num_clients}, but there are more'
            ' clients in a round.'
        ),
    )
    with tf.control_dependencies([check]):
      return tf.constant(self._num_clients)


class _RememberedVariates(_ControlVariates):
  """Control variates of a full round, see `tff_bn.processes.short_rounds`.

  As `_ControlVariates`; in addition, clients and server keep what a short round
  needs. Of its last round, a client keeps the shared variables that it got, the
  sum of the learning rates, and the round's number, from 1. The server keeps
  the shared variables after its last round, to notice if others change them.
  """

  _is_short = False

  def __init__(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      num_clients: Optional[int],
  ):
    super().__init__(model, weights, num_clients)
    self._received_names = [
        f'received_{model.variables[p].name}' for p in self._positions
    ]
    self._left_names = [
        f'left_{model.variables[p].name}' for p in self._positions
    ]
    # Steps don't read it; it brings the number to `finish`.
    self._round_num = tf.Variable(tf.zeros([], tf.int64), trainable=False)
    self.variables = [*self.variables, self._round_num]

  def initial_client_state(self, values: Tensors) -> State:
    """Returns c_i = 0; with the sum 0, the client derives c = 0."""
    return collections.OrderedDict(
        super().initial_client_state(values),
        **dict(zip(self._received_names, self._zeros())),
        last_rate_sum=tf.zeros([], self._rate_sum.dtype),
        last_round=tf.zeros([], tf.int64),
    )

  def initial_server_state(self) -> State:
    """Returns c = 0, which all clients know."""
    return collections.OrderedDict(
        super().initial_server_state(),
        **dict(zip(self._left_names, self._zeros())),
        num_rounds=tf.zeros([], tf.int64),
        next_is_short=tf.constant(True),
        is_exact=tf.constant(True),
        full_rounds=tf.zeros([], tf.int32),
        repeated_rounds=tf.zeros([], tf.int32),
    )

  def state_for_clients(self, server_state: State) -> State:
    """Returns the state without what only the server needs."""
    return _without(self._left_names, server_state)

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns also the number of the round."""
    started = super().start(before, server_state, client_state)
    return [*started, server_state['num_rounds'] + 1]

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns also what the client keeps of this round."""
    *started, round_num = started
    kept, sent = super().finish(started, before, after, collected, client_state)
    received = [before[position] for position in self._positions]
    return (
        collections.OrderedDict(
            kept,
            **dict(zip(self._received_names, received)),
            last_rate_sum=collected[0],
            last_round=round_num,
        ),
        sent,
    )

  def counts(
      self, server_state: State, client_state: State, num_steps: tf.Tensor
  ) -> State:
    """Returns terms that tell whether clients and server can derive c."""
    missed_last_round = tf.not_equal(
        client_state['last_round'], server_state['num_rounds']
    )
    return collections.OrderedDict(
        steps=num_steps,
        squared_steps=tf.square(num_steps),
        num_outdated=tf.cast(missed_last_round, tf.int32),
    )

  def next_server_state(
      self,
      server_state: State,
      total: State,
      aggregated: State,
      learning_rate: Optional[tf.Tensor],
  ) -> State:
    """Returns the new c, and whether clients can derive it."""
    assert learning_rate is not None  # SGD has one.
    changes = self._changes(server_state, aggregated)
    moved = self._moved(server_state, total, changes)
    is_finite = numerics.all_finite(moved)
    num_participants = tf.cast(total['num_participants'], tf.int64)
    # The clients' steps are equal where Cauchy's inequality is an equation.
    same_steps = tf.equal(
        tf.square(total['steps']), num_participants * total['squared_steps']
    )
    num_all = self._num_all_clients(total)
    before, after = (
        _values(aggregated[name].trainable)
        for name in ('weights_before', 'weights_after')
    )
    is_exact, was_repeated = tf.constant(True), tf.constant(False)
    if self._is_short:
      # From another model than the last round's, clients derive another c.
      is_from_last_round = tf.logical_or(
          tf.equal(server_state['num_rounds'], 0),
          _all_equal([server_state[n] for n in self._left_names], before),
      )
      is_exact = tf.reduce_all(
          [same_steps, tf.equal(total['num_outdated'], 0), is_from_last_round]
      )
    else:
      was_repeated = tf.logical_and(
          server_state['next_is_short'],
          tf.equal(total['num_clients'], num_all),
      )
    return collections.OrderedDict(
        (name, tf.where(is_finite, value, server_state[name]))
        for name, value in moved.items()
    ) | collections.OrderedDict(
        **dict(zip(self._left_names, after, strict=True)),
        num_rounds=server_state['num_rounds'] + 1,
        next_is_short=tf.reduce_all(
            [
                is_finite,
                same_steps,
                tf.equal(total['num_participants'], num_all),
                # Else the server may have rejected the new model.
                tf.logical_not(_all_equal(before, after)),
                learning_rate > 0,
                # Else the clients probably differ from round to round.
                tf.equal(total['num_outdated'], 0)
                if self._num_clients is None
                else True,
            ]
        ),
        is_exact=is_exact,
        full_rounds=server_state['full_rounds'] + int(not self._is_short),
        repeated_rounds=server_state['repeated_rounds']
        + tf.cast(was_repeated, tf.int32),
    )

  def _changes(
      self, server_state: State, aggregated: State
  ) -> Sequence[tf.Tensor]:
    """Returns mean_S(c_i' - c_i)."""
    del server_state
    return aggregated[_PART]

  def metrics(self, server_state: State, total: State) -> State:
    """Returns the numbers of rounds in which control variates were sent."""
    del total
    return collections.OrderedDict(
        (name, server_state[name])
        for name in ('full_rounds', 'repeated_rounds')
    )


class _DerivedVariates(_RememberedVariates):
  """Control variates of a short round, which are not sent.

  With the same sum R = K η of the learning rates at all clients, the change is

      mean_S(c_i' - c_i) = mean_S(x - y_i) / R - c.

  If all clients took part, c' is thus mean(x - y_i) / R, which clients know as
  soon as they get the mean of the models y_i.
  """

  _is_short = True

  def state_for_clients(self, server_state: State) -> State:
    """Returns the same, without c."""
    return _without(self._names, super().state_for_clients(server_state))

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns the same, with the derived c."""
    derived = [
        tf.math.divide_no_nan(
            client_state[name] - before[position],
            tf.cast(client_state['last_rate_sum'], before[position].dtype),
        )
        for name, position in zip(
            self._received_names, self._positions, strict=True
        )
    ]
    return super().start(
        before, {**server_state, **self._named(derived)}, client_state
    )

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns the same, but sends the sum of the learning rates only."""
    kept, _ = super().finish(started, before, after, collected, client_state)
    return kept, collections.OrderedDict({_PART: [collected[0]]})

  def _changes(
      self, server_state: State, aggregated: State
  ) -> Sequence[tf.Tensor]:
    """Returns mean_S(x - y_i) / R - c; 0 for the learning rate 0."""
    (rate_sum,) = aggregated[_PART]
    return [
        tf.where(
            rate_sum > 0,
            difference / tf.cast(rate_sum, difference.dtype)
            - server_state[name],
            tf.zeros_like(difference),
        )
        for name, difference in zip(
            self._names, _values(aggregated['trainable']), strict=True
        )
    ]


def _values(weights: Any) -> Sequence[tf.Tensor]:
  """Returns the values of shared weights, which may have names, in order."""
  return list(weights.values() if isinstance(weights, Mapping) else weights)


def _all_equal(values: Tensors, others: Tensors) -> tf.Tensor:
  """Whether all numbers of two lists of tensors are equal."""
  return tf.reduce_all(
      [
          tf.reduce_all(tf.equal(a, b))
          for a, b in zip(values, others, strict=True)
      ]
  )


def _without(names: Sequence[str], state: State) -> State:
  """Returns the entries of a state that have other names."""
  return collections.OrderedDict(
      (name, value) for name, value in state.items() if name not in names
  )
