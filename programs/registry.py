"""The algorithms by name: what `--algorithm` and `--algorithms` choose from.

To add an algorithm, add an entry to `ALGORITHMS`. Nothing here imports
TensorFlow: a builder is looked up when it is needed.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, Optional

# Flags that are not for every algorithm; an entry names those it understands.
_MEAN = (
    'client_weighting',
    'model_aggregator',
    'num_byzantine',
    'clipping_radius',
    'bucket_size',
    'attack',
    'attack_target',
    'attack_strength',
    'num_attackers',
)
_SERVER = _MEAN + (
    'server_optimizer',
    'server_learning_rate',
    'server_momentum',
)
_STATISTICS = ('statistics', 'statistics_aggregator')
_FEDTAN = _SERVER + _STATISTICS + ('moments',)


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """An algorithm as the programs see it.

  Attributes:
    name: The name that `--algorithm` takes.
    description: What it does, in a few words.
    builder_name: The function in `tff_bn.algorithms` that builds its process.
    arguments: Keyword arguments that the builder always gets.
    trains_on_union: Whether one model is trained on the union of the sampled
      clients' data.
    trains_in_float16: Whether it can scale the loss, as float16 needs it.
    local_steps: The only number of local steps that it can make, if it is not
      free.
    flags: The flags that have an effect on this algorithm but not on all.
  """

  name: str
  description: str
  builder_name: str
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  trains_on_union: bool = False
  trains_in_float16: bool = True
  local_steps: Optional[int] = None
  flags: tuple[str, ...] = ()

  def builder(self) -> Callable[..., Any]:
    """The function that builds the process; imports TensorFlow Federated."""
    from tff_bn import algorithms  # pylint: disable=g-import-not-at-top

    return functools.partial(
        getattr(algorithms, self.builder_name), **self.arguments
    )


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            name='centralized',
            description='one model, trained on the union of the data',
            builder_name='build_centralized',
            trains_on_union=True,
        ),
        Algorithm(
            name='fedavg',
            description=(
                'averages every variable, the BN statistics too (see'
                ' --statistics)'
            ),
            builder_name='build_fed_avg',
            flags=_SERVER + _STATISTICS,
        ),
        Algorithm(
            name='fedbn',
            description='all BN variables stay with the client',
            builder_name='build_fed_bn',
            flags=_SERVER,
        ),
        Algorithm(
            name='silobn',
            description=(
                'BN statistics stay with the client, scale and shift are'
                ' averaged'
            ),
            builder_name='build_silo_bn',
            flags=_SERVER,
        ),
        Algorithm(
            name='local_affine',
            description=(
                'BN scale and shift stay with the client, statistics are'
                ' averaged'
            ),
            builder_name='build_local_affine',
            flags=_SERVER + _STATISTICS,
        ),
        Algorithm(
            name='fedtan',
            description=(
                'in the first local step of a round, the BN statistics and'
                ' their gradients are those of all clients'
            ),
            builder_name='build_fedtan',
            trains_in_float16=False,
            flags=_FEDTAN,
        ),
        Algorithm(
            name='fedtan_forward_only',
            description='fedtan without the exchange of the gradients',
            builder_name='build_fedtan',
            arguments={'synchronize': 'forward'},
            trains_in_float16=False,
            flags=_FEDTAN,
        ),
        Algorithm(
            name='fedtan_ii',
            description=(
                'fedtan for --sync_rounds rounds; then the BN statistics are'
                ' fixed and everything else is averaged'
            ),
            builder_name='build_fedtan_ii',
            trains_in_float16=False,
            flags=_FEDTAN + ('sync_rounds', 'after_sync_factor'),
        ),
        Algorithm(
            name='fbn',
            description=(
                'normalizes with the shared running statistics, which are'
                " corrected for the clients' differences (see --pooled)"
            ),
            builder_name='build_fbn',
            flags=_SERVER + ('statistics_aggregator', 'pooled'),
        ),
        Algorithm(
            name='fixbn',
            description=(
                'fedavg for --fixbn_rounds rounds; then the BN statistics are'
                ' fixed and everything else is averaged'
            ),
            builder_name='build_fixbn',
            flags=_SERVER + _STATISTICS + ('fixbn_rounds',),
        ),
        Algorithm(
            name='dsgd',
            description=(
                "one step in each round with the mean of the clients'"
                ' gradients; the momentum lasts (needs --local_steps=1)'
            ),
            builder_name='build_dsgd',
            flags=_MEAN + _STATISTICS,
            local_steps=1,
        ),
        Algorithm(
            name='single',
            description='each client trains alone, nothing is sent',
            builder_name='build_single',
        ),
    )
}
