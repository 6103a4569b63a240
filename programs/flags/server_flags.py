"""The flags of the server's optimizer."""

import dataclasses
from typing import TYPE_CHECKING, Optional

from tff_bn.catalog import options
from tff_bn.catalog import value_types
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.flag_groups import flag
from tff_bn.programs.flags import registry

if TYPE_CHECKING:
  import tensorflow_federated as tff

# Default learning rates.
LEARNING_RATES = {'sgd': 1.0, 'sgdm': 0.1, 'adam': 0.01, 'yogi': 0.01}
# Reddi et al. 2021 (FedOpt) recommend this adaptivity.
_EPSILON = 1e-3


@dataclasses.dataclass(frozen=True)
class ServerFlags(flag_groups.Flags):
  """The server's optimizer."""

  TITLE = 'Server'

  server_optimizer: Optional[str] = flag(
      value_types.Choice(LEARNING_RATES),
      "The optimizer that the server applies to the mean of the clients'"
      f' changes (FedOpt): {", ".join(LEARNING_RATES)}; sgd with learning rate'
      ' 1 is plain averaging',
      'sgd',
      feature=registry.SERVER_OPTIMIZER,
  )
  server_learning_rate: Optional[float] = flag(
      value_types.POSITIVE,
      "The server's learning rate",
      compute=lambda flags: LEARNING_RATES[flags.server_optimizer],
      default_text=', '.join(
          f'{rate:g} for {name}' for name, rate in LEARNING_RATES.items()
      ),
      feature=registry.SERVER_OPTIMIZER,
  )
  server_momentum: Optional[float] = flag(
      value_types.MOMENTUM,
      'Momentum of --server_optimizer=sgdm',
      0.9,
      conditions=(options.only_for('server_optimizer', 'sgdm'),),
      feature=registry.SERVER_OPTIMIZER,
  )

  server_clip_norm: Optional[float] = flag(
      value_types.POSITIVE,
      "Largest global norm of the mean of the clients' changes, which is scaled"
      ' down to it',
      default_text='any',
      feature=options.OWN_NAME,
      argument=options.OWN_NAME,
  )

  def build_server_optimizer(
      self,
  ) -> 'Optional[tff.learning.optimizers.Optimizer]':
    """Builds the optimizer; None if the algorithm has none."""
    import tensorflow_federated as tff

    rate = self.server_learning_rate
    match self.server_optimizer:
      case None:
        return None
      case 'sgd':
        return tff.learning.optimizers.build_sgdm(rate)
      case 'sgdm':
        return tff.learning.optimizers.build_sgdm(rate, self.server_momentum)
      case 'adam':
        return tff.learning.optimizers.build_adam(rate, epsilon=_EPSILON)
      case 'yogi':
        return tff.learning.optimizers.build_yogi(rate, epsilon=_EPSILON)
    raise ValueError(f'server_optimizer={self.server_optimizer} is unknown.')
