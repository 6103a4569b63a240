"""Differential privacy of a message, as its strongest observer sees it.

McMahan, Ramage, Talwar, Zhang, Learning Differentially Private Recurrent
Language Models, ICLR 2018 (arXiv:1710.06963): each client's message is clipped
to an L2 norm, and Gaussian noise is added to the sum over the clients. An
observer who knows the messages of all other clients subtracts them. What is
left is this client's clipped message and the noise of the whole sum.

The update of the trainable variables is clipped jointly. The statistics are
clipped jointly, too, in units of the running statistics, to a norm of their
own. FedTAN's exchanges within a round are sent as they are: no mechanism of
this package protects them.
"""

from collections.abc import Sequence
import dataclasses
from typing import Optional

import numpy as np

from tff_bn.papers.privacy import client_message


@dataclasses.dataclass(frozen=True)
class Noise:
  """The parameters of differential privacy.

  Attributes:
    multiplier: The deviation of the noise, in units of the clip norms.
    clip_norm: The largest norm of an update.
    statistics_clip_norm: The largest norm of the statistics.
  """

  multiplier: float
  clip_norm: float
  statistics_clip_norm: float


def protect(
    message: client_message.ClientMessage,
    noise: Optional[Noise],
    rng: np.random.Generator,
) -> client_message.ClientMessage:
  """Returns the message that the strongest observer sees.

  Args:
    message: The client's message.
    noise: The parameters; `None`: the message is sent as it is.
    rng: The generator of the noise.
  """
  if noise is None:
    return message
  sent = iter(
      _clip_and_add_noise(
          [array for array in message.update if array is not None],
          noise.clip_norm,
          noise.multiplier,
          rng,
      )
  )
  return dataclasses.replace(
      message,
      update=[
          None if array is None else next(sent) for array in message.update
      ],
      statistics=_clip_and_add_noise(
          message.statistics, noise.statistics_clip_norm, noise.multiplier, rng
      ),
  )


def _clip_and_add_noise(
    arrays: Sequence[np.ndarray],
    clip_norm: float,
    multiplier: float,
    rng: np.random.Generator,
) -> list[np.ndarray]:
  """Clips arrays to a joint norm and adds noise."""
  norm = np.sqrt(sum(float(np.sum(np.square(array))) for array in arrays))
  factor = clip_norm / max(norm, clip_norm)
  deviation = multiplier * clip_norm
  return [
      (factor * array + deviation * rng.standard_normal(array.shape)).astype(
          array.dtype
      )
      for array in arrays
  ]
