"""The flags of the server's optimizer."""

import dataclasses
from typing import TYPE_CHECKING, Optional

from tff_bn.catalog import server
from tff_bn.programs.cli import flag_groups

if TYPE_CHECKING:
  import tensorflow_federated as tff

# Reddi et al. 2021 (FedOpt) recommend this adaptivity.
_EPSILON = 1e-3


@dataclasses.dataclass(frozen=True)
class ServerFlags(flag_groups.base_class(*server.OPTIONS)):  # type: ignore[misc]
  """The server's optimizer."""

  TITLE = 'Server'

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
