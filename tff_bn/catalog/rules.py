"""Robust rules, the steps before a rule (wrappers), and attacks."""

import dataclasses
import functools
import inspect
from typing import Any, Optional

from tff_bn.catalog import parts
from tff_bn.catalog import value_types
from tff_bn.catalog.options import OWN_NAME
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option

# The feature of algorithms whose server averages what the clients send.
MEAN = 'mean'
# The options that name rules.
AGGREGATORS = (
    'model_aggregator',
    'statistics_aggregator',
    'exchange_aggregator',
)
_LISTED = '--model_aggregator, --statistics_aggregator or --exchange_aggregator'
_ROOM = 'tff_bn.aggregators'


@dataclasses.dataclass(frozen=True)
class _Aggregating(parts.Part):
  """A rule or a wrapper.

  Its class gets the largest number of clients of a round as `num_clients`.

  Attributes:
    needs_num_byzantine: Whether `--num_byzantine` must be given.
  """

  needs_num_byzantine: bool = False


@dataclasses.dataclass(frozen=True)
class Rule(_Aggregating):
  """A rule in place of the clients' mean."""


@dataclasses.dataclass(frozen=True)
class Wrapper(_Aggregating):
  """A step before a rule. Its class gets the rule first."""


@dataclasses.dataclass(frozen=True)
class Attack(parts.Part):
  """What attackers do in place of honest training.

  Attributes:
    strength: The argument that gets `--attack_strength`, if there is one.
    poisons_data: Whether attackers train honestly on falsified data, which
      `builds` makes, given the clients' data and the number of attackers.
      Otherwise they falsify what they send.
  """

  strength: Optional[Option] = None
  poisons_data: bool = False


def chain(name: str) -> list[Wrapper | Rule]:
  """Returns the wrappers and the rule of an aggregator such as nnm+median."""
  *wrappers, last = name.split('+')
  return [*(WRAPPERS[wrapper] for wrapper in wrappers), RULES[last]]


def _is_mean(name: str, options: Any) -> bool:
  """Whether an aggregator is the mean, or has no effect."""
  return getattr(options, name) in ('mean', None)


def _used_parts(options: Any) -> list[Wrapper | Rule]:
  """Returns the wrappers and rules of all aggregators."""
  return [
      part for name in AGGREGATORS for part in chain(getattr(options, name))
  ]


def _users(option: str) -> list[str]:
  """Returns the rules and wrappers that get this option."""
  return [
      name for name, rule in {**RULES, **WRAPPERS}.items() if rule.has(option)
  ]


def uses(option: str, options: Any) -> bool:
  """Whether an aggregator gets this option."""
  return any(part.has(option) for part in _used_parts(options))


