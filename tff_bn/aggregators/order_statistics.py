"""Order statistics of each column of a matrix, by sorting networks.

A sorting network is a fixed sequence of comparators. Each comparator orders two
sets of rows in all columns at once, by one minimum and one maximum. This is
several times as fast as `tf.sort` or `tf.math.top_k`, which sort one column
after another. In processes with Python, NumPy sorts many rows, and those whose
number is unknown when the graph is built.
"""

import bisect
from collections.abc import Callable, Sequence
import functools
import itertools
from typing import NamedTuple, Optional

import tensorflow as tf

from tff_bn.common import aligned_arrays
from tff_bn.common import numpy_sort

# For more rows, building a graph with comparators of single rows would take
# many seconds.
_MOST_SINGLE_ROWS = 200
# In processes with Python, NumPy sorts more rows in less time.
_MOST_ROWS_WITHOUT_NUMPY = 64
# The largest number of runs of rows that the first comparators order. More runs
# need more operations. Fewer runs are too large for the processor's cache.
_MOST_FIRST_RUNS = 32
# The size of a comparator's operands: large enough to hide the overhead of
# TensorFlow operations, small enough for the processor's cache.
_OPERAND_BYTES = 2**16
# The number of blocks of columns that are sorted at the same time.
_PARALLEL_BLOCKS = 2
# If the number of rows is unknown, a loop runs over the comparators.
_LOOP_ROW_BYTES = 3 * 2**17
# The number of comparators in one iteration of that loop; they run in parallel.
_UNROLL = 4


class _Network(NamedTuple):
  """A sorting network whose comparators order runs of rows.

  Attributes:
    num_rows: The number of rows.
    levels: The number of rows in a run, and pairs of runs, in order. The first
      run of a pair gets the smaller values. Each run has half as many rows as
      those of the level before; the last ones are single rows.
  """

  num_rows: int
  levels: list[tuple[int, list[tuple[int, int]]]]


