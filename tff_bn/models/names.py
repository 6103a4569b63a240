"""Names of models and normalizations; importing this imports no Keras."""

import re

# Name -> what the model is.
MODEL_NAMES = {
    'small_cnn': '3 convolutions of 16, 32 and 32 channels; for small images',
    'mlp3': 'one hidden layer of 30 neurons (FedTAN)',
    'digits_cnn': (
        '3 convolutions of 64, 64 and 128 channels and 3 dense layers (FedBN,'
        ' table 3)'
    ),
    'fbn_cnn': (
        '4 convolutions of 64, 64, 128 and 128 channels, BN after ReLU, dropout'
        ' and 2 dense layers (FBN, table 1)'
    ),
    'resnet20': 'ResNet-20 with 16, 32 and 64 channels (FedTAN)',
    'mlp4': '3 hidden layers of 1024 neurons (FedPAN)',
    'vgg9': '6 convolutions of 32 to 256 channels and 3 dense layers (FedPAN)',
    'vgg11': '8 convolutions of 64 to 512 channels and 1 dense layer (FedPAN)',
    'vgg13': '10 convolutions of 64 to 512 channels, 1 dense layer (FedPAN)',
    'resnet20_wide': 'ResNet-20 with 64, 128 and 256 channels (FedPAN)',
}

# How a model that is not in `MODEL_NAMES` is named.
OTHER_MODELS = 'a function of yours as package.module:function'

# Name -> what the normalization is.
NORMALIZATION_NAMES = {
    'batch': 'batch normalization',
    'layer': 'layer normalization over the channels',
    'none': 'no normalization',
}

# Name -> what the layers compute in; a dtype policy of Keras.
PRECISION_NAMES = {
    'float32': 'everything in float32',
    'mixed_bfloat16': 'layers compute in bfloat16; variables are float32',
    'mixed_float16': (
        'layers compute in float16, with a scaled loss; variables are float32'
    ),
}

# Name -> what position encodings do to the units of the hidden layers (FedPAN).
PAN_NAMES = {
    'off': 'nothing',
    'add': 'each unit plus the encoding of its position',
    'multiply': 'each unit times the encoding of its position',
}

# How a normalization that is not in `NORMALIZATION_NAMES` is named.
OTHER_NORMALIZATIONS = 'group<N>: group normalization with N groups'


def is_other_model(name: str) -> bool:
  """Whether `name` has the form that `OTHER_MODELS` describes."""
  return ':' in name


def num_groups(normalization: str) -> int:
  """The N of `group<N>`; 0 if the normalization is another one."""
  match = re.fullmatch(r'group([1-9][0-9]*)', normalization)
  return int(match[1]) if match else 0


def is_other_normalization(name: str) -> bool:
  """Whether `name` has the form that `OTHER_NORMALIZATIONS` describes."""
  return num_groups(name) > 0
