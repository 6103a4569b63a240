"""How the rounds of a process move running statistics."""

import dataclasses
import enum

import numpy as np

from tff_bn.clients.local_training_config import LocalTrainingConfig


class Moves(enum.Enum):
  """How often a client's round moves running statistics by their momentum."""

  EACH_STEP = enum.auto()
  ONCE = enum.auto()
  # They are fixed, or the evaluation uses others.
  NEVER = enum.auto()


@dataclasses.dataclass(frozen=True)
class MovingStatistics:
  """How a round moves the running statistics of batch normalization.

  A move with the momentum m keeps the share m of the statistics before it.

  Attributes:
    moves: How often a client's round moves them.
    are_local: Whether each client has its own; otherwise, a round ends with the
      mean of the clients' statistics.
    config: The settings of local training.
  """

  moves: Moves
  are_local: bool
  config: LocalTrainingConfig

  def num_moves(self, num_batches: np.ndarray, num_calls: int) -> np.ndarray:
    """Returns how often a round moves the statistics of a layer.

    Args:
      num_batches: The number of batches in each client's dataset.
      num_calls: The number of the layer's calls in a step.
    """
    match self.moves:
      case Moves.EACH_STEP:
        return num_calls * self.config.num_steps(num_batches)
      case Moves.ONCE:
        return np.ones_like(num_batches)
      case Moves.NEVER:
        return np.zeros_like(num_batches)
