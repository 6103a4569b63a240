"""Algorithms, corrections of the clients' drift, and the options of some.

`ALGORITHMS` decide how batch normalization is treated, `CORRECTIONS` counteract
the drift of the clients' models; a name such as `fedbn+fedprox` combines both.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import functools
from typing import Any, Optional

from tff_bn.catalog import rules
from tff_bn.catalog import server
from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.catalog.options import OWN_NAME
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option
from tff_bn.catalog.parts import Part
from tff_bn.catalog.parts import Parts
from tff_bn.catalog.parts import listing
from tff_bn.common import spelling

# The feature of algorithms whose clients have own models.
CLIENT_MODELS = 'client_models'
# The algorithm that is trained, and the ones that are compared, by default. A
# correction alone corrects the former.
DEFAULT = 'fedavg'
COMPARED = ('centralized', 'fedavg', 'fedtan', 'fbn', 'fedbn')
OTHER = 'a builder or an entry of yours as package.module:NAME'
_ROOM = 'tff_bn.algorithms'
_JOIN = '+'


@dataclasses.dataclass(frozen=True)
class Need:
  """What an algorithm or a correction needs of an option.

  Attributes:
    option: The option.
    holds: Whether its value is possible, given the options of a run as
      attributes of an object. An option without effect is None.
    reason: Why it is not, as the rest of a sentence without its point. Or a
      function that returns it.
    excluded: The name of another option, which the first one excludes.
  """

  option: str
  holds: Callable[[Any], bool]
  reason: str | Callable[[], str]
  excluded: Optional[str] = None

  def describe(self, name: str, options: Any) -> str:
    """Returns the error about the options of an algorithm of this name."""
    reason = self.reason() if callable(self.reason) else self.reason
    text = _text(self.option, options)
    if self.excluded is None:
      return f'{text} is impossible with {name}{reason}.'
    excluded = _text(self.excluded, options)
    return f'{text} and {excluded} exclude each other with {name}{reason}.'

  def check(self, name: str, options: Any) -> None:
    """Raises a `ValueError` unless the need is met; see `describe`."""
    if not self.holds(options):
      raise ValueError(self.describe(name, options))


def _text(name: str, options: Any) -> str:
  value = getattr(options, name)
  return f'{name}={",".join(value) if isinstance(value, tuple) else value}'


@dataclasses.dataclass(frozen=True)
class _Entry(Part):
  """What an algorithm and a correction can have.

  Attributes:
    client_weighting: Its default of `--client_weighting`, if it has its own.
    needs_num_clients: Whether its builder gets the number of all clients as
      `num_clients`.
    needs: What it needs of the options.
  """

  client_weighting: Optional[str] = None
  needs_num_clients: bool = False
  needs: tuple[Need, ...] = ()


@dataclasses.dataclass(frozen=True)
class Correction(_Entry):
  """A correction of the drift of the clients' models.

  Its builder gets the builder of the corrected algorithm as `build_process`.
  Its name stands behind the `+`; alone, it stands for `fedavg+` and the name.
  """


@dataclasses.dataclass(frozen=True)
class Algorithm(_Entry):
  """A way to treat batch normalization, alone or with a correction.

  Attributes:
    features: The features that decide whether an option has an effect.
      Default: the server averages what the clients send.
    arguments: Further arguments that its builder always gets.
    build_process: What its builder gets as `build_process`, if anything:
      `module:NAME`.
    trains_on_union: Whether it trains one model on the union of the sampled
      clients' data.
    batch_norm: The class to which the model's BN layers are converted, a value
      of `to` of `tff_bn.convert_batch_norm`, if it needs one.
    keeps_optimizer: Whether the state of the clients' optimizer lasts for the
      whole training; otherwise it is new in each round.
    local_steps: The number of local steps, if only one number is possible.
    first_phase: The option with the number of rounds after which it fixes the
      BN statistics, if it does.
    later_rate: The option with the factor of the learning rate after these
      rounds, if it has one.
    ignores: Options for all algorithms that have no effect on this one, and
      why, as the end of a sentence.
    no_drift: Why corrections can't be combined with it, if they can't.
    possible_corrections: The corrections that can, nevertheless.
    impossible_corrections: Other corrections that can't be combined with it,
      and why, as the end of a sentence.
    correction: The correction with which it is combined.
  """

  features: tuple[str, ...] = (rules.MEAN,)
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  build_process: Optional[str] = None
  trains_on_union: bool = False
  batch_norm: Optional[str] = None
  keeps_optimizer: bool = False
  local_steps: Optional[int] = None
  first_phase: Optional[Option] = None
  later_rate: Optional[Option] = None
  ignores: Mapping[str, str] = dataclasses.field(default_factory=dict)
  no_drift: Optional[str] = None
  possible_corrections: Collection[str] = ()
  impossible_corrections: Mapping[str, str] = dataclasses.field(
      default_factory=dict
  )
  correction: Optional[Correction] = None

  @property
  def understood(self) -> frozenset[str]:
    """The features and the names of options that have an effect on it."""
    return frozenset(self.features) | {option.name for option in self.options}

  def builder(self) -> Callable[..., Any]:
    """Returns the builder of the process; imports TensorFlow Federated."""
    arguments = dict(self.arguments)
    if self.build_process is not None:
      arguments['build_process'] = Part('', '', self.build_process).load()
    builder = functools.partial(self.load(), **arguments)
    if self.correction is None:
      return builder
    return functools.partial(self.correction.load(), build_process=builder)

  def with_correction(self, correction: Correction, name: str) -> 'Algorithm':
    """Returns the combination with a correction, under a name.

    Raises:
      ValueError: If the correction can't be combined with it.
    """
    reason = self.impossible_corrections.get(correction.name)
    if correction.name not in self.possible_corrections:
      reason = self.no_drift or reason
    if reason:
      raise ValueError(
          f"{correction.name} can't be combined with {self.name}: {reason}."
      )
    return dataclasses.replace(
        self,
        name=name,
        correction=correction,
        options=self.options + correction.options,
        client_weighting=correction.client_weighting,
        needs_num_clients=correction.needs_num_clients,
        needs=(*self.needs, _NO_AVERAGES, *correction.needs),
    )

  def check(self, options: Any) -> None:
    """Raises a `ValueError` if a run's options do not fit; `needs` has more."""
    if self.local_steps not in (None, options.local_steps):
      given = 'local_epochs' if options.local_steps is None else 'local_steps'
      raise ValueError(
          f'{self.name} needs local_steps={self.local_steps}, but got'
          f' {given}={getattr(options, given)}.'
      )
    if self.first_phase is not None:
      if options.rounds == 1:
        raise ValueError(
            f'rounds=1 is too few for {self.name}, which fixes the BN'
            ' statistics after some rounds; use at least 2.'
        )
      name = self.first_phase.name
      if getattr(options, name) >= options.rounds:
        raise ValueError(
            f'{name}={getattr(options, name)} leaves no round in which the BN'
            f' statistics of {self.name} are fixed; it must be less than'
            f' rounds={options.rounds}.'
        )


