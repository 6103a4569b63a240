"""Names of models and normalizations; this module does not import Keras."""

import re

# Name -> description.
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
    'alexnet_bn': (
        'AlexNet: 5 convolutions of 64 to 384 channels and 3 dense layers'
        ' (FedBN, table 9)'
    ),
    'abide_mlp': '2 hidden layers of 16 neurons (FedBN, section 5.2)',
}

# The names of models that are not in `MODEL_NAMES`.
OTHER_MODELS = 'a function of yours as package.module:function'

# The models that can have the normalization `fixup`.
FIXUP_MODELS = ('resnet20', 'resnet20_wide')

# Name -> description.
NORMALIZATION_NAMES = {
    'batch': 'batch normalization',
    'layer': 'layer normalization over the channels',
    'batch_renorm': (
        'batch renormalization: corrects the batch to the running statistics'
    ),
    'static_batch': (
        'batch normalization without running statistics (HeteroFL): evaluation'
        ' uses the batch, too'
    ),
    'weight_standardization': (
        'standardized weights instead of normalization layers (FedWon)'
    ),
    'fixup': (
        'Fixup initialization instead of normalization; only for '
        + ' and '.join(FIXUP_MODELS)
    ),
    'feature': 'only the features before the last layer (FN)',
    'none': 'no normalization',
}

# Name of a dtype policy of Keras -> description.
PRECISION_NAMES = {
    'float32': 'everything in float32',
    'mixed_bfloat16': 'layers compute in bfloat16; variables are float32',
    'mixed_float16': (
        'layers compute in float16, with a scaled loss; variables are float32'
    ),
}

# Mode of the position encodings in hidden layers (FedPAN) -> description.
PAN_NAMES = {
    'off': 'nothing',
    'add': 'each unit plus the encoding of its position',
    'multiply': 'each unit times the encoding of its position',
}

# The names of normalizations that are not in `NORMALIZATION_NAMES`.
OTHER_NORMALIZATIONS = 'group<N>: group normalization with N groups'


def is_other_model(name: str) -> bool:
  """Returns whether `name` has the form described by `OTHER_MODELS`."""
  return ':' in name


def num_groups(normalization: str) -> int:
  """Returns the N of `group<N>`; 0 for any other normalization."""
  match = re.fullmatch(r'group([1-9][0-9]*)', normalization)
  return int(match[1]) if match else 0


def is_other_normalization(name: str) -> bool:
  """Returns whether `name` has the form described by `OTHER_NORMALIZATIONS`."""
  return num_groups(name) > 0
