"""The settings of a run, from flags that are checked against one another.

Nothing here imports TensorFlow, so a mistake is reported at once.
"""

from collections.abc import Sequence
import dataclasses
import os
import sys
from typing import TypeVar

from absl import flags as absl_flags

from tff_bn.catalog import models
from tff_bn.data import splits
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.flags import algorithm_flags
from tff_bn.programs.flags import data_flags
from tff_bn.programs.flags import held_out_flags
from tff_bn.programs.flags import model_flags
from tff_bn.programs.flags import registry
from tff_bn.programs.flags import robustness_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.flags import server_flags
from tff_bn.programs.flags import training_flags

_Group = TypeVar('_Group', bound=flag_groups.Flags)


# A dataclass has the fields of its last base first. flags.txt keeps this order.
@dataclasses.dataclass(frozen=True)
class RunSettings(
    run_flags.RunFlags,
    server_flags.ServerFlags,
    training_flags.TrainingFlags,
    model_flags.ModelFlags,
    held_out_flags.HeldOutFlags,
    data_flags.DataFlags,
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
      training_flags.TrainingFlags.define(values),
      server_flags.ServerFlags.define(values),
      robustness_flags.RobustnessFlags.define(values),
  )


def _algorithms(flags: ParsedFlags) -> Sequence[registry.Algorithm]:
  names = (flags.algorithm,) if flags.defines('algorithm') else flags.algorithms
  return [registry.find(name) for name in names]


def _selector(flags: ParsedFlags) -> str:
  """Returns the name of the flag that selects the algorithms."""
  return 'algorithm' if flags.defines('algorithm') else 'algorithms'


def check(flags: ParsedFlags) -> None:
  """Checks flags against one another.

  A flag that another one makes meaningless is an error, unless that other one
  overrules it: the command line overrules a flagfile.

  Args:
    flags: The flags of `tff-bn-train` or `tff-bn-compare`.

  Raises:
    ValueError: If flags contradict one another.
  """
  _load_users_code(flags)
  for group in (
      data_flags.DataFlags,
      held_out_flags.HeldOutFlags,
      server_flags.ServerFlags,
      model_flags.ModelFlags,
  ):
    group.check(flags)
  algorithms = _algorithms(flags)
  _check_features(flags, algorithms)
  algorithm_flags.AlgorithmOptions.check(flags)
  training_flags.TrainingFlags.check(flags)
  _check_model(flags, algorithms)
  for algorithm in algorithms:
    _check_needs(flags, algorithm)
  if any(registry.MEAN in algorithm.flags for algorithm in algorithms):
    robustness_flags.RobustnessFlags.check(flags)
    _check_robustness(flags, algorithms)
  for algorithm in algorithms:
    _check_correction(flags, algorithm)
  held_out_flags.check_algorithms(flags, algorithms)
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
  for name, option in RunSettings.specs().items():
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
  algorithm = registry.find(settings.algorithm)
  return registry.CLIENT_MODELS in _understood(settings, algorithm)


def _understood(
    flags: ParsedFlags | RunSettings, algorithm: registry.Algorithm
) -> Sequence[str]:
  """Returns the flags and features that have an effect on an algorithm."""
  if models.has_personal_encodings(flags):
    return (*algorithm.flags, registry.CLIENT_MODELS)
  return algorithm.flags


def _check_features(
    flags: ParsedFlags, algorithms: Sequence[registry.Algorithm]
) -> None:
  """Checks that some algorithm understands every flag that is given."""
  selector = _selector(flags)
  for name, spec in sorted(RunSettings.specs().items()):
    if spec.feature is not None and not any(
        spec.feature in _understood(flags, algorithm)
        for algorithm in algorithms
    ):
      flags.refuse_unless_overruled(
          name,
          selector,
          f'has no effect with {flags.text(selector)}; it is for'
          f' {", ".join(registry.users(spec.feature))}',
      )


