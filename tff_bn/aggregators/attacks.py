"""Attacks on what clients send: models, statistics, or any other vectors.

The attackers are omniscient, as in the cited papers: they see what all honest
clients send in the round and collude. An `Attack` computes the attackers'
vectors; `Attacked` applies it before an aggregation rule.
"""

import abc
from collections.abc import Callable
import math
import numbers
from typing import Optional

import numpy as np
import tensorflow as tf

from tff_bn.aggregators import robust_rule
from tff_bn.catalog import rules
from tff_bn.catalog import value_types

# A rule: maps the clients' vectors, one client in a row, the attackers first,
# to the aggregate.
Defense = Callable[[tf.Tensor], tf.Tensor]


class Attack(abc.ABC):
  """Computes the vectors that attackers send.

  Attributes:
    count: The weight that the attackers send; with batch normalization
      statistics, also the number of values of each layer. `None`: the true
      weight and numbers.
    stays_finite: Whether infinities and NaN are replaced by the greatest finite
      numbers before they are sent, since rules drop clients that send them.
  """

  count: Optional[float] = None
  stays_finite: bool = True

  @abc.abstractmethod
  def values(
      self,
      honest: tf.Tensor,
      num_attackers: int,
      round_num: tf.Tensor,
      is_mean: Optional[np.ndarray] = None,
      defense: Optional[Defense] = None,
  ) -> tf.Tensor:
    """Computes the attackers' vectors of a round.

    The result does not depend on the order of the honest clients.

    Args:
      honest: The honest clients' vectors, one client in a row: floats of shape
        `[h, d]` with h ≥ 1. `h` may be unknown at tracing time.
      num_attackers: The number of attackers.
      round_num: The number of the round, an int32 scalar.
      is_mean: For batch normalization statistics, a bool for each column: true
        for a mean, false for a variance; shape `[d]`. `None` for other values.
      defense: The rule that aggregates the vectors of this round, for attacks
        that try it out.

    Returns:
      The attackers' vectors, `[num_attackers, d]` of the dtype of `honest`.
    """


class _SharedVector(Attack):
  """An attack in which all attackers send the same vector."""

  def values(
      self, honest, num_attackers, round_num, is_mean=None, defense=None
  ):
    """See the base class."""
    del round_num, defense
    vector = self._vector(honest, num_attackers, is_mean)
    return tf.repeat(vector[tf.newaxis], num_attackers, axis=0)

  @abc.abstractmethod
  def _vector(
      self,
      honest: tf.Tensor,
      num_attackers: int,
      is_mean: Optional[np.ndarray],
  ) -> tf.Tensor:
    """Computes the vector, of shape `[d]`; see `values`."""


class SignFlipping(_SharedVector):
  """Sends the opposite of the honest mean ("SF").

  With `H` the honest clients, each attacker sends `-mean(H)`. For batch
  normalization statistics, only the sign of the means is flipped, because a
  negative variance would give the attackers away (Guerraoui et al. 2024,
  section 5).

  Example: for the honest rows [1, 2] and [3, 6], attackers send [-2, -4]; they
  send [-2, 4] if the second column is a variance.

  Reference:
    Allen-Zhu et al., Byzantine-Resilient Non-Convex Stochastic Gradient
    Descent, ICLR 2021.
  """

  def _vector(self, honest, num_attackers, is_mean):
    mean = tf.math.reduce_mean(honest, axis=0)
    flipped = -mean
    if is_mean is not None:
      flipped = tf.where(is_mean, flipped, mean)
    return flipped


class FallOfEmpires(_SharedVector):
  """Sends a negative multiple of the honest mean ("FOE").

  With `H` the honest clients, each attacker sends `(1 - factor) mean(H)`. A
  factor greater than 1 reverses the direction.

  Example: for the honest rows [1, 2] and [3, 6] and the factor 1.5, attackers
  send [-1, -2].

  Reference:
    Xie et al., Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner
    Product Manipulation, UAI 2020; in the parametrization of Allouah et al.,
    Fixing by Mixing, AISTATS 2023.
  """

  def __init__(self, factor: float):
    """Initializes the attack.

    Args:
      factor: How many times the honest mean is subtracted from itself.

    Raises:
      TypeError: If the factor is no number.
      ValueError: If it is not finite.
    """
    rules.FACTOR.check(factor, self)
    self.factor = factor

  def _vector(self, honest, num_attackers, is_mean):
    return (1 - self.factor) * tf.math.reduce_mean(honest, axis=0)


