"""SCAFFOLD's rounds without control variates in the messages.

If all clients made K steps in the last round and the server took the mean y of
their models as the new model, then the server's control variate is

    c = (x - y) / (K η),

so a client computes c from the models that it got in this round and in the last
one. The server computes c in the same way, from the mean change of the models.
Such a short round sends what FedAvg sends, and its result is the same but for
rounding errors. Control variates are sent

*   in all rounds, with another `server_optimizer` than SGD with learning rate
    1, with `server_clip_norm`, or with another `model_aggregator` than the
    default mean;
*   in a round with fewer than `num_clients` clients;
*   in a round after one in which a client was dropped or without data, the
    clients made different numbers of steps, or the server rejected the model;
    without `num_clients`, also after one with other clients than before;
*   in a round in which it turns out that the clients made different numbers of
    steps, that a client took no part in the round before, or that the server's
    model was changed after that round. This round is computed twice, first
    without control variates.

The metric `full_rounds` is the number of rounds so far in which they were sent,
and `repeated_rounds` the number of these that were computed twice, see
`tff_bn.processes.short_rounds`.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.common import numerics
from tff_bn.keras_model import shared_weights
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import short_rounds

if TYPE_CHECKING:
  from tff_bn.algorithms import scaffold

__all__: list[str] = []


def round_variants(
    correction: 'scaffold.Scaffold',
) -> drift_correction.RoundVariants:
  """Returns SCAFFOLD for short and for full rounds."""
  return drift_correction.RoundVariants(
      _Variant(correction, _DerivedVariates),
      _Variant(correction, _RememberedVariates),
      functools.partial(
          short_rounds.build_process, num_clients=correction.num_clients
      ),
  )


@dataclasses.dataclass(frozen=True)
class _Variant(drift_correction.DriftCorrection):
  """SCAFFOLD in one kind of round."""

  correction: 'scaffold.Scaffold'
  bound_class: 'type[_RememberedVariates]'

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> drift_correction.BoundCorrection:
    """See the base class."""
    variates = self.correction.bind(model, weights, client_optimizer)
    return self.bound_class(variates, model)


class _RememberedVariates(drift_correction.BoundCorrection):
  """Control variates of a full round.

  In addition to them, clients and server keep what a short round needs. Of its
  last round, a client keeps the shared variables that it got, the sum of the
  learning rates, and the round's number, from 1. The server keeps the shared
  variables after its last round, to notice if others change them.
  """

  _is_short = False

  def __init__(
      self, variates: 'scaffold.ControlVariates', model: BatchNormModel
  ):
    self._variates = variates
    names = [model.variables[p].name for p in variates.positions]
    self._received_names = [f'received_{name}' for name in names]
    self._left_names = [f'left_{name}' for name in names]
    # The number of the round. Only `finish` reads it.
    round_num = tf.Variable(tf.zeros([], tf.int64), trainable=False)
    self.variables = [*variates.variables, round_num]
    self.collecting = variates.collecting

  def initial_client_state(self, values: Tensors) -> State:
    """Returns c_i = 0; with the sum 0, the client derives c = 0."""
    return collections.OrderedDict(
        self._variates.initial_client_state(values),
        **dict(zip(self._received_names, self._variates.zeros())),
        last_rate_sum=tf.zeros([], self._variates.rate_sum.dtype),
        last_round=tf.zeros([], tf.int64),
    )

  def initial_server_state(self) -> State:
    """Returns c = 0, which all clients know."""
    return collections.OrderedDict(
        self._variates.initial_server_state(),
        **dict(zip(self._left_names, self._variates.zeros())),
        num_rounds=tf.zeros([], tf.int64),
        next_is_short=tf.constant(True),
        is_exact=tf.constant(True),
        full_rounds=tf.zeros([], tf.int32),
        repeated_rounds=tf.zeros([], tf.int32),
    )

  def state_for_clients(self, server_state: State) -> State:
    """Returns the state without the entries that only the server needs."""
    return _without(self._left_names, server_state)

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns SCAFFOLD's values and the number of the round."""
    started = self._variates.start(before, server_state, client_state)
    return [*started, server_state['num_rounds'] + 1]

  def correct(
      self, gradients: tuple[tf.Tensor, ...], learning_rate: Optional[Any]
  ) -> tuple[tf.Tensor, ...]:
    """Returns g - c_i + c."""
    return self._variates.correct(gradients, learning_rate)

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns SCAFFOLD's results and what a client keeps of this round."""
    *started, round_num = started
    kept, sent = self._variates.finish(
        started, before, after, collected, client_state
    )
    received = [before[position] for position in self._variates.positions]
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
    moved = self._variates.next_server_state(
        server_state, total, {self._variates.part: changes}, learning_rate
    )
    is_finite = numerics.all_finite(moved)
    num_participants = tf.cast(total['num_participants'], tf.int64)
    # All K_i are equal if and only if (Σ K_i)² = n Σ K_i².
    same_steps = tf.equal(
        tf.square(total['steps']), num_participants * total['squared_steps']
    )
    num_all = self._variates.num_all_clients(total)
    before, after = (
        shared_weights.part_values(aggregated[name].trainable)
        for name in ('weights_before', 'weights_after')
    )
    is_exact, was_repeated = tf.constant(True), tf.constant(False)
    if self._is_short:
      # Clients derive c from the model of the last round. If the server's
      # model was changed since then, their c is wrong.
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
                # The model stays the same if the server rejects the new one.
                tf.logical_not(_all_equal(before, after)),
                learning_rate > 0,
                # If other clients took part now, expect others next time.
                tf.equal(total['num_outdated'], 0)
                if self._variates.num_clients is None
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
    return aggregated[self._variates.part]

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
    """Returns the state of a full round without c."""
    return _without(
        self._variates.names, super().state_for_clients(server_state)
    )

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns the values of a full round, with the derived c."""
    derived = [
        tf.math.divide_no_nan(
            client_state[name] - before[position],
            tf.cast(client_state['last_rate_sum'], before[position].dtype),
        )
        for name, position in zip(
            self._received_names, self._variates.positions, strict=True
        )
    ]
    return super().start(
        before, {**server_state, **self._variates.named(derived)}, client_state
    )

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns the same state, and sends only the sum of the learning rates."""
    kept, _ = super().finish(started, before, after, collected, client_state)
    return kept, collections.OrderedDict({self._variates.part: [collected[0]]})

  def _changes(
      self, server_state: State, aggregated: State
  ) -> Sequence[tf.Tensor]:
    """Returns mean_S(x - y_i) / R - c; 0 for the learning rate 0."""
    (rate_sum,) = aggregated[self._variates.part]
    return [
        tf.where(
            rate_sum > 0,
            difference / tf.cast(rate_sum, difference.dtype)
            - server_state[name],
            tf.zeros_like(difference),
        )
        for name, difference in zip(
            self._variates.names,
            shared_weights.part_values(aggregated['trainable']),
            strict=True,
        )
    ]


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
