"""The flags of the algorithms: which one runs, and the options of some."""

import dataclasses
from typing import Any, Optional

from tff_bn.catalog import options
from tff_bn.catalog import parts
from tff_bn.catalog import value_types
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.flag_groups import flag
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.flags import first_look
from tff_bn.programs.flags import registry

_STATISTICS = {
    'naive': 'mean of the means, mean of the variances',
    'pooled': (
        "mean and variance of the union of the clients' data, which adds the"
        " variance of the clients' means"
    ),
}
_MOMENTS = {
    'two_pass': (
        'two exchanges, as in the paper: first the mean of the means, then the'
        ' mean of the variances about it'
    ),
    'fused': 'one exchange for both; exact also for batches of different sizes',
}
_BACKWARD = {
    'none': 'no averages, as in the paper',
    'mean': "of the mean gradient of a layer's output",
    'running': (
        'of the mean gradient, and of the mean product of the gradient and the'
        ' normalized values'
    ),
}
_HAS_AVERAGES = options.Condition(
    'fbn_backward',
    lambda flags: flags.fbn_backward in ('mean', 'running'),
    'is for --fbn_backward=mean and --fbn_backward=running, not for {}',
)
_ALGORITHM = value_types.CheckedText(registry.find)


def _explain_algorithms() -> str:
  return (
      parts.listing(registry.ALGORITHMS)
      + f"or {registry.DEFAULT} with a correction of the drift of the clients'"
      ' models in local training:\n'
      + parts.listing(registry.CORRECTIONS)
      + 'or one of each, such as fedbn+fedprox or fbn+scaffold\n'
  )


def _dsgd_algorithms() -> list[str]:
  return [
      name
      for name in registry.users('dsgd_momentum')
      if not registry.find(name).trains_on_union
  ]


def _option(
    parser: Any, explanation: Any, default: Any = None, **more: Any
) -> Any:
  """Declares a flag that some algorithms only understand."""
  return flag(
      parser,
      explanation,
      default,
      **{'feature': options.OWN_NAME, 'argument': options.OWN_NAME, **more},
  )


def _share_of_rounds(share: float) -> dict[str, Any]:
  """Options of a flag whose default is this share of `--rounds`."""

  def compute(flags: ParsedFlags) -> int:
    return max(1, round(share * flags.rounds))

  return dict(
      compute=compute, default_text=f'{share:.0%} of --rounds, but at least 1'
  )


