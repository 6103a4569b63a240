"""Aggregators of model updates and of batch normalization statistics.

All of them are `tff.aggregators` factories.
"""

from tff_bn import dependencies

dependencies.require_tff()

from tff_bn.aggregators.model_update import ModelUpdateFactory  # noqa: E402
from tff_bn.aggregators.moments import NaiveMomentsFactory  # noqa: E402
from tff_bn.aggregators.moments import PooledMomentsFactory  # noqa: E402
from tff_bn.aggregators.moments import layer_moments  # noqa: E402
from tff_bn.aggregators.moments import layer_moments_type  # noqa: E402

__all__ = [
    'ModelUpdateFactory',
    'NaiveMomentsFactory',
    'PooledMomentsFactory',
    'layer_moments',
    'layer_moments_type',
]
