"""The mean of the clients' values, the baseline of robust rules."""

from typing import Optional

from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule


class Mean(robust_rule.CheckedRule):
  """The mean of all clients' values, each with the same weight.

  `mean(x)_j = Σ_i x_ij / n`. It tolerates no attackers: a single attacker can
  move it anywhere. Only values that are not finite are left out.

  Example: the mean of the rows [1, 2], [3, 4] and [8, 0] is [4, 2].
  """

  def __init__(self, *, num_clients: Optional[int] = None):
    """Initializes the rule.

    Args:
      num_clients: The largest number of clients in a round, if known.

    Raises:
      ValueError: If `num_clients` is not positive.
    """
    super().__init__(0, num_clients=num_clients)

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_byzantine, num_dropped
    return distances.mean(values), state
