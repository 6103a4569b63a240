"""The options of the rounds and of the clients' training."""

from typing import Any, Optional

from tff_bn.catalog import algorithms
from tff_bn.catalog import options as options_lib
from tff_bn.catalog import privacy
from tff_bn.catalog import rules
from tff_bn.catalog import server
from tff_bn.catalog import value_types
from tff_bn.catalog.options import OWN_NAME
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option
from tff_bn.catalog.options import only_for
from tff_bn.catalog.parts import Part
from tff_bn.catalog.parts import Parts
from tff_bn.catalog.parts import listing

# The clients' optimizers with their default learning rates. FedPAN has Adam's.
LEARNING_RATES = {'sgd': 0.1, 'adam': 3e-4}
_AUGMENTATION = 'tff_bn.data.augmentation'
# They draw transforms, given the number of images, their shape and a generator.
AUGMENTATIONS = Parts(
    Part('none', 'nothing', f'{_AUGMENTATION}:keep'),
    Part(
        'flip_crop',
        'a horizontal flip with probability 1/2, and a random crop of the image'
        ' with a black border of 4 pixels, as in the code of FedTAN and FedPAN'
        ' for CIFAR',
        f'{_AUGMENTATION}:flip_crop',
    ),
    Part(
        'flip_rotate',
        'a horizontal flip with probability 1/2, and a rotation by up to 30'
        " degrees with a black border, as in FedBN's code for Office-Caltech10"
        ' and DomainNet',
        f'{_AUGMENTATION}:flip_rotate',
    ),
)
NUM_EXAMPLES = 'num_examples'
SAMPLE_WEIGHTS = 'sample_weights'
UNIFORM = 'uniform'
# They weight clients differently.
_WEIGHTINGS = (NUM_EXAMPLES, SAMPLE_WEIGHTS)
# The corrections that weight all clients alike by default.
_UNIFORM = [
    name
    for name, correction in algorithms.CORRECTIONS.items()
    if correction.client_weighting == UNIFORM
]
_NUM_STEPS = 5
# A batch, the steps and the passes of a client's round are in memory at once.
STEPS = value_types.Number(int, minimum=1, maximum=10**6)
MEAN_STEPS = value_types.Number(float, minimum=0, maximum=STEPS.maximum)
EPOCHS = value_types.Number(int, minimum=1, maximum=10**4)


def parse_schedule(text: str) -> tuple[tuple[int, float], ...]:
  """Parses `ROUND:FACTOR,...` as pairs, e.g. '6000:0.1,8000:0.01'."""
  schedule = []
  for item in text.split(','):
    try:
      start, factor = item.split(':')
      schedule.append((int(start), float(factor)))
    except ValueError as error:
      raise ValueError(
          'must be a list of ROUND:FACTOR, for example 6000:0.1,8000:0.01.'
      ) from error
  starts = [start for start, _ in schedule]
  if starts[0] < 1 or any(b <= a for a, b in zip(starts, starts[1:])):
    raise ValueError('must give increasing rounds, the first at least 1.')
  if starts[-1] > value_types.LARGEST_INT:
    raise ValueError(f'must give rounds of at most {value_types.LARGEST_INT}.')
  if not all(
      0 <= factor <= value_types.LARGEST_FLOAT for _, factor in schedule
  ):
    raise ValueError(
        f'must give factors from 0 to {value_types.LARGEST_FLOAT}.'
    )
  return tuple(schedule)


def _except_those_that_keep_it() -> str:
  """Returns the algorithms whose optimizer lasts for the whole training."""
  *names, last = (
      name
      for name, algorithm in algorithms.ALGORITHMS.items()
      if algorithm.keeps_optimizer
  )
  return f'{", ".join(names)} and {last}'


