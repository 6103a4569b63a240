"""Tests for `tff_bn.common.seeding`."""

import numpy as np
import pytest

from tff_bn.common import seeding

Stream = seeding.Stream


@pytest.mark.parametrize(
    ('stream', 'numbers', 'entropy'),
    [
        (None, [], [5]),
        (None, [2], [5, 2]),
        (Stream.BATCHES, [2, 7], [3, 5, 2, 7]),
        (Stream.PERSONAL_PHASES, [2], [5, 2, 0x70686173]),
    ],
)
def test_bits_of_a_generator(stream, numbers, entropy):
  # Results of finished runs depend on these bits.
  found = seeding.generator(stream, 5, *numbers).integers(2**60, size=4)
  expected = np.random.default_rng(entropy).integers(2**60, size=4)
  np.testing.assert_array_equal(found, expected)


def test_streams_differ():
  numbers = [
      seeding.generator(stream, 5).integers(2**60)
      for stream in (None, *seeding.Stream)
  ]
  assert len(set(numbers)) == len(numbers)


def test_negative_seed():
  with pytest.raises(ValueError, match='seed=-1 is negative'):
    seeding.generator(None, -1)
