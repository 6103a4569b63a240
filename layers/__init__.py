"""Keras layers for batch normalization in federated learning.

This package needs TensorFlow only: it does not import TensorFlow Federated.
"""

from tff_bn.layers.discovery import batch_norm_layers
from tff_bn.layers.discovery import is_batch_norm
from tff_bn.layers.federated_batch_normalization import (
    FederatedBatchNormalization,
)
from tff_bn.layers.position_encoding import PositionEncoding

__all__ = [
    'FederatedBatchNormalization',
    'PositionEncoding',
    'batch_norm_layers',
    'is_batch_norm',
]
