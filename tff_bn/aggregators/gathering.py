"""Gathers all clients' values at the server, for rules that need each of them.

A mean can be computed by adding up one client after another. A median can't:
robust aggregation rules need the values of all clients at once, as the rows of
a matrix. `gather` brings them there, and a `Rule` is what aggregates them.
"""

import abc
import collections
from collections.abc import Mapping
import math
import numbers
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import numerics

# Level i holds no or 2^i rows, the last one any number.
_NUM_LEVELS = 10
_COUNT_TYPES = collections.OrderedDict(
    num_dropped=tff.TensorType(np.int32), num_abstained=tff.TensorType(np.int32)
)


def gathered_type(vector_type: tff.TensorType) -> tff.StructType:
  """The type of what `gather` returns, without its placement.

  Args:
    vector_type: The type of a client's vector, `float[d]`.

  Returns:
    `<values=float[?,d],num_dropped=int32,num_abstained=int32>`.
  """
  return tff.to_type(
      collections.OrderedDict(values=_matrix_type(vector_type), **_COUNT_TYPES)
  )


def gather(vectors: tff.Value, participates: tff.Value) -> tff.Value:
  """Gathers the clients' vectors at the server.

  To be called in a `tff.federated_computation`. With n clients, each row is
  copied about log₂ n times: the rows are kept in matrices of 1, 2, 4, ... rows,
  as the digits of a binary counter, and two matrices of the same size become
  one of the next.

  Args:
    vectors: One vector a client, `{float[d]}@CLIENTS`.
    participates: Whether the client's vector is wanted, `{bool}@CLIENTS`.

  Returns:
    `<values=float[?,d],num_dropped=int32,num_abstained=int32>@SERVER`: the
    vectors in the clients' order as rows, without those of clients that don't
    participate, and without those that are not finite, in which there is a NaN
    or an infinity; `num_dropped` is the number of the latter, `num_abstained`
    that of clients that don't participate.
  """
  zero, accumulate, merge, report = _accumulator(vectors.type_signature.member)
  return tff.federated_aggregate(
      tff.federated_zip((vectors, participates)),
      zero(),
      accumulate,
      merge,
      report,
  )


def _accumulator(
    vector_type: tff.TensorType,
) -> tuple[tff.Computation, ...]:
  """Computations for a `tff.federated_aggregate` that gathers vectors."""
  (size,) = vector_type.shape
  dtype = tf.as_dtype(vector_type.dtype)
  total_type = tff.to_type(
      collections.OrderedDict(
          levels=[_matrix_type(vector_type)] * _NUM_LEVELS, **_COUNT_TYPES
      )
  )

  @tff.tensorflow.computation
  def zero():
    return collections.OrderedDict(
        levels=[_no_rows(size, dtype) for _ in range(_NUM_LEVELS)],
        num_dropped=tf.zeros([], tf.int32),
        num_abstained=tf.zeros([], tf.int32),
    )

  @tff.tensorflow.computation(
      total_type, (vector_type, tff.TensorType(np.bool_))
  )
  def accumulate(total, value):
    vector, is_wanted = value
    is_finite = tf.reduce_all(tf.math.is_finite(vector))
    levels = tf.cond(
        tf.logical_and(is_wanted, is_finite),
        lambda: _append(total['levels'], vector[tf.newaxis]),
        lambda: [tf.identity(level) for level in total['levels']],
    )
    is_dropped = tf.logical_and(is_wanted, tf.logical_not(is_finite))
    return collections.OrderedDict(
        levels=_with_shape(levels, size),
        num_dropped=total['num_dropped'] + tf.cast(is_dropped, tf.int32),
        num_abstained=total['num_abstained']
        + tf.cast(tf.logical_not(is_wanted), tf.int32),
    )

  @tff.tensorflow.computation(total_type, total_type)
  def merge(a, b):
    rows = tf.concat([*reversed(a['levels']), *reversed(b['levels'])], axis=0)
    levels = [_no_rows(size, dtype)] * (_NUM_LEVELS - 1) + [rows]
    return collections.OrderedDict(
        levels=_with_shape(levels, size),
        num_dropped=a['num_dropped'] + b['num_dropped'],
        num_abstained=a['num_abstained'] + b['num_abstained'],
    )

  @tff.tensorflow.computation(total_type)
  def report(total):
    return collections.OrderedDict(
        values=tf.concat([*reversed(total['levels'])], axis=0),
        num_dropped=total['num_dropped'],
        num_abstained=total['num_abstained'],
    )

  return zero, accumulate, merge, report


