"""Aggregators of model updates and of batch normalization statistics.

All aggregators are `tff.aggregators` factories. A `Rule` needs the values of
all clients at once. The attacks are for simulations. Rules and attacks are
imported on first use.

The rules, steps before rules and attacks are the entries of
`tff_bn.catalog.rules`, so a new one is a module, an entry, and nothing else
here.
"""

from typing import TYPE_CHECKING

from tff_bn.imports import dependencies
from tff_bn.imports import lazy

dependencies.require_tff()

from tff_bn.aggregators.model_update import ModelUpdateFactory  # noqa: E402
from tff_bn.aggregators.moments_factories import FbnMomentsFactory  # noqa: E402
from tff_bn.aggregators.moments_factories import MomentsFactory  # noqa: E402
from tff_bn.aggregators.moments_factories import NaiveMomentsFactory  # noqa: E402
from tff_bn.aggregators.moments_factories import PooledMomentsFactory  # noqa: E402
from tff_bn.aggregators.moments_factories import layer_moments  # noqa: E402
from tff_bn.aggregators.moments_factories import layer_moments_type  # noqa: E402
from tff_bn.aggregators.weighted_mean import WeightedMeanFactory  # noqa: E402
from tff_bn.catalog import rules  # noqa: E402

if TYPE_CHECKING:
  from tff_bn.aggregators.attacked_rule import Attacked
  from tff_bn.aggregators.attacks import Attack
  from tff_bn.aggregators.attacks import FalsifiedCounts
  from tff_bn.aggregators.dp_sums import DpSums
  from tff_bn.aggregators.loss_weighted import LossWeightedFactory
  from tff_bn.aggregators.robust_rule import Rule
  from tff_bn.aggregators.secure_sums import SecureSums
  from tff_bn.aggregators.summed_update import RoundSums
  from tff_bn.aggregators.summed_update import SummedUpdate

# Name -> the module of this package in which it is defined.
_PARTS = rules.classes(
    rules.RULES, rules.WRAPPERS, rules.FILTERS, rules.ATTACKS
)

__all__ = [
    'Attack',
    'Attacked',
    'DpSums',
    'FalsifiedCounts',
    'FbnMomentsFactory',
    'LossWeightedFactory',
    'ModelUpdateFactory',
    'MomentsFactory',
    'NaiveMomentsFactory',
    'PooledMomentsFactory',
    'RoundSums',
    'Rule',
    'SecureSums',
    'SummedUpdate',
    'WeightedMeanFactory',
    'layer_moments',
    'layer_moments_type',
]
__all__ += _PARTS
__all__.sort()

__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        'Attack': 'attacks',
        'Attacked': 'attacked_rule',
        'DpSums': 'dp_sums',
        'FalsifiedCounts': 'attacks',
        'LossWeightedFactory': 'loss_weighted',
        'RoundSums': 'summed_update',
        'Rule': 'robust_rule',
        'SecureSums': 'secure_sums',
        'SummedUpdate': 'summed_update',
        **_PARTS,
    },
)
