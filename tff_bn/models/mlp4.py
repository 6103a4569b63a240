"""The perceptron of the FedPAN paper (appendix B): 784-1024-1024-1024-C.

Li et al., Federated Learning with Position-Aware Neurons, CVPR 2022.
"""

import keras

from tff_bn.models import normalization as normalization_lib

_HIDDEN = (1024, 1024, 1024)


def build_mlp4(
    input_shape: tuple[int, ...],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds a perceptron with three hidden layers of 1024 units.

  Normalization and ReLU follow each hidden layer. The paper's network has no
  normalization.

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
        x,
        units,
        normalization,
        kernel_initializer='he_normal',
        name=f'hidden_{number}',
    )
    x = normalization_lib.normalize(x, normalization, f'norm_{number}')
    x = layers.ReLU(name=f'relu_{number}')(x)
  outputs = normalization_lib.logits(x, num_classes, normalization)
  return keras.Model(inputs, outputs, name='mlp4')
