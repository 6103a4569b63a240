"""Models of which all weights are random, also those that begin as 0 or 1."""

import keras
import numpy as np

from tff_bn import models

# Of the inputs.
SHAPES = {
    'mlp3': (4, 4, 1),
    'mlp4': (4, 4, 1),
    'small_cnn': (8, 8, 1),
    # 2x2 pixels are left where these two are flattened.
    'digits_cnn': (8, 8, 1),
    'fbn_cnn': (8, 8, 1),
    'vgg9': (8, 8, 3),
    'resnet20': (8, 8, 3),
}


def build(name, normalization='batch'):
  """A model of the package; see `randomize`."""
  keras.utils.set_random_seed(3)
  model = models.build_model_fn(name, SHAPES[name], 10, normalization)()
  randomize(model)
  return model


def randomize(model):
  """No two values alike, statistics and scales of any size but 0."""
  rng = np.random.default_rng(1)
  model.set_weights(
      [
          w * rng.uniform(0.5, 1.5, w.shape)
          if w.ndim > 1 and w.std() > 0
          else rng.uniform(0.5, 1.5, w.shape)
          for w in model.get_weights()
      ]
  )


def with_normal_weights(model, seed=1):
  """The model, with scales and shifts of either sign."""
  rng = np.random.default_rng(seed)
  model.set_weights(
      [
          rng.uniform(0.5, 2, size=w.shape)
          if 'variance' in w.name
          else rng.normal(size=w.shape)
          for w in model.weights
      ]
  )
  return model


def inputs(model, num):
  """As many random examples for the model."""
  rng = np.random.default_rng(2)
  return rng.normal(size=(num, *model.input_shape[1:])).astype(np.float32)


class Subclassed(keras.Model):
  """A model that is not functional."""

  def __init__(self):
    super().__init__(name='mine')
    self.dense = keras.layers.Dense(2)

  def call(self, inputs):
    return self.dense(inputs)
