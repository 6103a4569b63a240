"""The settings of a run, from flags that are checked against one another.

Nothing here imports TensorFlow, so a mistake is reported at once.
"""

from collections.abc import Sequence
import dataclasses
import os
from typing import Optional

from absl import flags as absl_flags

from tff_bn.data import names as data_names
from tff_bn.programs import cli
from tff_bn.programs import defaults
from tff_bn.programs import flag_groups
from tff_bn.programs import parsers
from tff_bn.programs import registry

# The fields of `RunSettings` that decide about the clients' data.
DATA_FIELDS = (
    *flag_groups.define_data_flags(absl_flags.FlagValues()).names,
    'clients_per_round',
    'seed',
)


@dataclasses.dataclass(frozen=True)
class RunSettings:
  """The flags that define a run of one algorithm with one seed.

  Every field has the name, and the meaning, of a flag of `tff-bn-train`. A flag
  that has no effect on the run is None, whatever its default.
  """

  algorithm: str
  statistics: Optional[str]
  moments: Optional[str]
  sync_rounds: Optional[int]
  after_sync_factor: Optional[float]
  dataset: str
  data_dir: Optional[str]
  image_size: Optional[str]
  split: str
  num_clients: Optional[int]
  classes_per_client: Optional[int]
  dirichlet_alpha: Optional[float]
  gamma: Optional[float]
  imbalance: Optional[float]
  model: str
  normalization: str
  precision: str
  rounds: int
  clients_per_round: Optional[int]
  local_steps: Optional[int]
  local_epochs: Optional[int]
  batch_size: int
  client_learning_rate: float
  client_learning_rate_schedule: Optional[str]
  client_momentum: float
  client_weight_decay: float
  client_weighting: Optional[str]
  jit_compile: bool
  server_optimizer: Optional[str]
  server_learning_rate: Optional[float]
  server_momentum: Optional[float]
  seed: int
  evaluate_every: int
  checkpoint_every: int

  def to_flags(self) -> dict[str, str]:
    """The flags' texts by name, for `flags.txt`."""
    return {
        name: parsers.to_text(value)
        for name, value in dataclasses.asdict(self).items()
        if value is not None
    }


def check(flags: cli.ParsedFlags):
  """Checks flags against one another.

  A flag that another one makes meaningless is an error, unless that other one
  overrules it: the command line overrules a flagfile.

  Args:
    flags: The flags of `tff-bn-train` or `tff-bn-compare`.

  Raises:
    ValueError: If flags contradict one another.
  """
  for name, split in flag_groups.SPLIT_FLAGS.items():
    if flags.split != split:
      refuse_unless_overruled(
          flags, name, 'split', f'is only for --split={split}'
      )
  if flags.server_optimizer != 'sgdm':
    refuse_unless_overruled(
        flags,
        'server_momentum',
        'server_optimizer',
        'is only for --server_optimizer=sgdm',
    )
  selector = 'algorithm' if flags.defines('algorithm') else 'algorithms'
  algorithms = _algorithms(flags)
  for name in sorted(
      {
          name
          for algorithm in registry.ALGORITHMS.values()
          for name in algorithm.flags
      }
  ):
    if not any(name in algorithm.flags for algorithm in algorithms):
      users = [
          algorithm.name
          for algorithm in registry.ALGORITHMS.values()
          if name in algorithm.flags
      ]
      refuse_unless_overruled(
          flags,
          name,
          selector,
          f'has no effect with --{selector}='
          f'{parsers.to_text(getattr(flags, selector))}; it is for'
          f' {", ".join(users)}',
      )
  if (
      flags.local_steps is not None
      and flags.local_epochs is not None
      and flags.source('local_steps') == flags.source('local_epochs')
  ):
    raise ValueError(
        f'--local_steps={flags.local_steps} and'
        f' --local_epochs={flags.local_epochs} exclude each other; give one of'
        ' them.'
    )
  if flags.precision == 'mixed_float16':
    impossible = [a.name for a in algorithms if not a.trains_in_float16]
    if impossible:
      raise ValueError(
          f'--precision=mixed_float16 is impossible with --{selector}='
          f'{parsers.to_text(getattr(flags, selector))}:'
          f' {", ".join(impossible)} cannot scale the loss, as float16 needs'
          ' it. Use mixed_bfloat16 or float32.'
      )
  if any('sync_rounds' in algorithm.flags for algorithm in algorithms):
    _check_sync_rounds(flags)
  num_clients = _num_clients(flags)
  if (
      flags.clients_per_round is not None
      and num_clients is not None
      and flags.clients_per_round > num_clients
  ):
    raise ValueError(
        f'--clients_per_round={flags.clients_per_round} asks for more clients'
        f' than --num_clients={num_clients}; use at most {num_clients}.'
    )


def _default_sync_rounds(flags: cli.ParsedFlags) -> int:
  return max(1, round(defaults.SYNC_SHARE * flags.rounds))


def _check_sync_rounds(flags: cli.ParsedFlags):
  sync_rounds = flags.sync_rounds
  if sync_rounds is None and flags.rounds == 1:
    raise ValueError(
        '--rounds=1 is too few for fedtan_ii, which fixes the BN statistics'
        ' after some rounds; use at least 2.'
    )
  if sync_rounds is not None and sync_rounds >= flags.rounds:
    raise ValueError(
        f'--sync_rounds={sync_rounds} leaves no round in which the BN'
        ' statistics of fedtan_ii are fixed; it must be less than'
        f' --rounds={flags.rounds}.'
    )


