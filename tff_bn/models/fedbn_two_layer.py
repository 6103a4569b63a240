"""The two-layer network of the FedBN paper's synthetic experiment.

Li et al., ICLR 2021, section 4 and appendix F: 100 hidden neurons with ReLU.
"""

import keras

from tff_bn.models import normalization as normalization_lib

_HIDDEN = 100


def build_fedbn_two_layer(
    input_shape: tuple[int, ...],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds a perceptron with a hidden layer of 100 neurons.

  Normalization and ReLU follow the hidden layer. As in the paper, its weights
  and, without BN, its biases are drawn from a normal distribution. The
  deviation is not legible in the paper's text; it is 1 here.

  Args:
    input_shape: The shape of a sample: an image, which is flattened, or a
      vector.
    num_classes: Number of classes.
    normalization: The normalization after the hidden layer.

  Returns:
    An untrained functional model with logits as output.
  """
  layers = keras.layers
  normal = keras.initializers.RandomNormal
  inputs = keras.Input(input_shape, name='input')
  x = layers.Flatten(name='flatten')(inputs)
  x = normalization_lib.dense(
      x,
      _HIDDEN,
      normalization,
      kernel_initializer=normal(stddev=1.0),
      bias_initializer=normal(stddev=1.0),
      name='hidden',
  )
  x = normalization_lib.normalize(x, normalization, 'norm')
  x = layers.ReLU(name='relu')(x)
  outputs = normalization_lib.logits(x, num_classes, normalization)
  return keras.Model(inputs, outputs, name='fedbn_two_layer')