def users(feature: str) -> list[str]:
  """Returns the algorithms and corrections with this option or feature."""
  return [
      entry.name
      for entry in _entries()
      if entry.has(feature) or feature in getattr(entry, 'features', ())
  ]


def _entries() -> list[Algorithm | Correction]:
  return [*ALGORITHMS.values(), *CORRECTIONS.values()]


# Declares an option that only some algorithms have.
_own_option = functools.partial(Option, argument=OWN_NAME, feature=OWN_NAME)


def _share_of_rounds(share: float) -> dict[str, Any]:
  """Returns the default of an option that is this share of `--rounds`."""
  return dict(
      compute=lambda options: max(1, round(share * options.rounds)),
      default_text=f'{share:.0%} of --rounds, but at least 1',
  )


_STATISTICS_KINDS = {
    'naive': 'mean of the means, mean of the variances',
    'pooled': (
        "mean and variance of the union of the clients' data, which adds the"
        " variance of the clients' means"
    ),
}
STATISTICS = _own_option(
    'statistics',
    value_types.Choice(_STATISTICS_KINDS),
    "How the clients' running BN statistics are combined where they are"
    f' shared:\n{listing(_STATISTICS_KINDS)}',
    'naive',
    argument=None,
)
_MOMENTS_KINDS = {
    'two_pass': (
        'two exchanges, as in the paper: first the mean of the means, then the'
        ' mean of the variances about it'
    ),
    'fused': 'one exchange for both; exact also for batches of different sizes',
}
MOMENTS = _own_option(
    'moments',
    value_types.Choice(_MOMENTS_KINDS),
    lambda: (
        f'How the clients of {", ".join(users("moments"))} compute the mean and'
        ' the variance over all their batches, at each BN layer:\n'
        + listing(_MOMENTS_KINDS)
    ),
    'two_pass',
)
_FEDTAN_STATISTICS_KINDS = {
    'all_steps': 'of all local steps, as in the paper',
    'first_step': (
        'of the first, synchronized step alone, which are those of all clients'
    ),
}
FEDTAN_STATISTICS = _own_option(
    'fedtan_statistics',
    value_types.Choice(_FEDTAN_STATISTICS_KINDS),
    lambda: (
        f'The batch statistics of {", ".join(users("fedtan_statistics"))} that'
        f' move the running ones:\n{listing(_FEDTAN_STATISTICS_KINDS)}'
    ),
    'all_steps',
    argument='running_statistics',
    conditions=(
        Condition(
            'local_steps',
            lambda options: options.local_steps != 1
            or options.fedtan_every != 1,
            'has no effect with --local_steps={}, unless --fedtan_every is at'
            ' least 2: all steps are synchronized',
        ),
    ),
)
FEDTAN_EVERY = _own_option(
    'fedtan_every',
    value_types.POSITIVE_INTEGER,
    lambda: (
        f'{", ".join(users("fedtan_every"))}: synchronizes the rounds 1, n + 1,'
        ' 2n + 1, … for this number n. All others are rounds of fedavg;'
        ' with --fedtan_statistics=first_step, they do not move the running BN'
        ' statistics'
    ),
    1,
    argument='synchronize_every',
)
SYNC_ROUNDS = _own_option(
    'sync_rounds',
    value_types.POSITIVE_INTEGER,
    'Number of rounds after which fedtan_ii fixes the BN statistics; less than'
    ' --rounds',
    # The paper's are 10 to 40 % of the rounds.
    **_share_of_rounds(0.2),
)
AFTER_SYNC_FACTOR = _own_option(
    'after_sync_factor',
    value_types.POSITIVE,
    'Further factor of --client_learning_rate in fedtan_ii after --sync_rounds:'
    ' with fixed statistics, the steps must be smaller',
    # The paper's are 0.02 on CIFAR-10 and 0.1 on MNIST.
    0.1,
    argument=None,
)
FIXBN_ROUNDS = _own_option(
    'fixbn_rounds',
    value_types.POSITIVE_INTEGER,
    'Number of rounds after which fixbn fixes the BN statistics; less than'
    ' --rounds',
    # As in FBN's paper, where it is 1500 of 3000.
    **_share_of_rounds(0.5),
)
POOLED = _own_option(
    'pooled',
    value_types.BOOLEAN,
    "In fbn, clients' BN statistics are weighted by the number of values over"
    ' which they are computed, which is exact for batches of any size. With'
    ' --nopooled all clients have the same weight, as in the paper',
    True,
)
_BACKWARD_KINDS = {
    'none': 'no averages, as in the paper',
    'mean': "of the mean gradient of a layer's output",
    'running': (
        'of the mean gradient, and of the mean product of the gradient and the'
        ' normalized values'
    ),
}
FBN_BACKWARD = _own_option(
    'fbn_backward',
    value_types.Choice(_BACKWARD_KINDS),
    'The running averages of the gradients that fbn uses in the backward pass'
    f' of batch normalization:\n{listing(_BACKWARD_KINDS)}',
    'none',
    argument='backward',
)
FBN_BACKWARD_RESTART = _own_option(
    'fbn_backward_restart',
    value_types.Number(float, above=1),
    'fbn: the averages of --fbn_backward start again from 0 in a channel after'
    ' a round in which the mean square of its normalized values (with the new'
    ' BN statistics and the unbiased variance) was not between 1 divided by'
    ' this number and this number; 1.5 makes training stable',
    default_text='they never do',
    argument='backward_restart',
    conditions=(
        Condition(
            'fbn_backward',
            lambda options: not _has_no_averages(options),
            'is for --fbn_backward=mean and --fbn_backward=running, not for {}',
        ),
    ),
)
HBN_STATISTICS_RATE = _own_option(
    'hbn_statistics_rate',
    value_types.POSITIVE_SHARE,
    'The rate r at which hbn moves the BN statistics that clients use in'
    ' training: new = (1 - r) * old + r * those of the round. Evaluation uses'
    ' statistics of the evaluated model on all training data',
    0.002,
    argument='statistics_rate',
)
_DEVIATION_KINDS = {
    'pooled': "that of all clients' values, by the law of total variance",
    'mean': "the mean of the clients' deviations",
}
VARIATE_DEVIATION = _own_option(
    'variate_deviation',
    value_types.Choice(_DEVIATION_KINDS),
    "The deviation in the server's control variates of bn_scaffold:\n"
    + listing(_DEVIATION_KINDS),
    'pooled',
)
DSGD_MOMENTUM = _own_option(
    'dsgd_momentum',
    value_types.MOMENTUM,
    lambda: (
        'μ of the momentum m ← μ m + (1-μ) g that every client keeps in'
        f' {", ".join(n for n in users("dsgd_momentum") if n != "centralized")}'
        ' and sends in place of its gradient g, so that --model_aggregator gets'
        ' momentums. Without it, clients send gradients, and --client_momentum'
        ' is the momentum of the server, v ← μ v + g. In centralized, the same'
        ' momentum of the one model'
    ),
    default_text='none',
    argument='momentum',
)
CENTRALIZED_BATCH_SIZE = _own_option(
    'centralized_batch_size',
    value_types.Number(int, minimum=1, maximum=10**6),
    'Number of examples in a batch of centralized, where --local_epochs counts'
    " passes over the union of the clients' data",
    default_text='--batch_size times the number of clients in a round',
    # An argument of the training loop, not of the builder.
    argument=None,
)
PROXIMAL_STRENGTH = _own_option(
    'proximal_strength',
    value_types.NOT_NEGATIVE,
    'μ of fedprox, and of fedbs once it is fedprox: μ/2 times the squared'
    " distance from the server's model is added to the loss",
    1e-3,
)
FEDBS_EPSILON = _own_option(
    'fedbs_epsilon',
    value_types.POSITIVE,
    'fedbs becomes fedprox after the first round in which the standard'
    " deviation of the clients' training losses is less than this",
    0.01,
    argument='epsilon',
)
FEDDYN_STRENGTH = _own_option(
    'feddyn_strength',
    value_types.POSITIVE,
    "α of feddyn: α/2 times the squared distance from the server's model is"
    " added to the loss, and the client's state moves by α times the change of"
    ' its model',
    # As in the authors' code for CIFAR-10.
    0.01,
)
MOON_WEIGHT = _own_option(
    'moon_weight',
    value_types.NOT_NEGATIVE,
    'μ of moon: the weight of the contrastive loss',
    1.0,
    argument='contrastive_weight',
)
MOON_TEMPERATURE = _own_option(
    'moon_temperature',
    value_types.POSITIVE,
    'τ of moon: the temperature of the contrastive loss',
    0.5,
    argument='temperature',
)
MOON_FEATURE_LAYER = _own_option(
    'moon_feature_layer',
    value_types.TEXT,
    'Name of the layer of the model whose output moon contrasts',
    default_text='the last hidden layer, which is --moon_projection if given',
    argument='feature_layer',
)
GREG_WEIGHT = _own_option(
    'greg_weight',
    value_types.NOT_NEGATIVE,
    'λ of greg: the weight of the divergence of the two outputs',
    0.1,
    argument='consistency_weight',
)

