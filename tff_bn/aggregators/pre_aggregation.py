"""Steps before a rule: they change the values that the rule aggregates."""

import abc
import collections
from typing import Optional

import tensorflow as tf

from tff_bn.aggregators import distances
from tff_bn.aggregators import robust_rule
from tff_bn.catalog import rules
from tff_bn.catalog import value_types

# With one or two values, the median and most other rules are the mean.
_MIN_BUCKETS = 3


class PreAggregation(robust_rule.CheckedRule, abc.ABC):
  """Changes the clients' values, then applies a rule to them.

  Attributes:
    rule: The rule.
  """

  def __init__(
      self,
      rule: robust_rule.Rule,
      num_byzantine: int,
      *,
      num_clients: Optional[int] = None,
  ):
    """Initializes the step.

    Args:
      rule: The rule that aggregates the changed values.
      num_byzantine: The number of attackers to tolerate (f).
      num_clients: The largest number of clients in a round, if known.

    Raises:
      TypeError: If `rule` is no rule.
      ValueError: If `num_byzantine` is too large, here or for the rule.
    """
    robust_rule.check_rule(self, rule)
    self.rule = rule
    super().__init__(num_byzantine, num_clients=num_clients)

  @abc.abstractmethod
  def change(self, values: tf.Tensor, num_byzantine: tf.Tensor) -> tf.Tensor:
    """Changes the clients' values.

    Args:
      values: One client in a row: finite floats of shape `[n, d]`, n ≥ 1.
      num_byzantine: The number of attackers to tolerate among the rows, an
        int32 scalar.

    Returns:
      The new values, finite, of the same shape and dtype.
    """

  def needed_clients(self, num_dropped):
    """See the base class: enough for this step and for the rule."""
    own = super().needed_clients(num_dropped)
    return robust_rule.larger(own, self.rule.needed_clients(num_dropped))

  def check_num_clients(self, num_clients):
    """See the base class."""
    super().check_num_clients(num_clients)
    self.rule.check_num_clients(num_clients)

  def initial_state(self, size, dtype):
    """See the base class."""
    return self.rule.initial_state(size, dtype)

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    """See the base class."""
    changed = self.change(values, num_byzantine)
    return self.rule.aggregate(changed, num_dropped, state)


class NearestNeighborMixing(PreAggregation):
  """Replaces each value by the mean of its n - f nearest values ("NNM").

  `y_i = Σ_{j near i} x_j / (n - f)`, with x_i itself among the nearest, and
  Euclidean distances over the whole structure. Then a rule aggregates the y_i.
  Mixing makes honest clients more similar, which helps the rule if their data
  differ. Of values at the same distance, the first is chosen. Distances of
  float32 values are rounded to about 6 digits.

  Example: with f = 1, the rows [0], [2] and [9] become [1], [1] and [5.5].

  Reference:
    Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under
    Heterogeneity, AISTATS 2023.
  """

  def change(self, values, num_byzantine):
    """See the base class."""
    num_near = tf.shape(values)[0] - num_byzantine
    is_near = distances.nearest(distances.squared_distances(values), num_near)
    weights = tf.cast(is_near, tf.float64) / tf.cast(num_near, tf.float64)
    return distances.mix(values, weights)


class StaticClipping(PreAggregation):
  """Scales each value down to a length.

  `y_i = x_i min(1, C / ‖x_i‖)`, with Euclidean lengths over the whole structure
  and the largest length C. Then a rule aggregates the y_i. Clipping alone
  tolerates no attackers.

  Example: with C = 1, the rows [0, 0.5] and [3, 4] become [0, 0.5] and [0.6,
  0.8].

  Reference:
    Allouah et al., Adaptive Gradient Clipping for Robust Federated Learning,
    ICLR 2025 (arXiv:2405.14432).
  """

  def __init__(
      self,
      rule: robust_rule.Rule,
      max_norm: float,
      *,
      num_clients: Optional[int] = None,
  ):
    """Initializes the step.

    Args:
      rule: The rule that aggregates the clipped values, with the number of
        attackers to tolerate.
      max_norm: The length to which longer values are scaled down (C).
      num_clients: The largest number of clients in a round, if known.

    Raises:
      TypeError: If `rule` is no rule, or `max_norm` no number.
      ValueError: If `max_norm` is not positive, or the clients are too few
        for the rule.
    """
    robust_rule.check_rule(self, rule)
    rules.CLIPPING_NORM.check(max_norm, self)
    self.max_norm = float(max_norm)
    super().__init__(rule, rule.num_byzantine, num_clients=num_clients)

  def min_clients(self, num_byzantine):
    """See the base class: the rule's."""
    return self.rule.min_clients(num_byzantine)

  def change(self, values, num_byzantine):
    """See the base class."""
    del num_byzantine
    length = tf.constant(self.max_norm, tf.float64)
    return _clip(values, distances.lengths(values), length)


class AdaptiveRobustClipping(PreAggregation):
  """Scales the longest values down to the length of the next one ("ARC").

  Of n values, the `k = ⌊2 f (n - f) / n⌋` longest are scaled down to the length
  of the (k + 1)-th longest, with Euclidean lengths over the whole structure.
  Then a rule aggregates all values. Unlike a fixed length, this keeps the
  robustness of the rule.

  Example: with f = 1, k = 1 of the rows [1, 0], [0, 2] and [3, 4] is scaled
  down: they become [1, 0], [0, 2] and [1.2, 1.6].

  Reference:
    Allouah et al., Adaptive Gradient Clipping for Robust Federated Learning,
    ICLR 2025 (arXiv:2405.14432).
  """

  def change(self, values, num_byzantine):
    """See the base class."""
    lengths = distances.lengths(values)
    num_rows = tf.shape(values)[0]
    num_clipped = 2 * num_byzantine * (num_rows - num_byzantine) // num_rows
    descending = tf.sort(lengths, direction='DESCENDING')
    return _clip(values, lengths, descending[num_clipped])


def _clip(
    values: tf.Tensor, lengths: tf.Tensor, max_norm: tf.Tensor
) -> tf.Tensor:
  """Scales rows down to a largest length, given their lengths."""
  factors = tf.where(lengths > max_norm, max_norm / lengths, 1.0)
  return distances.scale_rows(values, factors)


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

  Reference:
    Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via
    Bucketing, ICLR 2022.
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
      TypeError: If `rule` is no rule, or another argument no number.
      ValueError: If `bucket_size` is not positive, or the buckets are fewer
        than three or too few for the rule.
    """
    robust_rule.check_rule(self, rule)
    rules.BUCKET_SIZE.check(bucket_size, self)
    value_types.SEED.check('seed', seed, self)
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
