"""Random generators of NumPy, each from an explicit seed and for one purpose.

Draws inside of TensorFlow functions take their seeds as tensors and are not
made here.
"""

import enum
from typing import Optional

import numpy as np


class Stream(enum.IntEnum):
  """The purpose of random numbers. Streams of one seed are independent."""

  SPLIT = 1
  TEST_SETS = 2
  BATCHES = 3
  SUBSET = 0x73756273
  AUGMENTATION = 0x6175676D
  EVALUATION_CLIENTS = 0x6576616C
  PERSONAL_PHASES = 0x70686173
  ANALYZED_EXAMPLES = 0x6578616D
  ANALYZED_CLIENTS = 0x636C6965
  ANALYZED_HALVES = 0x68616C66
  ANALYZED_INPUTS = 0x696E7075
  SHUFFLED_UNITS = 0x73687566
  VALIDATION = 0x76616C69
  BALANCED_CLASSES = 0x62616C61
  CLIENT_SCALINGS = 0x7363616C


def generator(
    stream: Optional[Stream], seed: int, *numbers: int
) -> np.random.Generator:
  """Makes a generator that depends only on the arguments.

  Args:
    stream: The purpose of the random numbers. `None` if the seed has no other
      purpose.
    seed: The user's seed, not negative.
    *numbers: Further numbers that distinguish this generator from others, such
      as the round. Not negative.

  Returns:
    The generator.

  Raises:
    ValueError: If the seed is negative.
  """
  if seed < 0:
    raise ValueError(f'seed={seed} is negative; use 0 or a greater number.')
  entropy = [seed, *numbers]
  if stream is not None:
    # The order decides the bits, so it must stay the same for each stream.
    entropy.insert(0 if stream <= Stream.BATCHES else len(entropy), stream)
  return np.random.default_rng(entropy)
