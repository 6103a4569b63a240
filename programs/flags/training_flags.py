"""The flags of the rounds, the clients' training and the server's optimizer."""

from collections.abc import Callable
import dataclasses
from typing import TYPE_CHECKING, Any, Optional

from tff_bn.catalog import algorithms
from tff_bn.catalog import local_training
from tff_bn.catalog import server
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.parsed_flags import ParsedFlags

if TYPE_CHECKING:
  import tensorflow as tf
  import tensorflow_federated as tff

# The positions of the samples of a client's round take 8 bytes each.
_MAX_SAMPLES = 10**7
# Reddi et al. 2021 (FedOpt) recommend this adaptivity.
_SERVER_EPSILON = 1e-3
# Pairs (first round, factor of the learning rate), rounds increasing.
Schedule = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class TrainingFlags(flag_groups.base_class(*local_training.OPTIONS)):  # type: ignore[misc]
  """The rounds, and the clients' training in each of them."""

  TITLE = 'Training'

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    super().check(flags)
    num_steps = flag_groups.value(local_training.LOCAL_STEPS, flags, ())
    local_training.check_shuffles(num_steps, flags.shuffle_times)
    sizes = {
        option.name: getattr(flags, option.name)
        for option in (
            local_training.BATCH_SIZE,
            algorithms.CENTRALIZED_BATCH_SIZE,
        )
    }
    for name, size in sizes.items():
      if None not in (num_steps, size) and num_steps * size > _MAX_SAMPLES:
        raise ValueError(
            f'--local_steps={num_steps} with --{name}={size} makes'
            f' {num_steps * size} examples of a client in a round; at most'
            f' {_MAX_SAMPLES} are possible.'
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

    `more` are further factors. Returns None if the learning rate is constant.
    """
    import tensorflow as tf

    schedules = list(more)
    if self.client_learning_rate_schedule is not None:
      schedules.insert(
          0, local_training.parse_schedule(self.client_learning_rate_schedule)
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
        return tff.learning.optimizers.build_adam(rate, epsilon=_SERVER_EPSILON)
      case 'yogi':
        return tff.learning.optimizers.build_yogi(rate, epsilon=_SERVER_EPSILON)
    raise ValueError(f'server_optimizer={self.server_optimizer} is unknown.')
