"""Geometric median.

Reference:
  Pillutla et al., Robust Aggregation for Federated Learning, IEEE Transactions
  on Signal Processing, 2022.
"""

from typing import Optional

import tensorflow as tf

from tff_bn.aggregators import argument_checks
from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule


class GeometricMedian(robust_rule.CheckedRule):
  """The point with the least sum of distances to the clients' values.

  `argmin_z Σ_i ‖x_i - z‖`, with Euclidean distances over the whole structure,
  computed by the smoothed Weiszfeld algorithm. Starting from the mean of
  central values, it iterates

    z ← Σ_i w_i x_i / Σ_i w_i with w_i = 1 / max(ν, ‖x_i - z‖).

  z is always a weighted mean of the values, and the weights depend only on the
  values' inner products, so the cost of an iteration does not depend on the
  size of the values.

  If less than half of the clients are attackers, the distance of the result
  from any point is at most 2 (n - f) / (n - 2f) times the distance of the
  furthest honest value.

  Example: the geometric median of the rows [0, 0], [1, 0], [0, 1] and [100,
  100] is about [0.5, 0.5].
  """

  def __init__(
      self,
      num_byzantine: int = 0,
      *,
      smoothing: float = 1e-6,
      tolerance: float = 1e-10,
      max_iterations: int = 1000,
      num_clients: Optional[int] = None,
  ):
    """Initializes the rule.

    Args:
      num_byzantine: The number of attackers to tolerate (f), less than half of
        the clients. It does not change the result.
      smoothing: The lower bound ν of distances, relative to the radius of a
        ball that contains more than half of the values.
      tolerance: The iteration ends when the point moves by less, relative to
        the same radius.
      max_iterations: The largest number of iterations.
      num_clients: The largest number of clients in a round, if known.

    Raises:
      ValueError: If `num_byzantine` is too large, or another argument is not
        positive.
    """
    super().__init__(num_byzantine, num_clients=num_clients)
    argument_checks.check_positive(self, 'smoothing', smoothing)
    argument_checks.check_positive(self, 'tolerance', tolerance)
    argument_checks.check_count(self, 'max_iterations', max_iterations, 1)
    self.smoothing = smoothing
    self.tolerance = tolerance
    self.max_iterations = max_iterations

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_byzantine, num_dropped
    products, center = distances.middle_products(values)
    weights = self._weights(products)
    return (
        tf.cast(distances.move(values, center, weights), values.dtype),
        state,
    )

  def _weights(self, products: tf.Tensor) -> tf.Tensor:
    """Computes the rows' weights from the products of their differences."""
    lengths = tf.linalg.diag_part(products)
    radius = tf.sort(lengths)[tf.size(lengths) // 2]
    smallest = self.smoothing**2 * radius

    def step(k, weights, _):
      moments = tf.linalg.matvec(products, weights)
      squared = lengths - 2 * moments + tf.tensordot(weights, moments, 1)
      new = tf.math.rsqrt(tf.maximum(squared, smallest))
      new /= tf.reduce_sum(new)
      change = new - weights
      moved = tf.tensordot(change, tf.linalg.matvec(products, change), 1)
      return k + 1, new, moved

    # If most values are equal (radius 0), this start is the median.
    is_near = tf.cast(lengths <= radius, products.dtype)
    return tf.while_loop(
        lambda k, _, moved: (radius > 0)
        & (k < self.max_iterations)
        & (moved > self.tolerance**2 * radius),
        step,
        (
            0,
            is_near / tf.reduce_sum(is_near),
            tf.constant(float('inf'), products.dtype),
        ),
    )[1]
