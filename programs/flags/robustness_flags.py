"""The flags of robust aggregation and of attacks.

`RULES`, `WRAPPERS` and `ATTACKS` are the registries. An entry names its class
in `tff_bn.aggregators`, and the flags that are arguments of the class.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
from typing import TYPE_CHECKING, Any, Optional

from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.flag_groups import OWN_NAME
from tff_bn.programs.cli.flag_groups import flag
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.flags import registry

if TYPE_CHECKING:
  from tff_bn import aggregators

_AGGREGATORS = ('model_aggregator', 'statistics_aggregator')
_ATTACK_TARGET = 'both'


@dataclasses.dataclass(frozen=True)
class Rule:
  """A rule in place of the clients' mean, or a wrapper of rules.

  Attributes:
    description: What it computes, in a few words.
    class_name: Its class in `tff_bn.aggregators`.
    arguments: The names of the flags that are arguments of the class, by the
      arguments' names; `seed` is the run's. `num_clients` is always given.
    needs_num_byzantine: Whether `--num_byzantine` must be given.
  """

  description: str
  class_name: str
  arguments: Mapping[str, str] = dataclasses.field(
      default_factory=lambda: {'num_byzantine': 'num_byzantine'}
  )
  needs_num_byzantine: bool = False


RULES = {
    'mean': Rule('the mean, which one client can move anywhere', 'Mean', {}),
    'median': Rule('the median of each coordinate', 'CoordinateMedian'),
    'trimmed_mean': Rule(
        'the mean of each coordinate without its --num_byzantine largest and'
        ' smallest values',
        'TrimmedMean',
        needs_num_byzantine=True,
    ),
    'geometric_median': Rule(
        'the point with the least sum of distances', 'GeometricMedian'
    ),
    'krum': Rule(
        'the client that is nearest to its neighbors',
        'Krum',
        needs_num_byzantine=True,
    ),
    'multi_krum': Rule(
        'the mean of the clients that are nearest to theirs',
        'MultiKrum',
        needs_num_byzantine=True,
    ),
    'mea_med': Rule(
        'the mean of the values nearest to the median',
        'MeaMed',
        needs_num_byzantine=True,
    ),
    'centered_clipping': Rule(
        'the last result plus the mean of the differences from it, clipped to'
        ' --clipping_radius',
        'CenteredClipping',
        {'num_byzantine': 'num_byzantine', 'radius': 'clipping_radius'},
    ),
    'mda': Rule(
        'minimum diameter averaging: the mean of the clients that are nearest'
        ' to each other',
        'MinimumDiameterAveraging',
        needs_num_byzantine=True,
    ),
    'monna': Rule(
        'the mean of the clients that are nearest to --trusted_client',
        'NearestNeighborAveraging',
        {'num_byzantine': 'num_byzantine', 'trusted_client': 'trusted_client'},
        needs_num_byzantine=True,
    ),
    'caf': Rule(
        'covariance bound-agnostic filter: the mean with lower weights in the'
        ' directions of most variance',
        'CovarianceBoundAgnosticFilter',
        needs_num_byzantine=True,
    ),
    'smea': Rule(
        'smallest maximum eigenvalue averaging: the mean of the clients that'
        ' vary least in any direction; for few clients',
        'SmallestMaximumEigenvalueAveraging',
        needs_num_byzantine=True,
    ),
    'bulyan': Rule(
        'the mean of the values nearest to the median of clients that krum'
        ' selects',
        'Bulyan',
        needs_num_byzantine=True,
    ),
}
WRAPPERS = {
    'nnm': Rule(
        'first replaces each client by the mean of its nearest neighbors',
        'NearestNeighborMixing',
        needs_num_byzantine=True,
    ),
    'bucketing': Rule(
        'first takes means of random groups of --bucket_size clients',
        'Bucketing',
        {'bucket_size': 'bucket_size', 'seed': 'seed'},
    ),
    'clipping': Rule(
        'first scales clients down to the norm --clipping_norm',
        'StaticClipping',
        {'max_norm': 'clipping_norm'},
    ),
    'arc': Rule(
        'adaptive robust clipping: first scales the longest clients down to'
        ' the norm of the next one',
        'AdaptiveRobustClipping',
        needs_num_byzantine=True,
    ),
}
# In their order: the last mapping comes first.
_RULES_AND_WRAPPERS = collections.ChainMap(WRAPPERS, RULES)


@dataclasses.dataclass(frozen=True)
class Attack:
  """What attackers do in place of honest training.

  Attributes:
    description: What they do, in a few words.
    class_name: The class in `tff_bn.aggregators` that computes what they send;
      None if they send what they computed from falsified labels.
    arguments: As of a `Rule`.
    strength: The default of `--attack_strength`, for attacks with it as an
      argument; None: the class has a default.
  """

  description: str
  class_name: Optional[str]
  arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)
  strength: Optional[float] = None

  @property
  def has_strength(self) -> bool:
    """Whether `--attack_strength` has an effect on it."""
    return 'attack_strength' in self.arguments.values()


ATTACKS = {
    'sf': Attack(
        'sign flipping: minus the mean of the honest clients; of the BN'
        ' statistics only the means are flipped',
        'SignFlipping',
    ),
    'foe': Attack(
        'fall of empires: (1 - --attack_strength) times the mean of the honest'
        ' clients',
        'FallOfEmpires',
        {'factor': 'attack_strength'},
        strength=3.0,
    ),
    'alie': Attack(
        'a little is enough: the mean of the honest clients plus'
        ' --attack_strength times their standard deviation',
        'ALittleIsEnough',
        {'deviations': 'attack_strength'},
    ),
    'ipm': Attack(
        'inner product manipulation: minus --attack_strength times the mean of'
        ' the honest clients',
        'InnerProductManipulation',
        {'epsilon': 'attack_strength'},
        strength=0.5,
    ),
    'optimized_alie': Attack(
        'alie with the shift that does most harm to the aggregator',
        'OptimizedALittleIsEnough',
    ),
    'optimized_ipm': Attack(
        'ipm with the strength that does most harm to the aggregator',
        'OptimizedInnerProductManipulation',
    ),
    'mimic': Attack(
        'copies of one honest client that differs much from the others',
        'Mimic',
    ),
    'gaussian': Attack(
        'normal noise with the standard deviation --attack_strength',
        'GaussianNoise',
        {'stddev': 'attack_strength', 'seed': 'seed'},
        strength=200.0,  # Blanchard et al. 2017.
    ),
    'inf': Attack(
        'infinity, which all aggregators drop',
        'Infinity',
    ),
    'label_flip': Attack(
        'trains honestly on labels y that became C - 1 - y; ignores'
        ' --attack_target',
        None,
    ),
}
TARGETS = {
    'statistics': 'the BN statistics that they send',
    'model': 'all other variables that they send',
    'both': 'both',
}


def _parts(flags: ParsedFlags) -> set[str]:
  """Returns the rules and wrappers of both aggregators."""
  return {
      part for name in _AGGREGATORS for part in getattr(flags, name).split('+')
  }


def _users(name: str) -> list[str]:
  """Returns the rules and wrappers with this flag as an argument."""
  return [
      part
      for part, rule in _RULES_AND_WRAPPERS.items()
      if name in rule.arguments.values()
  ]


def _rule_flag(name: str, *arguments: Any) -> Any:
  """Declares the flag of this name, which some rules only have."""
  users = _users(name)
  return flag(
      *arguments,
      conditions=(
          flag_groups.Condition(
              'model_aggregator',
              lambda flags: not _parts(flags).isdisjoint(_users(name)),
              f'is only for {", ".join(users)} in --model_aggregator or'
              ' --statistics_aggregator',
          ),
      ),
      feature=registry.MEAN,
  )


def _attack_flag(
    *arguments: Any,
    conditions: Sequence[flag_groups.Condition] = (),
    **options: Any,
) -> Any:
  """Declares a flag that has an effect with an attack only."""
  needs_attack = flag_groups.Condition(
      'attack', lambda flags: flags.attack is not None, 'needs --attack'
  )
  return flag(
      *arguments,
      **options,
      conditions=(needs_attack, *conditions),
      feature=registry.MEAN,
  )


def _defends_or_attacks(flags: ParsedFlags) -> bool:
  return flags.attack is not None or _parts(flags) != {'mean'}


def num_attackers(flags: ParsedFlags) -> Optional[int]:
  """Returns the number of attackers; None if there is no attack."""
  if flags.attack is None:
    return None
  return flags.num_attackers or flags.num_byzantine


def _explain_num_byzantine() -> str:
  rules = _RULES_AND_WRAPPERS.items()
  users = [name for name, rule in rules if rule.needs_num_byzantine]
  return (
      'Number of clients of a round against which the aggregators must be'
      f' robust; less than half of them. Required by {", ".join(users)}'
  )


def falsifies_values(attack: Optional[str]) -> bool:
  """Whether an attack changes the values that clients send, not their data."""
  return attack is not None and ATTACKS[attack].class_name is not None


def trusts_attackers(flags: ParsedFlags, num_clients: int) -> bool:
  """Whether monna trusts one of the attackers, the first clients."""
  number = num_attackers(flags)
  if number is None or _parts(flags).isdisjoint(_users('trusted_client')):
    return False
  position = flags.trusted_client
  if position < 0:
    position += num_clients
  return 0 <= position < number


def takes_no_weights(flags: ParsedFlags) -> bool:
  """Whether the aggregator of the model treats all clients alike."""
  return flags.model_aggregator != 'mean' or (
      falsifies_values(flags.attack) and flags.attack_target != 'statistics'
  )


@dataclasses.dataclass(frozen=True)
class RobustnessFlags(flag_groups.Flags):
  """The server's rules against Byzantine clients, and their attack."""

  TITLE = 'Robustness'

  model_aggregator: Optional[str] = flag(
      parsers.ChainParser(WRAPPERS, RULES),
      lambda: (
          "What the server computes from the clients' changes of the model:\n"
          + flag_groups.listing(RULES)
          + flag_groups.listing(
              {f'{name}+...': rule for name, rule in WRAPPERS.items()}
          )
      ),
      'mean',
      feature=registry.MEAN,
  )
  statistics_aggregator: Optional[str] = flag(
      parsers.ChainParser(WRAPPERS, RULES),
      "The same for the clients' running BN statistics, in place of the means"
      ' of --statistics or of the algorithm. Rules other than the mean weight'
      ' all clients alike',
      'mean',
      feature=OWN_NAME,
  )
  num_byzantine: Optional[int] = flag(
      flag_groups.POSITIVE_INTEGER,
      _explain_num_byzantine,
      default_text='none',
      conditions=(
          flag_groups.Condition(
              'model_aggregator',
              _defends_or_attacks,
              'has no effect without another --model_aggregator or'
              ' --statistics_aggregator than the mean',
          ),
      ),
      feature=registry.MEAN,
  )
  clipping_radius: Optional[float] = _rule_flag(
      'clipping_radius',
      flag_groups.POSITIVE,
      'Radius of centered_clipping',
      10.0,
  )
  clipping_norm: Optional[float] = _rule_flag(
      'clipping_norm',
      flag_groups.POSITIVE,
      'Largest norm of a client after clipping',
      2.0,
  )
  trusted_client: Optional[int] = _rule_flag(
      'trusted_client',
      flag_groups.INTEGER,
      'Position among the clients of a round of the one that monna trusts, from'
      ' 0 for the first; negative numbers count from the end. The first clients'
      ' are the attackers',
      -1,
  )
  bucket_size: Optional[int] = _rule_flag(
      'bucket_size',
      flag_groups.POSITIVE_INTEGER,
      'Number of clients in a group of bucketing',
      2,
  )
  attack: Optional[str] = flag(
      parsers.ChoiceParser(ATTACKS),
      lambda: (
          'What the first --num_attackers clients of a round send instead of'
          ' their results, knowing the values of the other clients:\n'
          + flag_groups.listing(ATTACKS)
      ),
      default_text='none',
      feature=registry.MEAN,
  )
  attack_target: Optional[str] = _attack_flag(
      parsers.ChoiceParser(TARGETS),
      'What attackers falsify:\n' + flag_groups.listing(TARGETS),
      _ATTACK_TARGET,
      conditions=[
          flag_groups.Condition(
              'attack',
              lambda flags: falsifies_values(flags.attack),
              'has no effect on --attack={}, which falsifies labels',
          )
      ],
  )
  attack_strength: Optional[float] = _attack_flag(
      flag_groups.POSITIVE,
      'The strength of --attack',
      conditions=[
          flag_groups.Condition(
              'attack',
              lambda flags: ATTACKS[flags.attack].has_strength,
              'has no effect on --attack={}, which has no strength',
          )
      ],
      compute=lambda flags: ATTACKS[flags.attack].strength,
      default_text=', '.join(
          f"{attack.strength or 'as large as its paper allows'} for {name}"
          for name, attack in ATTACKS.items()
          if attack.has_strength
      ),
  )
  num_attackers: Optional[int] = _attack_flag(
      flag_groups.POSITIVE_INTEGER,
      'Number of attackers, less than the clients of a round',
      compute=lambda flags: flags.num_byzantine,
      default_text='--num_byzantine',
  )

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    for name in _AGGREGATORS:
      for part in getattr(flags, name).split('+'):
        if (
            _RULES_AND_WRAPPERS[part].needs_num_byzantine
            and flags.num_byzantine is None
        ):
          raise ValueError(
              f'{flags.text(name)} needs --num_byzantine, the number of clients'
              f' that {part} has to withstand.'
          )
    super().check(flags)
    if flags.attack is not None and not num_attackers(flags):
      raise ValueError(
          f'--attack={flags.attack} needs --num_attackers, the number of'
          ' clients of a round that attack.'
      )

  def build_rule(
      self, target: str, seed: int, num_clients: Optional[int]
  ) -> 'Optional[aggregators.Rule]':
    """Builds the rule that aggregates the clients' values, and the attack.

    Args:
      target: 'model', for the clients' changes of the model; or 'statistics',
        for their running BN statistics.
      seed: Decides the random choices of rules and attacks.
      num_clients: The number of clients of a round, if it is known.

    Returns:
      The rule; None for the mean of honest clients.
    """
    from tff_bn import aggregators

    name = getattr(self, f'{target}_aggregator')
    attack_class = None
    if self.attack is not None and self.attack_target in (target, 'both'):
      attack_class = ATTACKS[self.attack].class_name
    if name is None or (name == 'mean' and attack_class is None):
      return None
    values = {**dataclasses.asdict(self), 'seed': seed}
    values['num_byzantine'] = self.num_byzantine or 0

    def build(
        class_name: str,
        arguments: Mapping[str, str],
        *wrapped: aggregators.Rule,
        **more: Any,
    ) -> Any:
      given = {key: values[flag_name] for key, flag_name in arguments.items()}
      return getattr(aggregators, class_name)(*wrapped, **given, **more)

    *wrappers, last = name.split('+')
    wrapped: tuple[aggregators.Rule, ...] = ()
    for part in (last, *reversed(wrappers)):
      entry = _RULES_AND_WRAPPERS[part]
      rule = build(
          entry.class_name, entry.arguments, *wrapped, num_clients=num_clients
      )
      wrapped = (rule,)
    if self.attack is not None and attack_class is not None:
      assert self.num_attackers is not None  # The flags are checked.
      rule = aggregators.Attacked(
          rule,
          build(attack_class, ATTACKS[self.attack].arguments),
          self.num_attackers,
          num_clients=num_clients,
      )
    return rule