_LAYERS = (
    'a regular expression for whole names of layers, or paths such as'
    ' backbone/conv1 in nested models'
)
LOCAL_LAYERS = _own_option(
    'local_layers',
    value_types.REGULAR_EXPRESSION,
    'Layers that stay with the client, with all their variables, besides what'
    f' --algorithm keeps there: {_LAYERS}',
    default_text='none',
)
HEAD_LAYERS = _own_option(
    'head_layers',
    value_types.REGULAR_EXPRESSION,
    lambda: (
        f'The layers of the head in {", ".join(users("head_layers"))}:'
        f' {_LAYERS}'
    ),
    default_text='the last layer with a kernel',
)
HEAD_STEPS = _own_option(
    'head_steps',
    value_types.POSITIVE_INTEGER,
    'Number of steps in which a client of fedrep trains the head in a round,'
    ' before it trains the other layers for --local_steps or --local_epochs',
    default_text='as many as for the other layers',
)
DITTO_STRENGTH = _own_option(
    'ditto_strength',
    value_types.NOT_NEGATIVE,
    "λ of ditto: λ/2 times the squared distance from the server's model is"
    ' added to the loss of personal models',
    1.0,
)
FEDAP_OWN_SHARE = _own_option(
    'fedap_own_share',
    value_types.SHARE,
    "λ of fedap: the share of a client's own model in its average of all"
    ' models',
    0.5,
)
FEDAP_FEDBN_ROUNDS = _own_option(
    'fedap_fedbn_rounds',
    value_types.POSITIVE_INTEGER,
    'Number of rounds of fedbn at the start of fedap; the BN statistics after'
    ' them say how similar clients are',
    5,
)

