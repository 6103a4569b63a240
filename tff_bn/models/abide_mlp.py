"""The perceptron of the FedBN paper for ABIDE (section 5.2): 5995-16-16-2."""

import keras

from tff_bn.models import normalization as normalization_lib

_HIDDEN = (16, 16)


def build_abide_mlp(
    input_shape: tuple[int, ...],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds a perceptron with two hidden layers of 16 units.

  Normalization and ReLU follow each hidden layer. The paper's inputs are
  vectors of 5,995 connections between regions of the brain, with two classes.

  Args:
    input_shape: The shape of a sample: an image, which is flattened, or a
      vector.
    num_classes: Number of classes.
    normalization: The normalization after each hidden layer.

  Returns:
    An untrained functional model with logits as output.
  """
  layers = keras.layers
  inputs = keras.Input(input_shape, name='input')
  x = layers.Flatten(name='flatten')(inputs)
  for number, units in enumerate(_HIDDEN, start=1):
    x = normalization_lib.dense(
        x, units, normalization, name=f'hidden_{number}'
    )
    x = normalization_lib.normalize(x, normalization, f'norm_{number}')
    x = layers.ReLU(name=f'relu_{number}')(x)
  outputs = normalization_lib.logits(x, num_classes, normalization)
  return keras.Model(inputs, outputs, name='abide_mlp')
