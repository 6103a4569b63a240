"""The settings of a run, from flags that are checked against one another.

Nothing here imports TensorFlow, so a mistake is reported at once.
"""

from collections.abc import Collection, Sequence
import dataclasses
import os
import sys
from typing import TypeVar

from absl import flags as absl_flags

from tff_bn.catalog import algorithms as algorithms_lib
from tff_bn.catalog import local_training
from tff_bn.catalog import models
from tff_bn.catalog import rules
from tff_bn.data import splits
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import named_code
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.flags import algorithm_flags
from tff_bn.programs.flags import data_flags
from tff_bn.programs.flags import held_out_flags
from tff_bn.programs.flags import model_flags
from tff_bn.programs.flags import objective_flags
from tff_bn.programs.flags import privacy_flags
from tff_bn.programs.flags import robustness_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.flags import training_flags

_Group = TypeVar('_Group', bound=flag_groups.Flags)


# A dataclass has the fields of its last base first. flags.txt keeps this order.
@dataclasses.dataclass(frozen=True)
class RunSettings(
    run_flags.RunFlags,
    training_flags.ServerFlags,
    training_flags.TrainingFlags,
    objective_flags.ObjectiveFlags,
    model_flags.ModelFlags,
    held_out_flags.HeldOutFlags,
    data_flags.DataFlags,
    privacy_flags.PrivacyFlags,
    robustness_flags.RobustnessFlags,
    algorithm_flags.AlgorithmFlags,
):
  """The flags that define a run of one algorithm with one seed.

  A flag that has no effect on the run is None, whatever its default is.
  """

  def to_flags(self) -> dict[str, str]:
    """Returns the flags' texts by name, for `flags.txt`."""
    return {
        name: parsers.to_text(value)
        for name, value in dataclasses.asdict(self).items()
        if value is not None
    }

  def part(self, group: type[_Group]) -> _Group:
    """Returns the settings of one group of flags."""
    return group(**{name: getattr(self, name) for name in group.specs()})


