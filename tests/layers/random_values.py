"""Random inputs and random weights of layers."""

import numpy as np


def inputs(shape, seed=0):
  """Returns normally distributed values."""
  return np.random.default_rng(seed).normal(2, 3, shape)


def randomize(layer, seed=1):
  """Assigns random positive values to the weights of a layer."""
  rng = np.random.default_rng(seed)
  for variable in layer.weights:
    variable.assign(rng.uniform(0.5, 2, variable.shape))