def _matrix_type(vector_type: tff.TensorType) -> tff.TensorType:
  return tff.TensorType(vector_type.dtype, [None, *vector_type.shape])


def _no_rows(size: int, dtype: tf.DType) -> tf.Tensor:
  # TFF wants a zero of an unknown number of rows, as the later totals are.
  return tf.compat.v1.placeholder_with_default(
      tf.zeros([0, size], dtype), [None, size]
  )


def _with_shape(levels: list[tf.Tensor], size: int) -> list[tf.Tensor]:
  return [tf.ensure_shape(level, [None, size]) for level in levels]


def _append(levels: list[tf.Tensor], row: tf.Tensor) -> list[tf.Tensor]:
  """Adds a row as 1 is added to a binary number: the levels are its digits."""
  last = len(levels) - 1

  def carry_to(level):
    def branch():
      # The last level is never carried on, so what it has stays in it.
      merged = levels[: level + (level == last)]
      rows = tf.concat([*reversed(merged), row], axis=0)
      nothing = rows[:0]
      return [nothing] * level + [rows] + levels[level + 1 :]

    return branch

  is_full = tf.stack([tf.shape(level)[0] > 0 for level in levels[:last]])
  first_empty = tf.reduce_sum(tf.math.cumprod(tf.cast(is_full, tf.int32)))
  return tf.switch_case(first_empty, [carry_to(i) for i in range(last + 1)])