def define_shared_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the flags that have the same meaning for all runs."""
  return (
      data_flags.DataFlags.define(values),
      held_out_flags.HeldOutFlags.define(values),
      model_flags.ModelFlags.define(values),
      objective_flags.ObjectiveFlags.define(values),
      training_flags.TrainingFlags.define(values),
      training_flags.ServerFlags.define(values),
      robustness_flags.RobustnessFlags.define(values),
      privacy_flags.PrivacyFlags.define(values),
  )


def _algorithms(flags: ParsedFlags) -> list[algorithms_lib.Algorithm]:
  given = getattr(flags, _selector(flags))
  names = (given,) if flags.defines('algorithm') else given
  return list(map(algorithms_lib.find, names))


def _selector(flags: ParsedFlags) -> str:
  """Returns the name of the flag that selects the algorithms."""
  return 'algorithm' if flags.defines('algorithm') else 'algorithms'


def check(flags: ParsedFlags) -> None:
  """Checks the flags of a program against one another.

  A flag that another one makes meaningless is a ValueError, unless that other
  one overrules it: the command line overrules a flagfile.
  """
  try:
    _check(flags)
  except ValueError as error:
    # The catalog's errors name options.
    text = parsers.name_flags(str(error), RunSettings.specs())
    raise ValueError(text) from error


def _check(flags: ParsedFlags) -> None:
  _load_users_code(flags)
  for group in (
      data_flags.DataFlags,
      held_out_flags.HeldOutFlags,
      training_flags.ServerFlags,
      model_flags.ModelFlags,
      objective_flags.ObjectiveFlags,
      run_flags.RunFlags,
  ):
    group.check(flags)
  algorithms = _algorithms(flags)
  _check_features(flags, algorithms)
  algorithm_flags.AlgorithmFlags.check(flags)
  training_flags.TrainingFlags.check(flags)
  if any(rules.MEAN in algorithm.understood for algorithm in algorithms):
    robustness_flags.RobustnessFlags.check(flags)
    _check_robustness(flags, algorithms)
    privacy_flags.PrivacyFlags.check(flags)
  _check_needs(flags, algorithms)
  num_clients = held_out_flags.num_training_clients(flags)
  if (
      flags.clients_per_round is not None
      and num_clients is not None
      and flags.clients_per_round > num_clients
  ):
    without = ''
    if flags.held_out_clients is not None:
      without = f' without {flags.text("held_out_clients")}'
    raise ValueError(
        f'--clients_per_round={flags.clients_per_round} asks for more clients'
        f' than --num_clients={splits.chosen_num_clients(flags)}{without}; use'
        f' at most {num_clients}.'
    )


def _load_users_code(flags: ParsedFlags) -> None:
  """Imports the code of the user that flags name."""
  specs = {**algorithm_flags.ComparisonFlags.specs(), **RunSettings.specs()}
  for name, option in specs.items():
    value = getattr(flags, name) if flags.defines(name) else None
    if value is None or not option.values.names_code(value):
      continue
    # As `python -m` does, let modules in the working folder be imported.
    if os.getcwd() not in sys.path:
      sys.path.insert(0, os.getcwd())
    try:
      option.values.load(value)
    except ValueError as error:
      raise ValueError(f'{flags.text(name)}: {error}') from error


def has_client_models(settings: RunSettings) -> bool:
  """Whether the clients of a run have own models."""
  algorithm = algorithms_lib.find(settings.algorithm)
  return algorithms_lib.CLIENT_MODELS in _understood(settings, algorithm)


def trust_flag(settings: RunSettings) -> str:
  """Returns what the commands that read a run need: ` --trust_run`, or ''."""
  types = {name: option.values for name, option in settings.specs().items()}
  if named_code.find(dataclasses.asdict(settings), types) is None:
    return ''
  return f' --{named_code.TRUST_RUN}'


def _understood(
    flags: ParsedFlags | RunSettings, algorithm: algorithms_lib.Algorithm
) -> Collection[str]:
  """Returns the features and options that have an effect on an algorithm."""
  if models.has_personal_encodings(flags) or (
      algorithm.has(algorithms_lib.LOCAL_LAYERS.name)
      and flags.local_layers is not None
  ):
    return algorithm.understood | {algorithms_lib.CLIENT_MODELS}
  return algorithm.understood


def _check_features(
    flags: ParsedFlags, algorithms: Sequence[algorithms_lib.Algorithm]
) -> None:
  """Checks that every flag that is given has an effect on some algorithm."""
  selector = _selector(flags)
  no_effect = f'has no effect with {flags.text(selector)}'
  for name, spec in sorted(RunSettings.specs().items()):
    if spec.feature is not None and not any(
        spec.feature in _understood(flags, algorithm)
        for algorithm in algorithms
    ):
      users = ', '.join(algorithms_lib.users(spec.feature))
      flags.refuse_unless_overruled(
          name, selector, f'{no_effect}; it is for {users}'
      )
  for name, reason in algorithms[0].ignores.items():
    if all(name in algorithm.ignores for algorithm in algorithms):
      flags.refuse_unless_overruled(name, selector, f'{no_effect}, {reason}')


def _check_needs(
    flags: ParsedFlags, algorithms: Sequence[algorithms_lib.Algorithm]
) -> None:
  """Checks what the algorithms need of the flags."""
  unmet: dict[algorithms_lib.Need, list[str]] = {}
  texts: dict[algorithms_lib.Need, str] = {}
  for algorithm in algorithms:
    options = _resolve(flags, algorithm, 0)
    algorithm.check(options)
    for need in algorithm.needs:
      if not need.holds(options):
        unmet.setdefault(need, []).append(algorithm.name)
        texts.setdefault(need, need.describe(algorithm.name, options))
  for need, (_, *others) in unmet.items():
    same = f' The same holds for {", ".join(others)}.' if others else ''
    raise ValueError(texts[need] + same)


def _check_robustness(
    flags: ParsedFlags, algorithms: Sequence[algorithms_lib.Algorithm]
) -> None:
  """Checks the rules and the attack against the rest of the flags."""
  num_attackers = robustness_flags.num_attackers(flags)
  if (
      rules.falsifies_values(flags.attack)
      and flags.attack_target == 'statistics'
      and not any(a.has('statistics_aggregator') for a in algorithms)
  ):
    raise ValueError(
        '--attack_target=statistics has no effect with'
        f' {flags.text(_selector(flags))}, whose clients send no BN statistics.'
    )
  if (
      rules.falsifies_values(flags.attack)
      and flags.attack_target in ('exchanges', 'all')
      and not any(a.has('exchange_aggregator') for a in algorithms)
  ):
    raise ValueError(
        f'--attack_target={flags.attack_target} has no effect with'
        f' {flags.text(_selector(flags))}, whose rounds have one exchange; use'
        ' statistics, model or both.'
    )
  num_clients = flags.clients_per_round or (
      held_out_flags.num_training_clients(flags)
  )
  if num_clients is not None:
    if (
        flags.num_byzantine is not None
        and 2 * flags.num_byzantine >= num_clients
    ):
      raise ValueError(
          f'--num_byzantine={flags.num_byzantine} must be less than half of the'
          f' {num_clients} clients of a round.'
      )
    if num_attackers is not None and num_attackers >= num_clients:
      raise ValueError(
          f'--num_attackers={num_attackers} must be less than the'
          f' {num_clients} clients of a round.'
      )
    if robustness_flags.trusts_attackers(flags, num_clients):
      raise ValueError(
          f'--trusted_client={flags.trusted_client} is one of the first'
          f' {num_attackers} of {num_clients} clients of a round, which are the'
          ' attackers; trust a later one.'
      )
  attack = f' and --attack={flags.attack}' if flags.attack else ''
  local_training.check_weighting(
      flags.client_weighting,
      f'--model_aggregator={flags.model_aggregator}{attack}',
      not rules.takes_no_weights(flags),
  )


def resolve(flags: ParsedFlags, algorithm: str, seed: int) -> RunSettings:
  """Computes the settings of a run, with the defaults that depend on flags.

  The flags are checked. A ValueError says that `flags.txt` could not hold the
  value of one.
  """
  settings = _resolve(flags, algorithms_lib.find(algorithm), seed)
  _check_lines(settings)
  return settings


def _resolve(
    flags: ParsedFlags, algorithm: algorithms_lib.Algorithm, seed: int
) -> RunSettings:
  understood = _understood(flags, algorithm)
  without_effect = [
      name
      for name, spec in RunSettings.specs().items()
      if name in algorithm.ignores
      or (spec.feature is not None and spec.feature not in understood)
  ]
  known = {}
  if algorithm.client_weighting is not None and flags.client_weighting is None:
    known['client_weighting'] = algorithm.client_weighting
  return RunSettings.read(
      flags.without(without_effect),
      understood,
      algorithm=algorithm.name,
      seed=seed,
      **known,
  )


def _check_lines(settings: RunSettings) -> None:
  """Checks that `flags.txt` can hold the flags of a run.

  The path of a dataset contains the working folder, which no flag names.
  """
  for name, text in settings.to_flags().items():
    parsers.check_characters(f'--{name}={text}')
    if text != text.strip():
      raise ValueError(
          f'--{name}={text}: must not begin or end with a space; rename the'
          ' file.'
      )