@dataclasses.dataclass(frozen=True)
class AlgorithmOptions(flag_groups.Flags):
  """The options that some algorithms only have."""

  statistics: Optional[str] = _option(
      value_types.Choice(_STATISTICS),
      "How the clients' running BN statistics are combined where they are"
      f' shared:\n{parts.listing(_STATISTICS)}',
      'naive',
      argument=None,
  )
  moments: Optional[str] = _option(
      value_types.Choice(_MOMENTS),
      lambda: (
          f'How the clients of {", ".join(registry.users("moments"))} compute'
          ' the mean and the variance over all their batches, at each BN'
          f' layer:\n{parts.listing(_MOMENTS)}'
      ),
      'two_pass',
  )
  sync_rounds: Optional[int] = _option(
      value_types.POSITIVE_INTEGER,
      'Number of rounds after which fedtan_ii fixes the BN statistics; less'
      ' than --rounds',
      # The paper's are 10 to 40 % of the rounds.
      **_share_of_rounds(0.2),
  )
  after_sync_factor: Optional[float] = _option(
      value_types.POSITIVE,
      'Further factor of --client_learning_rate in fedtan_ii after'
      ' --sync_rounds: with fixed statistics, the steps must be smaller',
      # The paper's are 0.02 on CIFAR-10 and 0.1 on MNIST.
      0.1,
      argument=None,
  )
  fixbn_rounds: Optional[int] = _option(
      value_types.POSITIVE_INTEGER,
      'Number of rounds after which fixbn fixes the BN statistics; less than'
      ' --rounds',
      # As in FBN's paper, where it is 1500 of 3000.
      **_share_of_rounds(0.5),
  )
  pooled: Optional[bool] = _option(
      None,
      "In fbn, clients' BN statistics are weighted by the number of values over"
      ' which they are computed, which is exact for batches of any size. With'
      ' --nopooled all clients have the same weight, as in the paper',
      True,
  )
  fbn_backward: Optional[str] = _option(
      value_types.Choice(_BACKWARD),
      'The running averages of the gradients that fbn uses in the backward pass'
      f' of batch normalization:\n{parts.listing(_BACKWARD)}',
      'none',
      argument='backward',
  )
  fbn_backward_restart: Optional[float] = _option(
      value_types.Number(float, above=1),
      'fbn: the averages of --fbn_backward start again from 0 in a channel'
      ' after a round in which the mean square of its normalized values (with'
      ' the new BN statistics and the unbiased variance) was not between 1'
      ' divided by this number and this number; 1.5 makes training stable',
      default_text='they never do',
      conditions=(_HAS_AVERAGES,),
      argument='backward_restart',
  )
  hbn_statistics_rate: Optional[float] = _option(
      value_types.Number(float, above=0, maximum=1),
      'The rate r at which hbn moves the BN statistics that clients use in'
      ' training: new = (1 - r) * old + r * those of the round. Evaluation uses'
      ' statistics of the evaluated model on all training data',
      0.002,
      argument='statistics_rate',
  )
  dsgd_momentum: Optional[float] = _option(
      value_types.MOMENTUM,
      lambda: (
          f'μ of the momentum m ← μ m + (1-μ) g that every client keeps in'
          f' {", ".join(_dsgd_algorithms())} and sends in place of'
          ' its gradient g, so that --model_aggregator gets momentums. Without'
          ' it, clients send gradients, and --client_momentum is the momentum'
          ' of the server, v ← μ v + g. In centralized, the same momentum of'
          ' the one model'
      ),
      default_text='none',
      argument='momentum',
  )
  proximal_strength: Optional[float] = _option(
      value_types.NOT_NEGATIVE,
      'μ of fedprox, and of fedbs once it is fedprox: μ/2 times the squared'
      " distance from the server's model is added to the loss",
      1e-3,
  )
  fedbs_epsilon: Optional[float] = _option(
      value_types.POSITIVE,
      'fedbs becomes fedprox after the first round in which the standard'
      " deviation of the clients' training losses is less than this",
      0.01,
      argument='epsilon',
  )
  moon_weight: Optional[float] = _option(
      value_types.NOT_NEGATIVE,
      'μ of moon: the weight of the contrastive loss',
      1.0,
      argument='contrastive_weight',
  )
  moon_temperature: Optional[float] = _option(
      value_types.POSITIVE,
      'τ of moon: the temperature of the contrastive loss',
      0.5,
      argument='temperature',
  )
  moon_feature_layer: Optional[str] = _option(
      value_types.TEXT,
      'Name of the layer of the model whose output moon contrasts',
      default_text='the last hidden layer, which is --moon_projection if given',
      argument='feature_layer',
  )


@dataclasses.dataclass(frozen=True)
class _Algorithm(flag_groups.Flags):
  """The algorithm of a run."""

  algorithm: str = flag(
      _ALGORITHM,
      lambda: f'What to train:\n{_explain_algorithms()}',
      registry.DEFAULT,
  )


@dataclasses.dataclass(frozen=True)
class _Algorithms(flag_groups.Flags):
  """The algorithms of a comparison."""

  algorithms: tuple[str, ...] = flag(
      value_types.List(_ALGORITHM),
      lambda: f'What to compare, separated by commas:\n{_explain_algorithms()}',
      registry.COMPARED,
      default_text=first_look.explain(),
  )


# A dataclass has the fields of its last base first.
@dataclasses.dataclass(frozen=True)
class AlgorithmFlags(AlgorithmOptions, _Algorithm):
  """The algorithm of a run and its options."""

  TITLE = 'Algorithm'


@dataclasses.dataclass(frozen=True)
class ComparisonFlags(AlgorithmOptions, _Algorithms):
  """The algorithms of a comparison, their options, and the table's."""

  TITLE = 'Algorithms'

  average_last: int = flag(
      value_types.POSITIVE_INTEGER,
      'Number of evaluated rounds, counted from the last one, over which the'
      ' table averages',
      5,
  )