def map_ordered(
    values: tf.Tensor,
    ranks: tf.Tensor,
    statistic: Callable[[Sequence[tf.Tensor]], tf.Tensor],
    most_rows: Optional[int] = None,
    usual_ranks: Optional[Sequence[int]] = None,
) -> tf.Tensor:
  """Computes a statistic of the partitioned values of each column.

  Args:
    values: Floats of shape `[n, d]`, with n ≥ 1; no NaN.
    ranks: The ranks whose values the statistic needs, in ascending order, int32
      of shape `[r]`. Fewer ranks can need less work, in particular if r is
      static.
    statistic: Maps a block of columns to one row. It gets the rows of the ranks
      from `ranks[0]` to `ranks[-1]`, in one matrix, or in a matrix for each
      row. The row of each of `ranks` has the values of this rank, the rows
      above it have no larger values, and the rows below it no smaller ones.
    most_rows: The largest possible n. Default: unknown, unless n is static.
    usual_ranks: What `ranks` usually are if n = `most_rows`. Then fewer
      comparators can be enough.

  Returns:
    The statistic of all columns, `[d]`.
  """
  most_rows = values.shape[0] if values.shape[0] is not None else most_rows
  num_rows = tf.shape(values)[0]

  def map_with(order, row_bytes):
    """`order` returns the rows of given ranks, as one or more matrices."""

    def map_block(block):
      if most_rows is not None and most_rows <= _MOST_ROWS_WITHOUT_NUMPY:
        return statistic(order(block, ranks))
      return statistic(
          [
              numpy_sort.sorted_rows(
                  lambda block, ranks: tf.concat(order(block, ranks), axis=0),
                  block,
                  ranks,
              )
          ]
      )

    return _map_blocks(values, map_block, row_bytes)

  def within_ranks(ordered, ranks):
    return [ordered[ranks[0] : ranks[-1] + 1]]

  if most_rows is None:
    return map_with(
        lambda block, ranks: within_ranks(
            _order(block, _comparators(_groups(ranks, tf.shape(block)[0]))),
            ranks,
        ),
        _LOOP_ROW_BYTES,
    )
  if most_rows > _MOST_SINGLE_ROWS:
    return map_with(
        lambda block, ranks: within_ranks(
            _order_in_two_levels(block, ranks, most_rows), ranks
        ),
        _OPERAND_BYTES >> (_num_bits(most_rows) // 2),
    )
  network = _network(most_rows)
  has_runs = len(network.levels) > 1
  row_bytes = _OPERAND_BYTES // 2 if has_runs else _OPERAND_BYTES

  def map_any_ranks():
    return map_with(
        lambda block, ranks: within_ranks(
            tf.concat(_order_runs(block, network), 0), ranks
        ),
        row_bytes,
    )

  if usual_ranks is None:
    return map_any_ranks()
  usual_network = _needed(network, usual_ranks)
  usual_rows = slice(usual_ranks[0], usual_ranks[-1] + 1)
  return tf.cond(
      tf.equal(num_rows, most_rows)
      & tf.reduce_all(tf.equal(ranks, usual_ranks)),
      # TensorFlow leaves out the operations whose results are not used.
      lambda: map_with(
          lambda block, _: _order_runs(block, usual_network)[usual_rows],
          row_bytes,
      ),
      map_any_ranks,
  )


def _map_blocks(
    values: tf.Tensor,
    function: Callable[[tf.Tensor], tf.Tensor],
    row_bytes: int,
) -> tf.Tensor:
  """Maps blocks of columns, with rows of about `row_bytes`, to one row."""
  size = values.shape[1]
  num_blocks = max(-(-size * values.dtype.size // row_bytes), 1)
  if num_blocks == 1:
    return tf.ensure_shape(function(values), [size])
  num_blocks = _PARALLEL_BLOCKS * -(-num_blocks // _PARALLEL_BLOCKS)
  # Blocks of about the same size share the processor's cores evenly. TensorFlow
  # copies a part of a tensor unless a tensor could begin there.
  alignment = aligned_arrays.ALIGNMENT // values.dtype.size
  num_parts = -(-size // (num_blocks * alignment))
  # With an odd number, the values of a column spread over the whole cache.
  block = (num_parts | 1) * alignment
  num_blocks = -(-size // block)

  def body(i, results):
    columns = values[:, i * block : (i + 1) * block]
    return i + 1, results.write(i, function(columns))

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
      # The processor's cache has room for few blocks.
      parallel_iterations=_PARALLEL_BLOCKS,
  )
  return tf.ensure_shape(results.concat(), [size])


def scaled_sum(matrices: Sequence[tf.Tensor], scale: tf.Tensor) -> tf.Tensor:
  """Returns the sum of rows, each multiplied by the scalar `scale`.

  Args:
    matrices: One matrix, or several matrices of one row each.
    scale: The factor.
  """
  if len(matrices) > 1:
    return tf.add_n([row * scale for row in matrices])[0]
  weights = tf.fill([tf.shape(matrices[0])[0]], scale)
  return tf.linalg.matvec(matrices[0], weights, transpose_a=True)


def scale_for_sums(count: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Returns a scale with which `count` rows can be summed without overflow.

  It is the largest power of 2 that is at most 1 / count, because scaling by a
  power of 2 does not round.
  """
  powers = tf.bitwise.left_shift(1, tf.range(30))
  # The smallest power that is at least `count`.
  exponent = tf.reduce_sum(tf.cast(powers < count, tf.int32))
  return 1 / tf.cast(tf.bitwise.left_shift(1, exponent), dtype)


def median_of(matrices: Sequence[tf.Tensor]) -> tf.Tensor:
  """Returns the median of each column, given rows in ascending order."""
  ordered = tf.concat(matrices, axis=0)
  low, high = median_ranks(tf.shape(ordered)[0])
  # The sum of halves does not overflow.
  return tf.gather(ordered, low) / 2 + tf.gather(ordered, high) / 2


def median_ranks(num_rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the two ranks, possibly equal, whose mean is the median."""
  return (num_rows - 1) // 2, num_rows // 2


def _order(values: tf.Tensor, comparators: tf.Tensor) -> tf.Tensor:
  """Sorts the rows by the given comparators."""
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
  )[1].stack()


def _order_runs(values: tf.Tensor, network: _Network) -> list[tf.Tensor]:
  """Returns the rows, ordered by a network, as matrices of one row each.

  The rows include the infinite rows that the network needs in addition.
  """
  runs = [_padded(values, network.num_rows)]
  for num_rows, comparators in network.levels:
    # Parts of a tensor along its first axis are not copied.
    runs = [
        part for run in runs for part in tf.split(run, run.shape[0] // num_rows)
    ]
    _compare(runs, comparators)
  return runs


def _order_in_two_levels(
    values: tf.Tensor, ranks: tf.Tensor, most_rows: int
) -> tf.Tensor:
  """Sorts the rows by comparators that order two matrices of rows each.

  The rows, padded to 2^(b + c), are numbered by b low and c high bits. They are
  held as 2^c matrices, one for each value of the high bits, with a row for each
  value of the low bits; or the other way round. Batcher's network sorts the
  rows of each value of the high bits. Then c stages merge pairs of sorted sets
  by bitonic mergers: first their comparators of different high bits, then those
  of different low bits.

  After the comparators of different high bits of the last stage, each matrix
  has the right rows in any order. If the number of ranks is static, only the
  matrices of these ranks are sorted.

  Reference:
    Batcher, Sorting networks and their applications, AFIPS 1968.
  """
  num_bits = _num_bits(most_rows)
  num_stages = num_bits // 2
  num_low, num_high = 2 ** (num_bits - num_stages), 2**num_stages
  # Before the first comparator, a row may have any number.
  high = tf.split(_padded(values, num_low * num_high), num_high)
  are_negated = [0] * num_high
  for stage in range(num_stages + 1):
    # The second set of a pair must be in descending order when the next stage
    # merges the pair, so its negated rows are sorted.
    become_negated = [k >> stage & 1 for k in range(num_high)]
    high = [
        x if before == after else -x
        for x, before, after in zip(high, are_negated, become_negated)
    ]
    are_negated = become_negated
    _compare(high, _half_cleaners(num_high, 2**stage))
    if stage == num_stages and ranks.shape[0] is not None:
      # The matrix of the last row may have some of the infinite rows.
      sorted_ranks = tf.concat([ranks, [tf.shape(values)[0] - 1]], axis=0)
      ordered = _with_sorted_matrices(tf.stack(high), sorted_ranks // num_low)
      break
    columns = tf.stack(high, axis=1)
    if stage:
      low = _sorted_bitonic(columns)
    else:
      low = tf.unstack(columns)
      _compare(low, _merge_exchange(num_low))
    ordered = tf.stack(low, axis=1)
    high = tf.unstack(ordered)
  ordered = tf.reshape(ordered, [num_low * num_high, tf.shape(values)[1]])
  return ordered[: tf.shape(values)[0]]


def _with_sorted_matrices(
    matrices: tf.Tensor, positions: tf.Tensor
) -> tf.Tensor:
  """Sorts the rows of some of the matrices, `[k, m, d]`, which are bitonic."""
  bitonic = tf.transpose(tf.gather(matrices, positions), [1, 0, 2])
  return tf.tensor_scatter_nd_update(
      matrices,
      positions[:, tf.newaxis],
      tf.stack(_sorted_bitonic(bitonic), axis=1),
  )


def _sorted_bitonic(tensor: tf.Tensor) -> list[tf.Tensor]:
  """Sorts a tensor with 2^k entries (k > 0) along its first, bitonic axis."""
  size = tensor.shape[0]
  a, b = tf.unstack(tensor) if size == 2 else tf.split(tensor, 2)
  low, high = tf.minimum(a, b), tf.maximum(a, b)
  if size == 2:
    return [low, high]
  return _sorted_bitonic(low) + _sorted_bitonic(high)


def _num_bits(num_rows: int) -> int:
  """Returns the number of bits of the largest row number."""
  return (num_rows - 1).bit_length()


def _padded(values: tf.Tensor, num_rows: int) -> tf.Tensor:
  """Appends infinite rows up to a number of rows."""
  missing = num_rows - tf.shape(values)[0]
  padded = tf.cond(
      missing > 0,
      lambda: tf.concat(
          [
              values,
              tf.fill(
                  [missing, tf.shape(values)[1]],
                  tf.constant(float('inf'), values.dtype),
              ),
          ],
          axis=0,
      ),
      # Without a copy.
      lambda: values,
  )
  return tf.ensure_shape(padded, [num_rows, values.shape[1]])


def _compare(
    tensors: list[tf.Tensor], comparators: Sequence[tuple[int, int]]
) -> None:
  """Applies comparators to tensors of the same shape, in place."""
  for low, high in comparators:
    a, b = tensors[low], tensors[high]
    tensors[low], tensors[high] = tf.minimum(a, b), tf.maximum(a, b)


def _half_cleaners(num_tensors: int, size: int) -> list[tuple[int, int]]:
  """Returns the comparators that sort bitonic sets of `size` tensors each."""
  comparators = []
  distance = size // 2
  while distance:
    comparators += [
        (k, k + distance) for k in range(num_tensors) if not k & distance
    ]
    distance //= 2
  return comparators


@functools.cache
def _network(num_rows: int) -> _Network:
  """Returns the network of `_comparators` for a static number of rows.

  While Knuth's p is at least 2^k, the algorithm treats rows m 2^k, ...,
  (m + 1) 2^k - 1 alike, for each m. So a comparator can order two runs of 2^k
  rows. This takes fewer operations than comparators of single rows.

  Args:
    num_rows: The smallest number of rows. The network has up to 2^k - 1 more.
  """
  run = 1
  while num_rows > run * _MOST_FIRST_RUNS:
    run *= 2
  num_runs = -(-num_rows // run)
  levels = [(run, _merge_exchange(num_runs))]
  while run > 1:
    run, num_runs = run // 2, 2 * num_runs
    levels.append((run, _merge_exchange(num_runs, 1)))
  return _Network(num_runs, levels)


def _merge_exchange(
    num_rows: int, first_p: Optional[int] = None
) -> list[tuple[int, int]]:
  """Returns all comparators of Knuth's algorithm; see `_comparators`.

  Args:
    num_rows: The number of rows, or of runs of rows.
    first_p: The first value of Knuth's p. Default: the largest one, with which
      the comparators sort.
  """
  largest = 1
  while 2 * largest < num_rows:
    largest *= 2
  comparators = []
  p = first_p or largest
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


def _needed(network: _Network, ranks: Sequence[int]) -> _Network:
  """Returns the comparators that ranks need; see `_comparators`."""
  groups = [
      bisect.bisect_left(ranks, rank) + bisect.bisect_right(ranks, rank)
      for rank in range(network.num_rows)
  ]
  new_groups = itertools.count(max(groups) + 1)
  levels = []
  for run, comparators in reversed(network.levels):
    needed = []
    for low, high in reversed(comparators):
      pairs = [(run * low + k, run * high + k) for k in range(run)]
      if any(groups[a] != groups[b] for a, b in pairs):
        needed.append((low, high))
        for a, b in pairs:
          groups[a] = groups[b] = next(new_groups)
    levels.append((run, needed[::-1]))
  return _Network(network.num_rows, levels[::-1])


def _groups(ranks: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
  """Returns the group of each rank, int32 of shape `[n]`.

  Each of `ranks`, which are ascending, is a group. The ranks between two of
  them are in the same group, because their order does not matter.
  """
  all_ranks = tf.range(num_rows)
  return tf.searchsorted(ranks, all_ranks, side='left') + tf.searchsorted(
      ranks, all_ranks, side='right'
  )


def _comparators(groups: tf.Tensor) -> tf.Tensor:
  """Returns the comparators of Batcher's merge exchange that `groups` need.

  The network has (log₂ n)(log₂ n + 1) / 2 layers. The comparators of a layer
  have no row in common, so they can run in parallel.

  From the last layer to the first, the function tracks the group in which each
  row will end. A comparator whose rows end in the same group is not needed.
  Before a needed comparator, the order of its two rows does not matter, so they
  form a new group.

  Reference:
    Knuth, The Art of Computer Programming, volume 3, algorithm 5.2.2M.

  Args:
    groups: The group of each rank, int32 of shape `[n]`.

  Returns:
    Pairs of row numbers, the first for the smaller value: int32 of shape
    `[?, 2]`. Each layer is padded to a multiple of `_UNROLL` pairs.
  """
  num_rows = tf.size(groups)
  powers = tf.bitwise.left_shift(1, tf.range(30))
  # The largest power of 2 that is less than the number of rows.
  largest = tf.reduce_max(tf.where(powers < num_rows, powers, 1))

  # Knuth's algorithm backwards. In his order, p is halved after each stage. A
  # stage begins with the layer of distance d = p and remainder r = 0 (here
  # q = p). Then come the layers with r = p and d = q - p, for q from the
  # largest power of 2 down to 2p.
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
    # Pads by repeating the last comparator, which changes nothing.
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
