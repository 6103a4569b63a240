"""Krum and Multi-Krum.

Reference:
  Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant
  Gradient Descent, NeurIPS 2017.
"""

from typing import Any, Optional

import tensorflow as tf

from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule
from tff_bn.catalog import value_types


class _KrumScores(robust_rule.CheckedRule):
  """The scores of both rules."""

  def min_clients(self, num_byzantine: Any) -> Any:
    """See the base class: 2f + 3."""
    return 2 * num_byzantine + 3

  def _best(self, values: tf.Tensor, num_byzantine: tf.Tensor) -> tf.Tensor:
    """Returns the rows' numbers, the lowest scores first."""
    squared = tf.sort(distances.squared_distances(values), axis=1)
    # The first column has the distances of the rows from themselves.
    num_near = tf.shape(values)[0] - num_byzantine - 2
    scores = tf.reduce_sum(squared[:, 1 : num_near + 1], axis=1)
    return tf.argsort(scores, stable=True)


class Krum(_KrumScores):
  """The value of the client that is nearest to its nearest neighbours.

  A client's score is the sum of its squared Euclidean distances, over the whole
  structure, to the n - f - 2 clients nearest to it:

    `krum(x) = x_i with i = argmin_i Σ_{j near i} ‖x_i - x_j‖²`.

  Of clients with the same score, the first is chosen. Scores of float32 values
  are rounded to about 6 digits, so clients whose scores differ by less count as
  the same. Krum needs 2f + 3 clients.

  The n - f - 2 neighbors are those of the paper. ByzFL adds up the distances to
  n - f - 1 neighbors, so it can choose another client.

  Example: with f = 0, Krum of the rows [0], [1], [3] and [9] looks at the two
  nearest neighbours of each: the scores are 10, 5, 13 and 100, the result [1].
  """

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_dropped
    return tf.gather(values, self._best(values, num_byzantine)[0]), state


class MultiKrum(_KrumScores):
  """The mean of the values of the clients with the best scores of `Krum`.

  As for `Krum`, ByzFL's scores have one neighbor more.

  Example: with f = 0 and the scores 10, 5, 13 and 100 of the example of `Krum`,
  the two best of the rows [0], [1], [3] and [9] have the mean [0.5].
  """

  def __init__(
      self,
      num_byzantine: int,
      num_selected: Optional[int] = None,
      *,
      num_clients: Optional[int] = None,
  ):
    """Initializes the rule.

    Args:
      num_byzantine: The number of attackers to tolerate (f).
      num_selected: The number of averaged values (m), at most n - f. Default:
        n - f.
      num_clients: The largest number of clients in a round, if known.

    Raises:
      TypeError: If an argument is no number.
      ValueError: If `num_byzantine` is too large, or `num_selected` is not
        positive.
    """
    if num_selected is not None:
      value_types.POSITIVE_INTEGER.check('num_selected', num_selected, self)
    self.num_selected = num_selected
    super().__init__(num_byzantine, num_clients=num_clients)

  def min_clients(self, num_byzantine: Any) -> Any:
    """See the base class: max(2f + 3, f + m)."""
    needed = super().min_clients(num_byzantine)
    if self.num_selected is None:
      return needed
    return robust_rule.larger(needed, num_byzantine + self.num_selected)

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_dropped
    num_selected = self.num_selected
    if num_selected is None:
      num_selected = tf.shape(values)[0] - num_byzantine
    best = self._best(values, num_byzantine)[:num_selected]
    # Weights of all rows, because copies of the selected rows need memory.
    is_selected = tf.tensor_scatter_nd_update(
        tf.zeros([tf.shape(values)[0]], values.dtype),
        best[:, tf.newaxis],
        tf.ones([num_selected], values.dtype),
    )
    return distances.mean_of_some(values, is_selected), state