def _check_model(
    flags: ParsedFlags, algorithms: Sequence[registry.Algorithm]
) -> None:
  """Checks that every algorithm can train the model."""
  selected = flags.text(_selector(flags))
  if flags.precision == 'mixed_float16':
    impossible = [a.name for a in algorithms if not a.trains_in_float16]
    if impossible:
      raise ValueError(
          f'--precision=mixed_float16 is impossible with {selected}:'
          f' {", ".join(impossible)} cannot scale the loss, as float16 needs'
          ' it. Use mixed_bfloat16 or float32.'
      )
    if flags.fbn_backward in ('mean', 'running'):
      raise ValueError(
          f'--fbn_backward={flags.fbn_backward} is impossible with'
          ' --precision=mixed_float16, which scales gradients; use'
          ' mixed_bfloat16 or float32.'
      )
  if not any(map(_moves_statistics_by_momentum, algorithms)):
    flags.refuse_unless_overruled(
        'batch_norm_momentum',
        _selector(flags),
        f'has no effect with {selected}, which has --hbn_statistics_rate',
    )
  impossible = [a.name for a in algorithms if not a.trains_personal_models]
  if impossible and models.has_personal_encodings(flags):
    possible = [
        name
        for name, algorithm in registry.ALGORITHMS.items()
        if algorithm.trains_personal_models
    ]
    raise ValueError(
        f'--pan_personal_share={flags.pan_personal_share:g} is impossible with'
        f' {selected}: {", ".join(impossible)} cannot give clients personal'
        f' encodings. Use 0, or {", ".join(possible)}.'
    )


def _moves_statistics_by_momentum(algorithm: registry.Algorithm) -> bool:
  """Whether the momentum of the BN layers has an effect."""
  return algorithm.batch_norm != 'hybrid'


def _check_needs(flags: ParsedFlags, algorithm: registry.Algorithm) -> None:
  """Checks what an algorithm needs of the other flags."""
  if algorithm.batch_norm is not None and flags.normalization == 'batch_renorm':
    raise ValueError(
        f'--normalization=batch_renorm is impossible with {algorithm.name},'
        ' which has its own batch normalization layers; use'
        ' --normalization=batch.'
    )
  if algorithm.first_phase is not None:
    num_rounds = getattr(flags, algorithm.first_phase)
    if num_rounds is None and flags.rounds == 1:
      raise ValueError(
          f'--rounds=1 is too few for {algorithm.name}, which fixes the BN'
          ' statistics after some rounds; use at least 2.'
      )
    if num_rounds is not None and num_rounds >= flags.rounds:
      raise ValueError(
          f'--{algorithm.first_phase}={num_rounds} leaves no round in which the'
          f' BN statistics of {algorithm.name} are fixed; it must be less than'
          f' --rounds={flags.rounds}.'
      )
  if algorithm.local_steps not in (None, flags.local_steps):
    raise ValueError(
        f'{algorithm.name} needs --local_steps={algorithm.local_steps}, but got'
        f' {training_flags.describe_local_training(flags)}.'
    )
  if algorithm.needs_same_units and flags.shuffle_times:
    raise ValueError(
        f'--shuffle_times={flags.shuffle_times:g} is impossible with'
        f' {algorithm.name}, which needs the gradients of all clients for the'
        ' same units; use 0.'
    )
  if algorithm.needs_sgd and flags.client_optimizer != 'sgd':
    raise ValueError(
        f'{flags.text("client_optimizer")} is impossible with {algorithm.name},'
        ' whose steps are steps of SGD with the mean gradient; use sgd.'
    )
  if 'dsgd_momentum' in algorithm.flags and flags.dsgd_momentum is not None:
    _check_dsgd_momentum(flags, algorithm)


