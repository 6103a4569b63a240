"""Keras layers for batch normalization in federated learning.

This package needs Keras 3 only, with any backend: it imports neither TensorFlow
nor TensorFlow Federated.
"""

import keras

if int(keras.__version__.split('.')[0]) < 3:
  raise ImportError(
      f'tff_bn needs Keras 3, but Keras {keras.__version__} is installed; run'
      ' `pip install --upgrade keras`.'
  )

# The check comes first, because the modules cannot be imported with Keras 2.
# Keras needs `ConvertedLayer` to load models.
from tff_bn.layers import converted_layer as _  # noqa: F401
from tff_bn.layers.batch_renormalization import BatchRenormalization
from tff_bn.layers.discovery import all_layers
from tff_bn.layers.discovery import batch_norm_layers
from tff_bn.layers.discovery import is_batch_norm
from tff_bn.layers.feature_normalization import FeatureNormalization
from tff_bn.layers.federated_batch_normalization import (
    FederatedBatchNormalization,
)
from tff_bn.layers.hybrid_batch_normalization import HybridBatchNormalization
from tff_bn.layers.kernel_normalization import KernelNormalization
from tff_bn.layers.position_encoding import PositionEncoding
from tff_bn.layers.scalars import ScalarBias
from tff_bn.layers.scalars import ScalarMultiplier
from tff_bn.layers.static_batch_normalization import StaticBatchNormalization
from tff_bn.layers.weight_standardization import WeightStandardizedConv1D
from tff_bn.layers.weight_standardization import WeightStandardizedConv2D
from tff_bn.layers.weight_standardization import WeightStandardizedDense

__all__ = [
    'BatchRenormalization',
    'FeatureNormalization',
    'FederatedBatchNormalization',
    'HybridBatchNormalization',
    'KernelNormalization',
    'PositionEncoding',
    'ScalarBias',
    'ScalarMultiplier',
    'StaticBatchNormalization',
    'WeightStandardizedConv1D',
    'WeightStandardizedConv2D',
    'WeightStandardizedDense',
    'all_layers',
    'batch_norm_layers',
    'is_batch_norm',
]
