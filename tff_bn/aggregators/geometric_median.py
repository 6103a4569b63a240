"""Geometric median.

Reference:
  Pillutla et al., Robust Aggregation for Federated Learning, IEEE Transactions
  on Signal Processing, 2022.
"""

from typing import Optional

import tensorflow as tf

from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule
from tff_bn.catalog import value_types

# If a value's squared distance from the result is below this share of the
# values' squared radius, the result is computed in float64.
_MIN_SHARE = 1 / 16


class GeometricMedian(robust_rule.CheckedRule):
  """The point with the least sum of distances to the clients' values.

  `argmin_z Σ_i ‖x_i - z‖`, with Euclidean distances over the whole structure,
  computed by the smoothed Weiszfeld algorithm. Starting from the mean of
  central values, it iterates

    z ← Σ_i w_i x_i / Σ_i w_i with w_i = 1 / max(ν, ‖x_i - z‖).

  z is always a weighted mean of the values, and the weights depend only on the
  values' inner products, so the cost of an iteration does not depend on the
  size of the values. The products of float32 values are computed in float32,
  unless too many digits would cancel.

  It iterates until z hardly moves. ByzFL's result differs: it makes three
  iterations from 0, with ν = 0.1.

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
      TypeError: If an argument is no number.
      ValueError: If `num_byzantine` is too large, or another argument is not
        positive.
    """
    super().__init__(num_byzantine, num_clients=num_clients)
    value_types.POSITIVE.check('smoothing', smoothing, self)
    value_types.POSITIVE.check('tolerance', tolerance, self)
    value_types.POSITIVE_INTEGER.check('max_iterations', max_iterations, self)
    self.smoothing = smoothing
    self.tolerance = tolerance
    self.max_iterations = max_iterations

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_byzantine, num_dropped
    products, is_accurate = distances.medoid_products(values)
    weights, least, radius = self._weights(products)
    return (
        tf.cond(
            # Near one of the values, the digits of its distance cancel.
            is_accurate & (least > _MIN_SHARE * radius),
            lambda: distances.mix(values, weights[tf.newaxis])[0],
            lambda: self._exact(values),
        ),
        state,
    )

  def _exact(self, values: tf.Tensor) -> tf.Tensor:
    """Computes the result in float64."""
    products, center = distances.middle_products(values)
    weights, *_ = self._weights(products)
    return tf.cast(distances.move(values, center, weights), values.dtype)

  def _weights(
      self, products: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Computes the rows' weights from the products of their differences.

    The differences are those from a central row. Returns the weights, the least
    squared distance of a row from the result, and the squared radius of a ball
    around the central row that contains more than half of the rows.
    """
    lengths = tf.linalg.diag_part(products)
    radius = tf.sort(lengths)[tf.size(lengths) // 2]
    smallest = self.smoothing**2 * radius

    def squared_distances(weights, moments):
      return lengths - 2 * moments + tf.reduce_sum(weights * moments)

    def step(k, weights, moments, _):
      squared = squared_distances(weights, moments)
      new = tf.math.rsqrt(tf.maximum(squared, smallest))
      new /= tf.reduce_sum(new)
      new_moments = tf.linalg.matvec(products, new)
      moved = tf.reduce_sum((new - weights) * (new_moments - moments))
      return k + 1, new, new_moments, moved

    # If most values are equal (radius 0), this start is the median. Rounding
    # must not decide which of several equal values are near.
    is_near = tf.cast(lengths <= 1.001 * radius, products.dtype)
    start = is_near / tf.reduce_sum(is_near)
    _, weights, moments, _ = tf.while_loop(
        lambda k, _, __, moved: (radius > 0)
        & (k < self.max_iterations)
        & (moved > self.tolerance**2 * radius),
        step,
        (
            0,
            start,
            tf.linalg.matvec(products, start),
            tf.constant(float('inf'), products.dtype),
        ),
    )
    least = tf.reduce_min(squared_distances(weights, moments))
    return weights, least, radius
