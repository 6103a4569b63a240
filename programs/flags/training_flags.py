"""The flags of the rounds and of the clients' training."""

from collections.abc import Callable
import dataclasses
from typing import TYPE_CHECKING, Any, Optional

from tff_bn.catalog import options
from tff_bn.catalog import parts
from tff_bn.catalog import value_types
from tff_bn.data import augmentation
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.flag_groups import flag
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.flags import registry
from tff_bn.programs.flags import robustness_flags

if TYPE_CHECKING:
  import tensorflow as tf
  import tensorflow_federated as tff

_LOCAL_STEPS = 5
# The clients' optimizers with their default learning rates. FedPAN has Adam's.
_LEARNING_RATES = {'sgd': 0.1, 'adam': 3e-4}
_CLIENT_WEIGHTING = 'num_examples'
# The positions of the samples of a client's round take 8 bytes each.
_MAX_SAMPLES = 10**7
# Pairs (first round, factor of the learning rate), rounds increasing.
Schedule = tuple[tuple[int, float], ...]


def _overrules(flags: ParsedFlags, name: str, other: str) -> bool:
  """Whether a flag is given and overrules another one that excludes it."""
  return getattr(flags, name) is not None and (
      getattr(flags, other) is None or flags.source(name) > flags.source(other)
  )


def _default_weighting(flags: ParsedFlags) -> str:
  if robustness_flags.takes_no_weights(flags):
    return 'uniform'
  return _CLIENT_WEIGHTING


def _algorithms_with_one_optimizer() -> str:
  *names, last = (
      name
      for name, algorithm in registry.ALGORITHMS.items()
      if algorithm.keeps_optimizer
  )
  return f'{", ".join(names)} and {last}'


def describe_local_training(flags: ParsedFlags) -> str:
  """Returns the flag that sets how long clients train in a round."""
  if flags.local_epochs is not None:
    return flags.text('local_epochs')
  return f'--local_steps={flags.local_steps or _LOCAL_STEPS}'


