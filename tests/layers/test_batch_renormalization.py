"""What only batch renormalization does: its limits."""

import keras
import numpy as np
import pytest
import random_values

from tff_bn.layers import BatchRenormalization


def _layer(shape, **arguments):
  layer = BatchRenormalization(dtype='float64', **arguments)
  layer.build([None, *shape[1:]])
  random_values.randomize(layer)
  return layer


def test_unclipped_output_is_normalized_by_the_moving_statistics():
  layer = _layer([8, 3], r_max=1e6, d_max=1e6)
  x = random_values.inputs([8, 3])
  expected = layer(x, training=False)
  np.testing.assert_allclose(layer(x, training=True), expected, rtol=1e-10)


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


def test_without_corrections_training_equals_keras():
  ours = _layer([6, 5, 4, 3], r_max=1, d_max=0, momentum=0.7)
  theirs = keras.layers.BatchNormalization(dtype='float64', momentum=0.7)
  theirs.build([None, 5, 4, 3])
  theirs.set_weights(ours.get_weights())
  for seed in range(3):
    x = random_values.inputs([6, 5, 4, 3], seed)
    np.testing.assert_allclose(
        ours(x, training=True), theirs(x, training=True), rtol=1e-10
    )
  for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10)


def test_configuration_has_the_limits():
  layer = BatchRenormalization(1, 0.5, r_max=2, d_max=1)
  again = BatchRenormalization.from_config(layer.get_config())
  for each in (layer, again):
    assert (each.axis, each.momentum) == (1, 0.5)
    assert (each.r_max, each.d_max) == (2, 1)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(r_max=0.9), 'r_max=0.9 must be a number, at least 1'),
        (dict(r_max=float('nan')), 'r_max=nan'),
        (dict(r_max=float('inf')), 'r_max=inf'),
        (dict(d_max=-0.1), 'd_max=-0.1 must be a number, at least 0'),
        (dict(d_max=float('nan')), 'd_max=nan'),
        (dict(d_max=float('inf')), 'd_max=inf'),
    ],
)
def test_wrong_limits(arguments, message):
  with pytest.raises(ValueError, match=message):
    BatchRenormalization(**arguments)
