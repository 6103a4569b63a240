"""What only batch renormalization does: its limits."""

import numpy as np
import pytest

from tff_bn.layers import BatchRenormalization


@pytest.mark.parametrize('mean', [-100.0, 100.0])
@pytest.mark.parametrize('variance', [1e-4, 1e4])
def test_limits_on_both_sides(mean, variance):
  layer = BatchRenormalization(dtype='float64', epsilon=1e-9)
  layer.build([None, 1])
  layer.moving_mean.assign([mean])
  layer.moving_variance.assign([variance])
  # The batch has mean 0 and variance 1.
  output = layer(np.array([[-1.0], [1.0]]), training=True)
  r = 3 if variance < 1 else 1 / 3
  d = np.clip(-mean / np.sqrt(variance), -5, 5)
  np.testing.assert_allclose(output, [[d - r], [d + r]], rtol=1e-6)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(r_max=0.9), 'r_max=0.9 must be a number, at least 1'),
        (dict(r_max=float('nan')), 'r_max=nan'),
        (dict(d_max=-0.1), 'd_max=-0.1 must be a number, at least 0'),
        (dict(d_max=float('inf')), 'd_max=inf'),
    ],
)
def test_wrong_limits(arguments, message):
  with pytest.raises(ValueError, match=message):
    BatchRenormalization(**arguments)
