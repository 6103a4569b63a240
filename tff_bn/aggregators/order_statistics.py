"""Order statistics over the rows of a matrix, for each column by itself.

TensorFlow sorts one row after another, in a loop over single numbers. A sorting
network does the same to all columns at once: it is a fixed sequence of
comparators, each of which exchanges two rows where they are out of order, with
one minimum and one maximum of whole rows. This is ten times faster, and uses
only operations that any TensorFlow runtime has.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Optional

import tensorflow as tf

# If there can be so many rows at most, each comparator gets operations of its
# own in the graph, which is twice as fast as a loop over them. The graph of
# more would take seconds to build.
_MOST_UNROLLED_ROWS = 128
# Columns are processed in blocks whose rows are so large: large enough to hide
# what a TensorFlow operation costs, small enough for the processor's cache.
_ROW_BYTES = 3 * 2**17
_UNROLLED_ROW_BYTES = 2**17
# Comparators in one iteration of the loop, which may run at the same time.
_UNROLL = 4


def map_ordered(
    values: tf.Tensor,
    groups: tf.Tensor,
    statistic: Callable[[tf.TensorArray], tf.Tensor],
    most_rows: Optional[int] = None,
) -> tf.Tensor:
  """Computes a statistic of the values in each column, in ascending order.

  Args:
    values: Floats of shape `[n, d]`, with n ≥ 1; no NaN.
    groups: For each rank, the number of its group, int32 of shape `[n]`. The
      values whose ranks are in one group may come in any order; so the fewer
      groups there are, the less has to be done.
    statistic: A function from n rows, of which row k has the values of rank k
      of some of the columns, to one row.
    most_rows: How large n can be, if that is known. It need not be given where
      n is known when the computation is traced.

  Returns:
    The statistic's rows for all columns, `[d]`.
  """
  size = values.shape[1]
  most_rows = values.shape[0] if values.shape[0] is not None else most_rows
  if most_rows is not None and most_rows <= _MOST_UNROLLED_ROWS:
    row_bytes = _UNROLLED_ROW_BYTES
    order = functools.partial(_order_unrolled, most_rows=most_rows)
  else:
    row_bytes = _ROW_BYTES
    order = functools.partial(_order, comparators=_comparators(groups))
  block = row_bytes // values.dtype.size
  num_blocks = max(-(-size // block), 1)
  if num_blocks == 1:
    return tf.ensure_shape(statistic(order(values)), [size])

  def body(i, results):
    columns = values[:, i * block : (i + 1) * block]
    return i + 1, results.write(i, statistic(order(columns)))

  _, results = tf.while_loop(
      lambda i, _: i < num_blocks,
      body,
      (
          0,
          tf.TensorArray(
              values.dtype,
              size=num_blocks,
              infer_shape=False,
              element_shape=[None],
          ),
      ),
      # One after another: the cache is for one block.
      parallel_iterations=1,
  )
  return tf.ensure_shape(results.concat(), [size])


def sum_of_ranks(
    rows: tf.TensorArray, start: tf.Tensor, stop: tf.Tensor, scale: tf.Tensor
) -> tf.Tensor:
  """Adds up rows, each multiplied by a scale.

  Args:
    rows: The rows in ascending order.
    start: The first rank.
    stop: The rank after the last one, greater than `start`.
    scale: A scalar.

  Returns:
    The sum.
  """
  return tf.while_loop(
      lambda k, _: k < stop,
      lambda k, total: (k + 1, total + scale * rows.read(k)),
      (start + 1, scale * rows.read(start)),
  )[1]


def scale_for_sums(count: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """A scale with which finite rows can be added up without overflow.

  Args:
    count: How many rows are added up, an int32 scalar.
    dtype: The rows' dtype.

  Returns:
    A power of 2, by which numbers are multiplied without loss of digits, of at
    most 1 / count.
  """
  powers = tf.bitwise.left_shift(1, tf.range(30))
  # The first power that is at least `count`.
  exponent = tf.reduce_sum(tf.cast(powers < count, tf.int32))
  return 1 / tf.cast(tf.bitwise.left_shift(1, exponent), dtype)


def median_of(rows: tf.TensorArray) -> tf.Tensor:
  """The median, of rows in ascending order."""
  low, high = median_ranks(rows.size())
  # Halves can be added without overflow.
  return rows.read(low) / 2 + rows.read(high) / 2


def median_ranks(num_rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """The two ranks, perhaps the same one, whose mean is the median."""
  return (num_rows - 1) // 2, num_rows // 2


def _order(values: tf.Tensor, comparators: tf.Tensor) -> tf.TensorArray:
  """Sends the rows through comparators."""
  rows = tf.TensorArray(
      values.dtype,
      size=tf.shape(values)[0],
      element_shape=values.shape[1:],
      clear_after_read=False,
  ).unstack(values)

  def body(k, rows):
    positions = tf.unstack(
        tf.reshape(comparators[k : k + _UNROLL], [2 * _UNROLL])
    )
    ordered = []
    for low, high in zip(positions[::2], positions[1::2]):
      a, b = rows.read(low), rows.read(high)
      ordered += [(low, tf.minimum(a, b)), (high, tf.maximum(a, b))]
    for position, row in ordered:
      rows = rows.write(position, row)
    return k + _UNROLL, rows

  return tf.while_loop(
      lambda k, _: k < tf.shape(comparators)[0], body, (0, rows)
  )[1]


def _order_unrolled(values: tf.Tensor, most_rows: int) -> tf.TensorArray:
  """Sorts the rows; those that are missing from `most_rows` would be last."""
  num_rows = tf.shape(values)[0]
  missing = most_rows - num_rows
  rows = values
  if values.shape[0] is None:
    rows = tf.pad(values, [[0, missing], [0, 0]], constant_values=float('inf'))
  rows = tf.unstack(rows, num=most_rows)
  for low, high in _all_comparators(most_rows):
    a, b = rows[low], rows[high]
    rows[low], rows[high] = tf.minimum(a, b), tf.maximum(a, b)
  return tf.TensorArray(
      values.dtype,
      size=num_rows,
      element_shape=values.shape[1:],
      clear_after_read=False,
  ).unstack(tf.stack(rows)[:num_rows])


@functools.cache
def _all_comparators(num_rows: int) -> Sequence[tuple[int, int]]:
  """The comparators that sort a known number of rows, see `_comparators`."""
  largest = 1
  while 2 * largest < num_rows:
    largest *= 2
  comparators = []
  p = largest
  while p:
    q, remainder, distance = largest, 0, p
    while True:
      comparators += [
          (low, low + distance)
          for low in range(num_rows - distance)
          if low & p == remainder
      ]
      if q == p:
        break
      q, remainder, distance = q // 2, p, q - p
    p //= 2
  return comparators


def _comparators(groups: tf.Tensor) -> tf.Tensor:
  """Batcher's merge exchange, without what is not needed for the groups.

  The network has (log₂ n)(log₂ n + 1) / 2 layers. In each, the comparators have
  no row in common, so they can be applied at the same time.

  Going through them from the last to the first, we know for each row in which
  group it will end. A comparator whose two rows end in the same group can be
  left out. Before one that is needed, its two rows may come in any order: they
  are a group of their own.

  Reference:
    Knuth, The Art of Computer Programming, volume 3, algorithm 5.2.2M.

  Args:
    groups: The group of each rank, int32 of shape `[n]`.

  Returns:
    Pairs of row numbers, the first one for the smaller value: int32 of shape
    `[?, 2]`. Those of each layer are a multiple of `_UNROLL`.
  """
  num_rows = tf.size(groups)
  powers = tf.bitwise.left_shift(1, tf.range(30))
  # The largest power of 2 that is less than the number of rows.
  largest = tf.reduce_max(tf.where(powers < num_rows, powers, 1))

  # Knuth's algorithm backwards. He goes on from p to p / 2; for each p, from
  # the layer with the distance d = p and the remainder r = 0, to those with
  # r = p and d = q - p for q from the largest power of 2 down to 2p. The former
  # is here q = p.
  def layer(p, q, groups, comparators):
    is_first = tf.equal(q, p)
    distance = tf.where(is_first, p, q - p)
    remainder = tf.where(is_first, 0, p)
    low = tf.range(tf.maximum(num_rows - distance, 0))
    low = tf.boolean_mask(
        low, tf.equal(tf.bitwise.bitwise_and(low, p), remainder)
    )
    low = tf.boolean_mask(
        low,
        tf.not_equal(tf.gather(groups, low), tf.gather(groups, low + distance)),
    )
    num_needed = tf.size(low)
    new_groups = tf.reduce_max(groups) + 1 + tf.range(num_needed)
    groups = tf.tensor_scatter_nd_update(
        groups,
        tf.concat([low, low + distance], axis=0)[:, tf.newaxis],
        tf.concat([new_groups, new_groups], axis=0),
    )
    # A comparator may be applied twice.
    num_padded = -(-num_needed // _UNROLL) * _UNROLL
    low = tf.gather(low, tf.minimum(tf.range(num_padded), num_needed - 1))
    return (
        tf.where(is_first, 2 * p, p),
        tf.where(
            is_first,
            tf.minimum(4 * p, largest),
            tf.where(tf.equal(q, largest), p, 2 * q),
        ),
        groups,
        tf.concat(
            [tf.stack([low, low + distance], axis=1), comparators], axis=0
        ),
    )

  return tf.while_loop(
      lambda p, *_: p <= largest,
      layer,
      (
          tf.constant(1),
          tf.minimum(2, largest),
          groups,
          tf.zeros([0, 2], tf.int32),
      ),
      shape_invariants=(
          tf.TensorShape([]),
          tf.TensorShape([]),
          tf.TensorShape([None]),
          tf.TensorShape([None, 2]),
      ),
  )[-1]
