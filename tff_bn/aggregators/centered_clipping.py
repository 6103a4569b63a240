"""Centered clipping.

Reference:
  Karimireddy et al., Learning from History for Byzantine Robust Optimization,
  ICML 2021.
"""

from typing import Optional

import tensorflow as tf

from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule
from tff_bn.catalog import rules
from tff_bn.catalog import value_types


class CenteredClipping(robust_rule.CheckedRule):
  """Moves the previous aggregate by the mean of clipped differences from it.

  With v the aggregate of the previous round (0 in the first round) and τ the
  radius, each iteration computes

    v ← v + Σ_i (x_i - v) min(1, τ / ‖x_i - v‖) / n,

  with Euclidean lengths over the whole structure. So each client moves the
  aggregate by at most τ / n.

  Example: with τ = 1, the rows [0, 0] and [3, 4] in the first round have the
  aggregate [0.3, 0.4].
  """

  def __init__(
      self,
      radius: float,
      num_iterations: int = 1,
      num_byzantine: int = 0,
      *,
      num_clients: Optional[int] = None,
  ):
    """Initializes the rule.

    Args:
      radius: The length at which differences are clipped (τ).
      num_iterations: The number of iterations in a round.
      num_byzantine: The number of attackers to tolerate (f), less than half of
        the clients. It does not change the result.
      num_clients: The largest number of clients in a round, if known.

    Raises:
      TypeError: If an argument is no number.
      ValueError: If `num_byzantine` is too large, or another argument is not
        positive.
    """
    super().__init__(num_byzantine, num_clients=num_clients)
    rules.CLIPPING_RADIUS.check(radius, self)
    value_types.POSITIVE_INTEGER.check('num_iterations', num_iterations, self)
    self.radius = radius
    self.num_iterations = num_iterations

  def initial_state(self, size, dtype):
    """See the base class: the first center, 0."""
    return tf.zeros([size], dtype)

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_byzantine, num_dropped
    center, is_accurate = state, tf.constant(True)
    for _ in range(self.num_iterations):
      center, is_step_accurate = distances.clipped_mean(
          values, center, self.radius
      )
      is_accurate &= is_step_accurate
    center = tf.cond(
        is_accurate, lambda: center, lambda: self._exact(values, state)
    )
    return center, center

  def _exact(self, values: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
    """Computes the result in float64, for squares that overflow."""
    center = tf.cast(state, tf.float64)
    num_rows = tf.cast(tf.shape(values)[0], tf.float64)
    for _ in range(self.num_iterations):
      lengths = tf.sqrt(distances.squared_lengths(values, center))
      # The maximum avoids a division by 0.
      shares = self.radius / tf.maximum(lengths, self.radius)
      center = distances.move(values, center, shares / num_rows)
    return tf.cast(center, values.dtype)
