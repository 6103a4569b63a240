"""Linear Keras models with batch normalization, and their data."""

import keras
import numpy as np
import tensorflow as tf

from tff_bn.keras_model.batch_norm_model import BatchNormModel


class Linear:
  """A linear model with batch normalization and the mean squared error."""

  def __init__(self, kind):
    self.kind = kind

  def _keras_model(self):
    dense = keras.layers.Dense(2, dtype='float64', name='dense')
    norm = keras.layers.BatchNormalization(
        momentum=0.75, epsilon=2**-10, dtype='float64', name='norm'
    )
    layers = [norm, dense] if self.kind == 'bn_dense' else [dense, norm]
    return keras.Sequential([keras.Input((4,), dtype='float64'), *layers])

  def model(self):
    keras.utils.set_random_seed(0)
    return BatchNormModel(
        self._keras_model,
        (
            tf.TensorSpec((None, 4), tf.float64),
            tf.TensorSpec((None, 2), tf.float64),
        ),
        loss_fn=lambda: keras.losses.MeanSquaredError(dtype='float64'),
    )

  def arrays(self, num_examples, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(seed % 3, 1 + seed % 2, (num_examples, 4))
    return x, rng.normal(seed, 1, (num_examples, 2))

  def dataset(self, num_examples, seed):
    return tf.data.Dataset.from_tensor_slices(
        self.arrays(num_examples, seed)
    ).batch(8)