# Why algorithms can't be combined with corrections of the clients' drift.
_NOTHING_SHARED = 'its clients share nothing, so there is no common model'
ONE_MODEL = 'it trains one model on all data, so no clients drift apart'
ONE_STEP = (
    'its clients make one step in a round, from the same model, so they do not'
    ' drift apart'
)
FIRST_STEP = (
    'the first step of its rounds has the gradient of the mean loss of all'
    ' clients; a correction would change the losses, gradients or weights of'
    ' single clients'
)

RUNNING_STATISTICS = (
    'its clients normalize with running statistics in training, too, so there'
    ' are no others to compare with'
)
_NO_SHARED_STATISTICS = {
    'greg': 'its clients keep their BN statistics, so the server has none'
}


def _has_no_averages(options: Any) -> bool:
  return options.fbn_backward in (None, 'none')


def _is_plain_sgd(options: Any) -> bool:
  # SGD is the default.
  return options.client_optimizer in (None, 'sgd')


def _without_personal_models() -> str:
  possible = [
      name
      for name, entry in ALGORITHMS.items()
      if _NO_PERSONAL_MODELS not in entry.needs
  ]
  return (
      ', which cannot give clients personal encodings; use 0, or'
      f' {", ".join(possible)}'
  )


SAME_UNITS = Need(
    'shuffle_times',
    lambda options: not options.shuffle_times,
    ', which needs the gradients of all clients for the same units; use 0',
)
FIXED_UNITS = Need(
    'shuffle_times',
    lambda options: not options.shuffle_times,
    ', which fixes some layers while it trains the others; use 0',
)
_NO_PERSONAL_MODELS = Need(
    'pan_personal_share',
    lambda options: not options.pan_personal_share,
    _without_personal_models,
)
_FEDTAN_NEEDS = (
    SAME_UNITS,
    _NO_PERSONAL_MODELS,
    Need(
        'moments',
        lambda options: options.moments == 'fused'
        or not rules.has_exchange_rule(options),
        ' if its exchanges have a rule or are attacked; use fused',
    ),
    Need(
        'precision',
        lambda options: options.precision != 'mixed_float16',
        ', which cannot scale the loss, as float16 needs it; use mixed_bfloat16'
        ' or float32',
    ),
)
_FBN_NEEDS = (
    Need(
        'fbn_backward',
        lambda options: options.precision != 'mixed_float16'
        or _has_no_averages(options),
        ', because float16 needs scaled gradients; use mixed_bfloat16 or'
        ' float32',
        'precision',
    ),
    Need(
        'client_filter',
        lambda options: options.client_filter is None
        or _has_no_averages(options),
        ': the averages of the backward pass are those of all clients',
        'fbn_backward',
    ),
)