def _check_dsgd_momentum(
    flags: ParsedFlags, algorithm: registry.Algorithm
) -> None:
  """Checks the flags that the momentum of DSGD's clients excludes."""
  momentum = flags.text('dsgd_momentum')
  if flags.client_momentum:
    reason = 'the first is the momentum of each client, the second of the mean'
    if algorithm.trains_on_union:
      reason = 'the first is an average, the second a sum'
    raise ValueError(
        f'{momentum} and --client_momentum={flags.client_momentum:g} exclude'
        f' each other with {algorithm.name}: {reason} of the gradients. Give'
        ' one of them.'
    )
  if 'fbn_backward' in algorithm.flags and flags.fbn_backward != 'none':
    raise ValueError(
        f'{momentum} and --fbn_backward={flags.fbn_backward} exclude each other'
        f' with {algorithm.name}, which computes the averages of the backward'
        ' pass from the gradients that clients send; with the first, they send'
        ' momentums. --client_momentum is possible.'
    )


def _check_correction(
    flags: ParsedFlags, algorithm: registry.Algorithm
) -> None:
  """Checks what a correction of the clients' drift needs of other flags."""
  correction = algorithm.correction
  if correction is None:
    return
  if 'fbn_backward' in algorithm.flags and flags.fbn_backward != 'none':
    raise ValueError(
        f'--fbn_backward={flags.fbn_backward} is impossible with'
        f" {algorithm.name}: both correct the gradients of the clients' steps."
    )
  if correction.needs_plain_sgd:
    reason = (
        f'is impossible with {algorithm.name}, which computes the mean gradient'
        ' of a client from the change by its steps of plain SGD'
    )
    if flags.client_optimizer != 'sgd':
      raise ValueError(f'{flags.text("client_optimizer")} {reason}; use sgd.')
    if flags.client_momentum:
      raise ValueError(
          f'--client_momentum={flags.client_momentum:g} {reason}; use 0.'
      )
  if not correction.keeps_weights and robustness_flags.takes_no_weights(flags):
    raise ValueError(
        f'--model_aggregator={flags.model_aggregator}'
        + (f' with --attack={flags.attack}' if flags.attack else '')
        + f' is impossible with {algorithm.name}, which weights the clients by'
        ' their losses.'
    )


def _check_robustness(
    flags: ParsedFlags, algorithms: Sequence[registry.Algorithm]
) -> None:
  """Checks the rules and the attack against the rest of the flags."""
  num_attackers = robustness_flags.num_attackers(flags)
  if (
      robustness_flags.falsifies_values(flags.attack)
      and flags.attack_target == 'statistics'
      and not any('statistics_aggregator' in a.flags for a in algorithms)
  ):
    raise ValueError(
        '--attack_target=statistics has no effect with'
        f' {flags.text(_selector(flags))}, whose clients send no BN statistics.'
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
  if (
      flags.client_weighting == 'num_examples'
      and robustness_flags.takes_no_weights(flags)
  ):
    raise ValueError(
        '--client_weighting=num_examples is impossible with'
        f' --model_aggregator={flags.model_aggregator}'
        + (f' and --attack={flags.attack}' if flags.attack else '')
        + ', which takes no weights; use uniform.'
    )


def resolve(flags: ParsedFlags, algorithm: str, seed: int) -> RunSettings:
  """Computes the settings of a run, with the defaults that depend on flags.

  Args:
    flags: The flags of `tff-bn-train` or `tff-bn-compare`, checked.
    algorithm: The run's algorithm.
    seed: The run's seed.

  Returns:
    The settings of this run.

  Raises:
    ValueError: If `flags.txt` could not hold the value of a flag.
  """
  entry = registry.find(algorithm)
  understood = _understood(flags, entry)
  without_effect = [
      name
      for name, spec in RunSettings.specs().items()
      if spec.feature is not None and spec.feature not in understood
  ]
  if not _moves_statistics_by_momentum(entry):
    without_effect.append('batch_norm_momentum')
  known = {}
  if entry.client_weighting is not None and flags.client_weighting is None:
    known['client_weighting'] = entry.client_weighting
  settings = RunSettings.read(
      flags.without(without_effect),
      understood,
      algorithm=algorithm,
      seed=seed,
      **known,
  )
  _check_lines(settings)
  return settings


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
