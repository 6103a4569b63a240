"""The covariance bound-agnostic filter.

Reference:
  Allouah et al., Towards Trustworthy Federated Learning with Untrusted
  Participants, ICML 2025.
"""

import tensorflow as tf

from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule
from tff_bn.aggregators import scatter


class CovarianceBoundAgnosticFilter(robust_rule.CheckedRule):
  """A mean that leaves out clients by the direction of most variance ("CAF").

  Starting from the weights c_i = 1, each step computes the weighted mean μ and
  the weighted covariance matrix of the values, its largest eigenvalue λ, and an
  eigenvector v of λ. Then it reduces the weights:

    c_i ← c_i (1 - τ_i / max_{j: c_j > 0} τ_j) with τ_i = ⟨x_i - μ, v⟩².

  The steps end when the weights add up to at most n - 2f, after at most 2f
  steps, since each step makes a weight 0. The result is the μ with the least λ;
  for f = 0, the mean.

  ByzFL estimates v by one step of the power method from a random vector, so its
  results are random, unless the values differ in one direction only. Here, v is
  computed to rounding errors, from the inner products of the values. In ByzFL
  the greatest τ_j may belong to a client with weight 0. That shortens the
  steps: an attacker that is 1000 times as far away as the others causes about a
  million of them.

  Example: with f = 1, the rows [0], [2] and [10] have the means 4 (λ = 18.7)
  and 1.1 (λ = 1), so the result is about [1.1].
  """

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_dropped
    products, is_accurate = distances.medoid_products(values)
    result = tf.cond(
        is_accurate,
        lambda: distances.mix(
            values, _weights(products, num_byzantine)[tf.newaxis]
        )[0],
        lambda: _exact(values, num_byzantine),
    )
    return result, state


def _exact(values: tf.Tensor, num_byzantine: tf.Tensor) -> tf.Tensor:
  """Computes the result in float64."""
  products, center = distances.middle_products(values)
  weights = _weights(products, num_byzantine)
  return tf.cast(distances.move(values, center, weights), values.dtype)


def _weights(products: tf.Tensor, num_byzantine: tf.Tensor) -> tf.Tensor:
  """Computes the weights of the rows in the result.

  Args:
    products: The inner products of the rows' differences from some point,
      float64 of shape `[n, n]`.
    num_byzantine: The number of attackers to tolerate, an int32 scalar.

  Returns:
    Weights with the sum 1, float64 of shape `[n]`.
  """
  num_rows = tf.shape(products)[0]
  least_sum = tf.cast(num_rows - 2 * num_byzantine, products.dtype)

  def step(weights, best, least):
    shares = weights / tf.reduce_sum(weights)
    largest, projections = scatter.main_direction(products, shares)
    projections = tf.where(weights > 0, tf.abs(projections), 0.0)
    most = tf.reduce_max(projections)
    relative = tf.math.divide_no_nan(projections, most)
    # Equal values have no direction of most variance.
    reduced = tf.where(
        most > 0, weights * (1 - tf.square(relative)), tf.zeros_like(weights)
    )
    is_better = largest < least
    return (
        reduced,
        tf.where(is_better, shares, best),
        tf.where(is_better, largest, least),
    )

  ones = tf.ones([num_rows], products.dtype)
  infinity = tf.constant(float('inf'), products.dtype)
  _, best, _ = tf.while_loop(
      lambda weights, *_: tf.reduce_sum(weights) > least_sum,
      step,
      (ones, ones / tf.reduce_sum(ones), infinity),
      maximum_iterations=tf.maximum(2 * num_byzantine, 1),
  )
  return best