def _one_momentum(reason: str) -> Need:
  return Need(
      'dsgd_momentum',
      lambda options: options.dsgd_momentum is None
      or not options.client_momentum,
      f': {reason} of the gradients. Give one of them',
      'client_momentum',
  )


_DSGD_NEEDS = (
    SAME_UNITS,
    Need(
        'client_optimizer',
        _is_plain_sgd,
        ', whose steps are steps of SGD with the mean gradient; use sgd',
    ),
    _one_momentum(
        'the first is the momentum of each client, the second of the mean'
    ),
)
_PLAIN_SGD = (
    ', which computes the mean gradient of a client from the change by its'
    ' steps of plain SGD; use '
)
_NEEDS_SGD = (
    ', which needs the factor of each gradient in the change of the model; use'
    ' sgd'
)
_MEAN = ', which needs the weighted mean of what the clients send'
_LOSSES = ', which weights the clients by their losses'
_PROBABILITIES = ', which compares probabilities of exclusive classes'
# The losses of their softmax; None: the default.
_SOFTMAX_LOSSES = (None, 'cross_entropy', 'categorical_focal_crossentropy')
_ALL_CLIENTS = Need(
    'client_filter',
    lambda options: options.client_filter is None,
    ', which corrects drift: the filter is for algorithms without a correction',
)
_NO_AVERAGES = Need(
    'fbn_backward',
    _has_no_averages,
    ": both correct the gradients of the clients' steps",
)


_ONLY_MEAN = (
    _ALL_CLIENTS,
    Need(
        'model_aggregator',
        lambda options: options.model_aggregator == 'mean',
        _MEAN,
    ),
    Need('attack', lambda options: not rules.takes_no_weights(options), _MEAN),
)


def _correction_of_object(name: str, found: Any) -> Correction:
  """Returns the entry of a user's builder."""
  if isinstance(found, Part) or not callable(found):
    raise ValueError(
        f'{name} must be a tff_bn.catalog.algorithms.Correction, or a builder'
        f' with the argument build_process, but is a {type(found).__name__}.'
    )
  return Correction(name, 'a correction of yours', found)


_SCAFFOLD: dict[str, Any] = dict(
    client_weighting='uniform',
    needs_num_clients=True,
)
_SCAFFOLD_NEEDS = (
    Need('client_optimizer', _is_plain_sgd, f'{_PLAIN_SGD}sgd'),
    Need(
        'client_momentum',
        lambda options: not options.client_momentum,
        f'{_PLAIN_SGD}0',
    ),
)

CORRECTIONS: Parts[Correction] = Parts(
    Correction(
        'fedprox',
        "local training stays near to the server's model (see"
        ' --proximal_strength)',
        f'{_ROOM}.fed_prox:build_fed_prox',
        (PROXIMAL_STRENGTH,),
        needs=(_ALL_CLIENTS,),
    ),
    Correction(
        'scaffold',
        'gradients are corrected by control variates, which clients and server'
        ' keep',
        f'{_ROOM}.scaffold:build_scaffold',
        needs=(_ALL_CLIENTS, *_SCAFFOLD_NEEDS),
        **_SCAFFOLD,
    ),
    Correction(
        'moon',
        "features stay near to the features of the server's model, and away"
        " from the features of the client's previous model",
        f'{_ROOM}.moon:build_moon',
        (MOON_WEIGHT, MOON_TEMPERATURE, MOON_FEATURE_LAYER),
        needs=(_ALL_CLIENTS,),
    ),
    Correction(
        'greg',
        'outputs with the statistics of the batch and with the running ones of'
        ' the server stay similar (see --greg_weight)',
        f'{_ROOM}.greg:build_greg',
        (GREG_WEIGHT,),
        needs=(
            _ALL_CLIENTS,
            Need(
                'task',
                lambda options: options.task in (None, *tasks.EXCLUSIVE),
                f'{_PROBABILITIES}; use {" or ".join(tasks.EXCLUSIVE)}',
            ),
            Need(
                'loss',
                lambda options: options.loss in _SOFTMAX_LOSSES
                or names_code(options.loss),
                f'{_PROBABILITIES} by the softmax of its loss; use'
                f' {" or ".join(filter(None, _SOFTMAX_LOSSES))}',
            ),
        ),
    ),
    Correction(
        'fedbs',
        'clients are weighted by their losses; once the losses are similar (see'
        ' --fedbs_epsilon), it is fedprox',
        f'{_ROOM}.fed_bs:build_fed_bs',
        (FEDBS_EPSILON, PROXIMAL_STRENGTH),
        needs=(
            _ALL_CLIENTS,
            Need(
                'model_aggregator',
                lambda options: options.model_aggregator == 'mean',
                _LOSSES,
            ),
            Need(
                'attack',
                lambda options: not rules.takes_no_weights(options),
                _LOSSES,
            ),
        ),
    ),
    Correction(
        'fednova',
        'updates are divided by the numbers of local steps, and the server'
        ' moves by their mean times the mean number of steps',
        f'{_ROOM}.fed_nova:build_fed_nova',
        needs=(
            *_ONLY_MEAN,
            Need('client_optimizer', _is_plain_sgd, _NEEDS_SGD),
        ),
    ),
    Correction(
        'feddyn',
        "two terms in each client's loss move its optimum towards the optimum"
        ' of all clients (see --feddyn_strength)',
        f'{_ROOM}.fed_dyn:build_fed_dyn',
        (FEDDYN_STRENGTH,),
        client_weighting='uniform',
        needs_num_clients=True,
        needs=_ONLY_MEAN,
    ),
    of_object=_correction_of_object,
)

