"""The programs' flags, in the groups that `--help` prints.

Each `define_*` function defines one group in the given `FlagValues` and
returns its title and the flags' names. A flag whose default depends on another
flag has the default None here; `settings.resolve` fills it in.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, Optional

from absl import flags

from tff_bn.data import names as data_names
from tff_bn.models import names as model_names
from tff_bn.programs import defaults
from tff_bn.programs import parsers
from tff_bn.programs import registry
from tff_bn.programs import run_folder

# Which flag needs which value of --split.
SPLIT_FLAGS = {
    'classes_per_client': 'classes',
    'dirichlet_alpha': 'dirichlet',
    'gamma': 'gamma',
    'imbalance': 'unbalanced',
}
# Name -> what it is.
RUNTIMES = {
    'in_process': "this program's own TensorFlow, on its CPU or GPUs",
    'ray': 'workers of a Ray cluster, on one or several machines',
    'native': "TensorFlow Federated's worker process, on the CPU",
}
# Flags of --runtime=ray -> arguments of `tff_bn.runtime.ray_runtime`.
RAY_FLAGS = {
    'ray_address': 'address',
    'num_workers': 'num_workers',
    'cpus_per_worker': 'cpus_per_worker',
    'gpus_per_worker': 'gpus_per_worker',
    'client_timeout': 'client_timeout',
    'worker_timeout': 'worker_timeout',
}
MOMENTS = {
    'two_pass': (
        'two exchanges, as in the paper: the mean of the means, then that of'
        ' the variances about it'
    ),
    'fused': (
        'one exchange for both; exact also for batches of different sizes'
    ),
}
# Rules in place of the clients' mean.
RULES = {
    'mean': 'the mean, which one client can move anywhere',
    'median': 'the median of each coordinate',
    'trimmed_mean': (
        'the mean of each coordinate without its --num_byzantine largest and'
        ' smallest values'
    ),
    'geometric_median': 'the point with the least sum of distances',
    'krum': 'the client that is nearest to its neighbors',
    'multi_krum': 'the mean of the clients that are nearest to theirs',
    'mea_med': 'the mean of the values nearest to the median',
    'centered_clipping': (
        'the last result plus the mean of the differences from it, clipped to'
        ' --clipping_radius'
    ),
}
RULE_WRAPPERS = {
    'nnm': 'first replaces each client by the mean of its nearest neighbors',
    'bucketing': 'first takes means of random groups of --bucket_size clients',
}
# Rules and wrappers that have to know how many clients are Byzantine.
COUNTING_RULES = ('trimmed_mean', 'krum', 'multi_krum', 'mea_med', 'nnm')
ATTACKS = {
    'sf': (
        'sign flipping: minus the mean of the honest clients; of the BN'
        ' statistics only the means are flipped'
    ),
    'foe': (
        'fall of empires: (1 - --attack_strength) times the mean of the honest'
        ' clients'
    ),
    'alie': (
        'a little is enough: the mean of the honest clients plus'
        ' --attack_strength times their standard deviation'
    ),
    'ipm': (
        'inner product manipulation: minus --attack_strength times the mean of'
        ' the honest clients'
    ),
    'mimic': 'copies of one honest client that differs much from the others',
    'gaussian': ('normal noise with the standard deviation --attack_strength'),
    'label_flip': (
        'trains honestly on labels y that became C - 1 - y; ignores'
        ' --attack_target'
    ),
}
ATTACK_TARGETS = {
    'statistics': 'what they send of the BN statistics',
    'model': 'what they send of all other variables',
    'both': 'both',
}
SERVER_OPTIMIZERS = tuple(defaults.SERVER_LEARNING_RATE)


@dataclasses.dataclass(frozen=True)
class FlagGroup:
  """Flags that `--help` prints together.

  Attributes:
    title: The group's title.
    names: The flags' names, in the order in which they are printed.
  """

  title: str
  names: tuple[str, ...]


class Definer:
  """Defines flags one by one and remembers their names.

  Attributes:
    values: Where the flags are defined.
    inherited: If not None, no flag has a default of its own: this text says
      where values that are not given come from.
  """

  def __init__(self, values: flags.FlagValues, inherited: Optional[str] = None):
    self.values = values
    self.inherited = inherited
    self._names = []

  def __call__(
      self,
      name: str,
      parser: flags.ArgumentParser,
      explanation: str,
      default: Any = None,
      default_text: Optional[str] = None,
  ):
    """Defines a flag.

    Args:
      name: The flag's name.
      parser: Parses and checks its value.
      explanation: What it does: sentences without the last point.
      default: Its default.
      default_text: The default in words, if it is no fixed value.
    """
    if self.inherited is not None:
      default, default_text = None, self.inherited
    elif default_text is None:
      default_text = parsers.to_text(default)
    flags.DEFINE(
        parser,
        name,
        default,
        # After a list, in a line of its own.
        explanation
        + (
            f'(default: {default_text})'
            if explanation.endswith('\n')
            else f' (default: {default_text}).'
        ),
        flag_values=self.values,
    )
    self._names.append(name)

  def boolean(self, name: str, explanation: str, default: bool = False):
    """Defines a flag that is on or off."""
    flags.DEFINE_boolean(
        name,
        default,
        f'{explanation} (default: {"yes" if default else "no"}).',
        flag_values=self.values,
    )
    self._names.append(name)

  def group(self, title: str) -> FlagGroup:
    """The group of all flags defined so far."""
    return FlagGroup(title, tuple(self._names))


_POSITIVE_INTEGER = parsers.NumberParser(int, minimum=1)
_POSITIVE = parsers.NumberParser(float, above=0)
_NOT_NEGATIVE = parsers.NumberParser(float, minimum=0)
_MOMENTUM = parsers.NumberParser(float, minimum=0, below=1)
_SPLIT_FLAGS = ('classes_per_client', 'dirichlet_alpha', 'gamma', 'imbalance')
_SEED = parsers.NumberParser(int, minimum=0, maximum=2**32 - 1)
_ALGORITHM = parsers.CheckedTextParser(registry.find)


def define_algorithm_flag(values: flags.FlagValues) -> FlagGroup:
  """Defines `--algorithm`."""
  define = Definer(values)
  define(
      'algorithm',
      _ALGORITHM,
      f'What to train:\n{_algorithm_list()}',
      defaults.ALGORITHM,
  )
  _define_algorithm_options(define)
  return define.group('Algorithm')


def define_algorithms_flag(values: flags.FlagValues) -> FlagGroup:
  """Defines `--algorithms` and what is reported of them."""
  define = Definer(values)
  define(
      'algorithms',
      parsers.TupleParser(_ALGORITHM),
      f'What to compare, separated by commas:\n{_algorithm_list()}',
      defaults.ALGORITHMS,
      # Spaces, so that the line can be wrapped.
      ', '.join(defaults.ALGORITHMS),
  )
  _define_algorithm_options(define)
  define(
      'average_last',
      _POSITIVE_INTEGER,
      'The table gives means over so many evaluated rounds, the last ones',
      defaults.AVERAGE_LAST,
  )
  return define.group('Algorithms')


def _list(items: Mapping[str, str]) -> str:
  """Lines that explain the values that a flag may have."""
  return ''.join(
      f'  {name}: {description}\n' for name, description in items.items()
  )


def _algorithm_list() -> str:
  def descriptions(entries):
    return _list({entry.name: entry.description for entry in entries})

  return (
      descriptions(registry.ALGORITHMS.values())
      + "or fedavg with a correction of the drift of the clients' models in"
      ' local training:\n'
      + descriptions(registry.CORRECTIONS.values())
      + 'or one of both, such as fedbn+fedprox or fbn+scaffold\n'
  )


def _define_algorithm_options(define: Definer):
  """Defines the flags that are for some algorithms only."""
  define(
      'statistics',
      parsers.ChoiceParser(('naive', 'pooled')),
      "How the clients' running BN statistics are combined where they are"
      ' shared:\n'
      + _list(
          {
              'naive': 'mean of the means, mean of the variances',
              'pooled': (
                  "mean and variance of the union of the clients' data, which"
                  " adds the variance of the clients' means"
              ),
          }
      ),
      default_text=defaults.STATISTICS,
  )
  define(
      'moments',
      parsers.ChoiceParser(tuple(MOMENTS)),
      'How the clients of fedtan, fedtan_forward_only and fedtan_ii find the'
      ' mean and the variance of all their batches, at each BN layer:\n'
      + _list(MOMENTS),
      default_text=defaults.MOMENTS,
  )
  define(
      'sync_rounds',
      _POSITIVE_INTEGER,
      'Number of rounds after which fedtan_ii fixes the BN statistics; less'
      ' than --rounds',
      default_text=f'{defaults.SYNC_SHARE:.0%} of --rounds, but at least 1',
  )
  define(
      'after_sync_factor',
      _POSITIVE,
      'Factor of --client_learning_rate in fedtan_ii after --sync_rounds,'
      ' besides that of --client_learning_rate_schedule: with fixed statistics,'
      ' the steps must be smaller',
      default_text=f'{defaults.AFTER_SYNC_FACTOR:g}',
  )
  define(
      'fixbn_rounds',
      _POSITIVE_INTEGER,
      'Number of rounds after which fixbn fixes the BN statistics; less than'
      ' --rounds',
      default_text=f'{defaults.FIXBN_SHARE:.0%} of --rounds, but at least 1',
  )
  define.boolean(
      'pooled',
      "In fbn, clients' BN statistics count by the number of values that they"
      ' are made of, which is exact for batches of any size. With --nopooled'
      ' clients count alike, as in the paper',
      default=True,
  )
  define(
      'proximal_strength',
      _NOT_NEGATIVE,
      'μ of fedprox, and of fedbs once it is fedprox: μ/2 times the squared'
      " distance from the server's model is added to the loss",
      default_text=f'{defaults.PROXIMAL_STRENGTH:g}',
  )
  define(
      'fedbs_epsilon',
      _POSITIVE,
      'fedbs becomes fedprox after the first round in which the standard'
      " deviation of the clients' training losses is less than this",
      default_text=f'{defaults.FEDBS_EPSILON:g}',
  )
  define(
      'moon_weight',
      _NOT_NEGATIVE,
      'μ of moon: the weight of the contrastive loss',
      default_text=f'{defaults.MOON_WEIGHT:g}',
  )
  define(
      'moon_temperature',
      _POSITIVE,
      'τ of moon: the temperature of the contrastive loss',
      default_text=f'{defaults.MOON_TEMPERATURE:g}',
  )
  define(
      'moon_feature_layer',
      flags.ArgumentParser(),
      'Name of the layer of the model whose output moon contrasts',
      default_text='the last hidden layer',
  )


def define_robustness_flags(values: flags.FlagValues) -> FlagGroup:
  """Defines what the server does against some of the clients."""
  define = Definer(values)
  rules = parsers.ChainParser(tuple(RULE_WRAPPERS), tuple(RULES))
  define(
      'model_aggregator',
      rules,
      "What the server makes of the clients' changes of the model:\n"
      + _list(RULES)
      + _list({f'{name}+...': text for name, text in RULE_WRAPPERS.items()}),
      defaults.MODEL_AGGREGATOR,
  )
  define(
      'statistics_aggregator',
      rules,
      "The same for the clients' running BN statistics, within what"
      ' --statistics says or the correction of fbn. Other than the mean, it'
      ' counts clients alike',
      defaults.STATISTICS_AGGREGATOR,
  )
  define(
      'num_byzantine',
      _POSITIVE_INTEGER,
      'How many clients of a round the aggregators have to withstand; less than'
      f' half of them. {", ".join(COUNTING_RULES)} need it',
      default_text='none',
  )
  define(
      'clipping_radius',
      _POSITIVE,
      'The radius of centered_clipping',
      default_text=f'{defaults.CLIPPING_RADIUS:g}',
  )
  define(
      'bucket_size',
      _POSITIVE_INTEGER,
      'The size of the groups of bucketing',
      default_text=f'{defaults.BUCKET_SIZE}',
  )
  define(
      'attack',
      parsers.ChoiceParser(tuple(ATTACKS)),
      'What the first --num_attackers clients of a round send instead of what'
      ' they computed, knowing what the others send:\n' + _list(ATTACKS),
      default_text='none',
  )
  define(
      'attack_target',
      parsers.ChoiceParser(tuple(ATTACK_TARGETS)),
      'What attackers falsify:\n' + _list(ATTACK_TARGETS),
      default_text=defaults.ATTACK_TARGET,
  )
  define(
      'attack_strength',
      _POSITIVE,
      'The strength of --attack',
      default_text=', '.join(
          f"{strength or 'as large as its paper allows'} for {name}"
          for name, strength in defaults.ATTACK_STRENGTH.items()
      ),
  )
  define(
      'num_attackers',
      _POSITIVE_INTEGER,
      'Number of attackers, less than the clients of a round',
      default_text='--num_byzantine',
  )
  return define.group('Robustness')


def define_data_flags(
    values: flags.FlagValues, inherited: Optional[str] = None
) -> FlagGroup:
  """Defines the dataset and its split over the clients.

  Args:
    values: Where the flags are defined.
    inherited: If not None, the flags have no defaults; this text says where
      values that are not given come from.

  Returns:
    The group.
  """
  define = Definer(values, inherited)
  define(
      'dataset',
      parsers.ChoiceParser(
          tuple(data_names.DATASET_NAMES),
          data_names.OTHER_DATASETS,
          data_names.is_other_dataset,
      ),
      'The data:\n'
      + _list(data_names.DATASET_NAMES)
      + f'or {data_names.OTHER_DATASETS}',
      defaults.DATASET,
  )
  define(
      'data_dir',
      flags.ArgumentParser(),
      'Folder in which datasets that are not built in lie or are stored',
      default_text="the dataset library's own",
  )
  define(
      'image_size',
      parsers.CheckedTextParser(parsers.parse_image_size),
      'HEIGHTxWIDTH in pixels that images are brought to, for example 32x32',
      default_text="the images' own size",
  )
  define(
      'split',
      parsers.ChoiceParser(tuple(data_names.SPLIT_NAMES)),
      'How the training data is split over the clients:\n'
      + parsers.name_flags(_list(data_names.SPLIT_NAMES), _SPLIT_FLAGS),
      defaults.SPLIT,
  )
  define(
      'num_clients',
      _POSITIVE_INTEGER,
      'Number of clients',
      default_text=(
          f'{defaults.NUM_CLIENTS}; one for each domain with --split=domains,'
          ' for each writer with --split=natural'
      ),
  )
  define(
      'classes_per_client',
      _POSITIVE_INTEGER,
      'Number of classes that each client has with --split=classes',
      default_text=f'{defaults.CLASSES_PER_CLIENT}',
  )
  define(
      'dirichlet_alpha',
      _POSITIVE,
      'Concentration for --split=dirichlet: the smaller, the more the'
      " clients' labels differ",
      default_text=f'{defaults.DIRICHLET_ALPHA:g}',
  )
  define(
      'gamma',
      parsers.NumberParser(float, minimum=0, maximum=1),
      "Share of each client's data that is drawn at random with --split=gamma:"
      ' 1 is the same for all clients, 0 sorted by class',
      default_text=f'{defaults.GAMMA:g}',
  )
  define(
      'imbalance',
      _NOT_NEGATIVE,
      "How much the clients' sizes differ with --split=unbalanced: the standard"
      ' deviation of their logarithm',
      default_text=f'{defaults.IMBALANCE:g}',
  )
  return define.group('Data')


def define_model_flags(values: flags.FlagValues) -> FlagGroup:
  """Defines the model."""
  define = Definer(values)
  define(
      'model',
      parsers.ChoiceParser(
          tuple(model_names.MODEL_NAMES),
          model_names.OTHER_MODELS,
          model_names.is_other_model,
      ),
      'The model:\n'
      + _list(model_names.MODEL_NAMES)
      + f'or {model_names.OTHER_MODELS}, which is called with the shape of a'
      ' sample and the number of classes and returns an untrained'
      ' keras.Model with logits as output',
      defaults.MODEL,
  )
  define(
      'normalization',
      parsers.ChoiceParser(
          tuple(model_names.NORMALIZATION_NAMES),
          model_names.OTHER_NORMALIZATIONS,
          model_names.is_other_normalization,
      ),
      'The normalization layers of the model:\n'
      + _list(model_names.NORMALIZATION_NAMES)
      + f'or {model_names.OTHER_NORMALIZATIONS}',
      defaults.NORMALIZATION,
  )
  define(
      'precision',
      parsers.ChoiceParser(tuple(model_names.PRECISION_NAMES)),
      "What the model's layers compute in. Losses and BN statistics are float32"
      ' in any case. Mixed precision is for GPUs that have it in hardware, on'
      ' the CPU it is slower:\n' + _list(model_names.PRECISION_NAMES),
      defaults.PRECISION,
  )
  define(
      'batch_norm_momentum',
      _MOMENTUM,
      'Momentum of the running BN statistics: they become this times the old'
      ' ones plus the rest times the new ones. fbn may need 0.99 or more',
      default_text="the model's own, 0.9 for those above",
  )
  define(
      'pan',
      parsers.ChoiceParser(tuple(model_names.PAN_NAMES)),
      'Position-aware neurons (FedPAN): what is done to each unit of the hidden'
      ' layers, before its activation:\n' + _list(model_names.PAN_NAMES),
      defaults.PAN,
  )
  define(
      'pan_amplitude',
      _NOT_NEGATIVE,
      'Amplitude of the position encodings of --pan',
      default_text=', '.join(
          f'{amplitude:g} for {name}'
          for name, amplitude in defaults.PAN_AMPLITUDE.items()
      ),
  )
  define(
      'pan_period',
      _NOT_NEGATIVE,
      'How many periods of the sine the position encodings of a layer span',
      default_text=f'{defaults.PAN_PERIOD:g}',
  )
  define(
      'pan_personal_share',
      parsers.NumberParser(float, minimum=0, maximum=1),
      'Whose the position encodings are. 0: the same for all clients; 1: all'
      " are a client's own, moved by a phase that is drawn for it and each"
      ' layer; between: those of that share of the units of each hidden layer,'
      ' the last ones',
      default_text=f'{defaults.PAN_PERSONAL_SHARE:g}',
  )
  return define.group('Model')


def define_training_flags(values: flags.FlagValues) -> FlagGroup:
  """Defines the rounds and the clients' training in them."""
  define = Definer(values)
  define('rounds', _POSITIVE_INTEGER, 'Number of rounds', defaults.ROUNDS)
  define(
      'clients_per_round',
      _POSITIVE_INTEGER,
      'Number of clients that are drawn in each round',
      default_text='all',
  )
  define(
      'local_steps',
      _POSITIVE_INTEGER,
      'Batches that a client trains on in a round',
      default_text=f'{defaults.LOCAL_STEPS}, unless --local_epochs is given',
  )
  define(
      'local_epochs',
      _POSITIVE_INTEGER,
      'Passes over its data that a client trains in a round, instead of'
      ' --local_steps',
      default_text='none',
  )
  define(
      'batch_size',
      _POSITIVE_INTEGER,
      'Examples in a batch',
      defaults.BATCH_SIZE,
  )
  define(
      'client_learning_rate',
      _POSITIVE,
      "Learning rate of the clients' SGD",
      defaults.CLIENT_LEARNING_RATE,
  )
  define(
      'client_learning_rate_schedule',
      parsers.CheckedTextParser(parsers.parse_schedule),
      'Factors of --client_learning_rate as ROUND:FACTOR,...: 60:0.1,80:0.01'
      ' means 0.1 times --client_learning_rate from round 60 on and 0.01 times'
      ' from round 80 on',
      default_text='always 1',
  )
  define(
      'client_momentum',
      _MOMENTUM,
      "Momentum of the clients' SGD; except with dsgd it starts from zero in"
      ' each round',
      defaults.CLIENT_MOMENTUM,
  )
  define(
      'client_weight_decay',
      _NOT_NEGATIVE,
      'L2 decay: this times the weights is added to the gradients',
      defaults.CLIENT_WEIGHT_DECAY,
  )
  define(
      'client_gradient_clip_norm',
      _POSITIVE,
      "Longest gradient of a batch in the clients' training: a longer one (by"
      ' the norm over all variables) is scaled down to it, before weight decay',
      default_text='any',
  )
  define(
      'client_warmup_steps',
      parsers.NumberParser(int, minimum=0),
      "Number of steps over which the clients' learning rate rises linearly at"
      ' the start of each round, as their optimizers start; with centralized'
      ' and dsgd, whose optimizers last, at the start of the training',
      defaults.CLIENT_WARMUP_STEPS,
  )
  define(
      'client_weighting',
      parsers.ChoiceParser(('num_examples', 'uniform')),
      "Weights of the clients in the server's mean: num_examples that they"
      ' trained on in the round, or uniform',
      default_text=(
          f'{defaults.CLIENT_WEIGHTING}; uniform with another'
          ' --model_aggregator than the mean, or an attack on the model'
      ),
  )
  define(
      'max_failed_rounds',
      _POSITIVE_INTEGER,
      'The run stops after so many rounds in a row in which every client was'
      ' dropped, because its loss or its update was not finite',
      defaults.MAX_FAILED_ROUNDS,
  )
  define.boolean(
      'jit_compile',
      "Compiles the clients' steps with XLA, which changes results in the last"
      ' bits. For GPUs: on the CPU it was measured to be 3 to 6 times slower.'
      ' Only with --runtime=in_process',
  )
  return define.group('Training')


