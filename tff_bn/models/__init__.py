"""Model architectures, built by name or by a user's function.

`tff_bn.models.names` can be imported without Keras, which is imported when a
model is first used.
"""

from tff_bn.imports import lazy
from tff_bn.models import names
from tff_bn.models.names import MODEL_NAMES
from tff_bn.models.names import NORMALIZATION_NAMES
from tff_bn.models.names import PAN_NAMES
from tff_bn.models.names import PRECISION_NAMES

# Name -> the module of this package in which it is defined.
_MEMBERS = {
    'build_abide_mlp': 'abide_mlp',
    'build_alexnet_bn': 'alexnet_bn',
    'build_digits_cnn': 'digits_cnn',
    'build_fbn_cnn': 'fbn_cnn',
    'build_mlp3': 'mlp3',
    'build_mlp4': 'mlp4',
    'build_model_fn': 'building',
    'build_resnet20': 'resnet20',
    'build_resnet20_wide': 'resnet20',
    'build_small_cnn': 'small_cnn',
    'build_vgg': 'vgg',
}

__all__ = [
    'MODEL_NAMES',
    'NORMALIZATION_NAMES',
    'PAN_NAMES',
    'PRECISION_NAMES',
    'names',
    *_MEMBERS,
]

__getattr__, __dir__ = lazy.attach(__name__, _MEMBERS)