_SERVER = (server.SERVER_OPTIMIZER, server.SERVER_CLIP_NORM)
_SHARED = (STATISTICS, rules.STATISTICS_AGGREGATOR, rules.CLIENT_FILTER)
_FBN = (
    rules.STATISTICS_AGGREGATOR,
    rules.CLIENT_FILTER,
    POOLED,
    FBN_BACKWARD,
    FBN_BACKWARD_RESTART,
)
_FEDTAN_OPTIONS = (
    *_SERVER,
    *_SHARED,
    *(MOMENTS, FEDTAN_STATISTICS, FEDTAN_EVERY, rules.EXCHANGE_AGGREGATOR),
)
_FEDTAN: dict[str, Any] = dict(
    needs=_FEDTAN_NEEDS,
    no_drift=FIRST_STEP,
    # Its term is 0 in the first step.
    possible_corrections=('fedprox',),
)
_DSGD: dict[str, Any] = dict(
    keeps_optimizer=True,
    local_steps=1,
    no_drift=ONE_STEP,
)
_DSGD_OPTIONS = (server.SERVER_CLIP_NORM, DSGD_MOMENTUM)


def _algorithm_of_object(name: str, found: Any) -> Algorithm:
  """Returns the entry of a user's builder or correction."""
  default = ALGORITHMS[DEFAULT]
  if isinstance(found, Correction):
    return default.with_correction(dataclasses.replace(found, name=name), name)
  if isinstance(found, Part) or not callable(found):
    raise ValueError(
        f'{name} must be a tff_bn.catalog.algorithms.Algorithm or Correction,'
        f' or a builder of processes, but is a {type(found).__name__}.'
    )
  # It gets what the builder of the default gets.
  return dataclasses.replace(
      default,
      name=name,
      description='an algorithm of yours',
      builds=found,
  )


