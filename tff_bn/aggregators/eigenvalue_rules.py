"""Rules that look at the directions in which the clients' values vary most."""

import math

import tensorflow as tf

from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule

# The largest number of subsets times n³, the cost of the eigenvalues of a
# matrix.
_LARGEST_COST = 10**10
# Eigenvalues that differ by less, relative to the smallest, count as equal.
_TOLERANCE = 1e-9
# The number of matrix elements whose eigenvalues are computed at a time.
_BLOCK_ELEMENTS = 2**20


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

  Reference:
    Allouah et al., Towards Trustworthy Federated Learning with Untrusted
    Participants, ICML 2025.
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
  """Returns the weights of the rows in the result, with the sum 1, `[n]`.

  For `products`, see `centered`.
  """
  num_rows = tf.shape(products)[0]
  least_sum = tf.cast(num_rows - 2 * num_byzantine, products.dtype)

  def step(weights, best, least):
    shares = weights / tf.reduce_sum(weights)
    largest, projections = main_direction(products, shares)
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


class SmallestMaximumEigenvalueAveraging(robust_rule.CheckedRule):
  """The mean of the n - f values that vary least in any direction ("SMEA").

  `Σ_{i ∈ S} x_i / (n - f)`, where S is the set of n - f clients whose empirical
  covariance matrix has the least maximum eigenvalue. Of several such sets, the
  first in lexicographic order is chosen.

  All `n! / (f! (n - f)!)` sets are compared, so SMEA is for few clients or few
  attackers: this number times n³ may be at most 10^10, which takes less than a
  minute. With 20 clients, f can be at most 9; with 100 clients, 2.

  ByzFL estimates the eigenvalues by one step of the power method from a random
  vector. Here they are computed to rounding errors, from the n inner products
  of each value with the others.

  Example: with f = 1, the rows [0], [2] and [9] have the mean [1].

  Reference:
    Allouah et al., On the Privacy-Robustness-Utility Trilemma in Distributed
    Learning, ICML 2023.
  """

  def check_num_clients(self, num_clients):
    """See the base class; the sets must not be too many, either."""
    super().check_num_clients(num_clients)

    def is_feasible(f):
      return (
          not f or math.comb(num_clients, f) * num_clients**3 <= _LARGEST_COST
      )

    if is_feasible(self.num_byzantine):
      return
    num_sets = math.comb(num_clients, self.num_byzantine)
    possible = max(filter(is_feasible, range(self.num_byzantine)))
    raise ValueError(
        f'num_byzantine={self.num_byzantine} of'
        ' SmallestMaximumEigenvalueAveraging would take too long, because it'
        f' compares {num_sets} sets of {num_clients} clients; use num_byzantine'
        f' of at most {possible}, fewer clients, or another rule.'
    )

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_dropped
    num_rows = tf.shape(values)[0]
    counts = counts_of_subsets(num_rows, num_byzantine)
    num_sets = counts[num_rows, num_byzantine]
    cost = tf.cast(num_sets, tf.float64) * tf.cast(num_rows, tf.float64) ** 3
    is_feasible = tf.debugging.Assert(
        (num_byzantine == 0) | (cost <= _LARGEST_COST),
        [
            'SmallestMaximumEigenvalueAveraging would take too long, because it'
            f' compares more than {_LARGEST_COST:.0e} / n³ sets. Use a smaller'
            ' num_byzantine, fewer clients, or another rule. Clients,'
            ' num_byzantine:',
            num_rows,
            num_byzantine,
        ],
    )
    values = robust_rule.after_checks(values, is_feasible)
    products, is_accurate = distances.medoid_products(values)
    products = tf.cond(
        is_accurate,
        lambda: products,
        lambda: distances.middle_products(values)[0],
    )
    eigenvalues = largest_eigenvalues_of_all(products, counts, num_byzantine)
    is_least = eigenvalues <= (1 + _TOLERANCE) * tf.reduce_min(eigenvalues)
    first = tf.argmax(tf.cast(is_least, tf.int32))
    included = subsets_of_ranks(counts, num_byzantine, first[tf.newaxis])[0]
    return (
        distances.mean_of_some(values, tf.cast(included, values.dtype)),
        state,
    )


