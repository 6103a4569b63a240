"""Aggregators of model updates and of batch normalization statistics.

All aggregators are `tff.aggregators` factories. A `Rule` needs the values of
all clients at once. The attacks are for simulations.

The rules, steps before rules and attacks are the entries of
`tff_bn.catalog.rules`, so a new one is a module, an entry, and nothing else
here.
"""

from typing import TYPE_CHECKING, Any

from tff_bn.imports import dependencies

dependencies.require_tff()

from tff_bn.aggregators.attacked_rule import Attacked  # noqa: E402
from tff_bn.aggregators.attacks import Attack  # noqa: E402
from tff_bn.aggregators.attacks import FalsifiedCounts  # noqa: E402
from tff_bn.aggregators.loss_weighted import LossWeightedFactory  # noqa: E402
from tff_bn.aggregators.model_update import ModelUpdateFactory  # noqa: E402
from tff_bn.aggregators.moments_factories import FbnMomentsFactory  # noqa: E402
from tff_bn.aggregators.moments_factories import MomentsFactory  # noqa: E402
from tff_bn.aggregators.moments_factories import NaiveMomentsFactory  # noqa: E402
from tff_bn.aggregators.moments_factories import PooledMomentsFactory  # noqa: E402
from tff_bn.aggregators.moments_factories import layer_moments  # noqa: E402
from tff_bn.aggregators.moments_factories import layer_moments_type  # noqa: E402
from tff_bn.aggregators.robust_rule import Rule  # noqa: E402
from tff_bn.aggregators.weighted_mean import WeightedMeanFactory  # noqa: E402
from tff_bn.catalog import rules  # noqa: E402

__all__ = [
    'Attack',
    'Attacked',
    'FalsifiedCounts',
    'FbnMomentsFactory',
    'LossWeightedFactory',
    'ModelUpdateFactory',
    'MomentsFactory',
    'NaiveMomentsFactory',
    'PooledMomentsFactory',
    'Rule',
    'WeightedMeanFactory',
    'layer_moments',
    'layer_moments_type',
]

for _part in rules.classes(rules.RULES, rules.WRAPPERS, rules.ATTACKS):
  _class = _part.load()
  globals()[_class.__name__] = _class
  __all__.append(_class.__name__)
__all__.sort()

if TYPE_CHECKING:
  # Type checkers do not run the loop.
  def __getattr__(name: str) -> Any:
    ...
