"""Bucketing, a step before a robust rule.

Reference:
  Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via
  Bucketing, ICLR 2022.
"""

import collections
from typing import Optional

import tensorflow as tf

from tff_bn.aggregators import argument_checks
from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule

# With one or two values, the median and most other rules are the mean.
_MIN_BUCKETS = 3


class Bucketing(robust_rule.CheckedRule):
  """Aggregates the means of random buckets of clients.

  The clients' values are shuffled and split into ⌈n / bucket_size⌉ buckets of
  `bucket_size` values (the last may have fewer). Then a rule aggregates the
  means of the buckets. The means differ less than the values, but one attacker
  corrupts a whole bucket, so the rule has to tolerate the same number of
  attackers among fewer values.

  The values are shuffled by sorting them by a random hash of their bits. The
  result depends on the seed, the number of the round and the values, but not on
  the clients' order. Equal values, which attackers may send, are shuffled, too.

  Example: with buckets of 2, the rows [0], [2] and [9] may become [4.5] and
  [2], of the buckets {[0], [9]} and {[2]}.
  """

  def __init__(
      self,
      rule: robust_rule.Rule,
      bucket_size: int,
      seed: int = 0,
      *,
      num_clients: Optional[int] = None,
  ):
    """Initializes the rule.

    Args:
      rule: The rule that aggregates the buckets' means, with the number of
        attackers to tolerate.
      bucket_size: The number of values in a bucket (s).
      seed: The seed of the shuffling.
      num_clients: The largest number of clients in a round, if known.

    Raises:
      TypeError: If `rule` is no rule.
      ValueError: If `bucket_size` is not positive, or the buckets are fewer
        than three or too few for the rule.
    """
    robust_rule.check_rule(self, rule)
    argument_checks.check_count(self, 'bucket_size', bucket_size, 1)
    argument_checks.check_count(self, 'seed', seed, 0)
    self.rule = rule
    self.bucket_size = bucket_size
    self.seed = seed
    super().__init__(rule.num_byzantine, num_clients=num_clients)

  def needed_clients(self, num_dropped):
    """See the base class: enough clients to fill the buckets of the rule."""
    num_buckets = self.rule.needed_clients(num_dropped)
    return (num_buckets - 1) * self.bucket_size + 1

  def check_num_clients(self, num_clients):
    """See the base class."""
    super().check_num_clients(num_clients)
    num_buckets = -(-num_clients // self.bucket_size)
    if num_buckets < _MIN_BUCKETS:
      largest = (num_clients - 1) // (_MIN_BUCKETS - 1)
      advice = f'a size of at most {largest}' if largest else 'more clients'
      raise ValueError(
          f'bucket_size={self.bucket_size} makes too few buckets of'
          f' {num_clients} clients ({num_buckets}): with fewer than'
          f' {_MIN_BUCKETS} buckets, most rules are the mean; use'
          f' {advice}.'
      )
    try:
      self.rule.check_num_clients(num_buckets)
    except ValueError as error:
      raise ValueError(
          f'bucket_size={self.bucket_size} splits {num_clients} clients into'
          f' only {num_buckets} buckets, which the rule counts as clients:'
          f' {error}'
      ) from error

  def initial_state(self, size, dtype):
    """See the base class: the number of the round and the rule's state."""
    return collections.OrderedDict(
        round_num=tf.zeros([], tf.int32),
        rule=self.rule.initial_state(size, dtype),
    )

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    del num_byzantine
    round_num = state['round_num']
    num_rows = tf.shape(values)[0]
    num_buckets = -(-num_rows // self.bucket_size)
    # The rank of each row's hash.
    position = tf.argsort(tf.argsort(self._hashes(values, round_num)))
    members = tf.one_hot(
        position // self.bucket_size, num_buckets, axis=0, dtype=tf.float64
    )
    weights = members / tf.reduce_sum(members, axis=1, keepdims=True)
    result, rule_state = self.rule.aggregate(
        distances.mix(values, weights), num_dropped, state['rule']
    )
    return result, collections.OrderedDict(
        round_num=round_num + 1, rule=rule_state
    )

  def _hashes(self, values: tf.Tensor, round_num: tf.Tensor) -> tf.Tensor:
    """Returns a random number for each row that depends only on its bits."""
    size = values.shape[1]
    num_rows = tf.shape(values)[0]
    words = values.dtype.size // 4

    def random(shape, purpose):
      seed = tf.random.experimental.stateless_fold_in(
          tf.stack([self.seed, round_num]), purpose
      )
      return tf.random.stateless_uniform(
          shape, seed, minval=None, maxval=None, dtype=tf.int32
      )

    # The sum of the bits with random weights, modulo 2^32.
    bits = tf.reshape(tf.bitcast(values, tf.int32), [num_rows, size * words])
    hashes = tf.linalg.matvec(bits, random([size * words], 0))
    # Equal rows get different numbers.
    is_same = tf.cast(tf.equal(hashes[:, tf.newaxis], hashes), tf.int32)
    occurrence = tf.reduce_sum(tf.linalg.band_part(is_same, -1, 0), axis=1) - 1
    return hashes + tf.gather(random([num_rows], 1), occurrence)
