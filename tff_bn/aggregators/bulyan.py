"""Bulyan.

Reference:
  El Mhamdi et al., The Hidden Vulnerability of Distributed Learning in
  Byzantium, ICML 2018.
"""

import tensorflow as tf

from tff_bn.aggregators import coordinate_rules
from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule


class Bulyan(robust_rule.CheckedRule):
  """The mean around the median of the clients that Krum selects.

  First, Krum selects n - 2f clients, one after another: each time, the client
  with the best score among the clients that are left. With m clients left, the
  score is the sum of the squared Euclidean distances to the m - f - 2 nearest
  of them, at least one; see `Krum`. Then each coordinate of the result is the
  mean of the n - 4f selected values nearest to their median; see `MeaMed`.
  Bulyan needs 4f + 3 clients.

  The paper does not say what the score is if m < f + 3.

  Of clients with the same score, the first is selected. With a single neighbor,
  for m ≤ f + 3, the two clients that are nearest to each other always share the
  best score. This decides the last two selected clients with f = 1, and the
  last one with f = 2, so there the result can depend on the clients' order.

  Example: with f = 1, Krum selects all of the rows [0], [1], [2], [3], [4], [5]
  and [100] but the last two. The median is 2, and the three nearest values have
  the mean [2].
  """

  def min_clients(self, num_byzantine):
    """See the base class: 4f + 3."""
    return 4 * num_byzantine + 3

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_dropped
    squared = distances.squared_distances(values)
    is_selected = _select(squared, num_byzantine)
    selected = tf.boolean_mask(values, is_selected)
    selected.set_shape([None, values.shape[1]])
    return (
        coordinate_rules.mean_around_median(
            selected, 2 * num_byzantine, self.num_clients
        ),
        state,
    )


def _select(squared: tf.Tensor, num_byzantine: tf.Tensor) -> tf.Tensor:
  """Marks the n - 2f rows that Krum selects one after another, `[n]`.

  `squared` has the squared distances, float64 of shape `[n, n]`.
  """
  num_rows = tf.shape(squared)[0]
  # Each row is first among its own neighbors.
  order = tf.argsort(
      tf.linalg.set_diag(squared, -tf.ones([num_rows], squared.dtype)),
      axis=1,
      stable=True,
  )
  ordered = tf.gather(squared, order, batch_dims=1)

  def select(k, is_left):
    num_near = tf.maximum(num_rows - k - num_byzantine - 2, 1)
    is_there = tf.gather(is_left, order)
    # The row itself has rank 1, if it is left.
    rank = tf.cumsum(tf.cast(is_there, tf.int32), axis=1)
    is_near = is_there & (rank <= num_near + 1)
    scores = tf.reduce_sum(tf.where(is_near, ordered, 0.0), axis=1)
    best = tf.argmin(
        tf.where(is_left, scores, tf.constant(float('inf'), scores.dtype))
    )
    is_other = tf.not_equal(tf.range(num_rows, dtype=tf.int64), best)
    return k + 1, is_left & is_other

  _, is_left = tf.while_loop(
      lambda k, _: k < num_rows - 2 * num_byzantine,
      select,
      (0, tf.ones([num_rows], tf.bool)),
  )
  return ~is_left
