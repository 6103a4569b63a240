"""The mean, and rules that treat each coordinate separately."""

from typing import Optional

import tensorflow as tf

from tff_bn.aggregators import distances
from tff_bn.aggregators import order_statistics
from tff_bn.aggregators import robust_rule


class Mean(robust_rule.CheckedRule):
  """The mean of all clients' values, each with the same weight.

  `mean(x)_j = Σ_i x_ij / n`. It tolerates no attackers: a single attacker can
  move it anywhere. Only values that are not finite are left out.

  Example: the mean of the rows [1, 2], [3, 4] and [8, 0] is [4, 2].
  """

  def __init__(self, *, num_clients: Optional[int] = None):
    """Initializes the rule.

    Args:
      num_clients: The largest number of clients in a round, if known.

    Raises:
      ValueError: If `num_clients` is not positive.
    """
    super().__init__(0, num_clients=num_clients)

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_byzantine, num_dropped
    return distances.mean(values), state


class CoordinateMedian(robust_rule.CheckedRule):
  """The median of the clients' values in each coordinate.

  `median(x)_j` is the middle value of x_1j, ..., x_nj; for an even n, the mean
  of the two middle values. If less than half of the clients are attackers, it
  lies in the range of the honest clients' values.

  Example: the median of the rows [1, 2], [3, 4] and [8, 0] is [3, 2].

  Reference:
    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal
    Statistical Rates, ICML 2018.
  """

  def __init__(
      self, num_byzantine: int = 0, *, num_clients: Optional[int] = None
  ):
    """Initializes the rule.

    Args:
      num_byzantine: The number of attackers to tolerate (f), less than half of
        the clients. It does not change the result.
      num_clients: The largest number of clients in a round, if known.

    Raises:
      ValueError: If `num_byzantine` is too large.
    """
    super().__init__(num_byzantine, num_clients=num_clients)

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_byzantine, num_dropped
    ranks = order_statistics.median_ranks(tf.shape(values)[0])
    usual_ranks = None
    if self.num_clients is not None:
      usual_ranks = order_statistics.median_ranks(self.num_clients)
    return (
        order_statistics.map_ordered(
            values,
            tf.stack(ranks),
            order_statistics.median_of,
            self.num_clients,
            usual_ranks,
        ),
        state,
    )


class TrimmedMean(robust_rule.CheckedRule):
  """The mean of each coordinate without the f smallest and f largest values.

  With x_(1)j ≤ ... ≤ x_(n)j the values in ascending order,
  `trimmed_mean(x)_j = Σ_{f < k ≤ n-f} x_(k)j / (n - 2f)`. It lies in the range
  of the honest clients' values.

  Example: with f = 1, the trimmed mean of the rows [1, 2], [3, 4], [8, 0] and
  [5, 9] is [4, 3].

  Reference:
    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal
    Statistical Rates, ICML 2018.
  """

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_dropped
    num_rows = tf.shape(values)[0]
    start, stop = num_byzantine, num_rows - num_byzantine
    usual_ranks = None
    if self.num_clients is not None:
      last = self.num_clients - 1
      usual_ranks = (self.num_byzantine, last - self.num_byzantine)
    scale = order_statistics.scale_for_sums(stop - start, values.dtype)
    total = order_statistics.map_ordered(
        values,
        tf.stack([start, stop - 1]),
        lambda kept: order_statistics.scaled_sum(kept, scale),
        self.num_clients,
        usual_ranks,
    )
    return total / (scale * tf.cast(stop - start, values.dtype)), state


class MeaMed(robust_rule.CheckedRule):
  """The mean of the n - f values nearest to the median, for each coordinate.

  Of two values at the same distance from the median, the smaller one counts as
  nearer. A value that is further from the median than all honest values is
  never included.

  Example: with f = 1, the values 0, 3, 4, 5 and 100 of a coordinate have the
  median 4, and the mean (0 + 3 + 4 + 5) / 4 = 3.

  Reference:
    Xie et al., Generalized Byzantine-tolerant SGD, 2018 (arXiv:1802.10116).
  """

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_dropped
    return mean_around_median(values, num_byzantine, self.num_clients), state


def mean_around_median(
    values: tf.Tensor, num_left_out: tf.Tensor, most_rows: Optional[int] = None
) -> tf.Tensor:
  """Computes the mean of the values nearest to the median of each column.

  Of two values at the same distance from the median, the larger one is left
  out. The means are finite, of shape `[d]`.

  Args:
    values: Finite floats of shape `[n, d]`, with n ≥ 1.
    num_left_out: The number of values to leave out in each column, less than n.
    most_rows: The largest possible n, if known.
  """
  num_rows = tf.shape(values)[0]
  num_kept = num_rows - num_left_out
  scale = order_statistics.scale_for_sums(num_kept, values.dtype)
  ranks = tf.range(num_rows)
  low, high = order_statistics.median_ranks(num_rows)
  # The other ranks are always included, so they need no order. The first and
  # the last rank make `map_ordered` return all rows.
  is_needed = (
      (ranks < tf.maximum(num_left_out, 1))
      | (ranks >= tf.minimum(num_kept, num_rows - 1))
      | (ranks == low)
      | (ranks == high)
  )
  needed = tf.boolean_mask(ranks, is_needed)

  def mean_near_median(matrices):
    ordered = tf.concat(matrices, axis=0)
    median = order_statistics.median_of(matrices)

    # The nearest values have consecutive ranks. Starting from the smallest
    # values, each step replaces the smallest value by the next larger one if
    # that is nearer. A block of steps replaces different values.
    def replace(start, chosen):
      above = ordered[start : start + num_kept]
      num_above = tf.shape(above)[0]
      below = chosen[:num_above]
      is_nearer = above - median < median - below
      nearer = tf.where(is_nearer, above, below)
      return start + num_kept, tf.concat([nearer, chosen[num_above:]], axis=0)

    chosen = ordered[:num_kept]
    _, chosen = tf.while_loop(
        lambda start, _: start < num_rows, replace, (num_kept, chosen)
    )
    total = order_statistics.scaled_sum([chosen], scale)
    return total / (scale * tf.cast(num_kept, values.dtype))

  return order_statistics.map_ordered(
      values, needed, mean_near_median, most_rows
  )