class Rule(tff.aggregators.UnweightedAggregationFactory, abc.ABC):
  """A way to aggregate the clients' values that needs all of them at once.

  It is an ordinary TFF aggregation factory, for any structure of floats, which
  is aggregated as one vector. It can also be applied to a matrix with
  `aggregate`.

  A client whose value is not finite is left out, and counts as one of the
  attackers that the rule tolerates. A client with weight 0 abstains: it is left
  out, too, because it may just have no data. Attackers can abstain as well. So
  if the other clients are too few for the rule, abstaining clients count as
  attackers, but no more of them than necessary.

  Attributes:
    num_byzantine: The number of attackers that are tolerated (f), among them
      clients whose values were not finite.
    num_clients: How many clients take part in a round (n), or None.
  """

  def __init__(self, num_byzantine: int, *, num_clients: Optional[int] = None):
    """Initializes the rule.

    Args:
      num_byzantine: The number of attackers to tolerate (f).
      num_clients: How many clients will take part in a round, at most. If it is
        given, it is checked at once that the rule can tolerate so many
        attackers among them; if not, in the round. Rules that sort are twice as
        fast if they know it.

    Raises:
      ValueError: If `num_byzantine` is not a number of clients, or too large.
    """
    check_count(self, 'num_byzantine', num_byzantine, 0)
    if num_clients is not None:
      check_count(self, 'num_clients', num_clients, 1)
    self.num_byzantine = int(num_byzantine)
    self.num_clients = num_clients
    if num_clients is not None:
      self.check_num_clients(num_clients)

  def min_clients(self, num_byzantine: Any) -> Any:
    """How many clients the rule needs, to tolerate so many attackers.

    Args:
      num_byzantine: The number of attackers, an integer or a tensor.

    Returns:
      The least number of clients, attackers included; of the same type.
    """
    return 2 * num_byzantine + 1

  def needed_clients(self, num_dropped: Any) -> Any:
    """How many clients the rule needs when some attackers are already known.

    Args:
      num_dropped: How many clients were left out as attackers, an integer or a
        tensor.

    Returns:
      The least number of other clients; of the same type.
    """
    maximum = tf.maximum if isinstance(num_dropped, tf.Tensor) else max
    return self.min_clients(maximum(self.num_byzantine - num_dropped, 0))

  def presumed_attackers(
      self,
      num_rows: tf.Tensor,
      num_dropped: tf.Tensor,
      num_abstained: tf.Tensor,
  ) -> tf.Tensor:
    """How many of the clients that abstain have to be taken for attackers.

    Args:
      num_rows: The number of clients that are left.
      num_dropped: The number of clients whose values were not finite.
      num_abstained: The number of clients that abstained.

    Returns:
      The smallest number with which the clients that are left are enough, or
      else `num_abstained`; an int32 scalar.
    """
    presumed = tf.zeros([], tf.int32)
    for number in range(self.num_byzantine):
      is_short = num_rows < self.needed_clients(num_dropped + number)
      presumed += tf.cast(is_short, tf.int32)
    return tf.minimum(presumed, num_abstained)

  def check_num_clients(self, num_clients: int) -> None:
    """Checks that a number of clients is enough.

    Args:
      num_clients: The number of clients, attackers included.

    Raises:
      ValueError: If the rule can't tolerate `num_byzantine` among them.
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
    advice = f' or num_byzantine of at most {possible[-1]},' if possible else ''
    raise ValueError(
        f'num_byzantine={self.num_byzantine} is too large for {name} of'
        f' {num_clients} clients: it needs at least {needed} clients'
        f' then; use as many,{advice or " or another rule."}'
        + (' or another rule.' if advice else '')
    )

  def initial_state(self, size: int, dtype: tf.DType) -> Any:
    """What the rule knows before the first round.

    Args:
      size: The number of columns, d.
      dtype: The dtype of the values.

    Returns:
      A structure of tensors; `()` for a rule that keeps nothing.
    """
    del size, dtype
    return ()

  @abc.abstractmethod
  def aggregate(
      self, values: tf.Tensor, num_dropped: tf.Tensor, state: Any
  ) -> tuple[tf.Tensor, Any]:
    """Aggregates the rows of a matrix.

    Args:
      values: What the clients sent, one in a row: finite floats of shape `[n,
        d]`. n may be unknown when a computation is traced.
      num_dropped: How many clients were left out because their values were not
        finite; an int32 scalar. Each of them counts as one of the attackers
        that are tolerated.
      state: What the rule returned in the round before, or `initial_state`.

    Returns:
      The aggregate, of shape `[d]`, and the new state. The aggregate of no rows
      is 0.
    """

  def aggregate_gathered(
      self, gathered: Mapping[str, tf.Tensor], state: Any
  ) -> tuple[tf.Tensor, Any]:
    """Aggregates what `gather` returned.

    Args:
      gathered: The clients' values, and the numbers of those left out.
      state: See `aggregate`.

    Returns:
      The aggregate and the new state. A state that is not finite would spoil
      all later rounds; the old one is kept then.
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
      value_type: The type of a client's value: a float tensor, or any structure
        of them, of known shapes.

    Returns:
      An unweighted process: `<S@SERVER, {V}@CLIENTS> -> <state=S@SERVER,
      result=V@SERVER, measurements=<num_dropped=int32>@SERVER>`.

    Raises:
      TypeError: If the value is anything else.
      ValueError: If `num_clients` is known, and too small.
    """
    return self._create(value_type, None)

  def create_participating(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates a process for clients of which some don't take part.

    Args:
      value_type: As of `create`.
      weight_type: The type of a client's weight, a number. A client with weight
        0 (or less) abstains; one with weight NaN was dropped, as if its value
        were not finite; otherwise weights make no difference.

    Returns:
      A weighted process: `<S@SERVER, {V}@CLIENTS, {W}@CLIENTS> ->
      <state=S@SERVER, result=V@SERVER,
      measurements=<num_dropped=int32>@SERVER>`.

    Raises:
      TypeError: If the value is no structure of floats.
      ValueError: If `num_clients` is known, and too small.
    """
    return self._create(value_type, weight_type)

  def _create(
      self, value_type: tff.Type, weight_type: Optional[tff.Type]
  ) -> tff.templates.AggregationProcess:
    layout = VectorLayout(type(self).__name__, value_type)

    @tff.tensorflow.computation
    def initial_state():
      return self.initial_state(layout.size, layout.dtype)

    state_type = initial_state.type_signature.result
    if weight_type is None:

      @tff.tensorflow.computation(layout.value_type)
      def to_vector(value):
        return layout.to_vector(value), True

    else:

      @tff.tensorflow.computation(layout.value_type, weight_type)
      def to_vector(value, weight):
        vector = layout.to_vector(value)
        if weight.dtype.is_floating:
          lost = tf.constant(float('nan'), vector.dtype)
          vector = tf.where(tf.math.is_nan(weight), lost, vector)
        return vector, takes_part(weight)

    vector_type = to_vector.type_signature.result[0]

    @tff.tensorflow.computation(gathered_type(vector_type), state_type)
    def aggregate(gathered, state):
      result, new_state = self.aggregate_gathered(gathered, state)
      return layout.from_vector(result), new_state

    @tff.federated_computation
    def initialize():
      return tff.federated_eval(initial_state, tff.SERVER)

    def run(state, client_value):
      vectors = tff.federated_map(to_vector, client_value)
      gathered = gather(vectors[0], vectors[1])
      result = tff.federated_map(aggregate, (gathered, state))
      return tff.templates.MeasuredProcessOutput(
          result[1],
          result[0],
          tff.federated_zip(
              collections.OrderedDict(num_dropped=gathered['num_dropped'])
          ),
      )

    state_at_server = initialize.type_signature.result
    value_at_clients = tff.FederatedType(layout.value_type, tff.CLIENTS)
    if weight_type is None:

      @tff.federated_computation(state_at_server, value_at_clients)
      def next_fn(state, value):
        return run(state, value)

    else:

      @tff.federated_computation(
          state_at_server,
          value_at_clients,
          tff.FederatedType(weight_type, tff.CLIENTS),
      )
      def next_fn(state, value, weight):
        return run(state, (value, weight))

    return tff.templates.AggregationProcess(initialize, next_fn)


