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
    'attack',
    'num_attackers',
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
  fixbn_rounds: Optional[int]
  pooled: Optional[bool]
  proximal_strength: Optional[float]
  fedbs_epsilon: Optional[float]
  moon_weight: Optional[float]
  moon_temperature: Optional[float]
  moon_feature_layer: Optional[str]
  model_aggregator: Optional[str]
  statistics_aggregator: Optional[str]
  num_byzantine: Optional[int]
  clipping_radius: Optional[float]
  bucket_size: Optional[int]
  attack: Optional[str]
  attack_target: Optional[str]
  attack_strength: Optional[float]
  num_attackers: Optional[int]
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
  batch_norm_momentum: Optional[float]
  pan: str
  pan_amplitude: Optional[float]
  pan_period: Optional[float]
  pan_personal_share: Optional[float]
  rounds: int
  clients_per_round: Optional[int]
  local_steps: Optional[int]
  local_epochs: Optional[int]
  batch_size: int
  client_learning_rate: float
  client_learning_rate_schedule: Optional[str]
  client_momentum: float
  client_weight_decay: float
  client_gradient_clip_norm: Optional[float]
  client_warmup_steps: int
  client_weighting: Optional[str]
  max_failed_rounds: int
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
  if flags.pan == 'off':
    for name in ('pan_amplitude', 'pan_period', 'pan_personal_share'):
      refuse_unless_overruled(
          flags, name, 'pan', 'has no effect with --pan=off'
      )
  selector = 'algorithm' if flags.defines('algorithm') else 'algorithms'
  algorithms = _algorithms(flags)
  for name, users in sorted(registry.known_flags().items()):
    if not any(name in algorithm.flags for algorithm in algorithms):
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
  _check_personal_encodings(flags, algorithms)
  for algorithm in algorithms:
    if algorithm.first_phase is not None:
      _check_phase(flags, algorithm.first_phase, algorithm.name)
    if algorithm.local_steps not in (None, flags.local_steps):
      raise ValueError(
          f'{algorithm.name} needs --local_steps={algorithm.local_steps}, but'
          f' got {_local_training(flags)}.'
      )
  if any('model_aggregator' in algorithm.flags for algorithm in algorithms):
    _check_robustness(flags, algorithms)
  _check_corrections(flags, algorithms)
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


def _personal_share(flags: cli.ParsedFlags) -> Optional[float]:
  """The share of personal position encodings; None: --pan is off."""
  if flags.pan == 'off' or 0 in (flags.pan_amplitude, flags.pan_period):
    return None
  if flags.pan_personal_share is None:
    return defaults.PAN_PERSONAL_SHARE
  return flags.pan_personal_share


def _check_personal_encodings(
    flags: cli.ParsedFlags, algorithms: Sequence[registry.Algorithm]
):
  """Checks that clients can have position encodings of their own."""
  if flags.pan != 'off' and flags.pan_personal_share:
    for name in ('pan_amplitude', 'pan_period'):
      if getattr(flags, name) == 0:
        refuse_unless_overruled(
            flags,
            'pan_personal_share',
            name,
            f'has no effect with --{name}=0, which switches position encodings'
            ' off',
        )
  impossible = [a.name for a in algorithms if not a.trains_personal_models]
  if _personal_share(flags) and impossible:
    selector = 'algorithm' if flags.defines('algorithm') else 'algorithms'
    possible = [
        name
        for name, algorithm in registry.ALGORITHMS.items()
        if algorithm.trains_personal_models
    ]
    raise ValueError(
        f'--pan_personal_share={flags.pan_personal_share:g} is impossible with'
        f' --{selector}={parsers.to_text(getattr(flags, selector))}:'
        f' {", ".join(impossible)} cannot give clients encodings of their own.'
        f' Use 0, or {", ".join(possible)}.'
    )


def _check_corrections(
    flags: cli.ParsedFlags, algorithms: Sequence[registry.Algorithm]
):
  """Checks what corrections of the clients' drift ask of other flags."""
  for algorithm in algorithms:
    correction = algorithm.correction
    if correction is None:
      continue
    if correction.needs_plain_sgd and flags.client_momentum:
      raise ValueError(
          f'--client_momentum={flags.client_momentum:g} is impossible with'
          f' {algorithm.name}, which computes the mean gradient of a client'
          ' from what its steps of plain SGD change; use 0.'
      )
    if not correction.keeps_weights and _is_robust(flags):
      raise ValueError(
          f'--model_aggregator={flags.model_aggregator}'
          + (f' with --attack={flags.attack}' if flags.attack else '')
          + f' is impossible with {algorithm.name}, whose clients count by'
          ' their losses: it takes no weights.'
      )


