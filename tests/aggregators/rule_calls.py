"""Robust rules, and calls of them without TFF."""

import tensorflow as tf

from tff_bn import aggregators

MAX_BYZANTINE = 4
_M = MAX_BYZANTINE

RULES = {
    'mean': aggregators.Mean(),
    'median': aggregators.CoordinateMedian(_M),
    'trimmed_mean': aggregators.TrimmedMean(_M),
    'mea_med': aggregators.MeaMed(_M),
    'krum': aggregators.Krum(_M),
    'multi_krum': aggregators.MultiKrum(_M),
    'multi_krum_of_3': aggregators.MultiKrum(_M, 3),
    'geometric_median': aggregators.GeometricMedian(_M),
    'centered_clipping': aggregators.CenteredClipping(4.0, 3, _M),
    'mda': aggregators.MinimumDiameterAveraging(_M),
    'monna': aggregators.NearestNeighborAveraging(_M),
    'caf': aggregators.CovarianceBoundAgnosticFilter(_M),
    'smea': aggregators.SmallestMaximumEigenvalueAveraging(_M),
    'bulyan': aggregators.Bulyan(_M),
}
RULES |= {
    **{
        f'nnm_{name}': aggregators.NearestNeighborMixing(RULES[name], _M)
        for name in ('mean', 'trimmed_mean', 'krum', 'geometric_median')
    },
    **{
        f'arc_{name}': aggregators.AdaptiveRobustClipping(RULES[name], _M)
        for name in ('trimmed_mean', 'krum')
    },
    'clipping_trimmed_mean': aggregators.StaticClipping(
        aggregators.TrimmedMean(_M), 5.0
    ),
    'bucketing_median': aggregators.Bucketing(
        aggregators.CoordinateMedian(_M), 2
    ),
}


def aggregate(rule, values, num_dropped=0, state=None):
  """Returns the aggregate as an array, and the rule's new state."""
  if state is None:
    state = rule.initial_state(values.shape[1], tf.as_dtype(values.dtype))
  result, state = rule.aggregate(
      tf.constant(values), tf.constant(num_dropped), state
  )
  return result.numpy(), state