class CheckedRule(Rule):
  """A rule that checks in the round that enough clients are left.

  Subclasses say how to aggregate then.
  """

  def aggregate(self, values, num_dropped, state):
    """See the base class.

    Args:
      values: The clients' values.
      num_dropped: How many clients were left out.
      state: The state.

    Returns:
      The aggregate and the new state. To compute them raises a
      `tf.errors.InvalidArgumentError` if fewer clients are left than
      `min_clients` of the attackers that are still to be tolerated.
    """
    num_byzantine = tf.maximum(self.num_byzantine - num_dropped, 0)
    num_clients = tf.shape(values)[0]
    needed = self.min_clients(num_byzantine)
    is_empty = tf.equal(num_clients, 0)
    is_enough = tf.debugging.Assert(
        tf.logical_or(is_empty, num_clients >= needed),
        [
            f'{type(self).__name__} with num_byzantine={self.num_byzantine}'
            ' has to tolerate this many attackers:',
            num_byzantine,
            'so it needs at least this many clients with finite values:',
            needed,
            'but there are:',
            num_clients,
            'Use more clients, a smaller num_byzantine, or another rule.',
        ],
    )
    checks = [is_enough]
    if self.num_clients is not None:
      checks.append(
          tf.debugging.Assert(
              num_clients <= self.num_clients,
              [
                  f'{type(self).__name__} was made for'
                  f' num_clients={self.num_clients}, but there are:',
                  num_clients,
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
    """Aggregates rows of which there is one at least, and enough.

    Args:
      values: As for `aggregate`.
      num_byzantine: How many attackers are to be tolerated among the rows: an
        int32 scalar.
      num_dropped: As for `aggregate`.
      state: As for `aggregate`.

    Returns:
      As `aggregate`.
    """


def without_abstaining(
    counts: tf.Tensor, values: tf.Tensor, num_dropped: tf.Tensor
) -> collections.OrderedDict[str, tf.Tensor]:
  """Leaves out the rows of clients that do not take part, as `gather` does.

  Args:
    counts: The clients' weights or counts, one client in a row: `[n, k]`.
    values: Their values, finite, `[n, d]`.
    num_dropped: How many clients were left out before.

  Returns:
    As `gather`: clients whose counts are not finite are dropped, those without
    a count greater than 0 abstain.
  """
  is_finite = tf.reduce_all(tf.math.is_finite(counts), axis=1)
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
  """Whether a client with this weight takes part; NaN: it was dropped."""
  if not weight.dtype.is_floating:
    return weight > 0
  # Not `not weight <= 0`, which TensorFlow's optimizer turns into `weight > 0`.
  return tf.logical_or(weight > 0, tf.math.is_nan(weight))


def after_checks(
    values: tf.Tensor, *checks: Optional[tf.Operation]
) -> tf.Tensor:
  """The values, which can't be had unless all assertions hold.

  Args:
    values: The values.
    *checks: What `tf.debugging.Assert` returned: no operation if the check is
      done at once.

  Returns:
    The values. Some runtimes trace without automatic control dependencies.
  """
  with tf.control_dependencies([c for c in checks if c is not None]):
    return tf.identity(values)


def check_count(owner: Any, name: str, value: Any, least: int) -> None:
  """Checks that an argument is an integer.

  Args:
    owner: The object whose argument it is.
    name: The argument's name.
    value: Its value.
    least: The least value allowed.

  Raises:
    ValueError: If it is not an integer, or less.
  """
  if (
      isinstance(value, bool)
      or not isinstance(value, numbers.Integral)
      or value < least
  ):
    raise ValueError(
        f'{name}={value!r} of {type(owner).__name__} must be an integer of at'
        f' least {least}.'
    )


def check_positive(owner: Any, name: str, value: Any) -> None:
  """Checks that an argument is a positive number.

  Args:
    owner: The object whose argument it is.
    name: The argument's name.
    value: Its value.

  Raises:
    ValueError: If it is not positive and finite.
  """
  if (
      isinstance(value, bool)
      or not isinstance(value, numbers.Real)
      or not 0 < value < math.inf
  ):
    raise ValueError(
        f'{name}={value!r} of {type(owner).__name__} must be a positive number.'
    )


def check_rule(owner: Any, rule: Any) -> None:
  """Checks that an argument is a rule.

  Args:
    owner: The object whose argument `rule` it is.
    rule: The argument.

  Raises:
    TypeError: If it is anything else.
  """
  if not isinstance(rule, Rule):
    raise TypeError(
        f'{type(owner).__name__} needs a rule that aggregates a matrix, but'
        f' was given {rule!r}; use one of Mean, CoordinateMedian, TrimmedMean,'
        ' GeometricMedian, Krum, MultiKrum, MeaMed, CenteredClipping,'
        ' NearestNeighborMixing, Bucketing.'
    )


class VectorLayout:
  """How a structure of floats is laid out as one vector, in its own order.

  Attributes:
    value_type: The structure's type.
    dtype: The vector's dtype: float64 if any tensor has it, else float32.
    size: The vector's number of entries.
  """

  def __init__(self, name: str, value_type: Any):
    """Lays out a structure.

    Args:
      name: Who needs it, for the error message.
      value_type: The structure's type, or what `tff.to_type` makes it of.

    Raises:
      TypeError: If it is no structure of floats of known shapes.
    """
    self.value_type = tff.to_type(value_type)
    # `tff.structure` keeps the order of dictionaries; `tf.nest` sorts keys.
    self._types = dict(_leaves(self.value_type))
    wrong = [
        f'{path or "the value"}: {leaf}'
        for path, leaf in self._types.items()
        if not isinstance(leaf, tff.TensorType)
        or not tf.as_dtype(leaf.dtype).is_floating
        or None in leaf.shape
    ]
    if wrong:
      raise TypeError(
          f'{name} aggregates structures of floats of known shapes, but was'
          f' given {"; ".join(wrong)}.'
      )
    self._sizes = [math.prod(leaf.shape) for leaf in self._types.values()]
    self.size = sum(self._sizes)
    dtypes = {tf.as_dtype(leaf.dtype) for leaf in self._types.values()}
    self.dtype = tf.float64 if tf.float64 in dtypes else tf.float32

  def to_vector(self, value: Any) -> tf.Tensor:
    """Makes one vector of a structure."""
    tensors = [value]
    if isinstance(self.value_type, tff.StructType):
      tensors = tff.structure.flatten(
          tff.structure.from_container(value, recursive=True)
      )
    parts = [tf.reshape(tf.cast(t, self.dtype), [-1]) for t in tensors]
    return tf.ensure_shape(
        tf.concat([tf.zeros([0], self.dtype), *parts], axis=0), [self.size]
    )

  def from_vector(self, vector: tf.Tensor) -> Any:
    """Gives the parts of a vector their places, shapes and dtypes."""
    parts = iter(tf.split(vector, self._sizes) if self._sizes else [])
    return tff.types.structure_from_tensor_type_tree(
        lambda t: tf.cast(tf.reshape(next(parts), t.shape), t.dtype),
        self.value_type,
    )


def _leaves(value_type: tff.Type, path: str = '') -> list[tuple[str, tff.Type]]:
  """The paths and types of all that is no structure."""
  if not isinstance(value_type, tff.StructType):
    return [(path, value_type)]
  found = []
  for i, (name, element) in enumerate(tff.structure.iter_elements(value_type)):
    step = str(i) if name is None else name
    found += _leaves(element, f'{path}/{step}' if path else step)
  return found
