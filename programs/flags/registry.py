"""The algorithms by name: what `--algorithm` and `--algorithms` choose from.

`ALGORITHMS` decide how batch normalization is treated, `CORRECTIONS` counteract
the drift of the clients' models; a name such as `fedbn+fedprox` combines both.
An entry declares everything that the programs know about an algorithm. Nothing
here imports TensorFlow: a builder is looked up when it is needed.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, Optional

from tff_bn.common import spelling

# Features of algorithms that several flags need: the server averages what the
# clients send; it has an optimizer; clients have own models.
MEAN = 'mean'
SERVER_OPTIMIZER = 'server_optimizer'
CLIENT_MODELS = 'client_models'

_SERVER = (MEAN, SERVER_OPTIMIZER, 'server_clip_norm')
_STATISTICS = ('statistics', 'statistics_aggregator')
_FEDTAN = _SERVER + _STATISTICS + ('moments',)
_FBN = (
    'statistics_aggregator',
    'pooled',
    'fbn_backward',
    'fbn_backward_restart',
)
_DSGD = (MEAN, 'server_clip_norm', 'dsgd_momentum')

# Why an algorithm can't be combined with corrections of the clients' drift, nor
# be tested on clients that did not train.
NOTHING_SHARED = 'its clients share nothing, so there is no common model'
# Why an algorithm can't be combined with corrections of the clients' drift.
_ONE_MODEL = 'it trains one model on all data, so no clients drift apart'
_ONE_STEP = (
    'its clients make one step in a round, from the same model, so they do not'
    ' drift apart'
)
_FIRST_STEP = (
    'the first step of its rounds has the gradient of the mean loss of all'
    ' clients; a correction would change the losses, gradients or weights of'
    ' single clients'
)


@dataclasses.dataclass(frozen=True)
class Correction:
  """A way to correct the drift of the clients' models.

  Attributes:
    name: The name behind the `+`; alone, it stands for `fedavg+` and the name.
    description: What it does, in a few words.
    builder_name: The function in `tff_bn.algorithms` that builds its process.
    keeps_weights: Whether the server weights clients by `--client_weighting`
      and `--model_aggregator`; otherwise the correction weights them.
    client_weighting: Its default of `--client_weighting`, if it has its own.
    needs_plain_sgd: Whether clients must train with SGD without momentum.
    needs_num_clients: Whether its builder needs the number of clients.
    flags: The flags that have an effect on it but not on all algorithms.
  """

  name: str
  description: str
  builder_name: str
  keeps_weights: bool = True
  client_weighting: Optional[str] = None
  needs_plain_sgd: bool = False
  needs_num_clients: bool = False
  flags: tuple[str, ...] = ()


CORRECTIONS = {
    correction.name: correction
    for correction in (
        Correction(
            'fedprox',
            "local training stays near to the server's model (see"
            ' --proximal_strength)',
            'build_fed_prox',
            flags=('proximal_strength',),
        ),
        Correction(
            'scaffold',
            'gradients are corrected by control variates, which clients and'
            ' server keep',
            'build_scaffold',
            client_weighting='uniform',
            needs_plain_sgd=True,
            needs_num_clients=True,
        ),
        Correction(
            'moon',
            "features stay near to the features of the server's model, and"
            " away from the features of the client's previous model",
            'build_moon',
            flags=('moon_weight', 'moon_temperature', 'moon_feature_layer'),
        ),
        Correction(
            'fedbs',
            'clients are weighted by their losses; once the losses are'
            ' similar (see --fedbs_epsilon), it is fedprox',
            'build_fed_bs',
            keeps_weights=False,
            flags=('fedbs_epsilon', 'proximal_strength'),
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """An algorithm as the programs see it.

  Attributes:
    name: The name that `--algorithm` takes.
    description: What it does, in a few words.
    builder_name: The function in `tff_bn.algorithms` that builds its process.
    arguments: Keyword arguments that the builder always gets.
    normalization_builder_name: The function in `tff_bn.algorithms` that says
      how batch normalization is treated, for builders with the argument
      `build_process`.
    trains_on_union: Whether one model is trained on the union of the sampled
      clients' data.
    trains_in_float16: Whether it scales the loss, which float16 needs.
    trains_personal_models: Whether clients can have personal position
      encodings.
    batch_norm: The class to which the model's BN layers are converted, a value
      of `to` of `tff_bn.convert_batch_norm`, if it needs one.
    has_shared_model: Whether there is a model for clients that did not train.
    keeps_optimizer: Whether the state of the optimizer lasts for the whole
      training; otherwise it is new in each round.
    needs_same_units: Whether all clients must have their hidden units in the
      same order.
    needs_sgd: Whether `--client_optimizer` must be SGD.
    local_steps: The number of local steps, if only one number is possible.
    first_phase: The flag with the number of rounds after which it fixes the BN
      statistics, if it does.
    later_rate: The flag with the factor of the learning rate after these
      rounds, if it has one.
    impossible: For each correction that can't be combined with it, the reason.
    correction: The correction with which it is combined.
    flags: The flags that have an effect on this algorithm but not on all, and
      the features `MEAN`, `SERVER_OPTIMIZER` and `CLIENT_MODELS`, which stand
      for flags.
  """

  name: str
  description: str
  builder_name: str
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  normalization_builder_name: Optional[str] = None
  trains_on_union: bool = False
  trains_in_float16: bool = True
  trains_personal_models: bool = True
  batch_norm: Optional[str] = None
  has_shared_model: bool = True
  keeps_optimizer: bool = False
  needs_same_units: bool = False
  needs_sgd: bool = False
  local_steps: Optional[int] = None
  first_phase: Optional[str] = None
  later_rate: Optional[str] = None
  impossible: Mapping[str, str] = dataclasses.field(default_factory=dict)
  correction: Optional[Correction] = None
  flags: tuple[str, ...] = ()

  @property
  def client_weighting(self) -> Optional[str]:
    """Its default of `--client_weighting`, if it has its own."""
    return self.correction.client_weighting if self.correction else None

  @property
  def needs_num_clients(self) -> bool:
    """Whether its builder needs the number of clients."""
    return self.correction is not None and self.correction.needs_num_clients

  def builder(self) -> Callable[..., Any]:
    """Returns the builder of the process; imports TensorFlow Federated."""
    from tff_bn import algorithms

    builder = functools.partial(
        getattr(algorithms, self.builder_name), **self.arguments
    )
    if self.normalization_builder_name is not None:
      builder = functools.partial(
          builder,
          build_process=getattr(algorithms, self.normalization_builder_name),
      )
    if self.correction is None:
      return builder
    return functools.partial(
        getattr(algorithms, self.correction.builder_name), build_process=builder
    )

  def with_correction(self, correction: Correction, name: str) -> 'Algorithm':
    """Combines the algorithm with a correction.

    Args:
      correction: The correction.
      name: The name of the combination.

    Returns:
      The combination.

    Raises:
      ValueError: If the correction can't be combined with it.
    """
    if correction.name in self.impossible:
      raise ValueError(
          f"{correction.name} can't be combined with {self.name}:"
          f' {self.impossible[correction.name]}.'
      )
    return dataclasses.replace(
        self,
        name=name,
        correction=correction,
        flags=self.flags + correction.flags,
    )


_FEDTAN_NEEDS: dict[str, Any] = dict(
    needs_same_units=True,
    trains_in_float16=False,
    trains_personal_models=False,
    impossible={name: _FIRST_STEP for name in CORRECTIONS if name != 'fedprox'},
)
_DSGD_NEEDS: dict[str, Any] = dict(
    keeps_optimizer=True,
    needs_same_units=True,
    needs_sgd=True,
    local_steps=1,
    impossible=dict.fromkeys(CORRECTIONS, _ONE_STEP),
)

ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            'centralized',
            'one model, trained on the union of the data',
            'build_centralized',
            trains_on_union=True,
            keeps_optimizer=True,
            trains_personal_models=False,
            flags=('dsgd_momentum',),
            impossible=dict.fromkeys(CORRECTIONS, _ONE_MODEL),
        ),
        Algorithm(
            'fedavg',
            'averages every variable, the BN statistics too (see'
            ' --statistics)',
            'build_fed_avg',
            flags=_SERVER + _STATISTICS,
        ),
        Algorithm(
            'fedbn',
            'all BN variables stay with the client',
            'build_fed_bn',
            flags=_SERVER + (CLIENT_MODELS,),
        ),
        Algorithm(
            'silobn',
            'BN statistics stay with the client, scale and shift are'
            ' averaged',
            'build_silo_bn',
            flags=_SERVER + (CLIENT_MODELS,),
        ),
        Algorithm(
            'local_affine',
            'BN scale and shift stay with the client, statistics are'
            ' averaged',
            'build_local_affine',
            flags=_SERVER + _STATISTICS + (CLIENT_MODELS,),
        ),
        Algorithm(
            'fedtan',
            'the first local step of a round uses the BN statistics of all'
            ' clients together, and their gradients',
            'build_fedtan',
            flags=_FEDTAN,
            **_FEDTAN_NEEDS,
        ),
        Algorithm(
            'fedtan_forward_only',
            'fedtan without the exchange of the gradients',
            'build_fedtan',
            arguments={'synchronize': 'forward'},
            flags=_FEDTAN,
            **_FEDTAN_NEEDS,
        ),
        Algorithm(
            'fedtan_ii',
            'fedtan for --sync_rounds rounds; then the BN statistics are'
            ' fixed and everything else is averaged',
            'build_fedtan_ii',
            first_phase='sync_rounds',
            later_rate='after_sync_factor',
            flags=_FEDTAN + ('sync_rounds', 'after_sync_factor'),
            **_FEDTAN_NEEDS,
        ),
        Algorithm(
            'fbn',
            'normalizes with the shared running statistics, which are'
            " corrected for the clients' differences (see --pooled)",
            'build_fbn',
            flags=_SERVER + _FBN,
        ),
        Algorithm(
            'fixbn',
            'fedavg for --fixbn_rounds rounds; then the BN statistics are'
            ' fixed and everything else is averaged',
            'build_fixbn',
            first_phase='fixbn_rounds',
            flags=_SERVER + _STATISTICS + ('fixbn_rounds',),
        ),
        Algorithm(
            'hbn',
            'normalizes with a mixture of shared BN statistics and the'
            " batch's; its share is trained and stays with the client",
            'build_hbn',
            batch_norm='hybrid',
            flags=_SERVER + ('statistics_aggregator', 'hbn_statistics_rate'),
        ),
        Algorithm(
            'dsgd',
            "one step in each round with the mean of the clients'"
            ' gradients, or of their momentums (see --dsgd_momentum); the'
            ' momentum lasts (needs --local_steps=1)',
            'build_dsgd',
            flags=_DSGD + _STATISTICS,
            **_DSGD_NEEDS,
        ),
        Algorithm(
            'dsgd_fbn',
            'dsgd that treats batch normalization as fbn does',
            'build_dsgd',
            normalization_builder_name='build_fbn',
            flags=_DSGD + _FBN,
            **_DSGD_NEEDS,
        ),
        Algorithm(
            'dsgd_fixbn',
            'dsgd that treats batch normalization as fixbn does',
            'build_dsgd',
            normalization_builder_name='build_fixbn',
            first_phase='fixbn_rounds',
            flags=_DSGD + _STATISTICS + ('fixbn_rounds',),
            **_DSGD_NEEDS,
        ),
        Algorithm(
            'single',
            'each client trains alone, nothing is sent',
            'build_single',
            has_shared_model=False,
            flags=(CLIENT_MODELS,),
            impossible=dict.fromkeys(CORRECTIONS, NOTHING_SHARED),
        ),
    )
}

# The algorithm that is trained, and the ones that are compared, by default. A
# correction alone corrects the former.
DEFAULT = 'fedavg'
COMPARED = ('centralized', 'fedavg', 'fedtan', 'fbn', 'fedbn')


def find(name: str) -> Algorithm:
  """Finds the algorithm that `--algorithm` names.

  Args:
    name: An algorithm, a correction, or both, joined by `+`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If there is no such algorithm. The message says what is allowed.
  """
  if name in ALGORITHMS:
    return ALGORITHMS[name]
  parts = [DEFAULT, name] if name in CORRECTIONS else name.split('+')
  known = (*ALGORITHMS, *CORRECTIONS)
  for part in parts:
    if part not in known:
      raise ValueError(
          f'must be one of {", ".join(known)}; or one of the first'
          f' {len(ALGORITHMS)} and one of the last {len(CORRECTIONS)} of these,'
          f' as in fedbn+fedprox.{spelling.suggestion(part, known)}'
      )
  corrections = [part for part in parts if part in CORRECTIONS]
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
  if parts[0] in CORRECTIONS:
    raise ValueError(
        f'must have the correction last: {"+".join(reversed(parts))}.'
    )
  return ALGORITHMS[parts[0]].with_correction(CORRECTIONS[parts[1]], name)


def users(flag: str) -> list[str]:
  """Returns the algorithms and corrections with this flag or feature."""
  entries: list[Algorithm | Correction] = [
      *ALGORITHMS.values(),
      *CORRECTIONS.values(),
  ]
  return [entry.name for entry in entries if flag in entry.flags]
