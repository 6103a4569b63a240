"""Bucketing: a step before any robust rule.

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

_BLOCK_COLUMNS = 2**13


class Bucketing(robust_rule.CheckedRule):
  """Aggregates the means of random buckets of clients.

  The clients' values are shuffled and put into buckets of `bucket_size` values,
  the last of which may have fewer; then a rule aggregates the means of the ⌈n /
  bucket_size⌉ buckets. They differ less than the values do. But one attacker in
  a bucket is enough to make it one, so that the rule has to tolerate as many
  attackers among fewer values.

  The shuffling depends on the seed, the number of the round and the values, not
  on the clients' order: values are sorted by a random hash of their bits. Equal
  values, as attackers may send, are shuffled like any others.

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
      rule: The rule that aggregates the buckets' means. The number of attackers
        to tolerate is its `num_byzantine`.
      bucket_size: How many values make a bucket (s).
      seed: The seed of the shuffling.
      num_clients: How many clients take part in a round, if that is known.

    Raises:
      TypeError: If `rule` is no rule.
      ValueError: If `bucket_size` is not positive, or the rule can't tolerate
        so many attackers among the buckets.
    """
    robust_rule.check_rule(self, rule)
    argument_checks.check_count(self, 'bucket_size', bucket_size, 1)
    argument_checks.check_count(self, 'seed', seed, 0)
    self.rule = rule
    self.bucket_size = bucket_size
    self.seed = seed
    super().__init__(rule.num_byzantine, num_clients=num_clients)

  def needed_clients(self, num_dropped):
    """As many as make the buckets that the rule needs."""
    num_buckets = self.rule.needed_clients(num_dropped)
    return (num_buckets - 1) * self.bucket_size + 1

  def check_num_clients(self, num_clients):
    """See the base class."""
    super().check_num_clients(num_clients)
    num_buckets = -(-num_clients // self.bucket_size)
    try:
      self.rule.check_num_clients(num_buckets)
    except ValueError as error:
      raise ValueError(
          f'bucket_size={self.bucket_size} makes of {num_clients} clients'
          f' only {num_buckets} buckets, each of which counts as a client:'
          f' {error}'
      ) from error

  def initial_state(self, size, dtype):
    """The number of the round, and the rule's state."""
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
    # Positions in the order of the hashes.
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
    """For each row a random number that depends on nothing but its bits."""
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

    weights = random([size, words], 0)

    def add(i, total):
      columns = slice(i * _BLOCK_COLUMNS, (i + 1) * _BLOCK_COLUMNS)
      bits = tf.bitcast(values[:, columns], tf.int32)
      bits = tf.reshape(bits, [num_rows, -1, words])
      return i + 1, total + tf.reduce_sum(bits * weights[columns], axis=[1, 2])

    # A sum of the bits with random weights, modulo 2^32.
    hashes = tf.while_loop(
        lambda i, _: i < -(-size // _BLOCK_COLUMNS),
        add,
        (0, tf.zeros([num_rows], tf.int32)),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
        parallel_iterations=1,
    )[1]
    # The first, second, ... of equal rows get different numbers.
    is_same = tf.cast(tf.equal(hashes[:, tf.newaxis], hashes), tf.int32)
    occurrence = tf.reduce_sum(tf.linalg.band_part(is_same, -1, 0), axis=1) - 1
    return hashes + tf.gather(random([num_rows], 1), occurrence)
