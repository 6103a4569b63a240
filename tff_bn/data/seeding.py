"""Random generators, each from an explicit seed and for one purpose."""

import enum

import numpy as np


class Stream(enum.IntEnum):
  """What random numbers are for: each purpose has numbers of its own."""

  SPLIT = 1
  TEST_SETS = 2
  BATCHES = 3


def generator(stream: Stream, seed: int, *numbers: int) -> np.random.Generator:
  """A generator that depends on the arguments alone.

  Args:
    stream: What the random numbers are for.
    seed: The user's seed, not negative.
    *numbers: What else distinguishes this generator from others, for example
      the round; none is negative.

  Returns:
    The generator.

  Raises:
    ValueError: If the seed is negative.
  """
  if seed < 0:
    raise ValueError(f'seed={seed} is negative; use 0 or a greater number.')
  return np.random.default_rng([stream, seed, *numbers])
