"""Tests of statistics relative to running ones, against numbers by hand."""

import numpy as np
import pytest

from tff_bn.aggregators import relative_statistics


@pytest.mark.parametrize(
    ('running_variance', 'square'), [(3.0, 3.001), (0.0, 0.001), (-1.0, 0.001)]
)
def test_values_have_the_unit_of_the_running_deviation(
    running_variance, square
):
  """Also where rounding or attackers made a running variance negative."""
  relative = relative_statistics.RelativeStatistics(
      np.float64([2.0]), np.float64([running_variance])
  )
  mean, variance = relative.of_mean([5.0]), relative.of_variance([7.0])
  np.testing.assert_allclose(mean, [3 / np.sqrt(square)])
  np.testing.assert_allclose(variance, [(7 - running_variance) / square])
  np.testing.assert_allclose(relative.to_mean(mean), [5.0])
  np.testing.assert_allclose(relative.to_variance(variance), [7.0])
  np.testing.assert_allclose(
      relative.spread(np.float64([2.0]), np.float64([5.0])), [square]
  )


def test_the_smallest_variance_is_a_share_of_the_running_one():
  relative = relative_statistics.RelativeStatistics(
      np.zeros(3), np.float64([4.0, 4.0, -4.0])
  )
  found = relative.at_least(np.float64([0.5, 2.0, -3.0]), 0.25)
  np.testing.assert_allclose(found, [1.0, 2.0, 0.0])
