"""What the server sees of a client, read from the values of a round.

Statistics are in units of the running statistics R and S, which the server
knows: (mean − R)/√(S + ε) and (variance − S)/(S + ε).
"""

from collections.abc import Sequence
import dataclasses
import re
from typing import Any, NamedTuple, Optional

import keras
import numpy as np

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.layers import discovery
from tff_bn.papers.privacy import recorded_round

_BY_POSITION = re.compile(r'update\.trainable\[(\d+)\]$')
_BY_NAME = re.compile(r'update\.trainable\.(\w+)$')


class Shared(NamedTuple):
  """What FedTAN's server sends to all clients about one layer.

  Attributes:
    mean: The mean over all clients.
    variance: The variance over all clients.
    scale: The sum over all clients of the weighted gradients of the scale.
    shift: The sum of the weighted gradients of the shift.
    weight: The sum of the clients' weights.
  """

  mean: np.ndarray
  variance: np.ndarray
  scale: np.ndarray
  shift: np.ndarray
  weight: np.ndarray


@dataclasses.dataclass(frozen=True)
class Exchanges:
  """FedTAN's exchanges with one client, layer by layer.

  Attributes:
    statistics: `[2, channels]` for each layer: the statistics of the client's
      batch, in units of the running statistics.
    gradients: The client's gradients of the scale and the shift of each layer.
    shared: The answers of the server.
  """

  statistics: Sequence[np.ndarray]
  gradients: Sequence[tuple[np.ndarray, np.ndarray]]
  shared: Sequence[Shared]


class RunningStatistics(NamedTuple):
  """The running statistics R and S of a layer.

  Attributes:
    mean: R.
    variance: S.
    epsilon: What the layer adds to the variance.
    rate: The share of a batch in the next running statistics.
  """

  mean: np.ndarray
  variance: np.ndarray
  epsilon: float
  rate: float

  def relative(self, mean: Any, variance: Any) -> Any:
    """Returns statistics in units of these, `[2, channels]`.

    Args:
      mean: An array or a tensor.
      variance: The same.
    """
    scale = self.variance + np.float32(self.epsilon)
    return keras.ops.stack(
        [
            (mean - self.mean) / np.sqrt(scale),
            (variance - self.variance) / scale,
        ]
    )


def running_statistics(model: keras.Model) -> list[RunningStatistics]:
  """Returns the running statistics of a model's layers, outside of a graph."""
  return [
      RunningStatistics(
          np.asarray(layer.moving_mean),
          np.asarray(layer.moving_variance),
          layer.epsilon,
          1 - layer.momentum,
      )
      for layer in discovery.batch_norm_layers(model)
  ]


@dataclasses.dataclass(frozen=True)
class ClientMessage:
  """What a client sends in a round.

  Attributes:
    update: For each trainable variable of the model the values before minus
      those after training; `None` if it is not sent.
    statistics: `[2, channels]` for each layer: the moved running statistics
      that the client sends, in units of the running statistics before the
      round. Empty if none are sent.
    exchanges: FedTAN's exchanges; `None` for other algorithms.
  """

  update: Sequence[Optional[np.ndarray]]
  statistics: Sequence[np.ndarray]
  exchanges: Optional[Exchanges]


class Reader:
  """Reads messages of the rounds of one model.

  The running statistics before the round are those of the model's initial
  weights, and its layers form a chain.
  """

  def __init__(self, model: BatchNormModel):
    """Initializes the reader with a model with its initial weights."""
    self._names = [v.name for v in model.variables if v.trainable]
    self._running = running_statistics(model.keras_model)

  def read(
      self, recording: recorded_round.Recording, client: int
  ) -> ClientMessage:
    """Returns the message of one client of a recorded round."""
    sent = recording.sent[client]
    last = max(number for number, _ in sent)
    update: list[Optional[np.ndarray]] = [None] * len(self._names)
    for (_, place), value in sent.items():
      if found := _BY_POSITION.match(place):
        update[int(found[1])] = value
      elif found := _BY_NAME.match(place):
        update[self._names.index(found[1])] = value
    statistics = [
        np.asarray(
            self._running[number].relative(
                sent[last, f'update.statistics[{number}].mean'],
                sent[last, f'update.statistics[{number}].variance'],
            )
        )
        for number in range(len(self._running))
        if (last, f'update.statistics[{number}].mean') in sent
    ]
    return ClientMessage(
        update,
        statistics,
        self._exchanges(sent, recording.received) if last > 1 else None,
    )

  def _exchanges(
      self,
      sent: dict[recorded_round.Place, np.ndarray],
      received: dict[recorded_round.Place, np.ndarray],
  ) -> Exchanges:
    """Reads the exchanges of the forward and of the backward pass."""
    depth = len(self._running)
    statistics, gradients, shared = [], [], []
    for number in range(depth):
      # Each layer has two exchanges forward and one backward, in this order.
      means, deviations, sums = (
          2 * number + 1,
          2 * number + 2,
          3 * depth - number,
      )
      weight = sent[means, 'sent.SUM[0].weight']
      total = received[means + 1, '[0].weight']
      mean = sent[means, 'sent.SUM[0].mean'] / weight
      global_mean = received[means + 1, '[0].mean'] / total
      deviation = sent[deviations, 'sent.SUM[0]'] / weight
      variance = deviation - np.square(mean - global_mean)
      statistics.append(
          np.asarray(self._running[number].relative(mean, variance))
      )
      gradients.append(
          tuple(
              sent[sums, f'sent.SUM[0].{name}'] / weight
              for name in ('scale', 'shift')
          )
      )
      shared.append(
          Shared(
              global_mean,
              received[deviations + 1, '[0]'] / total,
              received[sums + 1, '[0].scale'],
              received[sums + 1, '[0].shift'],
              total,
          )
      )
    return Exchanges(statistics, gradients, shared)