ROUNDS = Option('rounds', value_types.POSITIVE_INTEGER, 'Number of rounds', 60)
CLIENTS_PER_ROUND = Option(
    'clients_per_round',
    value_types.POSITIVE_INTEGER,
    'Number of clients that are sampled for each round',
    default_text='all',
)
LOCAL_STEPS = Option(
    'local_steps',
    STEPS,
    'Number of batches on which a client trains in a round',
    default_text=f'{_NUM_STEPS}, unless --local_epochs is given',
    argument=OWN_NAME,
    compute=lambda options: _NUM_STEPS,
    excludes='local_epochs',
)
# In the programs, the clients' datasets are as long as this option says, so it
# is no argument that they pass.
LOCAL_EPOCHS = Option(
    'local_epochs',
    EPOCHS,
    'Number of passes over its data that a client makes in a round, instead of'
    ' --local_steps',
    default_text='none',
    excludes='local_steps',
)
BATCH_SIZE = Option(
    'batch_size',
    value_types.Number(int, minimum=1, maximum=10**6),
    'Number of examples in a batch. With --local_steps, every batch has this'
    ' size: a client with fewer examples repeats them in a batch. With'
    ' --local_epochs, its batches are smaller',
    32,
)
CLIENT_OPTIMIZER = Option(
    'client_optimizer',
    value_types.Choice(LEARNING_RATES),
    lambda: (
        "Optimizer of the clients' training, sgd or adam (β1 = 0.9, β2 ="
        ' 0.999). It starts afresh in each round, except with'
        f' {_except_those_that_keep_it()}'
    ),
    'sgd',
    convert=lambda name: None if name == 'sgd' else name,
)
CLIENT_LEARNING_RATE = Option(
    'client_learning_rate',
    value_types.POSITIVE,
    'Learning rate of --client_optimizer',
    default_text=', '.join(
        f'{rate:g} for {name}' for name, rate in LEARNING_RATES.items()
    ),
    compute=lambda options: LEARNING_RATES[options.client_optimizer],
)
CLIENT_LEARNING_RATE_SCHEDULE = Option(
    'client_learning_rate_schedule',
    value_types.CheckedText(parse_schedule),
    'Factors of --client_learning_rate as ROUND:FACTOR,...: 60:0.1,80:0.01'
    ' means 0.1 times --client_learning_rate from round 60 on and 0.01 times'
    ' from round 80 on',
    default_text='always 1',
)
CLIENT_MOMENTUM = Option(
    'client_momentum',
    value_types.MOMENTUM,
    lambda: (
        'Momentum of --client_optimizer=sgd. It starts from zero in each round,'
        f' except with {_except_those_that_keep_it()}'
    ),
    0.0,
    conditions=(only_for('client_optimizer', 'sgd'),),
)
CLIENT_WEIGHT_DECAY = Option(
    'client_weight_decay',
    value_types.NOT_NEGATIVE,
    'Coupled L2 decay: this factor times the weights is added to the gradients',
    0.0,
    argument=OWN_NAME,
)
CLIENT_GRADIENT_CLIP_NORM = Option(
    'client_gradient_clip_norm',
    value_types.POSITIVE,
    "Largest global norm of a batch's gradient in the clients' training; a"
    ' longer gradient is scaled down to it, before weight decay',
    default_text='any',
    argument=OWN_NAME,
)
CLIENT_WARMUP_ROUNDS = Option(
    'client_warmup_rounds',
    value_types.COUNT,
    "Number of rounds over which the clients' learning rate rises linearly at"
    ' the start of the training: round n, counted from 1, multiplies it by n /'
    ' --client_warmup_rounds',
    0,
    argument=OWN_NAME,
)
CLIENT_WARMUP_STEPS = Option(
    'client_warmup_steps',
    value_types.COUNT,
    lambda: (
        "Number of steps over which the clients' learning rate rises linearly"
        ' at the start of each round, where their optimizers start; with'
        f' {_except_those_that_keep_it()}, at the start of the training'
    ),
    0,
    argument=OWN_NAME,
)
AUGMENT = Option(
    'augment',
    value_types.Choice(AUGMENTATIONS),
    'What is done to the images of each training batch, at random:\n'
    + listing(AUGMENTATIONS),
    'none',
    convert=lambda name: None if name == 'none' else name,
)
SHUFFLE_TIMES = Option(
    'shuffle_times',
    MEAN_STEPS,
    'N_sf, the mean number of times that each client permutes the hidden units'
    ' of its model at random in a round, at most the number of its steps: for'
    ' measuring how much it matters for averaging that units are aligned'
    ' (FedPAN, algorithm 2)',
    0.0,
    argument=OWN_NAME,
    convert=lambda times: times or None,
)
SHUFFLE_PROBABILITY = Option(
    'shuffle_probability',
    value_types.SHARE,
    'P_sf of the permutations of --shuffle_times: the probability that a unit'
    ' is swapped with a random one after it',
    0.1,
    argument=OWN_NAME,
    conditions=(
        Condition(
            'shuffle_times',
            lambda options: bool(options.shuffle_times),
            'has no effect with --shuffle_times=0',
        ),
    ),
)
CLIENT_WEIGHTING = Option(
    'client_weighting',
    value_types.Choice((*_WEIGHTINGS, UNIFORM)),
    "Weights of the clients in the server's mean: num_examples that they"
    ' trained on in the round, sample_weights: the sum of the weights of these'
    ' examples, or uniform',
    default_text=(
        f'{NUM_EXAMPLES}; {UNIFORM} with {", ".join(_UNIFORM)}, with another'
        ' --model_aggregator than the mean, an attack on the model, or'
        f' --privacy={privacy.DP}'
    ),
    argument=OWN_NAME,
    compute=lambda options: (
        UNIFORM
        if rules.takes_no_weights(options) or options.privacy == privacy.DP
        else NUM_EXAMPLES
    ),
    feature=rules.MEAN,
)
MAX_FAILED_ROUNDS = Option(
    'max_failed_rounds',
    value_types.POSITIVE_INTEGER,
    'The run stops after this number of consecutive rounds in which every'
    ' client was dropped because its loss or its update was not finite',
    10,
)
JIT_COMPILE = Option(
    'jit_compile',
    value_types.BOOLEAN,
    "Compiles the clients' steps with XLA, which rounds differently; training"
    ' amplifies the differences. For GPUs: on the CPU, a step of ResNet-20'
    ' takes 1.5 to 6 times as long. Not with --runtime=native',
    False,
    argument=OWN_NAME,
)
OPTIONS = options_lib.declared(vars())


def explain() -> str:
  """Returns a text on all options that are arguments of builders."""
  return options_lib.explain(
      LOCAL_EPOCHS,
      *(option for option in (*OPTIONS, *server.OPTIONS) if option.argument),
  )


def check_shuffles(local_steps: Optional[int], shuffle_times: float) -> None:
  """Raises a `ValueError` if clients permute units more often than they step.

  Without `local_steps`, the number of steps is not known.
  """
  if local_steps is not None and shuffle_times > local_steps:
    raise ValueError(
        f'shuffle_times={shuffle_times:g} must be at most'
        f' local_steps={local_steps}: a step permutes the units at most once.'
    )


def check_weighting(
    client_weighting: Any, aggregator: str, takes_weights: bool
) -> None:
  """Raises a `ValueError` if clients have weights that have no effect.

  `aggregator` is the model's aggregator as `argument=value`.
  """
  if client_weighting in _WEIGHTINGS and not takes_weights:
    raise ValueError(
        f'client_weighting={client_weighting} is impossible with {aggregator},'
        f' which takes no weights; use {UNIFORM}.'
    )
