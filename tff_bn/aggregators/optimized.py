"""Attacks whose strength is optimized against the rule.

References:
  Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model
  Poisoning Attacks and Defenses for Federated Learning, NDSS 2021.
  Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under
  Heterogeneity, AISTATS 2023.
"""

import abc
from collections.abc import Callable

import tensorflow as tf

from tff_bn.aggregators import attacks
from tff_bn.catalog import value_types


class _OptimizedAttack(attacks.Attack):
  """Sends a base vector plus a strength times a direction."""

  def __init__(
      self,
      num_evaluations: int = 20,
      first_step: float = 10.0,
      ratio: float = 0.8,
  ):
    """Initializes the attack.

    Args:
      num_evaluations: The number of strengths to try, 0 included.
      first_step: The first step of the search, positive.
      ratio: The factor of the step after each failure; between 0 and 1.

    Raises:
      TypeError: If an argument is no number.
      ValueError: If an argument is out of its range.
    """
    value_types.POSITIVE_INTEGER.check('num_evaluations', num_evaluations, self)
    value_types.POSITIVE.check('first_step', first_step, self)
    value_types.PART.check('ratio', ratio, self)
    self.num_evaluations = int(num_evaluations)
    self.first_step = first_step
    self.ratio = ratio

  @abc.abstractmethod
  def _base_and_direction(
      self, honest: tf.Tensor, mean: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the vectors, of shape `[d]`, from the honest ones."""

  def values(
      self, honest, num_attackers, round_num, is_mean=None, defense=None
  ):
    """See the base class.

    Raises:
      ValueError: If there is no `defense`.
    """
    del round_num, is_mean
    if defense is None:
      raise ValueError(f'{type(self).__name__} needs the defense to optimize.')
    mean = tf.math.reduce_mean(honest, axis=0)
    base, direction = self._base_and_direction(honest, mean)

    def vectors(strength):
      vector = base + tf.cast(strength, honest.dtype) * direction
      return tf.repeat(vector[tf.newaxis], num_attackers, axis=0)

    def damage(strength):
      sent = attacks.finite(vectors(strength))
      result = defense(tf.concat([sent, honest], axis=0))
      error = tf.cast(result, tf.float64) - tf.cast(mean, tf.float64)
      return tf.norm(error)

    strength = _maximize(
        damage, self.num_evaluations, self.first_step, self.ratio
    )
    return vectors(strength)


class OptimizedALittleIsEnough(_OptimizedAttack):
  """`ALittleIsEnough` with the shift that does most harm to the rule.

  With `H` the honest clients, each attacker sends `mean(H) + z std(H)`, where
  z ≥ 0 makes the distance of the rule's result from `mean(H)` large. The
  attackers try a few z with the rule and its state in this round. The search is
  ByzFL's. As there, std is the sample standard deviation (divided by h - 1; 0
  for one honest client).

  Example: against the mean, which any shift harms, 20 trials double the step 18
  times, so z = 10 (2^19 - 1).
  """

  def _base_and_direction(self, honest, mean):
    num_others = tf.cast(tf.shape(honest)[0] - 1, honest.dtype)
    squares = tf.reduce_sum(tf.math.squared_difference(honest, mean), axis=0)
    return mean, tf.sqrt(tf.math.divide_no_nan(squares, num_others))


class OptimizedInnerProductManipulation(_OptimizedAttack):
  """`InnerProductManipulation` with the strength that does most harm.

  With `H` the honest clients, each attacker sends `-ε mean(H)`, where ε ≥ 0
  makes the distance of the rule's result from `mean(H)` large. `FallOfEmpires`
  sends the same with the factor 1 + ε. The search is the one of
  `OptimizedALittleIsEnough`.
  """

  def _base_and_direction(self, honest, mean):
    del honest
    return tf.zeros_like(mean), -mean


def _maximize(
    function: Callable[[tf.Tensor], tf.Tensor],
    num_evaluations: int,
    first_step: float,
    ratio: float,
) -> tf.Tensor:
  """Searches for a nonnegative number with a large value of a function.

  From 0, steps are tried and doubled while the value increases. After that,
  each step from the best number is followed by a shorter one. Returns the best
  number that was tried.
  """

  def try_step(best, highest, step, is_growing):
    value = function(best + step)
    is_better = value > highest
    is_growing &= is_better
    return (
        tf.where(is_better, best + step, best),
        tf.where(is_better, value, highest),
        step * tf.where(is_growing, tf.constant(2.0, tf.float64), ratio),
        is_growing,
    )

  start = tf.zeros([], tf.float64)
  return tf.while_loop(
      lambda *_: True,
      try_step,
      (
          start,
          function(start),
          tf.constant(first_step, tf.float64),
          tf.constant(True),
      ),
      maximum_iterations=num_evaluations - 1,
  )[0]