def _algorithms(flags: cli.ParsedFlags) -> Sequence[registry.Algorithm]:
  names = (flags.algorithm,) if flags.defines('algorithm') else flags.algorithms
  return [registry.ALGORITHMS[name] for name in names]


def refuse_unless_overruled(
    flags: cli.ParsedFlags, name: str, overruling: str, reason: str
):
  """Refuses a flag that another one makes meaningless.

  Unless the other one overrules it: the command line overrules a flagfile.

  Args:
    flags: The flags.
    name: The flag.
    overruling: The other flag.
    reason: Why the flag is refused, as the end of a sentence without its point.

  Raises:
    ValueError: If the flag is refused.
  """
  source = flags.source(name)
  if source != cli.Source.DEFAULT and source >= flags.source(overruling):
    raise ValueError(
        f'--{name}={parsers.to_text(getattr(flags, name))} {reason}.'
    )


def resolve(flags: cli.ParsedFlags, algorithm: str, seed: int) -> RunSettings:
  """Fills in the defaults that depend on other flags.

  Args:
    flags: The flags of `tff-bn-train` or `tff-bn-compare`, checked.
    algorithm: The run's algorithm.
    seed: The run's seed.

  Returns:
    The settings of this run.
  """
  understood = registry.ALGORITHMS[algorithm].flags

  def split_flag(name, default):
    if flags.split != flag_groups.SPLIT_FLAGS[name]:
      return None
    value = getattr(flags, name)
    return default if value is None else value

  def algorithm_flag(name, default):
    if name not in understood:
      return None
    value = getattr(flags, name)
    return default if value is None else value

  local_steps, local_epochs = flags.local_steps, flags.local_epochs
  if local_steps is None and local_epochs is None:
    local_steps = defaults.LOCAL_STEPS
  elif local_steps is not None and local_epochs is not None:
    if flags.source('local_steps') > flags.source('local_epochs'):
      local_epochs = None
    else:
      local_steps = None
  server_optimizer = algorithm_flag(
      'server_optimizer', defaults.SERVER_OPTIMIZER
  )
  server_momentum = None
  if server_optimizer == 'sgdm':
    server_momentum = algorithm_flag(
        'server_momentum', defaults.SERVER_MOMENTUM
    )
  server_learning_rate = algorithm_flag(
      'server_learning_rate',
      defaults.SERVER_LEARNING_RATE.get(server_optimizer),
  )
  return RunSettings(
      algorithm=algorithm,
      statistics=algorithm_flag('statistics', defaults.STATISTICS),
      moments=algorithm_flag('moments', defaults.MOMENTS),
      sync_rounds=algorithm_flag('sync_rounds', _default_sync_rounds(flags)),
      after_sync_factor=algorithm_flag(
          'after_sync_factor', defaults.AFTER_SYNC_FACTOR
      ),
      dataset=_absolute_dataset(flags.dataset),
      data_dir=None if flags.data_dir is None else _absolute(flags.data_dir),
      image_size=flags.image_size,
      split=flags.split,
      num_clients=_num_clients(flags),
      classes_per_client=split_flag(
          'classes_per_client', defaults.CLASSES_PER_CLIENT
      ),
      dirichlet_alpha=split_flag('dirichlet_alpha', defaults.DIRICHLET_ALPHA),
      gamma=split_flag('gamma', defaults.GAMMA),
      imbalance=split_flag('imbalance', defaults.IMBALANCE),
      model=flags.model,
      normalization=flags.normalization,
      precision=flags.precision,
      rounds=flags.rounds,
      clients_per_round=flags.clients_per_round,
      local_steps=local_steps,
      local_epochs=local_epochs,
      batch_size=flags.batch_size,
      client_learning_rate=flags.client_learning_rate,
      client_learning_rate_schedule=flags.client_learning_rate_schedule,
      client_momentum=flags.client_momentum,
      client_weight_decay=flags.client_weight_decay,
      client_weighting=algorithm_flag(
          'client_weighting', defaults.CLIENT_WEIGHTING
      ),
      jit_compile=flags.jit_compile,
      server_optimizer=server_optimizer,
      server_learning_rate=server_learning_rate,
      server_momentum=server_momentum,
      seed=seed,
      evaluate_every=flags.evaluate_every,
      checkpoint_every=flags.checkpoint_every,
  )


def _num_clients(flags: cli.ParsedFlags) -> Optional[int]:
  """The number of clients; None: as many as the data has."""
  if flags.num_clients is None and flags.split not in ('domains', 'natural'):
    return defaults.NUM_CLIENTS
  return flags.num_clients


def _absolute_dataset(dataset: str) -> str:
  for prefix in (data_names.NPZ_PREFIX, data_names.FOLDER_PREFIX):
    if dataset.startswith(prefix):
      return prefix + _absolute(dataset.removeprefix(prefix))
  if dataset in data_names.DATASET_NAMES or dataset.startswith(
      data_names.TFDS_PREFIX
  ):
    return dataset
  return _absolute(dataset)


def _absolute(path: str) -> str:
  """Makes flags.txt valid in any working folder."""
  return os.path.abspath(os.path.expanduser(path))