class InnerProductManipulation(_SharedVector):
  """Makes the inner product of the aggregate and the honest mean negative.

  With `H` the honest clients, each attacker sends `-epsilon mean(H)` ("IPM"). A
  small epsilon hides from rules that look for outliers; a large epsilon moves
  the mean of all clients.

  Example: for the honest rows [1, 2] and [3, 6] and epsilon 0.5, attackers send
  [-1, -2].

  Reference:
    Xie et al., Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner
    Product Manipulation, UAI 2020.
  """

  def __init__(self, epsilon: float):
    """Initializes the attack.

    Args:
      epsilon: The length of the sent vector relative to the honest mean;
        positive.

    Raises:
      TypeError: If epsilon is no number.
      ValueError: If it is not finite and positive.
    """
    rules.EPSILON.check(epsilon, self)
    self.epsilon = epsilon

  def _vector(self, honest, num_attackers, is_mean):
    return -self.epsilon * tf.math.reduce_mean(honest, axis=0)


class ALittleIsEnough(_SharedVector):
  """Shifts each coordinate by a few standard deviations ("ALIE").

  With `H` the honest clients, each attacker sends `mean(H) + z std(H)`, with
  the mean and the population standard deviation of each coordinate: the root of
  the mean squared deviation from the mean. (The paper does not say which
  standard deviation it means. ByzFL takes the sample's, which is
  `√(h / (h - 1))` times as large for h honest clients.) To have a
  majority of n clients, f attackers need s more clients: `s = ⌊n/2 + 1⌋ - f`.
  By default `z = Φ⁻¹((n - f - s) / (n - f))`, the largest
  shift for which, with normal coordinates, s honest clients are further from
  the mean than the attackers.

  Example: for the honest rows [1, 2] and [3, 6] and 0.5 deviations, attackers
  send [2.5, 5]. With n = 10 and f = 3, s = 3 and z = Φ⁻¹(4/7) = 0.18.

  Reference:
    Baruch et al., A Little Is Enough: Circumventing Defenses for Distributed
    Learning, NeurIPS 2019, algorithm 3.
  """

  def __init__(self, deviations: Optional[float] = None):
    """Initializes the attack.

    Args:
      deviations: The shift `z` in standard deviations. The default needs at
        least 3 clients of which at most half are attackers; other rounds raise
        an error.

    Raises:
      TypeError: If `deviations` is no number.
      ValueError: If it is not finite.
    """
    if deviations is not None:
      rules.DEVIATIONS.check(deviations, self)
    self.deviations = deviations

  def _vector(self, honest, num_attackers, is_mean):
    mean = tf.math.reduce_mean(honest, axis=0)
    deviation = tf.math.reduce_std(honest, axis=0)
    if self.deviations is None:
      shift = self._default_deviations(tf.shape(honest)[0], num_attackers)
      shift = tf.cast(shift, honest.dtype)
    else:
      shift = self.deviations
    return mean + shift * deviation

  def _default_deviations(
      self, num_honest: tf.Tensor, num_attackers: int
  ) -> tf.Tensor:
    num_clients = num_honest + num_attackers
    # n - f - s, where f + s = ⌊n/2 + 1⌋.
    num_nearer = num_clients - (num_clients // 2 + 1)
    check = tf.debugging.Assert(
        (num_nearer >= 1) & (num_nearer < num_honest),
        [
            'ALittleIsEnough has a default shift only for at least 3 clients of'
            ' which at most half are attackers; give it the deviations. Honest'
            ' clients, attackers:',
            num_honest,
            num_attackers,
        ],
    )
    num_nearer = robust_rule.after_checks(num_nearer, check)
    return tf.math.ndtri(
        tf.cast(num_nearer, tf.float64) / tf.cast(num_honest, tf.float64)
    )


class Mimic(_SharedVector):
  """Sends a copy of one honest client's value, which gives it more weight.

  All attackers copy the honest client that is furthest along the direction in
  which the honest clients differ most: with `u` the first left singular vector
  of the honest rows minus their mean, the client i with the greatest |u_i|. If
  two clients are equally far on opposite sides, the sign of the direction's
  greatest coordinate decides. The copies are not outliers, but if the clients'
  data differ, they bias rules that select clients. The paper estimates the
  direction over the first rounds and then copies one client; here each round is
  treated separately.

  Example: for the honest rows [0, 0], [1, 0] and [5, 1], attackers send [5, 1].

  Reference:
    Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via
    Bucketing, ICLR 2022, section 3.2 and appendix B.
  """

  def _vector(self, honest, num_attackers, is_mean):
    centred = honest - tf.math.reduce_mean(honest, axis=0)
    # Squares may overflow, and the direction does not depend on the scale.
    centred = tf.math.divide_no_nan(
        centred, tf.math.reduce_max(tf.math.abs(centred))
    )
    # The Gram matrix of the clients is smaller than the covariance matrix.
    _, vectors = tf.linalg.eigh(
        tf.linalg.matmul(centred, centred, transpose_b=True)
    )
    projections = vectors[:, -1]
    # An eigenvector's sign is arbitrary.
    direction = tf.linalg.matvec(centred, projections, transpose_a=True)
    projections *= tf.math.sign(
        tf.gather(direction, tf.math.argmax(tf.math.abs(direction)))
    )
    distances = tf.math.abs(projections)
    # Rounding errors must not decide between the two sides.
    tolerance = math.sqrt(np.finfo(honest.dtype.as_numpy_dtype).eps)
    is_furthest = distances >= (1 - tolerance) * tf.math.reduce_max(distances)
    mimicked = tf.math.argmax(
        tf.where(is_furthest, projections, -tf.ones_like(projections))
    )
    return tf.gather(honest, mimicked)


class GaussianNoise(Attack):
  """Sends independent draws from a normal distribution.

  Each coordinate of each attacker is drawn from `N(0, stddev²)`. This simulates
  failures rather than a coordinated attack.

  Reference:
    Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent, NeurIPS 2017, section 5.
  """

  def __init__(self, stddev: float, seed: int):
    """Initializes the attack.

    Args:
      stddev: The standard deviation, positive.
      seed: The seed of the noise, at least 0. Each round has different noise.

    Raises:
      TypeError: If an argument is no number.
      ValueError: If `stddev` is not finite and positive, or the seed is
        negative.
    """
    rules.STDDEV.check(stddev, self)
    value_types.SEED.check('seed', seed, self)
    self.stddev = stddev
    self.seed = seed

  def values(
      self, honest, num_attackers, round_num, is_mean=None, defense=None
  ):
    """See the base class."""
    del is_mean, defense
    return tf.random.stateless_normal(
        [num_attackers, tf.shape(honest)[1]],
        seed=tf.stack(
            [tf.constant(self.seed, tf.int64), tf.cast(round_num, tf.int64)]
        ),
        stddev=self.stddev,
        dtype=honest.dtype,
    )


class Infinity(_SharedVector):
  """Sends infinity in each coordinate ("Inf").

  This simulates overflow, and tests whether a server checks what it receives.
  Rules do, even the mean: they drop the attackers and count them as such. So
  the result is the rule's result for the honest clients, or an error if they
  are too few for the rule.
  """

  stays_finite = False

  def _vector(self, honest, num_attackers, is_mean):
    return tf.fill(
        [tf.shape(honest)[1]], tf.constant(float('inf'), honest.dtype)
    )


class FalsifiedCounts(Attack):
  """Combines another attack with a falsified weight and falsified counts.

  Clients send a weight with each update, and the number of values with the
  statistics of each layer. Rules give all clients the same weight, so positive
  weights and counts have no effect. With 0 or less, the attackers abstain (see
  `tff_bn.aggregators.Rule`); with NaN or an infinity, they are dropped.

  Attributes:
    attack: The other attack.
    count: The count and weight.
  """

  def __init__(self, attack: Attack, count: float):
    """Initializes the attack.

    Args:
      attack: The other attack.
      count: The weight, and the number of values of each layer. Any number.

    Raises:
      TypeError: If `attack` is no attack, or `count` no number.
    """
    check_attack(self, attack)
    if isinstance(count, bool) or not isinstance(count, numbers.Real):
      raise TypeError(f'count={count!r} of FalsifiedCounts must be a number.')
    self.attack: Attack = attack
    self.count = float(count)
    self.stays_finite = attack.stays_finite

  def values(
      self, honest, num_attackers, round_num, is_mean=None, defense=None
  ):
    """See the base class."""
    return self.attack.values(
        honest, num_attackers, round_num, is_mean, defense
    )


def finite(values: tf.Tensor) -> tf.Tensor:
  """Replaces infinities and NaN by the greatest finite numbers."""
  greatest = values.dtype.max
  values = tf.where(tf.math.is_nan(values), greatest, values)
  return tf.clip_by_value(values, -greatest, greatest)


def check_attack(owner: object, attack: object) -> None:
  """Raises a `TypeError` if the argument `attack` of `owner` is no attack."""
  if not isinstance(attack, Attack):
    known = [*rules.classes(rules.ATTACKS), FalsifiedCounts.__name__]
    raise TypeError(
        f'{type(owner).__name__} needs an attack, but was given {attack!r}; use'
        f' one of {", ".join(known)}.'
    )