def centered(products: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
  """Returns inner products of the differences from weighted means, `[m, n, n]`.

  Args:
    products: The inner products of n rows' differences from some point, float64
      of shape `[n, n]`.
    shares: For each of m means, the weights of the rows, with the sum 1; of
      shape `[m, n]`.
  """
  with_mean = tf.matmul(shares, products)
  mean_with_mean = tf.reduce_sum(shares * with_mean, axis=1)
  return (
      products
      - with_mean[:, tf.newaxis]
      - with_mean[:, :, tf.newaxis]
      + mean_with_mean[:, tf.newaxis, tf.newaxis]
  )


def largest_eigenvalues(products: tf.Tensor, is_inside: tf.Tensor) -> tf.Tensor:
  """Returns the largest eigenvalue of the scatter matrix of each subset, `[m]`.

  For `products`, see `centered`. `is_inside` marks the rows in each subset,
  `[m, n]`.
  """
  included = tf.cast(is_inside, tf.float64)
  size = tf.reduce_sum(included, axis=1, keepdims=True)
  # The Gram matrix of the differences from the subset's mean has the same
  # nonzero eigenvalues as the scatter matrix.
  gram = centered(products, included / size)
  are_both = is_inside[:, tf.newaxis] & is_inside[:, :, tf.newaxis]
  gram = tf.where(are_both, gram, tf.zeros_like(gram))
  return tf.reduce_max(tf.linalg.eigvalsh(gram), axis=1)


def largest_eigenvalues_of_all(
    products: tf.Tensor, counts: tf.Tensor, num_left_out: tf.Tensor
) -> tf.Tensor:
  """Computes `largest_eigenvalues` of all subsets of a size, in blocks.

  The subsets are in lexicographic order. See `subsets_of_ranks` for the other
  arguments.
  """
  num_rows = tf.shape(products)[0]
  num_sets = counts[num_rows, num_left_out]
  block = tf.maximum(_BLOCK_ELEMENTS // (num_rows * num_rows), 1)
  block = tf.cast(block, tf.int64)

  def compute(start, eigenvalues):
    ranks = tf.range(start, tf.minimum(start + block, num_sets))
    found = largest_eigenvalues(
        products, subsets_of_ranks(counts, num_left_out, ranks)
    )
    return start + block, tf.concat([eigenvalues, found], axis=0)

  _, eigenvalues = tf.while_loop(
      lambda start, _: start < num_sets,
      compute,
      (tf.zeros([], tf.int64), tf.zeros([0], tf.float64)),
      shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
  )
  return eigenvalues


def main_direction(
    products: tf.Tensor, shares: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Finds the direction in which rows with the weights `shares` vary most.

  Returns:
    The largest eigenvalue of the weighted covariance matrix, and for each row
    the inner product of its difference from the mean with an eigenvector of an
    unknown length, of shape `[n]`.
  """
  (gram,) = tf.unstack(centered(products, shares[tf.newaxis]))
  # This matrix has the nonzero eigenvalues of the covariance matrix. Its
  # eigenvector u gives v = Σ √share_i u_i (x_i - μ), up to the length.
  roots = tf.sqrt(shares)
  eigenvalues, vectors = tf.linalg.eigh(roots * gram * roots[:, tf.newaxis])
  return eigenvalues[-1], tf.linalg.matvec(gram, roots * vectors[:, -1])


def counts_of_subsets(n: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
  """Returns Pascal's triangle with n + 1 rows and `most` + 1 columns, int64.

  Entries greater than 2^60 are replaced by 2^60.
  """

  def add_row(row, _):
    return tf.minimum(row + tf.pad(row[:-1], [[1, 0]]), 2**60)

  first = tf.one_hot(0, most + 1, dtype=tf.int64)
  rest = tf.scan(add_row, tf.range(n), first)
  return tf.concat([first[tf.newaxis], rest], axis=0)


def subsets_of_ranks(
    counts: tf.Tensor, num_left_out: tf.Tensor, ranks: tf.Tensor
) -> tf.Tensor:
  """Marks the elements of subsets, given their ranks in lexicographic order.

  Args:
    counts: The result of `counts_of_subsets`, n + 1 rows.
    num_left_out: The number of elements that are not in a subset.
    ranks: The ranks, from 0, int64 of shape `[m]`.

  Returns:
    Booleans of shape `[m, n]`.
  """
  n = tf.shape(counts)[0] - 1

  def decide(previous, element):
    ranks, left, _ = previous
    # The subsets that contain the element come first.
    num_with = tf.gather(counts[n - 1 - element], left)
    is_in = ranks < num_with
    return (
        tf.where(is_in, ranks, ranks - num_with),
        tf.where(is_in, left, left - 1),
        is_in,
    )

  left = tf.fill(tf.shape(ranks), num_left_out)
  _, _, is_in = tf.scan(
      decide, tf.range(n), (ranks, left, tf.zeros_like(ranks, tf.bool))
  )
  return tf.transpose(is_in)