def _local_training(flags: cli.ParsedFlags) -> str:
  if flags.local_epochs is not None:
    return f'--local_epochs={flags.local_epochs}'
  steps = flags.local_steps or defaults.LOCAL_STEPS
  return f'--local_steps={steps}'


def _share_of_rounds(flags: cli.ParsedFlags, share: float) -> int:
  return max(1, round(share * flags.rounds))


def _check_phase(flags: cli.ParsedFlags, name: str, algorithm: str):
  """Checks the number of rounds before an algorithm fixes the statistics."""
  num_rounds = getattr(flags, name)
  if num_rounds is None and flags.rounds == 1:
    raise ValueError(
        f'--rounds=1 is too few for {algorithm}, which fixes the BN statistics'
        ' after some rounds; use at least 2.'
    )
  if num_rounds is not None and num_rounds >= flags.rounds:
    raise ValueError(
        f'--{name}={num_rounds} leaves no round in which the BN statistics of'
        f' {algorithm} are fixed; it must be less than --rounds={flags.rounds}.'
    )


def _parts(flags: cli.ParsedFlags, name: str) -> Sequence[str]:
  """The wrappers and the rule of an aggregator."""
  return getattr(flags, name).split('+')


def _check_robustness(
    flags: cli.ParsedFlags, algorithms: Sequence[registry.Algorithm]
):
  """Checks the rules against some of the clients, and the attack."""
  parts = [
      (name, part)
      for name in ('model_aggregator', 'statistics_aggregator')
      for part in _parts(flags, name)
  ]
  for name, part in parts:
    if part in flag_groups.COUNTING_RULES and flags.num_byzantine is None:
      raise ValueError(
          f'--{name}={getattr(flags, name)} needs --num_byzantine, the number'
          f' of clients that {part} has to withstand.'
      )
  if flags.attack is None and all(part == 'mean' for _, part in parts):
    refuse_unless_overruled(
        flags,
        'num_byzantine',
        'model_aggregator',
        'has no effect without another --model_aggregator or'
        ' --statistics_aggregator than the mean',
    )
  for name, part in (
      ('clipping_radius', 'centered_clipping'),
      ('bucket_size', 'bucketing'),
  ):
    if all(part != other for _, other in parts):
      refuse_unless_overruled(
          flags,
          name,
          'model_aggregator',
          f'is only for {part} in --model_aggregator or'
          ' --statistics_aggregator',
      )
  if flags.attack is None:
    for name in ('attack_target', 'attack_strength', 'num_attackers'):
      refuse_unless_overruled(flags, name, 'attack', 'needs --attack')
  elif flags.attack not in defaults.ATTACK_STRENGTH:
    refuse_unless_overruled(
        flags,
        'attack_strength',
        'attack',
        f'has no effect on --attack={flags.attack}, which has no strength',
    )
  if flags.attack == 'label_flip':
    refuse_unless_overruled(
        flags,
        'attack_target',
        'attack',
        'has no effect on --attack=label_flip, which falsifies labels',
    )
  elif flags.attack_target == 'statistics' and not any(
      'statistics_aggregator' in algorithm.flags for algorithm in algorithms
  ):
    selector = 'algorithm' if flags.defines('algorithm') else 'algorithms'
    raise ValueError(
        f'--attack_target=statistics has no effect with --{selector}='
        f'{parsers.to_text(getattr(flags, selector))}, whose clients send no BN'
        ' statistics.'
    )
  num_attackers = _num_attackers(flags)
  if flags.attack is not None and num_attackers is None:
    raise ValueError(
        f'--attack={flags.attack} needs --num_attackers, the number of clients'
        ' of a round that attack.'
    )
  num_clients = flags.clients_per_round or _num_clients(flags)
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
  if flags.client_weighting == 'num_examples' and _is_robust(flags):
    raise ValueError(
        '--client_weighting=num_examples is impossible with'
        f' --model_aggregator={flags.model_aggregator}'
        + (f' and --attack={flags.attack}' if flags.attack else '')
        + ', which takes no weights; use uniform.'
    )


