"""Coordinate-wise median.

Reference:
  Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical
  Rates, ICML 2018.
"""

from typing import Optional

import tensorflow as tf

from tff_bn.aggregators import order_statistics
from tff_bn.aggregators import robust_rule


class CoordinateMedian(robust_rule.CheckedRule):
  """The median of the clients' values, in each coordinate by itself.

  `median(x)_j` is the value in the middle of x_1j, ..., x_nj; for an even n,
  the mean of the two in the middle. As long as less than half of the clients
  are attackers, it is in the range of the honest clients' values.

  Example: the median of the rows [1, 2], [3, 4] and [8, 0] is [3, 2].
  """

  def __init__(
      self, num_byzantine: int = 0, *, num_clients: Optional[int] = None
  ):
    """Initializes the rule.

    Args:
      num_byzantine: The number of attackers to tolerate (f). The median does
        not depend on it; it is only checked that it is less than half.
      num_clients: How many clients take part in a round, if that is known.

    Raises:
      ValueError: If so many attackers can't be tolerated.
    """
    super().__init__(num_byzantine, num_clients=num_clients)

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_byzantine, num_dropped
    num_rows = tf.shape(values)[0]
    ranks = tf.range(num_rows)
    low, high = order_statistics.median_ranks(num_rows)
    # One below the median, its own, and one above it.
    groups = tf.where(
        ranks < low, num_rows, tf.where(ranks > high, num_rows + 1, ranks)
    )
    return (
        order_statistics.map_ordered(
            values, groups, order_statistics.median_of, self.num_clients
        ),
        state,
    )