def define_server_flags(values: flags.FlagValues) -> FlagGroup:
  """Defines the server's optimizer."""
  define = Definer(values)
  define(
      'server_optimizer',
      parsers.ChoiceParser(SERVER_OPTIMIZERS),
      "What the server does with the mean of the clients' changes (FedOpt):"
      f' {", ".join(SERVER_OPTIMIZERS)}; sgd with learning rate 1 is plain'
      ' averaging',
      default_text=defaults.SERVER_OPTIMIZER,
  )
  define(
      'server_learning_rate',
      _POSITIVE,
      "The server's learning rate",
      default_text=', '.join(
          f'{rate:g} for {name}'
          for name, rate in defaults.SERVER_LEARNING_RATE.items()
      ),
  )
  define(
      'server_momentum',
      _MOMENTUM,
      'Momentum of --server_optimizer=sgdm',
      default_text=f'{defaults.SERVER_MOMENTUM:g}',
  )
  return define.group('Server')


def define_seed_flag(values: flags.FlagValues) -> FlagGroup:
  """Defines `--seed` and how often a run is evaluated and saved."""
  define = Definer(values)
  define(
      'seed',
      _SEED,
      'Decides every random choice: split, initial weights, clients drawn,'
      ' order of the batches',
      defaults.SEED,
  )
  _define_intervals(define)
  return define.group('Run')


