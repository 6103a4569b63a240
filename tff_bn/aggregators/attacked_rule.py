"""A rule that simulates attacks by some of its clients."""

import collections
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from tff_bn.aggregators import attacks
from tff_bn.aggregators import robust_rule
from tff_bn.catalog import rules


class Attacked(robust_rule.Rule):
  """Replaces some clients' values by an attack, then applies a rule.

  This is for simulations. The first clients of the round are the attackers.
  Clients that don't take part, or whose own values are not finite, are neither
  attackers nor honest.

  Attributes:
    rule: The rule.
    attack: The attack.
    num_attackers: The number of attackers.
  """

  def __init__(
      self,
      rule: robust_rule.Rule,
      attack: attacks.Attack,
      num_attackers: int,
      *,
      num_clients: Optional[int] = None,
  ):
    """Initializes the rule.

    Args:
      rule: The rule that aggregates the values of clients and attackers. It may
        tolerate fewer attackers than there are.
      attack: The attack.
      num_attackers: The number of attackers, at least 1.
      num_clients: The number of clients in a round, attackers included.
        Default: the rule's.

    Raises:
      TypeError: If `rule` is no rule, `attack` no attack, or `num_attackers` no
        number.
      ValueError: If `num_attackers` is less than 1, or if there is no honest
        client.
    """
    robust_rule.check_rule(self, rule)
    attacks.check_attack(self, attack)
    rules.NUM_ATTACKERS.check(num_attackers, self)
    self.rule = rule
    self.attack = attack
    self.num_attackers = int(num_attackers)
    if num_clients is None:
      num_clients = rule.num_clients
    super().__init__(rule.num_byzantine, num_clients=num_clients)

  def min_clients(self, num_byzantine):
    """See the base class."""
    return self.rule.min_clients(num_byzantine)

  def needed_clients(self, num_dropped):
    """See the base class."""
    return self.rule.needed_clients(num_dropped)

  def check_num_clients(self, num_clients):
    """See the base class."""
    if num_clients <= self.num_attackers:
      raise ValueError(
          f'num_attackers={self.num_attackers} leaves none of {num_clients}'
          f' clients honest; use at most {num_clients - 1}.'
      )
    self.rule.check_num_clients(num_clients)

  def initial_state(self, size, dtype):
    """See the base class: the number of the round and the rule's state."""
    return collections.OrderedDict(
        round_num=tf.zeros([], tf.int32),
        rule=self.rule.initial_state(size, dtype),
    )

  def aggregate(self, values, num_dropped, state):
    """See the base class; `values` are the values before the attack."""
    sent = self.corrupt(
        values,
        state['round_num'],
        num_dropped=num_dropped,
        rule_state=state['rule'],
    )
    # Clients with weight 0 were left out before.
    weights = tf.ones([tf.shape(values)[0], 1], values.dtype)
    weights = self.corrupt_counts(weights)
    result, rule_state = self.rule.aggregate_gathered(
        robust_rule.without_abstaining(weights, sent, num_dropped),
        state['rule'],
    )
    return result, collections.OrderedDict(
        round_num=state['round_num'] + 1, rule=rule_state
    )

  def corrupt_counts(self, counts: tf.Tensor) -> tf.Tensor:
    """Replaces the counts or weights of the attackers.

    Args:
      counts: The clients' counts of values for each layer, or their weights,
        one client in a row: floats of shape `[n, k]`.

    Returns:
      The counts or weights that the server receives, `[n, k]`.
    """
    if self.attack.count is None:
      return counts
    is_attacker = tf.range(tf.shape(counts)[0]) < self.num_attackers
    return tf.where(
        is_attacker[:, tf.newaxis],
        tf.constant(self.attack.count, counts.dtype),
        counts,
    )

  def corrupt(
      self,
      values: tf.Tensor,
      round_num: tf.Tensor,
      is_mean: Optional[np.ndarray] = None,
      num_dropped: tf.types.experimental.TensorLike = 0,
      rule_state: Any = None,
  ) -> tf.Tensor:
    """Replaces the values of the attackers.

    Args:
      values: The clients' values before the attack, one client in a row: finite
        floats of shape `[n, d]`.
      round_num: The number of the round, an int32 scalar.
      is_mean: See `Attack.values`.
      num_dropped: The number of clients that were left out because their values
        were not finite, an int32 scalar.
      rule_state: The rule's state before the round. Default: before the first.

    Returns:
      The values that the server receives: floats of shape `[n, d]`, finite
      unless the attack sends others. Without an honest client, `values` if
      clients were dropped. Otherwise the computation raises a
      `tf.errors.InvalidArgumentError`.
    """
    num_clients = tf.shape(values)[0]
    is_attacked = num_clients > self.num_attackers
    has_honest = tf.debugging.Assert(
        is_attacked | tf.equal(num_clients, 0) | (num_dropped > 0),
        [
            f'With num_attackers={self.num_attackers} there must be an honest'
            ' client with finite values, but the number of clients, attackers'
            ' included, is only:',
            num_clients,
        ],
    )
    values = robust_rule.after_checks(values, has_honest)
    if rule_state is None:
      rule_state = self.rule.initial_state(values.shape[1], values.dtype)

    def attacked():
      honest = values[self.num_attackers :]

      def defense(received):
        return self.rule.aggregate(received, num_dropped, rule_state)[0]

      sent = self.attack.values(
          honest, self.num_attackers, round_num, is_mean, defense
      )
      if self.attack.stays_finite:
        sent = attacks.finite(sent)
      return tf.concat([sent, honest], axis=0)

    sent = tf.cond(is_attacked, attacked, lambda: values)
    return tf.ensure_shape(sent, values.shape)
