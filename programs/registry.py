"""The algorithms by name: what `--algorithm` and `--algorithms` choose from.

To add an algorithm, add an entry to `ALGORITHMS`. Nothing here imports
TensorFlow: a builder is looked up when it is needed.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

# Flags that are not for every algorithm; an entry names those it understands.
_SERVER = (
    'client_weighting',
    'server_optimizer',
    'server_learning_rate',
    'server_momentum',
)


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """An algorithm as the programs see it.

  Attributes:
    name: The name that `--algorithm` takes.
    description: What it does, in a few words.
    builder_name: The function in `tff_bn.algorithms` that builds its process.
    partition_name: The constant in `tff_bn.partition` that says what the
      clients share.
    trains_on_union: Whether one model is trained on the union of the sampled
      clients' data.
    flags: The flags that have an effect on this algorithm but not on all.
  """

  name: str
  description: str
  builder_name: str
  partition_name: str
  trains_on_union: bool = False
  flags: tuple[str, ...] = ()

  def builder(self) -> Callable[..., Any]:
    """The function that builds the process; imports TensorFlow Federated."""
    from tff_bn import algorithms  # pylint: disable=g-import-not-at-top

    return getattr(algorithms, self.builder_name)


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            name='centralized',
            description='one model, trained on the union of the data',
            builder_name='build_centralized',
            partition_name='FEDAVG',
            trains_on_union=True,
        ),
        Algorithm(
            name='fedavg',
            description=(
                'averages every variable, the BN statistics too (see'
                ' --statistics)'
            ),
            builder_name='build_fed_avg',
            partition_name='FEDAVG',
            flags=_SERVER + ('statistics',),
        ),
        Algorithm(
            name='fedbn',
            description='all BN variables stay with the client',
            builder_name='build_fed_bn',
            partition_name='FEDBN',
            flags=_SERVER,
        ),
        Algorithm(
            name='silobn',
            description=(
                'BN statistics stay with the client, scale and shift are'
                ' averaged'
            ),
            builder_name='build_silo_bn',
            partition_name='SILOBN',
            flags=_SERVER,
        ),
        Algorithm(
            name='local_affine',
            description=(
                'BN scale and shift stay with the client, statistics are'
                ' averaged'
            ),
            builder_name='build_local_affine',
            partition_name='LOCAL_AFFINE',
            flags=_SERVER + ('statistics',),
        ),
        Algorithm(
            name='single',
            description='each client trains alone, nothing is sent',
            builder_name='build_single',
            partition_name='SINGLE',
        ),
    )
}
