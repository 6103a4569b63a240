"""Nearest neighbor mixing, a step before a robust rule.

Reference:
  Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under
  Heterogeneity, AISTATS 2023.
"""

from typing import Optional

import tensorflow as tf

from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule


class NearestNeighborMixing(robust_rule.CheckedRule):
  """Replaces each value by the mean of its n - f nearest values ("NNM").

  `y_i = Σ_{j near i} x_j / (n - f)`, with x_i itself among the nearest, and
  Euclidean distances over the whole structure. Then a rule aggregates the y_i.
  Mixing makes honest clients more similar, which helps the rule if their data
  differ. Of values at the same distance, the first is chosen. Distances of
  float32 values are rounded to about 6 digits.

  Example: with f = 1, the rows [0], [2] and [9] become [1], [1] and [5.5].
  """

  def __init__(
      self,
      rule: robust_rule.Rule,
      num_byzantine: int,
      *,
      num_clients: Optional[int] = None,
  ):
    """Initializes the rule.

    Args:
      rule: The rule that aggregates the mixed values.
      num_byzantine: The number of attackers to tolerate (f).
      num_clients: The largest number of clients in a round, if known.

    Raises:
      TypeError: If `rule` is no rule.
      ValueError: If `num_byzantine` is too large, here or for the rule.
    """
    robust_rule.check_rule(self, rule)
    self.rule = rule
    super().__init__(num_byzantine, num_clients=num_clients)

  def needed_clients(self, num_dropped):
    """See the base class: enough for this step and for the rule."""
    own = super().needed_clients(num_dropped)
    inner = self.rule.needed_clients(num_dropped)
    if isinstance(num_dropped, tf.Tensor):
      return tf.maximum(own, inner)
    return max(own, inner)

  def check_num_clients(self, num_clients):
    """See the base class."""
    super().check_num_clients(num_clients)
    self.rule.check_num_clients(num_clients)

  def initial_state(self, size, dtype):
    """See the base class."""
    return self.rule.initial_state(size, dtype)

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    num_near = tf.shape(values)[0] - num_byzantine
    is_near = distances.nearest(distances.squared_distances(values), num_near)
    weights = tf.cast(is_near, tf.float64) / tf.cast(num_near, tf.float64)
    return self.rule.aggregate(
        distances.mix(values, weights), num_dropped, state
    )
