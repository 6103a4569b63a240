"""Nearest-neighbor averaging, the rule of MoNNA.

Reference:
  Farhadkhani et al., Robust Collaborative Learning with Linear Gradient
  Overhead, ICML 2023.
"""

from typing import Optional

import tensorflow as tf

from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule
from tff_bn.catalog import rules


class NearestNeighborAveraging(robust_rule.CheckedRule):
  """The mean of the n - f values nearest to a trusted client's ("MoNNA").

  `Σ_{j near t} x_j / (n - f)`, with the trusted client's value x_t itself among
  the nearest, and Euclidean distances over the whole structure. Of values at
  the same distance, the first is chosen. MoNNA is this rule applied to
  momentums.

  In the paper there is no server: each client aggregates what it receives and
  trusts only its own value. A server has to know a client that it can trust, by
  its position in the round. If an attacker has this position, the rule has no
  defence. Clients that abstain or whose values are not finite have no position,
  so attackers that drop out move the positions of the clients between them.
  Only the first (0) and the last position (-1) are safe from that, as long as
  the trusted client itself takes part. `Attacked` makes the first clients
  attackers, so there -1 is the position to trust.

  Example: with f = 1 and t = 0, the rows [0], [2] and [9] have the mean [1].
  """

  def __init__(
      self,
      num_byzantine: int,
      trusted_client: int = 0,
      *,
      num_clients: Optional[int] = None,
  ):
    """Initializes the rule.

    Args:
      num_byzantine: The number of attackers to tolerate (f).
      trusted_client: The position of the trusted client among the clients of
        the round (t), from 0; negative positions count from the end.
      num_clients: The largest number of clients in a round, if known.

    Raises:
      TypeError: If an argument is no number.
      ValueError: If `num_byzantine` is too large, or `trusted_client` is no
        position among `num_clients`.
    """
    rules.TRUSTED_CLIENT.check(trusted_client, self)
    self.trusted_client = int(trusted_client)
    super().__init__(num_byzantine, num_clients=num_clients)

  def check_num_clients(self, num_clients):
    """See the base class."""
    super().check_num_clients(num_clients)
    if not -num_clients <= self.trusted_client < num_clients:
      raise ValueError(
          f'trusted_client={self.trusted_client} of NearestNeighborAveraging is'
          f' not among {num_clients} clients; use {-num_clients} to'
          f' {num_clients - 1}.'
      )

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_dropped
    num_rows = tf.shape(values)[0]
    is_present = tf.debugging.Assert(
        (self.trusted_client < num_rows) & (-self.trusted_client <= num_rows),
        [
            f'trusted_client={self.trusted_client} of NearestNeighborAveraging'
            ' is not among the clients with finite values, of which there are:',
            num_rows,
        ],
    )
    values = robust_rule.after_checks(values, is_present)
    position = tf.math.floormod(self.trusted_client, num_rows)
    squared = distances.squared_distances_from_row(values, position)
    # Of rows equal to the trusted one, the trusted one comes first.
    squared -= tf.one_hot(position, num_rows, dtype=squared.dtype)
    is_near = distances.nearest(squared[tf.newaxis], num_rows - num_byzantine)
    included = tf.cast(is_near[0], values.dtype)
    return distances.mean_of_some(values, included), state
