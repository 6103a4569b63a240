"""The 3-layer network of the FedTAN paper (section 6.1): 784-30-10 on MNIST."""

import keras

from tff_bn.models import normalization as normalization_lib

_HIDDEN = 30


def build_mlp3(
    input_shape: tuple[int, ...],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds a perceptron with a hidden layer of 30 units.

  Normalization and ReLU follow the hidden layer.

  Args:
    input_shape: The shape of a sample: an image, which is flattened, or a
      vector.
    num_classes: Number of classes.
    normalization: The normalization after the hidden layer.

  Returns:
    An untrained functional model with logits as output. With batch
    normalization, 784 inputs and ten classes it has 23,950 values, 60 of them
    moving means and variances. Table 5 of the paper counts 23,920: a bias of
    the hidden layer, which is redundant, and no statistics.
  """
  layers = keras.layers
  inputs = keras.Input(input_shape, name='input')
  x = layers.Flatten(name='flatten')(inputs)
  x = normalization_lib.dense(x, _HIDDEN, normalization, name='hidden')
  x = normalization_lib.normalize(x, normalization, 'norm')
  x = layers.ReLU(name='relu')(x)
  outputs = normalization_lib.logits(x, num_classes, normalization)
  return keras.Model(inputs, outputs, name='mlp3')
