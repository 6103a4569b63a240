"""Tests for the clipping and the noise of messages."""

import numpy as np
import pytest

from tff_bn.papers.privacy import client_message
from tff_bn.papers.privacy import message_noise

_NO_NOISE = 1e-9


def _protect(update, statistics, noise, seed=0, exchanges=None):
  return message_noise.protect(
      client_message.ClientMessage(update, statistics, exchanges),
      noise,
      np.random.default_rng(seed),
  )


def test_the_update_is_clipped_jointly_and_the_statistics_by_themselves():
  protected = _protect(
      [np.array([3.0, 0.0]), None, np.array([[4.0]])],
      [np.array([[6.0], [8.0]])],
      message_noise.Noise(_NO_NOISE, 2.0, 1.0),
  )
  np.testing.assert_allclose(protected.update[0], [1.2, 0.0], atol=1e-6)
  assert protected.update[1] is None
  np.testing.assert_allclose(protected.update[2], [[1.6]], atol=1e-6)
  np.testing.assert_allclose(protected.statistics[0], [[0.6], [0.8]], atol=1e-6)


def test_small_values_are_not_changed():
  protected = _protect(
      [np.array([0.3, 0.4])],
      [np.zeros((2, 1))],
      message_noise.Noise(_NO_NOISE, 2.0, 1.0),
  )
  np.testing.assert_allclose(protected.update[0], [0.3, 0.4], atol=1e-6)
  np.testing.assert_allclose(protected.statistics[0], 0, atol=1e-6)


def test_deviation_of_the_noise():
  protected = _protect(
      [np.zeros(20000, np.float32)],
      [np.zeros((2, 10000), np.float32)],
      message_noise.Noise(0.5, 3.0, 8.0),
  )
  # As a round of the package divides its noise.
  for (noise,), deviation in (
      (protected.update, 1.5 / np.sqrt(0.9)),
      (protected.statistics, 4.0 / np.sqrt(0.1)),
  ):
    assert noise.dtype == np.float32
    assert abs(noise.mean()) < 4 * deviation / np.sqrt(noise.size)
    assert noise.std() == pytest.approx(deviation, rel=0.03)
  correlation = np.corrcoef(
      protected.update[0], protected.statistics[0].ravel()
  )[0, 1]
  assert abs(correlation) < 0.05


def test_only_the_seed_decides_the_noise():
  arguments = ([np.zeros(3)], [], message_noise.Noise(1.0, 1.0, 1.0))
  first, again, other = (_protect(*arguments, seed) for seed in (1, 1, 2))
  np.testing.assert_array_equal(first.update[0], again.update[0])
  assert not np.array_equal(first.update[0], other.update[0])


def test_each_exchange_has_noise_and_a_norm_of_its_own():
  size = 10000
  exchanges = client_message.Exchanges(
      [np.zeros((2, size))] * 2, [(np.zeros(size), np.zeros(size))] * 2, []
  )
  found = _protect(
      [np.zeros(size)],
      [np.zeros((2, size))],
      message_noise.Noise(0.5, 3.0, 8.0),
      exchanges=exchanges,
  )
  # Six exchanges, and the statistics at the end.
  deviation = 0.5 * 8 * np.sqrt(7 / 0.1)
  for values in (
      *found.exchanges.statistics,
      *found.exchanges.gradients,
      found.statistics[0],
  ):
    for row in values:
      assert np.std(row) == pytest.approx(deviation, rel=0.04)
  assert np.std(found.update[0]) == pytest.approx(
      0.5 * 3 / np.sqrt(0.9), rel=0.04
  )


def test_exchanges_are_clipped_one_by_one():
  exchanges = client_message.Exchanges(
      [np.array([[3.0, 4.0], [0.0, 8.0]])],
      [(np.array([6.0]), np.array([8.0]))],
      [],
  )
  found = _protect(
      [np.zeros(1)],
      [],
      message_noise.Noise(_NO_NOISE, 2.0, 1.0),
      exchanges=exchanges,
  ).exchanges
  np.testing.assert_allclose(
      found.statistics[0], [[0.6, 0.8], [0.0, 1.0]], atol=1e-6
  )
  np.testing.assert_allclose(found.gradients[0], [[0.6], [0.8]], atol=1e-6)


def test_without_noise():
  update = [np.array([30.0])]
  assert _protect(update, [], None).update is update
