"""Robust rules, the steps before a rule (wrappers), and attacks."""

import dataclasses
from typing import Any, Optional

from tff_bn.catalog import value_types
from tff_bn.catalog.options import OWN_NAME
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option
from tff_bn.catalog.parts import Part
from tff_bn.catalog.parts import Parts
from tff_bn.catalog.parts import listing

# The feature of algorithms whose server averages what the clients send.
MEAN = 'mean'
# The options that name rules.
AGGREGATORS = ('model_aggregator', 'statistics_aggregator')
_ROOM = 'tff_bn.aggregators'


@dataclasses.dataclass(frozen=True)
class Rule(Part):
  """A rule in place of the clients' mean, or a wrapper of rules.

  Its class gets the largest number of clients of a round as `num_clients`. A
  wrapper gets the rule first.

  Attributes:
    needs_num_byzantine: Whether `--num_byzantine` must be given.
  """

  needs_num_byzantine: bool = False


@dataclasses.dataclass(frozen=True)
class Attack(Part):
  """What attackers do in place of honest training.

  Attributes:
    falsifies_labels: Whether they train honestly on falsified labels. Then it
      builds the function that falsifies them.
    strength: The argument that gets `--attack_strength`, if there is one.
  """

  falsifies_labels: bool = False
  strength: Optional[Option] = None


def _used_parts(options: Any) -> set[str]:
  """Returns the rules and wrappers of both aggregators."""
  return {
      part for name in AGGREGATORS for part in getattr(options, name).split('+')
  }


def _users(option: str) -> list[str]:
  """Returns the rules and wrappers that get this option."""
  return [
      name
      for parts in (RULES, WRAPPERS)
      for name, rule in parts.items()
      if rule.has(option)
  ]


def uses(option: str, options: Any) -> bool:
  """Whether an aggregator gets this option."""
  return any(find(part).has(option) for part in _used_parts(options))


def _rule_option(
    name: str,
    values: value_types.ValueType,
    description: str,
    default: Any,
    argument: str,
) -> Option:
  """Declares an option that only some rules have."""
  return Option(
      name,
      values,
      description,
      default,
      argument=argument,
      conditions=(
          Condition(
              'model_aggregator',
              lambda options: uses(name, options),
              lambda: (
                  f'is only for {", ".join(_users(name))} in'
                  ' --model_aggregator or --statistics_aggregator'
              ),
          ),
      ),
      feature=MEAN,
  )


NUM_BYZANTINE = Option(
    'num_byzantine',
    value_types.POSITIVE_INTEGER,
    lambda: (
        'Number of clients of a round against which the aggregators must be'
        ' robust; less than half of them. Required by '
        + ', '.join(
            name
            for parts in (RULES, WRAPPERS)
            for name, rule in parts.items()
            if rule.needs_num_byzantine
        )
    ),
    default_text='none',
    argument=OWN_NAME,
    conditions=(
        Condition(
            'model_aggregator',
            lambda options: options.attack is not None
            or _used_parts(options) != {'mean'},
            'has no effect without another --model_aggregator or'
            ' --statistics_aggregator than the mean',
        ),
    ),
    feature=MEAN,
)
CLIPPING_RADIUS = _rule_option(
    'clipping_radius',
    value_types.POSITIVE,
    'Radius of centered_clipping',
    10.0,
    'radius',
)
CLIPPING_NORM = _rule_option(
    'clipping_norm',
    value_types.POSITIVE,
    'Largest norm of a client after clipping',
    2.0,
    'max_norm',
)
TRUSTED_CLIENT = _rule_option(
    'trusted_client',
    value_types.INTEGER,
    'Position among the clients of a round of the one that monna trusts, from 0'
    ' for the first; negative numbers count from the end. The first clients are'
    ' the attackers',
    -1,
    'trusted_client',
)
BUCKET_SIZE = _rule_option(
    'bucket_size',
    value_types.POSITIVE_INTEGER,
    'Number of clients in a group of bucketing',
    2,
    'bucket_size',
)


def _rule_of_object(name: str, rule_class: Any) -> Rule:
  """Returns the entry of a user's class, which gets `num_byzantine`."""
  return Rule(name, 'a rule of yours', rule_class, (NUM_BYZANTINE,))