def _num_attackers(flags: cli.ParsedFlags) -> Optional[int]:
  if flags.attack is None:
    return None
  return flags.num_attackers or flags.num_byzantine


def attacks_values(attack: Optional[str]) -> bool:
  """Whether an attack is made on what clients send, not on their data."""
  return attack not in (None, 'label_flip')


def _is_robust(flags: cli.ParsedFlags) -> bool:
  """Whether the aggregator of the model takes no weights."""
  target = flags.attack_target or defaults.ATTACK_TARGET
  return flags.model_aggregator != 'mean' or (
      attacks_values(flags.attack) and target != 'statistics'
  )


def _algorithms(flags: cli.ParsedFlags) -> Sequence[registry.Algorithm]:
  names = (flags.algorithm,) if flags.defines('algorithm') else flags.algorithms
  return [registry.find(name) for name in names]


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
  understood = registry.find(algorithm).flags

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

  def pan_flag(name, default):
    if flags.pan == 'off':
      return None
    value = getattr(flags, name)
    return default if value is None else value

  def if_used(name, part, default):
    used = [
        other
        for aggregator in ('model_aggregator', 'statistics_aggregator')
        if aggregator in understood
        for other in _parts(flags, aggregator)
    ]
    return algorithm_flag(name, default) if part in used else None

  attack = algorithm_flag('attack', None)
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
      sync_rounds=algorithm_flag(
          'sync_rounds', _share_of_rounds(flags, defaults.SYNC_SHARE)
      ),
      after_sync_factor=algorithm_flag(
          'after_sync_factor', defaults.AFTER_SYNC_FACTOR
      ),
      fixbn_rounds=algorithm_flag(
          'fixbn_rounds', _share_of_rounds(flags, defaults.FIXBN_SHARE)
      ),
      pooled=algorithm_flag('pooled', None),
      proximal_strength=algorithm_flag(
          'proximal_strength', defaults.PROXIMAL_STRENGTH
      ),
      fedbs_epsilon=algorithm_flag('fedbs_epsilon', defaults.FEDBS_EPSILON),
      moon_weight=algorithm_flag('moon_weight', defaults.MOON_WEIGHT),
      moon_temperature=algorithm_flag(
          'moon_temperature', defaults.MOON_TEMPERATURE
      ),
      moon_feature_layer=algorithm_flag('moon_feature_layer', None),
      model_aggregator=algorithm_flag('model_aggregator', None),
      statistics_aggregator=algorithm_flag('statistics_aggregator', None),
      num_byzantine=algorithm_flag('num_byzantine', None),
      clipping_radius=if_used(
          'clipping_radius', 'centered_clipping', defaults.CLIPPING_RADIUS
      ),
      bucket_size=if_used('bucket_size', 'bucketing', defaults.BUCKET_SIZE),
      attack=attack,
      attack_target=algorithm_flag('attack_target', defaults.ATTACK_TARGET)
      if attacks_values(attack)
      else None,
      attack_strength=None
      if attack is None
      else algorithm_flag(
          'attack_strength', defaults.ATTACK_STRENGTH.get(attack)
      ),
      num_attackers=None if attack is None else _num_attackers(flags),
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
      batch_norm_momentum=flags.batch_norm_momentum,
      pan=flags.pan,
      pan_amplitude=pan_flag(
          'pan_amplitude', defaults.PAN_AMPLITUDE.get(flags.pan)
      ),
      pan_period=pan_flag('pan_period', defaults.PAN_PERIOD),
      pan_personal_share=_personal_share(flags),
      rounds=flags.rounds,
      clients_per_round=flags.clients_per_round,
      local_steps=local_steps,
      local_epochs=local_epochs,
      batch_size=flags.batch_size,
      client_learning_rate=flags.client_learning_rate,
      client_learning_rate_schedule=flags.client_learning_rate_schedule,
      client_momentum=flags.client_momentum,
      client_weight_decay=flags.client_weight_decay,
      client_gradient_clip_norm=flags.client_gradient_clip_norm,
      client_warmup_steps=flags.client_warmup_steps,
      client_weighting=algorithm_flag(
          'client_weighting',
          'uniform' if _is_robust(flags) else defaults.CLIENT_WEIGHTING,
      ),
      max_failed_rounds=flags.max_failed_rounds,
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