def _rule_option(
    name: str,
    values: value_types.ValueType,
    description: str,
    default: Any,
    argument: str = OWN_NAME,
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
              lambda: (f'is only for {", ".join(_users(name))} in {_LISTED}'),
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
            for name, rule in {**RULES, **WRAPPERS}.items()
            if rule.needs_num_byzantine
        )
    ),
    default_text='none',
    argument=OWN_NAME,
    conditions=(
        Condition(
            'model_aggregator',
            lambda options: options.attack is not None
            or any(part.name != 'mean' for part in _used_parts(options)),
            f'has no effect without another {_LISTED} than the mean',
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
)
BUCKET_SIZE = _rule_option(
    'bucket_size',
    value_types.POSITIVE_INTEGER,
    'Number of clients in a group of bucketing',
    2,
)


def _rule_of_object(name: str, found: Any) -> Rule:
  """Returns the entry of a user's class."""
  if isinstance(found, Wrapper) or _is_wrapper(name, found):
    raise ValueError(
        f'{name} is a step before a rule; write the rule behind it, as in'
        f' {name}+median.'
    )
  parts.require_arguments(name, found, num_byzantine=0, num_clients=1)
  return Rule(name, 'a rule of yours', found, (NUM_BYZANTINE,))


def _wrapper_of_object(name: str, found: Any) -> Wrapper:
  """Returns the entry of a user's class."""
  if isinstance(found, Rule) or not _is_wrapper(name, found):
    raise ValueError(
        f'{name} is a rule, but a step before a rule is needed: a class with'
        ' the argument `rule`, or an entry Wrapper(...).'
    )
  parts.require_arguments(name, found, None, num_byzantine=0, num_clients=1)
  return Wrapper(name, 'a step of yours', found, (NUM_BYZANTINE,))


def _is_wrapper(name: str, found: Any) -> bool:
  """Whether a user's class gets a rule; checks that it is a rule itself."""
  parts.require_class(
      name,
      found,
      f'{_ROOM}.robust_rule:Rule',
      f'a rule: a class derived from {_ROOM}.robust_rule.CheckedRule, or an'
      f' entry of {__name__}',
  )
  return 'rule' in inspect.signature(found).parameters


def _attack_of_object(name: str, found: Any) -> Attack:
  """Returns the entry of a user's class."""
  parts.require_class(
      name,
      found,
      f'{_ROOM}.attacks:Attack',
      f'an attack: a class derived from {_ROOM}.Attack, or an entry of'
      f' {__name__}',
  )
  parts.require_arguments(name, found)
  return Attack(name, 'an attack of yours', found)


RULES: parts.Parts[Rule] = parts.Parts(
    Rule(
        'mean',
        'the mean, which one client can move anywhere',
        f'{_ROOM}.coordinate_rules:Mean',
    ),
    Rule(
        'median',
        'the median of each coordinate',
        f'{_ROOM}.coordinate_rules:CoordinateMedian',
        (NUM_BYZANTINE,),
    ),
    Rule(
        'trimmed_mean',
        'the mean of each coordinate without its --num_byzantine largest and'
        ' smallest values',
        f'{_ROOM}.coordinate_rules:TrimmedMean',
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
        'the mean of all but --num_byzantine clients, those that are nearest to'
        ' their neighbors',
        f'{_ROOM}.krum:MultiKrum',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'mea_med',
        'the mean of the values of each coordinate that are nearest to their'
        ' median, all but --num_byzantine',
        f'{_ROOM}.coordinate_rules:MeaMed',
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
        'minimum diameter averaging: the mean of all but --num_byzantine'
        ' clients, those that are nearest to each other',
        f'{_ROOM}.mda:MinimumDiameterAveraging',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'monna',
        'the mean of all but --num_byzantine clients, those that are nearest to'
        ' --trusted_client',
        f'{_ROOM}.monna:NearestNeighborAveraging',
        (NUM_BYZANTINE, TRUSTED_CLIENT),
        needs_num_byzantine=True,
    ),
    Rule(
        'caf',
        'covariance bound-agnostic filter: the mean with lower weights in the'
        ' directions of most variance',
        f'{_ROOM}.eigenvalue_rules:CovarianceBoundAgnosticFilter',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'smea',
        'smallest maximum eigenvalue averaging: the mean of all but'
        ' --num_byzantine clients, those that vary least in any direction; for'
        ' few clients',
        f'{_ROOM}.eigenvalue_rules:SmallestMaximumEigenvalueAveraging',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Rule(
        'bulyan',
        'the mean of the values of each coordinate that are nearest to their'
        ' median, of clients that krum selects one after another',
        f'{_ROOM}.bulyan:Bulyan',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    of_object=_rule_of_object,
)
WRAPPERS: parts.Parts[Wrapper] = parts.Parts(
    Wrapper(
        'nnm',
        'first replaces each client by the mean of its nearest neighbors',
        f'{_ROOM}.pre_aggregation:NearestNeighborMixing',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    Wrapper(
        'bucketing',
        'first takes means of random groups of --bucket_size clients',
        f'{_ROOM}.pre_aggregation:Bucketing',
        (BUCKET_SIZE,),
        needs_seed=True,
    ),
    Wrapper(
        'clipping',
        'first scales clients down to the norm --clipping_norm',
        f'{_ROOM}.pre_aggregation:StaticClipping',
        (CLIPPING_NORM,),
    ),
    Wrapper(
        'arc',
        'adaptive robust clipping: first scales the clients with the largest'
        ' norms down to the next smaller norm',
        f'{_ROOM}.pre_aggregation:AdaptiveRobustClipping',
        (NUM_BYZANTINE,),
        needs_num_byzantine=True,
    ),
    of_object=_wrapper_of_object,
)


# The arguments behind `--attack_strength`. Each attack has a range and a
# default of its own.
FACTOR = Option('factor', value_types.FINITE, '', 3.0)
DEVIATIONS = Option(
    'deviations', value_types.FINITE, '', None, 'as large as its paper allows'
)
EPSILON = Option('epsilon', value_types.POSITIVE, '', 0.5)
# Blanchard et al. 2017.
STDDEV = Option('stddev', value_types.POSITIVE, '', 200.0)
WHITE_SHARE = Option('share', value_types.PART, '', 0.5)

ATTACKS = parts.Parts(
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
        strength=FACTOR,
    ),
    Attack(
        'alie',
        'a little is enough: the mean of the honest clients plus'
        ' --attack_strength times their standard deviation',
        f'{_ROOM}.attacks:ALittleIsEnough',
        strength=DEVIATIONS,
    ),
    Attack(
        'ipm',
        'inner product manipulation: minus --attack_strength times the mean of'
        ' the honest clients',
        f'{_ROOM}.attacks:InnerProductManipulation',
        strength=EPSILON,
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
        strength=STDDEV,
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
        'tff_bn.data.label_flipping:with_flipped_labels',
        poisons_data=True,
    ),
    Attack(
        'soda',
        'trains honestly on inputs x that became (1 - s) x + s max(x), with s ='
        ' --attack_strength, which moves the BN statistics alone; ignores'
        ' --attack_target',
        'tff_bn.data.shifted_inputs:with_shifted_inputs',
        strength=WHITE_SHARE,
        poisons_data=True,
    ),
    of_object=_attack_of_object,
)


def classes(*kinds: parts.Parts[Any]) -> dict[str, str]:
  """Returns the module of each class of `tff_bn.aggregators`, by its name."""
  found = {}
  for part in (part for kind in kinds for part in kind.values()):
    module, _, name = str(part.builds).partition(':')
    if module.startswith(f'{_ROOM}.'):
      found[name] = module.removeprefix(f'{_ROOM}.')
  return found


TARGETS = {
    'statistics': 'the BN statistics that they send',
    'model': 'all other variables that they send',
    'both': 'both',
    'exchanges': (
        'what they send in the exchanges of fedtan; needs --moments=fused'
    ),
    'all': 'all of these',
}
# The targets with which the values for an aggregator are falsified.
_TARGETS_OF = {
    'statistics_aggregator': ('statistics', 'both', 'all'),
    'model_aggregator': ('model', 'both', 'all'),
    'exchange_aggregator': ('exchanges', 'all'),
}


def _explain_aggregators() -> str:
  wrappers = {f'{name}+...': rule for name, rule in WRAPPERS.items()}
  return (
      "What the server computes from the clients' changes of the model:\n"
      + parts.listing(RULES)
      + parts.listing(wrappers)
      + f'or {OTHER_PARTS}\n'
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


OTHER_PARTS = 'a class or an entry of yours as package.module:NAME'
_AGGREGATOR = value_types.Chain(
    parts.PartName(WRAPPERS),
    parts.PartName(RULES, OTHER_PARTS),
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
EXCHANGE_AGGREGATOR = Option(
    'exchange_aggregator',
    _AGGREGATOR,
    'The same for what the clients of fedtan send in the exchanges of the first'
    ' step, in place of sums. Needs --moments=fused',
    'mean',
    feature=OWN_NAME,
)
FILTERS: parts.Parts[parts.Part] = parts.Parts(
    parts.Part(
        'bnguard',
        'divides the clients into two clusters by the statistics of the first'
        ' BN layer, and averages the larger cluster',
        f'{_ROOM}.bn_guard:BnGuardFactory',
    ),
)
CLIENT_FILTER = Option(
    'client_filter',
    value_types.Choice(FILTERS),
    'How the server chooses the clients of a round that it averages:\n'
    + parts.listing(FILTERS),
    default_text='averages all clients',
    argument=OWN_NAME,
    conditions=(
        *(
            Condition(
                name,
                functools.partial(_is_mean, name),
                f'is impossible with --{name}={{}}: the clients that are left'
                ' are averaged',
            )
            for name in ('model_aggregator', 'statistics_aggregator')
        ),
        Condition(
            'attack',
            lambda options: not falsifies_values(options.attack),
            'is impossible with --attack={}, which needs a rule to attack; use'
            ' an attack that falsifies data',
        ),
        Condition(
            'privacy',
            lambda options: options.privacy == 'none',
            'is impossible with --privacy={}, which hides what each client'
            ' sends',
        ),
    ),
    feature=OWN_NAME,
)
ATTACK = Option(
    'attack',
    parts.PartName(ATTACKS, OTHER_PARTS),
    lambda: (
        'What the first --num_attackers clients of a round send instead of'
        ' their results, knowing the values of the other clients:\n'
        + parts.listing(ATTACKS)
        + f'or {OTHER_PARTS}\n'
    ),
    default_text='none',
    feature=MEAN,
)
ATTACK_TARGET = _attack_option(
    'attack_target',
    value_types.Choice(TARGETS),
    'What attackers falsify:\n' + parts.listing(TARGETS),
    'both',
    conditions=(
        Condition(
            'attack',
            lambda options: not ATTACKS[options.attack].poisons_data,
            'has no effect on --attack={}, which falsifies data',
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
        f'{attack.strength.explain_default()} for {name}'
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
    EXCHANGE_AGGREGATOR,
    CLIENT_FILTER,
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
  return attack is not None and not ATTACKS[attack].poisons_data


def is_attacked(aggregator: str, options: Any) -> bool:
  """Whether attackers falsify the values for an option that names rules."""
  return (
      falsifies_values(options.attack)
      and options.attack_target in _TARGETS_OF[aggregator]
  )


def has_exchange_rule(options: Any) -> bool:
  """Whether FedTAN's exchanges have a rule, or attackers falsify them."""
  return options.exchange_aggregator is not None and (
      options.exchange_aggregator != 'mean'
      or is_attacked('exchange_aggregator', options)
  )


def takes_no_weights(options: Any) -> bool:
  """Whether the aggregator of the model treats all clients alike."""
  return options.model_aggregator != 'mean' or is_attacked(
      'model_aggregator', options
  )
