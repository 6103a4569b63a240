"""Differential privacy of a message, as its strongest observer sees it.

McMahan, Ramage, Talwar, Zhang, Learning Differentially Private Recurrent
Language Models, ICLR 2018 (arXiv:1710.06963): each client's message is clipped
to an L2 norm, and Gaussian noise is added to the sum over the clients. An
observer who knows the messages of all other clients subtracts them. What is
left is this client's clipped message and the noise of the whole sum.

An update is clipped as a whole, the statistics are clipped as a whole, in units
of the running statistics, and so is what a client sends in each exchange of
FedTAN. The noise is divided among them as `tff_bn.aggregators.DpSums` divides
it. The server's answers in the exchanges have no noise, so the observer knows
more than a real one.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple, Optional

import numpy as np

from tff_bn import aggregators
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


class Deviations(NamedTuple):
  """The standard deviations of the noise of the parts of a message."""

  update: float
  statistics: float
  exchange: float


def deviations(
    message: client_message.ClientMessage, noise: Noise
) -> Deviations:
  """Returns how much noise the parts of a message get."""
  exchanges = message.exchanges
  # Each layer has two exchanges forward and one backward.
  num_exchanges = 0 if exchanges is None else 3 * len(exchanges.statistics)
  parts = ['update', *(['statistics'] if message.statistics else [])]
  sums = aggregators.DpSums(noise.multiplier, num_clients=1)
  factors = {
      **sums.multipliers(['exchange'], num_exchanges),
      **sums.multipliers(parts, num_exchanges),
  }

  def deviation(part, clip_norm):
    return noise.multiplier * factors.get(part, 0.0) * clip_norm

  return Deviations(
      deviation('update', noise.clip_norm),
      deviation('statistics', noise.statistics_clip_norm),
      deviation('exchange', noise.statistics_clip_norm),
  )


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
  found = deviations(message, noise)

  def protected(arrays, clip_norm, deviation):
    return _clip_and_add_noise(arrays, clip_norm, deviation, rng)

  sent = iter(
      protected(
          [array for array in message.update if array is not None],
          noise.clip_norm,
          found.update,
      )
  )
  clip_norm = noise.statistics_clip_norm
  exchanges = message.exchanges
  if exchanges is not None:
    exchanges = dataclasses.replace(
        exchanges,
        statistics=[
            # Means and variances are exchanged one after the other.
            np.stack(
                [
                    protected([row], clip_norm, found.exchange)[0]
                    for row in layer
                ]
            )
            for layer in exchanges.statistics
        ],
        gradients=[
            tuple(protected(pair, clip_norm, found.exchange))
            for pair in exchanges.gradients
        ],
    )
  return dataclasses.replace(
      message,
      update=[
          None if array is None else next(sent) for array in message.update
      ],
      statistics=protected(message.statistics, clip_norm, found.statistics),
      exchanges=exchanges,
  )


def _clip_and_add_noise(
    arrays: Sequence[np.ndarray],
    clip_norm: float,
    deviation: float,
    rng: np.random.Generator,
) -> list[np.ndarray]:
  """Clips arrays to a joint norm and adds noise."""
  norm = np.sqrt(sum(float(np.sum(np.square(array))) for array in arrays))
  factor = clip_norm / max(norm, clip_norm)
  return [
      (factor * array + deviation * rng.standard_normal(array.shape)).astype(
          array.dtype
      )
      for array in arrays
  ]