def define_seeds_flag(values: flags.FlagValues) -> FlagGroup:
  """Defines `--seeds` and how often a run is evaluated and saved."""
  define = Definer(values)
  define(
      'seeds',
      parsers.TupleParser(_SEED),
      'Seeds, separated by commas. Each algorithm is trained once with each'
      ' seed; with the same seed all have the same split, initial weights and'
      ' clients drawn',
      defaults.SEEDS,
  )
  _define_intervals(define)
  return define.group('Runs')


def _define_intervals(define: Definer):
  define(
      'evaluate_every',
      _POSITIVE_INTEGER,
      'Rounds from one evaluation to the next; the initial and the final model'
      ' are evaluated in any case',
      defaults.EVALUATE_EVERY,
  )
  define(
      'checkpoint_every',
      _POSITIVE_INTEGER,
      'Rounds from one checkpoint to the next. The same command continues a'
      ' run that was stopped from its last checkpoint',
      defaults.CHECKPOINT_EVERY,
  )


def define_runtime_flags(values: flags.FlagValues) -> FlagGroup:
  """Defines where TFF computations run; what they compute is the same."""
  define = Definer(values)
  define(
      'runtime',
      parsers.ChoiceParser(tuple(RUNTIMES)),
      'What runs the federated computations:\n' + _list(RUNTIMES),
      defaults.RUNTIME,
  )
  define(
      'client_devices',
      parsers.TupleParser(flags.ArgumentParser()),
      'TensorFlow devices on which clients are computed, separated by commas,'
      ' such as GPU:0,GPU:1. Only with --runtime=in_process',
      default_text='all GPUs, or the CPU if there is none',
  )
  define(
      'ray_address',
      flags.ArgumentParser(),
      'The Ray cluster. auto or HOST:PORT: one to which this machine belongs;'
      ' local: one of this machine alone, while the program runs. This and the'
      ' following flags are only for --runtime=ray',
      defaults.RAY_ADDRESS,
  )
  define(
      'num_workers',
      _POSITIVE_INTEGER,
      'Processes that compute clients',
      default_text='as many as there is room for, also when machines join',
  )
  define(
      'cpus_per_worker',
      _POSITIVE_INTEGER,
      'Cores that Ray reserves for a worker',
      default_text="1 with a GPU, else half of this machine's",
  )
  define(
      'gpus_per_worker',
      parsers.NumberParser(float, minimum=0, maximum=1),
      'GPUs that Ray reserves for a worker; with 0.5 two share one',
      default_text='1 if the cluster has GPUs, else 0',
  )
  define(
      'client_timeout',
      parsers.NumberParser(float, above=0),
      'Seconds after which a client is given to a second worker; who is first,'
      ' counts',
      default_text='none',
  )
  define(
      'worker_timeout',
      parsers.NumberParser(float, above=0),
      'Seconds without any worker after which the program ends; the same'
      ' command continues from the last checkpoint',
      defaults.WORKER_TIMEOUT,
  )
  return define.group('Runtime')