@dataclasses.dataclass(frozen=True)
class TrainingFlags(flag_groups.Flags):
  """The rounds, and the clients' training in each of them."""

  TITLE = 'Training'

  rounds: int = flag(value_types.POSITIVE_INTEGER, 'Number of rounds', 60)
  clients_per_round: Optional[int] = flag(
      value_types.POSITIVE_INTEGER,
      'Number of clients that are sampled for each round',
      default_text='all',
  )
  local_steps: Optional[int] = flag(
      flag_groups.STEPS,
      'Number of batches on which a client trains in a round',
      compute=lambda flags: _LOCAL_STEPS,
      default_text=f'{_LOCAL_STEPS}, unless --local_epochs is given',
      ignored=lambda flags: _overrules(flags, 'local_epochs', 'local_steps'),
      argument=options.OWN_NAME,
  )
  local_epochs: Optional[int] = flag(
      flag_groups.EPOCHS,
      'Number of passes over its data that a client makes in a round, instead'
      ' of --local_steps',
      default_text='none',
      ignored=lambda flags: _overrules(flags, 'local_steps', 'local_epochs'),
  )
  batch_size: int = flag(
      flag_groups.BATCH_SIZE,
      'Number of examples in a batch. With --local_steps, every batch has this'
      ' size: a client with fewer examples repeats them in a batch. With'
      ' --local_epochs, its batches are smaller',
      32,
  )
  client_optimizer: Optional[str] = flag(
      value_types.Choice(_LEARNING_RATES),
      lambda: (
          "Optimizer of the clients' training, sgd or adam (β1 = 0.9, β2 ="
          ' 0.999). It starts afresh in each round, except with'
          f' {_algorithms_with_one_optimizer()}'
      ),
      'sgd',
      # Not in flags.txt, so that runs from before this flag can be continued.
      convert=lambda name: None if name == 'sgd' else name,
  )
  client_learning_rate: float = flag(
      value_types.POSITIVE,
      'Learning rate of --client_optimizer',
      compute=lambda flags: _LEARNING_RATES[flags.client_optimizer],
      default_text=', '.join(
          f'{rate:g} for {name}' for name, rate in _LEARNING_RATES.items()
      ),
  )
  client_learning_rate_schedule: Optional[str] = flag(
      value_types.CheckedText(parsers.parse_schedule),
      'Factors of --client_learning_rate as ROUND:FACTOR,...: 60:0.1,80:0.01'
      ' means 0.1 times --client_learning_rate from round 60 on and 0.01 times'
      ' from round 80 on',
      default_text='always 1',
  )
  client_momentum: Optional[float] = flag(
      value_types.MOMENTUM,
      lambda: (
          'Momentum of --client_optimizer=sgd. It starts from zero in each'
          f' round, except with {_algorithms_with_one_optimizer()}'
      ),
      0.0,
      conditions=(options.only_for('client_optimizer', 'sgd'),),
  )
  client_weight_decay: float = flag(
      value_types.NOT_NEGATIVE,
      'Coupled L2 decay: this factor times the weights is added to the'
      ' gradients',
      0.0,
      argument=options.OWN_NAME,
  )
  client_gradient_clip_norm: Optional[float] = flag(
      value_types.POSITIVE,
      "Largest global norm of a batch's gradient in the clients' training; a"
      ' longer gradient is scaled down to it, before weight decay',
      default_text='any',
      argument=options.OWN_NAME,
  )
  client_warmup_rounds: int = flag(
      value_types.Number(int, minimum=0),
      "Number of rounds over which the clients' learning rate rises linearly at"
      ' the start of the training',
      0,
      argument=options.OWN_NAME,
  )
  client_warmup_steps: int = flag(
      value_types.Number(int, minimum=0),
      lambda: (
          "Number of steps over which the clients' learning rate rises linearly"
          ' at the start of each round, where their optimizers start; with'
          f' {_algorithms_with_one_optimizer()}, at the start of the training'
      ),
      0,
      argument=options.OWN_NAME,
  )
  augment: Optional[str] = flag(
      value_types.Choice(augmentation.AUGMENTATIONS),
      'What is done to the images of each training batch, at random:\n'
      + parts.listing(augmentation.AUGMENTATIONS),
      'none',
      # Not in flags.txt, so that runs from before this flag can be continued.
      convert=lambda name: None if name == 'none' else name,
  )
  shuffle_times: Optional[float] = flag(
      flag_groups.MEAN_STEPS,
      'N_sf, the mean number of times that each client permutes the hidden'
      ' units of its model at random in a round, at most the number of its'
      ' steps: for measuring how much it matters for averaging that units are'
      ' aligned (FedPAN, algorithm 2)',
      0.0,
      # Not in flags.txt, so that runs from before this flag can be continued.
      convert=lambda times: times or None,
      argument=options.OWN_NAME,
  )
  shuffle_probability: Optional[float] = flag(
      value_types.SHARE,
      'P_sf of the permutations of --shuffle_times: the probability that a unit'
      ' is swapped with a random one after it',
      0.1,
      conditions=(
          options.Condition(
              'shuffle_times',
              lambda flags: bool(flags.shuffle_times),
              'has no effect with --shuffle_times=0',
          ),
      ),
      argument=options.OWN_NAME,
  )
  client_weighting: Optional[str] = flag(
      value_types.Choice(('num_examples', 'uniform')),
      "Weights of the clients in the server's mean: num_examples that they"
      ' trained on in the round, or uniform',
      compute=_default_weighting,
      default_text=(
          f'{_CLIENT_WEIGHTING}; uniform with scaffold, with another'
          ' --model_aggregator than the mean, or an attack on the model'
      ),
      feature=registry.MEAN,
  )
  max_failed_rounds: int = flag(
      value_types.POSITIVE_INTEGER,
      'The run stops after this number of consecutive rounds in which every'
      ' client was dropped because its loss or its update was not finite',
      10,
  )
  jit_compile: bool = flag(
      None,
      "Compiles the clients' steps with XLA, which rounds differently; training"
      ' amplifies the differences. For GPUs: on the CPU, a step of ResNet-20'
      ' takes 1.5 to 6 times as long. Not with --runtime=native',
      False,
      argument=options.OWN_NAME,
  )

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    super().check(flags)
    if (
        flags.local_steps is not None
        and flags.local_epochs is not None
        and flags.source('local_steps') == flags.source('local_epochs')
    ):
      raise ValueError(
          f'{flags.text("local_steps")} and {flags.text("local_epochs")}'
          ' exclude each other; give one of them.'
      )
    num_steps = flags.local_steps or _LOCAL_STEPS
    uses_steps = flags.local_epochs is None or _overrules(
        flags, 'local_steps', 'local_epochs'
    )
    if uses_steps and flags.shuffle_times > num_steps:
      raise ValueError(
          f'--shuffle_times={flags.shuffle_times:g} must be at most'
          f' --local_steps={num_steps}: a step permutes the units at most once.'
      )
    if uses_steps and num_steps * flags.batch_size > _MAX_SAMPLES:
      raise ValueError(
          f'--local_steps={num_steps} with --batch_size={flags.batch_size}'
          f' makes {num_steps * flags.batch_size} examples of a client in a'
          f' round; at most {_MAX_SAMPLES} are possible.'
      )

  def build_client_optimizer(self) -> 'tff.learning.optimizers.Optimizer':
    """Builds the optimizer of the clients' training."""
    import tensorflow_federated as tff

    rate = self.client_learning_rate
    if self.client_optimizer == 'adam':
      return tff.learning.optimizers.build_adam(rate)
    return tff.learning.optimizers.build_sgdm(
        rate, self.client_momentum or None
    )

  def build_learning_rate_schedule(
      self, *more: Schedule
  ) -> 'Optional[Callable[[tf.Tensor], tf.Tensor]]':
    """Builds the clients' learning rate as a function of finished rounds.

    Args:
      *more: Further factors of the learning rate.

    Returns:
      The function; None if the learning rate is constant.
    """
    import tensorflow as tf

    schedules = list(more)
    if self.client_learning_rate_schedule is not None:
      schedules.insert(
          0, parsers.parse_schedule(self.client_learning_rate_schedule)
      )
    if not schedules:
      return None

    def learning_rate(num_finished_rounds: tf.Tensor) -> Any:
      rate: Any = self.client_learning_rate
      for schedule in schedules:
        factor: Any = 1.0
        for start, later_factor in schedule:
          # Rounds count from 1: round `start` follows start - 1 finished ones.
          factor = tf.where(
              num_finished_rounds >= start - 1, later_factor, factor
          )
        rate *= factor
      return rate

    return learning_rate