RULES: Parts[Rule] = Parts(
    Rule(
        'mean',
        'the mean, which one client can move anywhere',
        f'{_ROOM}.mean:Mean',
    ),
    Rule(
        'median',
        'the median of each coordinate',
        f'{_ROOM}.coordinate_median:CoordinateMedian',
        (NUM_BYZANTINE,),
    ),
    Rule(
        'trimmed_mean',
        'the mean of each coordinate without its --num_byzantine largest and'
        ' smallest values',
        f'{_ROOM}.trimmed_mean:TrimmedMean',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'geometric_median',
        'the point with the least sum of distances',
        f'{_ROOM}.geometric_median:GeometricMedian',
        (NUM_BYZANTINE,),
    ),
    Rule(
        'krum',
        'the client that is nearest to its neighbors',
        f'{_ROOM}.krum:Krum',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'multi_krum',
        'the mean of the clients that are nearest to theirs',
        f'{_ROOM}.krum:MultiKrum',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'mea_med',
        'the mean of the values nearest to the median',
        f'{_ROOM}.mea_med:MeaMed',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'centered_clipping',
        'the last result plus the mean of the differences from it, clipped to'
        ' --clipping_radius',
        f'{_ROOM}.centered_clipping:CenteredClipping',
        (NUM_BYZANTINE, CLIPPING_RADIUS),
    ),
    Rule(
        'mda',
        'minimum diameter averaging: the mean of the clients that are nearest'
        ' to each other',
        f'{_ROOM}.mda:MinimumDiameterAveraging',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'monna',
        'the mean of the clients that are nearest to --trusted_client',
        f'{_ROOM}.monna:NearestNeighborAveraging',
        (NUM_BYZANTINE, TRUSTED_CLIENT),
        needs_num_byzantine=True,
    ),
    Rule(
        'caf',
        'covariance bound-agnostic filter: the mean with lower weights in the'
        ' directions of most variance',
        f'{_ROOM}.caf:CovarianceBoundAgnosticFilter',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'smea',
        'smallest maximum eigenvalue averaging: the mean of the clients that'
        ' vary least in any direction; for few clients',
        f'{_ROOM}.smea:SmallestMaximumEigenvalueAveraging',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'bulyan',
        'the mean of the values nearest to the median of clients that krum'
        ' selects',
        f'{_ROOM}.bulyan:Bulyan',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    of_object=_rule_of_object,
)
WRAPPERS: Parts[Rule] = Parts(
    Rule(
        'nnm',
        'first replaces each client by the mean of its nearest neighbors',
        f'{_ROOM}.nearest_neighbor_mixing:NearestNeighborMixing',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'bucketing',
        'first takes means of random groups of --bucket_size clients',
        f'{_ROOM}.bucketing:Bucketing',
        (BUCKET_SIZE,),
        needs_seed=True,
    ),
    Rule(
        'clipping',
        'first scales clients down to the norm --clipping_norm',
        f'{_ROOM}.clipping:StaticClipping',
        (CLIPPING_NORM,),
    ),
    Rule(
        'arc',
        'adaptive robust clipping: first scales the longest clients down to the'
        ' norm of the next one',
        f'{_ROOM}.clipping:AdaptiveRobustClipping',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    of_object=_rule_of_object,
)


def find(name: str) -> Rule:
  """Returns a rule or a wrapper."""
  return WRAPPERS[name] if name in WRAPPERS else RULES[name]


# The arguments behind `--attack_strength`. Each attack has a range and a
# default of its own.
_FACTOR = Option('factor', value_types.FINITE, '', 3.0)
_DEVIATIONS = Option('deviations', value_types.FINITE, '')
_EPSILON = Option('epsilon', value_types.POSITIVE, '', 0.5)
# Blanchard et al. 2017.
_STDDEV = Option('stddev', value_types.POSITIVE, '', 200.0)

ATTACKS = Parts(
    Attack(
        'sf',
        'sign flipping: minus the mean of the honest clients; of the BN'
        ' statistics only the means are flipped',
        f'{_ROOM}.attacks:SignFlipping',
    ),
    Attack(
        'foe',
        'fall of empires: (1 - --attack_strength) times the mean of the honest'
        ' clients',
        f'{_ROOM}.attacks:FallOfEmpires',
        strength=_FACTOR,
    ),
    Attack(
        'alie',
        'a little is enough: the mean of the honest clients plus'
        ' --attack_strength times their standard deviation',
        f'{_ROOM}.attacks:ALittleIsEnough',
        strength=_DEVIATIONS,
    ),
    Attack(
        'ipm',
        'inner product manipulation: minus --attack_strength times the mean of'
        ' the honest clients',
        f'{_ROOM}.attacks:InnerProductManipulation',
        strength=_EPSILON,
    ),
    Attack(
        'optimized_alie',
        'alie with the shift that does most harm to the aggregator',
        f'{_ROOM}.optimized:OptimizedALittleIsEnough',
    ),
    Attack(
        'optimized_ipm',
        'ipm with the strength that does most harm to the aggregator',
        f'{_ROOM}.optimized:OptimizedInnerProductManipulation',
    ),
    Attack(
        'mimic',
        'copies of one honest client that differs much from the others',
        f'{_ROOM}.attacks:Mimic',
    ),
    Attack(
        'gaussian',
        'normal noise with the standard deviation --attack_strength',
        f'{_ROOM}.attacks:GaussianNoise',
        strength=_STDDEV,
        needs_seed=True,
    ),
    Attack(
        'inf',
        'infinity, which all aggregators drop',
        f'{_ROOM}.attacks:Infinity',
    ),
    Attack(
        'label_flip',
        'trains honestly on labels y that became C - 1 - y; ignores'
        ' --attack_target',
        'tff_bn.data.label_flipping:flip_labels',
        falsifies_labels=True,
    ),
    of_object=lambda name, attack_class: Attack(
        name, 'an attack of yours', attack_class
    ),
)
TARGETS = {
    'statistics': 'the BN statistics that they send',
    'model': 'all other variables that they send',
    'both': 'both',
}


def _explain_aggregators() -> str:
  wrappers = {f'{name}+...': rule for name, rule in WRAPPERS.items()}
  return (
      "What the server computes from the clients' changes of the model:\n"
      + listing(RULES)
      + listing(wrappers)
      + f'or {OTHER_RULES}\n'
  )


def _attack_option(
    name: str,
    values: value_types.ValueType,
    description: str,
    default: Any = None,
    conditions: tuple[Condition, ...] = (),
    **more: Any,
) -> Option:
  """Declares an option that has an effect with an attack only."""
  needs_attack = Condition(
      'attack', lambda options: options.attack is not None, 'needs --attack'
  )
  return Option(
      name,
      values,
      description,
      default,
      conditions=(needs_attack, *conditions),
      feature=MEAN,
      **more,
  )


def _default_strength(options: Any) -> Optional[float]:
  strength = ATTACKS[options.attack].strength
  return strength.default if strength is not None else None


OTHER_RULES = 'a class or an entry of yours as package.module:NAME'
_AGGREGATOR = value_types.Chain(
    value_types.Choice(WRAPPERS, is_other=WRAPPERS.finds),
    value_types.Choice(RULES, OTHER_RULES, RULES.finds),
)
MODEL_AGGREGATOR = Option(
    'model_aggregator',
    _AGGREGATOR,
    _explain_aggregators,
    'mean',
    feature=MEAN,
)
STATISTICS_AGGREGATOR = Option(
    'statistics_aggregator',
    _AGGREGATOR,
    "The same for the clients' running BN statistics, in place of the means of"
    ' --statistics or of the algorithm. Rules other than the mean weight all'
    ' clients alike',
    'mean',
    feature=OWN_NAME,
)
ATTACK = Option(
    'attack',
    value_types.Choice(ATTACKS, OTHER_RULES, ATTACKS.finds),
    lambda: (
        'What the first --num_attackers clients of a round send instead of'
        ' their results, knowing the values of the other clients:\n'
        + listing(ATTACKS)
    ),
    default_text='none',
    feature=MEAN,
)
ATTACK_TARGET = _attack_option(
    'attack_target',
    value_types.Choice(TARGETS),
    'What attackers falsify:\n' + listing(TARGETS),
    'both',
    conditions=(
        Condition(
            'attack',
            lambda options: not ATTACKS[options.attack].falsifies_labels,
            'has no effect on --attack={}, which falsifies labels',
        ),
    ),
)
ATTACK_STRENGTH = _attack_option(
    'attack_strength',
    value_types.POSITIVE,
    'The strength of --attack',
    conditions=(
        Condition(
            'attack',
            lambda options: ATTACKS[options.attack].strength is not None,
            'has no effect on --attack={}, which has no strength',
        ),
    ),
    compute=_default_strength,
    default_text=', '.join(
        f"{attack.strength.default or 'as large as its paper allows'} for"
        f' {name}'
        for name, attack in ATTACKS.items()
        if attack.strength is not None
    ),
)
NUM_ATTACKERS = _attack_option(
    'num_attackers',
    value_types.POSITIVE_INTEGER,
    'Number of attackers, less than the clients of a round',
    compute=lambda options: options.num_byzantine,
    default_text='--num_byzantine',
)
OPTIONS = (
    MODEL_AGGREGATOR,
    STATISTICS_AGGREGATOR,
    NUM_BYZANTINE,
    CLIPPING_RADIUS,
    CLIPPING_NORM,
    TRUSTED_CLIENT,
    BUCKET_SIZE,
    ATTACK,
    ATTACK_TARGET,
    ATTACK_STRENGTH,
    NUM_ATTACKERS,
)


def falsifies_values(attack: Optional[str]) -> bool:
  """Whether an attack changes the values that clients send, not their data."""
  return attack is not None and not ATTACKS[attack].falsifies_labels


def takes_no_weights(options: Any) -> bool:
  """Whether the aggregator of the model treats all clients alike."""
  return options.model_aggregator != 'mean' or (
      falsifies_values(options.attack) and options.attack_target != 'statistics'
  )