ALGORITHMS: Parts[Algorithm] = Parts(
    Algorithm(
        'centralized',
        'one model, trained on the union of the data',
        f'{_ROOM}.centralized:build_centralized',
        (CENTRALIZED_BATCH_SIZE, DSGD_MOMENTUM),
        features=(),
        trains_on_union=True,
        keeps_optimizer=True,
        needs=(
            _NO_PERSONAL_MODELS,
            _one_momentum('the first is an average, the second a sum'),
        ),
        no_drift=ONE_MODEL,
    ),
    Algorithm(
        'fedavg',
        'averages every variable, the BN statistics too (see --statistics)',
        f'{_ROOM}.fed_avg:build_fed_avg',
        _SERVER + _SHARED + (LOCAL_LAYERS,),
    ),
    Algorithm(
        'fedbn',
        'all BN variables stay with the client',
        f'{_ROOM}.fed_bn:build_fed_bn',
        _SERVER + (LOCAL_LAYERS,),
        features=(rules.MEAN, CLIENT_MODELS),
        impossible_corrections=_NO_SHARED_STATISTICS,
    ),
    Algorithm(
        'silobn',
        'BN statistics stay with the client, scale and shift are averaged',
        f'{_ROOM}.silo_bn:build_silo_bn',
        _SERVER + (LOCAL_LAYERS,),
        features=(rules.MEAN, CLIENT_MODELS),
        impossible_corrections=_NO_SHARED_STATISTICS,
    ),
    Algorithm(
        'local_affine',
        'BN scale and shift stay with the client, statistics are averaged',
        f'{_ROOM}.local_affine:build_local_affine',
        _SERVER + _SHARED + (LOCAL_LAYERS,),
        features=(rules.MEAN, CLIENT_MODELS),
    ),
    Algorithm(
        'fedstein',
        'local_affine that shrinks the averaged statistics (James-Stein)',
        f'{_ROOM}.fed_stein:build_fed_stein',
        _SERVER + _SHARED + (LOCAL_LAYERS,),
        features=(rules.MEAN, CLIENT_MODELS),
    ),
    Algorithm(
        'fedap',
        'fedbn in which each client has an own average of all models, with'
        ' larger shares of clients with similar BN statistics',
        f'{_ROOM}.fed_ap:build_fed_ap',
        (FEDAP_OWN_SHARE, FEDAP_FEDBN_ROUNDS),
        features=(CLIENT_MODELS,),
        no_drift='its clients have no model in common from which they drift',
    ),
    Algorithm(
        'fedper',
        'the head (see --head_layers) stays with the client, everything else is'
        ' averaged',
        f'{_ROOM}.fed_per:build_fed_per',
        _SERVER + _SHARED + (HEAD_LAYERS,),
        features=(rules.MEAN, CLIENT_MODELS),
    ),
    Algorithm(
        'fedrep',
        'fedper that trains in each round first the head alone (see'
        ' --head_steps), then everything else',
        f'{_ROOM}.fed_rep:build_fed_rep',
        _SERVER + _SHARED + (HEAD_LAYERS, HEAD_STEPS),
        features=(rules.MEAN, CLIENT_MODELS),
        needs=(FIXED_UNITS,),
    ),
    Algorithm(
        'lg_fedavg',
        'averages the head only (see --head_layers), everything else stays with'
        ' the client',
        f'{_ROOM}.lg_fed_avg:build_lg_fed_avg',
        _SERVER + (HEAD_LAYERS,),
        features=(rules.MEAN, CLIENT_MODELS),
        impossible_corrections=_NO_SHARED_STATISTICS,
    ),
    Algorithm(
        'fedbabu',
        'the head (see --head_layers) keeps its initial values, everything else'
        ' is trained and averaged',
        f'{_ROOM}.fed_babu:build_fed_babu',
        _SERVER + _SHARED + (HEAD_LAYERS,),
        needs=(FIXED_UNITS,),
    ),
    Algorithm(
        'ditto',
        'fedavg, and each client trains its own model near to the model of'
        ' fedavg (see --ditto_strength)',
        f'{_ROOM}.ditto:build_ditto',
        _SERVER + _SHARED + (DITTO_STRENGTH,),
        features=(rules.MEAN, CLIENT_MODELS),
    ),
    Algorithm(
        'fedtan',
        'the first local step of a round uses the BN statistics of all clients'
        ' together, and their gradients',
        f'{_ROOM}.fedtan:build_fedtan',
        _FEDTAN_OPTIONS,
        **_FEDTAN,
    ),
    Algorithm(
        'fedtan_forward_only',
        'fedtan without the exchange of the gradients',
        f'{_ROOM}.fedtan:build_fedtan',
        _FEDTAN_OPTIONS,
        arguments={'synchronize': 'forward'},
        **_FEDTAN,
    ),
    Algorithm(
        'fedtan_ii',
        'fedtan for --sync_rounds rounds; then the BN statistics are fixed and'
        ' everything else is averaged',
        f'{_ROOM}.fedtan:build_fedtan_ii',
        _SERVER
        + _SHARED
        + (
            MOMENTS,
            FEDTAN_STATISTICS,
            rules.EXCHANGE_AGGREGATOR,
            SYNC_ROUNDS,
            AFTER_SYNC_FACTOR,
        ),
        first_phase=SYNC_ROUNDS,
        later_rate=AFTER_SYNC_FACTOR,
        **_FEDTAN,
    ),
    Algorithm(
        'fbn',
        'normalizes with the shared running statistics, which are corrected for'
        " the clients' differences (see --pooled)",
        f'{_ROOM}.fbn:build_fbn',
        _SERVER + _FBN,
        needs=_FBN_NEEDS,
        impossible_corrections={'greg': RUNNING_STATISTICS},
    ),
    Algorithm(
        'bn_scaffold',
        'scaffold that corrects the BN statistics of batches by control'
        ' variates, too (see --variate_deviation)',
        f'{_ROOM}.bn_scaffold:build_bn_scaffold',
        _SERVER + (STATISTICS, rules.STATISTICS_AGGREGATOR, VARIATE_DEVIATION),
        needs=_SCAFFOLD_NEEDS,
        no_drift='it corrects the drift by control variates',
        **_SCAFFOLD,
    ),
    Algorithm(
        'fixbn',
        'fedavg for --fixbn_rounds rounds; then the BN statistics are fixed and'
        ' everything else is averaged',
        f'{_ROOM}.fixbn:build_fixbn',
        _SERVER + _SHARED + (FIXBN_ROUNDS,),
        first_phase=FIXBN_ROUNDS,
    ),
    Algorithm(
        'hbn',
        "normalizes with a mixture of shared BN statistics and the batch's; its"
        ' share is trained and stays with the client',
        f'{_ROOM}.hbn:build_hbn',
        _SERVER + (rules.STATISTICS_AGGREGATOR, HBN_STATISTICS_RATE),
        batch_norm='hybrid',
        needs=(
            Need(
                'normalization',
                lambda options: options.normalization != 'batch_renorm',
                ', which has its own batch normalization layers; use batch',
            ),
        ),
        ignores={'batch_norm_momentum': 'which has --hbn_statistics_rate'},
        impossible_corrections={'greg': RUNNING_STATISTICS},
    ),
    Algorithm(
        'dsgd',
        "one step in each round with the mean of the clients' gradients, or of"
        ' their momentums (see --dsgd_momentum); the momentum lasts (needs'
        ' --local_steps=1)',
        f'{_ROOM}.dsgd:build_dsgd',
        _DSGD_OPTIONS + _SHARED,
        needs=_DSGD_NEEDS,
        **_DSGD,
    ),
    Algorithm(
        'dsgd_fbn',
        'dsgd that treats batch normalization as fbn does',
        f'{_ROOM}.dsgd:build_dsgd',
        _DSGD_OPTIONS + _FBN,
        build_process=f'{_ROOM}.fbn:build_fbn',
        needs=_DSGD_NEEDS
        + _FBN_NEEDS
        + (
            Need(
                'dsgd_momentum',
                lambda options: options.dsgd_momentum is None
                or _has_no_averages(options),
                ', which computes the averages of the backward pass from the'
                ' gradients that clients send; with the first, they send'
                ' momentums. --client_momentum is possible',
                'fbn_backward',
            ),
        ),
        **_DSGD,
    ),
    Algorithm(
        'dsgd_fixbn',
        'dsgd that treats batch normalization as fixbn does',
        f'{_ROOM}.dsgd:build_dsgd',
        _DSGD_OPTIONS + _SHARED + (FIXBN_ROUNDS,),
        build_process=f'{_ROOM}.fixbn:build_fixbn',
        first_phase=FIXBN_ROUNDS,
        needs=_DSGD_NEEDS,
        **_DSGD,
    ),
    Algorithm(
        'single',
        'each client trains alone, nothing is sent',
        f'{_ROOM}.single:build_single',
        features=(CLIENT_MODELS,),
        needs=(
            Need(
                'held_out_clients',
                lambda options: options.held_out_clients is None,
                f': {_NOTHING_SHARED} for other clients',
            ),
        ),
        no_drift=_NOTHING_SHARED,
    ),
    of_object=_algorithm_of_object,
)

