"""The base classes of robust aggregation rules."""

import abc
import collections
from collections.abc import Mapping
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import gathering
from tff_bn.aggregators import model_update
from tff_bn.aggregators import vector_layout
from tff_bn.catalog import rules
from tff_bn.catalog import value_types
from tff_bn.common import numerics


class Rule(model_update.ParticipatingFactory):
  """Aggregates the clients' values by a rule that needs all of them at once.

  A rule is an ordinary TFF aggregation factory for any structure of floats,
  which it aggregates as one vector. `aggregate` applies it to a matrix with the
  values of a client in each row:
  ```
  rule = aggregators.TrimmedMean(num_byzantine=1)
  values = tf.constant([[1.0, 2.0], [2.0, 2.0], [3.0, 2.0], [99.0, -99.0]])
  num_dropped = tf.constant(0)  # Clients that were left out before.
  state = rule.initial_state(2, values.dtype)  # For two columns.
  result, state = rule.aggregate(values, num_dropped, state)  # [2.5, 2.0]
  ```

  A client whose value is not finite is left out, and counts as one of the
  tolerated attackers. A client with weight 0 abstains: it is left out as well,
  but may simply have no data. Since attackers can abstain, too, abstaining
  clients count as attackers if the rule needs more clients than are left, but
  only as many as necessary.

  Attributes:
    num_byzantine: The number of tolerated attackers (f), including clients
      whose values were not finite.
    num_clients: The number of clients in a round (n), or `None`.
  """

  def __init__(self, num_byzantine: int, *, num_clients: Optional[int] = None):
    """Initializes the rule.

    Args:
      num_byzantine: The number of attackers to tolerate (f).
      num_clients: The largest number of clients in a round. If given, the
        constructor checks that they are enough for `num_byzantine`; otherwise
        each round does. Rules that sort are several times as fast if they
        know it.

    Raises:
      TypeError: If an argument is no number.
      ValueError: If `num_byzantine` is negative, or too large for
        `num_clients`.
    """
    value_types.COUNT.check('num_byzantine', num_byzantine, self)
    if num_clients is not None:
      value_types.POSITIVE_INTEGER.check('num_clients', num_clients, self)
    self.num_byzantine = int(num_byzantine)
    self.num_clients = num_clients
    if num_clients is not None:
      self.check_num_clients(num_clients)

  def min_clients(self, num_byzantine: Any) -> Any:
    """Returns the number of clients needed to tolerate `num_byzantine`.

    Args:
      num_byzantine: The number of attackers, an integer or a tensor.

    Returns:
      The least number of clients, attackers included; of the same type.
    """
    return 2 * num_byzantine + 1

  def needed_clients(self, num_dropped: Any) -> Any:
    """Returns the number of clients needed when some attackers were dropped.

    Args:
      num_dropped: The number of clients that were left out as attackers, an
        integer or a tensor.

    Returns:
      The least number of other clients; of the same type.
    """
    return self.min_clients(larger(self.num_byzantine - num_dropped, 0))

  def presumed_attackers(
      self,
      num_rows: tf.Tensor,
      num_dropped: tf.Tensor,
      num_abstained: tf.Tensor,
  ) -> tf.Tensor:
    """Returns how many abstaining clients count as attackers.

    Args:
      num_rows: The number of clients that are left.
      num_dropped: The number of clients whose values were not finite.
      num_abstained: The number of clients that abstained.

    Returns:
      The smallest number for which the rule has enough clients left, or
      `num_abstained` if there is none; an int32 scalar.
    """
    presumed = tf.zeros([], tf.int32)
    for number in range(self.num_byzantine):
      is_short = num_rows < self.needed_clients(num_dropped + number)
      presumed += tf.cast(is_short, tf.int32)
    return tf.minimum(presumed, num_abstained)

  def check_num_clients(self, num_clients: int) -> None:
    """Checks that the rule tolerates `num_byzantine` of `num_clients`.

    Args:
      num_clients: The number of clients, attackers included.

    Raises:
      ValueError: If the rule needs more clients.
    """
    needed = self.min_clients(self.num_byzantine)
    if num_clients >= needed:
      return
    name = type(self).__name__
    possible = [
        f
        for f in range(self.num_byzantine)
        if self.min_clients(f) <= num_clients
    ]
    advice = f' num_byzantine of at most {possible[-1]},' if possible else ''
    raise ValueError(
        f'num_byzantine={self.num_byzantine} is too large for {name} of'
        f' {num_clients} clients; use at least {needed} clients,{advice} or'
        ' another rule.'
    )

  def initial_state(self, size: int, dtype: tf.DType) -> Any:
    """Returns the rule's state before the first round.

    Args:
      size: The number of columns, d.
      dtype: The dtype of the values.

    Returns:
      A structure of tensors; `()` for a rule without a state.
    """
    del size, dtype
    return ()

  @abc.abstractmethod
  def aggregate(
      self, values: tf.Tensor, num_dropped: tf.Tensor, state: Any
  ) -> tuple[tf.Tensor, Any]:
    """Aggregates the rows of a matrix.

    Args:
      values: The clients' values, one client in a row: finite floats of shape
        `[n, d]`. n may be unknown at tracing time.
      num_dropped: The number of clients that were left out because their values
        were not finite, an int32 scalar. They count as attackers.
      state: The state after the previous round, or `initial_state`.

    Returns:
      The aggregate, of shape `[d]`, and the new state. The aggregate of no rows
      is 0.
    """

  def aggregate_gathered(
      self, gathered: Mapping[str, tf.Tensor], state: Any
  ) -> tuple[tf.Tensor, Any]:
    """Aggregates the result of `gathering.gather`.

    Args:
      gathered: The clients' values, and the numbers of clients left out.
      state: See `aggregate`.

    Returns:
      The aggregate and the new state. If the new state is not finite, which
      would spoil all later rounds, the old state.
    """
    values, num_dropped = gathered['values'], gathered['num_dropped']
    presumed = self.presumed_attackers(
        tf.shape(values)[0], num_dropped, gathered['num_abstained']
    )
    result, new_state = self.aggregate(values, num_dropped + presumed, state)
    return result, numerics.where(
        numerics.all_finite(new_state), new_state, state
    )

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the aggregation process.

    Args:
      value_type: The type of a client's value: a float tensor or a structure of
        float tensors, with static shapes.

    Returns:
      An unweighted process: `<S@SERVER, {V}@CLIENTS> -> <state=S@SERVER,
      result=V@SERVER, measurements=<num_dropped=int32>@SERVER>`.

    Raises:
      TypeError: If `value_type` is any other type.
    """
    process = self.create_participating(value_type, tff.TensorType(np.int32))

    @tff.tensorflow.computation
    def one():
      return tf.constant(1)

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      weight = tff.federated_eval(one, tff.CLIENTS)
      return process.next(state, value, weight)

    return tff.templates.AggregationProcess(process.initialize, next_fn)

  def create_participating(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates a weighted process, whose weights say which clients take part.

    Args:
      value_type: See `create`.
      weight_type: The type of a client's weight, a number. A client with weight
        0 or less abstains; a client with weight NaN is dropped, as if its value
        were not finite. Other weights have no effect.

    Returns:
      A weighted process: `<S@SERVER, {V}@CLIENTS, {W}@CLIENTS> ->
      <state=S@SERVER, result=V@SERVER,
      measurements=<num_dropped=int32>@SERVER>`.

    Raises:
      TypeError: See `create`.
    """
    layout = vector_layout.VectorLayout(type(self).__name__, value_type)

    @tff.tensorflow.computation
    def initial_state():
      return self.initial_state(layout.size, layout.dtype)

    @tff.tensorflow.computation(layout.value_type, weight_type)
    def to_vector(value, weight):
      vector = layout.to_vector(value)
      if weight.dtype.is_floating:
        lost = tf.constant(float('nan'), vector.dtype)
        vector = tf.where(tf.math.is_nan(weight), lost, vector)
      return vector, takes_part(weight)

    @tff.tensorflow.computation(
        gathering.gathered_type(to_vector.type_signature.result[0]),
        initial_state.type_signature.result,
    )
    def aggregate(gathered, state):
      result, new_state = self.aggregate_gathered(gathered, state)
      return layout.from_vector(result), new_state

    @tff.federated_computation
    def initialize():
      return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(layout.value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      vectors = tff.federated_map(to_vector, (value, weight))
      return gathering.aggregate(vectors, aggregate, state)

    return tff.templates.AggregationProcess(initialize, next_fn)


class CheckedRule(Rule):
  """A rule that checks in each round that enough clients are left."""

  def aggregate(self, values, num_dropped, state):
    """See the base class.

    The computation raises a `tf.errors.InvalidArgumentError` if fewer clients
    are left than `needed_clients`.
    """
    num_byzantine = tf.maximum(self.num_byzantine - num_dropped, 0)
    num_clients = tf.shape(values)[0]
    needed = self.min_clients(num_byzantine)
    is_empty = tf.equal(num_clients, 0)
    is_enough = tf.debugging.Assert(
        tf.logical_or(is_empty, num_clients >= needed),
        [
            tf.strings.format(
                f'{type(self).__name__} with num_byzantine={self.num_byzantine}'
                ' has to tolerate {} attackers among the clients with finite'
                ' values, so it needs at least {} of these clients, but there'
                ' are {}. Use more clients in a round, a smaller num_byzantine,'
                ' or another rule.',
                (num_byzantine, needed, num_clients),
            )
        ],
    )
    checks = [is_enough]
    if self.num_clients is not None:
      checks.append(
          tf.debugging.Assert(
              num_clients <= self.num_clients,
              [
                  tf.strings.format(
                      f'{type(self).__name__} was made for'
                      f' num_clients={self.num_clients}, but there are {{}}'
                      ' clients in the round.',
                      num_clients,
                  )
              ],
          )
      )
    values = after_checks(values, *checks)
    return tf.cond(
        is_empty,
        lambda: (
            tf.zeros([values.shape[1]], values.dtype),
            tf.nest.map_structure(tf.identity, state),
        ),
        lambda: self.aggregate_some(values, num_byzantine, num_dropped, state),
    )

  @abc.abstractmethod
  def aggregate_some(
      self,
      values: tf.Tensor,
      num_byzantine: tf.Tensor,
      num_dropped: tf.Tensor,
      state: Any,
  ) -> tuple[tf.Tensor, Any]:
    """Aggregates at least one row, and enough rows for `num_byzantine`.

    This is `aggregate` after its checks. `num_byzantine` is the number of
    attackers to tolerate among the rows, an int32 scalar.
    """


def larger(a: Any, b: Any) -> Any:
  """Returns the larger of two numbers, of which any may be a tensor."""
  is_tensor = isinstance(a, tf.Tensor) or isinstance(b, tf.Tensor)
  return tf.maximum(a, b) if is_tensor else max(a, b)


def without_abstaining(
    counts: tf.Tensor, values: tf.Tensor, num_dropped: tf.Tensor
) -> collections.OrderedDict[str, tf.Tensor]:
  """Leaves out the rows of clients that do not take part.

  Clients with counts or values that are not finite are dropped; clients without
  a positive count abstain. Returns the same as `gathering.gather`.

  Args:
    counts: The clients' weights or counts, one client in a row: `[n, k]`.
    values: The clients' values, `[n, d]`.
    num_dropped: The number of clients that were dropped before.
  """
  is_finite = tf.reduce_all(tf.math.is_finite(counts), axis=1)
  is_finite &= tf.reduce_all(tf.math.is_finite(values), axis=1)
  is_wanted = tf.reduce_any(takes_part(counts), axis=1)
  is_kept = tf.logical_and(is_wanted, is_finite)
  kept = tf.boolean_mask(values, is_kept)
  kept.set_shape([None, values.shape[1]])
  num_lost = tf.reduce_sum(
      tf.cast(tf.logical_and(is_wanted, tf.logical_not(is_finite)), tf.int32)
  )
  return collections.OrderedDict(
      values=kept,
      num_dropped=num_dropped + num_lost,
      num_abstained=tf.reduce_sum(tf.cast(tf.logical_not(is_wanted), tf.int32)),
  )


def takes_part(weight: tf.Tensor) -> tf.Tensor:
  """Returns whether a client takes part; also true for NaN (dropped)."""
  if not weight.dtype.is_floating:
    return weight > 0
  # TensorFlow's optimizer would turn `not weight <= 0` into `weight > 0`.
  return tf.logical_or(weight > 0, tf.math.is_nan(weight))


def after_checks(
    values: tf.Tensor, *checks: Optional[tf.Operation]
) -> tf.Tensor:
  """Returns a tensor that depends on assertions (`None` in eager mode).

  Some runtimes trace without automatic control dependencies.
  """
  with tf.control_dependencies([c for c in checks if c is not None]):
    return tf.identity(values)


def check_rule(owner: object, rule: object) -> None:
  """Raises a `TypeError` if the argument `rule` of `owner` is no rule."""
  if not isinstance(rule, Rule):
    raise TypeError(
        f'{type(owner).__name__} needs a rule that aggregates a matrix, but was'
        f' given {rule!r}; use one of'
        f' {", ".join(rules.classes(rules.RULES, rules.WRAPPERS))}.'
    )
