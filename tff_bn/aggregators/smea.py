"""Smallest maximum eigenvalue averaging.

Reference:
  Allouah et al., On the Privacy-Robustness-Utility Trilemma in Distributed
  Learning, ICML 2023.
"""

import math

import tensorflow as tf

from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule
from tff_bn.aggregators import scatter
from tff_bn.aggregators import subsets

# The largest number of subsets times n³, the cost of the eigenvalues of a
# matrix.
_LARGEST_COST = 10**10
# Eigenvalues that differ by less, relative to the smallest, count as equal.
_TOLERANCE = 1e-9


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
    counts = subsets.counts_of_subsets(num_rows, num_byzantine)
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
    eigenvalues = scatter.largest_eigenvalues_of_all(
        products, counts, num_byzantine
    )
    is_least = eigenvalues <= (1 + _TOLERANCE) * tf.reduce_min(eigenvalues)
    first = tf.argmax(tf.cast(is_least, tf.int32))
    included = subsets.subsets_of_ranks(
        counts, num_byzantine, first[tf.newaxis]
    )[0]
    return (
        distances.mean_of_some(values, tf.cast(included, values.dtype)),
        state,
    )
