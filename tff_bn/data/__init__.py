"""Datasets, and how they are split over clients.

`load_dataset` loads a dataset by name, `split_dataset` splits it over clients.
`from_clients` and `from_datasets` take data that clients have already.
The parts that need TensorFlow are imported on first use. The names of datasets
are in `tff_bn.catalog.datasets`.
"""

from tff_bn.imports import lazy

# Name -> the module of this package in which it is defined.
_MEMBERS = {
    'Dataset': 'dataset',
    'FederatedData': 'federated',
    'SPLITS': 'splits',
    'Split': 'splits',
    'SplitTask': 'splits',
    'draw_training_samples': 'training_samples',
    'flip_labels': 'label_flipping',
    'from_clients': 'own_clients',
    'from_datasets': 'own_clients',
    'load_dataset': 'loading',
    'split_dataset': 'splitting',
    'with_balanced_classes': 'class_balance',
    'with_flipped_labels': 'label_flipping',
    'with_shifted_inputs': 'shifted_inputs',
}

__all__ = [*_MEMBERS]

__getattr__, __dir__ = lazy.attach(__name__, _MEMBERS)
