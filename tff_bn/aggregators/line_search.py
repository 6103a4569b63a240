"""The line search of optimized attacks.

Reference:
  Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model
  Poisoning Attacks and Defenses for Federated Learning, NDSS 2021.
"""

from collections.abc import Callable

import tensorflow as tf


def maximize(
    function: Callable[[tf.Tensor], tf.Tensor],
    num_evaluations: int,
    first_step: float,
    ratio: float,
) -> tf.Tensor:
  """Searches for a nonnegative number with a large value of a function.

  From 0, steps are tried and doubled while the value increases. After that,
  each step from the best number is followed by a shorter one.

  Args:
    function: Maps a float64 scalar to a float64 scalar.
    num_evaluations: The number of numbers to try, 0 included.
    first_step: The first step.
    ratio: The factor of the step after each failure.

  Returns:
    The best number that was tried, a float64 scalar.
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