def define_output_flags(
    values: flags.FlagValues, default_output_dir: str
) -> FlagGroup:
  """Defines where a run's files go, and what is printed."""
  define = Definer(values)
  define(
      'output_dir',
      flags.ArgumentParser(),
      'Folder for all files. If it holds a run with the same flags, that run is'
      ' continued (an analysis is made again); a run with other flags is never'
      ' touched',
      default_output_dir,
  )
  define.boolean(
      'overwrite', 'Removes the run in --output_dir and starts afresh'
  )
  _define_verbosity(define)
  return define.group('Output')


def define_evaluation_flags(values: flags.FlagValues) -> FlagGroup:
  """Defines which run is evaluated, how, and where the result goes."""
  define = Definer(values)
  define(
      'run',
      flags.ArgumentParser(),
      'Folder of the finished run: the --output_dir of tff-bn-train, or a'
      ' folder in the runs/ of a comparison',
      default_text='none, it must be given',
  )
  define.boolean(
      'reestimate_statistics',
      'Computes the BN statistics anew before the evaluation, by forward passes'
      ' over the training data',
  )
  define(
      'output_dir',
      flags.ArgumentParser(),
      f'Folder for {run_folder.EVALUATION}',
      default_text="the run's",
  )
  _define_verbosity(define)
  return define.group('Evaluation')


def define_analysis_output_flags(
    values: flags.FlagValues, name: str
) -> FlagGroup:
  """Defines where the result of an analysis of runs goes."""
  define = Definer(values)
  define(
      'output_dir',
      flags.ArgumentParser(),
      f'Folder for {name}.csv, {name}.md and plots/',
      default_text=f"the run's, if it is one; else runs/{name}",
  )
  _define_verbosity(define)
  return define.group('Output')


def _define_verbosity(define: Definer):
  define(
      'verbosity',
      parsers.NumberParser(int, minimum=-1, maximum=1),
      'How much is logged: -1 warnings, 0 also information, 1 everything, with'
      ' the tracebacks of errors',
      -1,
  )
