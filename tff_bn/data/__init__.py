"""Datasets, and how they are split over clients.

`load_dataset` loads a dataset by name, `split_dataset` splits it over clients.
The parts that need TensorFlow are imported on first use, so that
`tff_bn.data.names` can be imported without it.
"""

from tff_bn.data import names
from tff_bn.data.names import DATASET_NAMES
from tff_bn.imports import lazy

# Name -> the module of this package in which it is defined.
_MEMBERS = {
    'SPLIT_NAMES': 'splits',
    'Dataset': 'dataset',
    'FederatedData': 'federated',
    'draw_training_samples': 'training_samples',
    'flip_labels': 'label_flipping',
    'load_dataset': 'loading',
    'split_dataset': 'splitting',
    'with_flipped_labels': 'label_flipping',
}

__all__ = ['DATASET_NAMES', 'SPLIT_NAMES', 'names', *_MEMBERS]

__getattr__, __dir__ = lazy.attach(__name__, _MEMBERS)
