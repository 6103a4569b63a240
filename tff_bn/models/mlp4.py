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
  """Builds the network: three times dense, normalization and ReLU; dense.

  The paper has no normalization in it.

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
    x = layers.Dense(
        units,
        use_bias=normalization_lib.needs_bias(normalization),
        kernel_initializer='he_normal',
        name=f'hidden_{number}',
    )(x)
    x = normalization_lib.normalize(x, normalization, f'norm_{number}')
    x = layers.ReLU(name=f'relu_{number}')(x)
  # The loss needs them in float32, whatever the other layers compute in.
  outputs = layers.Dense(num_classes, dtype='float32', name='logits')(x)
  return keras.Model(inputs, outputs, name='mlp4')