# The options that only some algorithms have, in the order of `--help`.
OPTIONS: tuple[Option, ...] = tuple(
    dict.fromkeys(
        option
        for entry in _entries()
        for option in entry.options
        if option not in (*rules.OPTIONS, *server.OPTIONS)
    )
)


def find(name: str) -> Algorithm:
  """Returns the algorithm that `--algorithm` names.

  The name is an algorithm, a correction, or both, joined by `+`. A user's part
  is imported.

  Raises:
    ValueError: If there is no such algorithm. The message continues a sentence
      whose subject is the option, or names the part.
  """
  check_name(name)
  parts = [DEFAULT, name] if name in CORRECTIONS else name.split(_JOIN)
  algorithm = ALGORITHMS[parts[0]]
  if len(parts) == 1:
    return algorithm
  if algorithm.correction is not None:
    raise ValueError(f'must have the correction last, but {parts[0]} is one.')
  return algorithm.with_correction(CORRECTIONS[parts[1]], name)


def check_name(name: str) -> None:
  """Checks the form of a name; see `find`. It imports no part of a user."""
  parts = name.split(_JOIN)
  known = (*ALGORITHMS, *CORRECTIONS)
  for part in parts:
    if part not in known and not names_code(part):
      raise ValueError(
          f'must be one of {", ".join(known)}; or one of the first'
          f' {len(ALGORITHMS)} and one of the last {len(CORRECTIONS)} of these,'
          f' as in fedbn+fedprox; or {OTHER}.{spelling.suggestion(part, known)}'
      )
  # The last part of a user is a correction.
  corrections = [
      part
      for part in parts
      if part in CORRECTIONS or (names_code(part) and part is not parts[0])
  ]
  if len(corrections) > 1:
    raise ValueError(
        f'{" and ".join(corrections)} are both corrections of the drift of the'
        " clients' models; choose one of them."
    )
  if len(parts) - len(corrections) > 1:
    others = [part for part in parts if part not in corrections]
    raise ValueError(
        f'{" and ".join(others)} both decide how batch normalization is'
        ' treated; choose one of them.'
    )
  if len(parts) > 1 and parts[0] in CORRECTIONS:
    raise ValueError(
        f'must have the correction last: {_JOIN.join(reversed(parts))}.'
    )


def names_code(name: str) -> bool:
  """Whether the name of an algorithm names a part of a user."""
  return ':' in name


def labels(names: Collection[str]) -> dict[str, str]:
  """Returns short names of algorithms, for tables, by their full names.

  They lack the modules of users' parts, unless two names would be the same.
  """
  short = {
      name: _JOIN.join(part.rpartition(':')[2] for part in name.split(_JOIN))
      for name in names
  }
  found = list(short.values())
  return {
      name: label if found.count(label) == 1 else name
      for name, label in short.items()
  }


class AlgorithmName(value_types.ValueType):
  """The names that `find` knows."""

  def parse(self, text):
    """See the base class."""
    if self.names_code(text):
      check_name(text)
    else:
      find(text)
    return text

  def names_code(self, value):
    """See the base class."""
    return names_code(value)

  def load(self, value):
    """See the base class."""
    find(value)


def listing_of_names() -> str:
  """Returns lines that explain the names that `find` knows."""
  return (
      listing(ALGORITHMS)
      + f"or {DEFAULT} with a correction of the drift of the clients' models in"
      ' local training:\n'
      + listing(CORRECTIONS)
      + 'or one of each, such as fedbn+fedprox or fbn+scaffold\n'
      + f'or {OTHER}\n'
  )


ALGORITHM = Option(
    'algorithm',
    AlgorithmName(),
    lambda: f'What to train:\n{listing_of_names()}',
    DEFAULT,
)
