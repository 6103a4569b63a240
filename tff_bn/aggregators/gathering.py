"""Collects the vectors of all clients at the server, as a matrix."""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

# Level i holds 0 or 2^i rows, the last level any number.
_NUM_LEVELS = 10
_COUNT_TYPES = collections.OrderedDict(
    num_dropped=tff.TensorType(np.int32), num_abstained=tff.TensorType(np.int32)
)


def gathered_type(vector_type: tff.TensorType) -> tff.StructType:
  """Returns the type of the result of `gather` for vectors of a type."""
  return tff.to_type(
      collections.OrderedDict(values=_matrix_type(vector_type), **_COUNT_TYPES)
  )


def gather(vectors: tff.Value, participates: tff.Value) -> tff.Value:
  """Gathers the clients' vectors at the server.

  To be called in a `tff.federated_computation`. The rows are kept in matrices
  of 1, 2, 4, ... rows, like the digits of a binary counter: two matrices of the
  same size are merged. So with n clients, each row is copied about log₂ n
  times.

  Args:
    vectors: One vector per client, `{float[d]}@CLIENTS`.
    participates: Whether to include the client's vector, `{bool}@CLIENTS`.

  Returns:
    `<values=float[?,d],num_dropped=int32,num_abstained=int32>@SERVER`. The rows
    of `values` are the finite vectors of the participating clients, in the
    clients' order. `num_dropped` is the number of participating clients with a
    NaN or an infinity, `num_abstained` the number of other clients.
  """
  zero, accumulate, merge, report = _accumulator(vectors.type_signature.member)
  return tff.federated_aggregate(
      tff.federated_zip((vectors, participates)),
      zero(),
      accumulate,
      merge,
      report,
  )


def aggregate(
    vectors: tff.Value, rule: tff.Computation, state: tff.Value
) -> tff.templates.MeasuredProcessOutput:
  """Gathers the clients' vectors and aggregates them at the server.

  To be called in a `tff.federated_computation`. The measurement is
  `num_dropped`.

  Args:
    vectors: A vector per client, and whether to include it,
      `{<float[d],bool>}@CLIENTS`.
    rule: Computes the result and the new state from the result of `gather` and
      the state.
    state: The rule's state, at the server.
  """
  gathered = gather(vectors[0], vectors[1])
  result = tff.federated_map(rule, (gathered, state))
  return tff.templates.MeasuredProcessOutput(
      result[1],
      result[0],
      tff.federated_zip(
          collections.OrderedDict(num_dropped=gathered['num_dropped'])
      ),
  )


def _accumulator(
    vector_type: tff.TensorType,
) -> tuple[tff.Computation, ...]:
  """Returns the arguments of a `tff.federated_aggregate` over vectors."""
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
  # TFF needs a zero with an unknown number of rows, like the later totals.
  return tf.compat.v1.placeholder_with_default(
      tf.zeros([0, size], dtype), [None, size]
  )


def _with_shape(levels: list[tf.Tensor], size: int) -> list[tf.Tensor]:
  return [tf.ensure_shape(level, [None, size]) for level in levels]


def _append(levels: list[tf.Tensor], row: tf.Tensor) -> list[tf.Tensor]:
  """Adds a row, like adding 1 to a binary number whose digits are levels."""
  last = len(levels) - 1

  def carry_to(level):
    def branch():
      # The last level keeps its rows; there is no level to carry them to.
      merged = levels[: level + (level == last)]
      rows = tf.concat([*reversed(merged), row], axis=0)
      nothing = rows[:0]
      return [nothing] * level + [rows] + levels[level + 1 :]

    return branch

  is_full = tf.stack([tf.shape(level)[0] > 0 for level in levels[:last]])
  first_empty = tf.reduce_sum(tf.math.cumprod(tf.cast(is_full, tf.int32)))
  return tf.switch_case(first_empty, [carry_to(i) for i in range(last + 1)])
