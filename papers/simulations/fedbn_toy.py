"""The toy example of the FedBN paper: error surfaces of a single weight.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization, ICLR 2021, section 1, figures 1 and 2. The paper fits
y = cos(w x) + noise with Gaussian x, whose variance differs between two
clients, and simplifies batch normalization to x / γ with the client's empirical
standard deviation γ. Its formulas are partly lost in the text. Here, the
clients' features are the same up to their scale: client k observes x = σ_k z
with z ~ N(0, 1), and y = cos(w* z) + noise. Then each client needs another
weight, w* / σ_k, unless it normalizes, as the paper says.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from tff_bn.common import seeding


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings of the example.

  Attributes:
    deviations: The standard deviation σ_k of each client's inputs.
    weight: The weight w* of the labels.
    noise: The standard deviation of the labels' noise.
    num_points: The number of points of a client.
    grid_size: The number of weights at which losses are computed.
    seed: The seed of the points.

  Raises:
    ValueError: If a number is out of its range.
  """

  deviations: tuple[float, ...] = (0.5, 2.0)
  weight: float = 2.0
  noise: float = 0.1
  num_points: int = 1000
  grid_size: int = 201
  seed: int = 0

  def __post_init__(self):
    if len(self.deviations) < 2 or min(self.deviations) <= 0:
      given = ','.join(map(str, self.deviations))
      raise ValueError(
          f'deviations={given} must be at least two positive numbers.'
      )
    if self.weight <= 0:
      raise ValueError(f'weight={self.weight} must be positive.')
    if self.noise < 0:
      raise ValueError(f'noise={self.noise} must not be negative.')
    for name in ('num_points', 'grid_size'):
      if getattr(self, name) < 2:
        raise ValueError(f'{name}={getattr(self, name)} must be at least 2.')


class Points(NamedTuple):
  """The points of a client.

  Attributes:
    x: The inputs, `[num_points]`.
    y: The labels, `[num_points]`.
  """

  x: np.ndarray
  y: np.ndarray

  @property
  def scale(self) -> float:
    """The empirical standard deviation γ, by which local BN divides."""
    return float(np.std(self.x))


def draw_points(settings: Settings) -> list[Points]:
  """Draws the points of each client."""
  rng = seeding.generator(None, settings.seed)
  clients = []
  for deviation in settings.deviations:
    z = rng.standard_normal(settings.num_points)
    noise = settings.noise * rng.standard_normal(settings.num_points)
    clients.append(Points(deviation * z, np.cos(settings.weight * z) + noise))
  return clients


def squared_loss(
    points: Points, weights: np.ndarray, scales: np.ndarray | float = 1.0
) -> np.ndarray:
  """Computes the mean squared error of cos(w x / γ).

  Args:
    points: A client's points.
    weights: The weights w.
    scales: The scales γ; they are broadcast to the weights.

  Returns:
    The loss for each weight and scale.
  """
  frequencies = np.asarray(weights / scales)
  # The points are the last axis.
  predictions = np.cos(frequencies[..., np.newaxis] * points.x)
  return np.mean(np.square(predictions - points.y), axis=-1)


def expected_loss(
    settings: Settings,
    deviation: float,
    weights: np.ndarray,
    scales: np.ndarray | float = 1.0,
) -> np.ndarray:
  """Computes the expectation of `squared_loss` in closed form.

  With a = w σ / γ and E cos(a z) = exp(-a² / 2), it is
  (1 + exp(-2 a²)) / 2 + (1 + exp(-2 w*²)) / 2
  - exp(-(a - w*)² / 2) - exp(-(a + w*)² / 2) plus the variance of the noise.

  Args:
    settings: The settings.
    deviation: The standard deviation σ of the client's inputs.
    weights: The weights w.
    scales: The scales γ; they are broadcast to the weights.

  Returns:
    The expected loss for each weight and scale.
  """
  a, b = weights * deviation / scales, settings.weight
  return (
      1
      + (np.exp(-2 * a**2) + np.exp(-2 * b**2)) / 2
      - np.exp(-((a - b) ** 2) / 2)
      - np.exp(-((a + b) ** 2) / 2)
      + settings.noise**2
  )


class Curves(NamedTuple):
  """The clients' losses as functions of the weight (figure 1).

  Attributes:
    weights: The weights, `[grid_size]`.
    losses: The loss of each client, `[num_clients, grid_size]`.
  """

  weights: np.ndarray
  losses: np.ndarray

  @property
  def best(self) -> np.ndarray:
    """The weight with the smallest loss of each client, `[num_clients]`."""
    return self.weights[np.argmin(self.losses, axis=1)]


class Surface(NamedTuple):
  """A client's loss as a function of weight and scale (figure 2).

  Attributes:
    weights: The weights, `[grid_size]`.
    scales: The scales, `[grid_size]`.
    losses: The losses, `[grid_size, grid_size]`, scales first.
  """

  weights: np.ndarray
  scales: np.ndarray
  losses: np.ndarray


class Choice(NamedTuple):
  """A way to choose the weight and the scale, and what comes of it.

  Attributes:
    name: What is averaged over the clients.
    weights: The weight of each client.
    scales: The scale of each client; 1 without BN.
    losses: The loss of each client.
  """

  name: str
  weights: np.ndarray
  scales: np.ndarray
  losses: np.ndarray


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of the example.

  Attributes:
    without_bn: The losses of cos(w x).
    with_bn: The losses of cos(w x / γ) with the client's own scale.
    surface: The losses of the first client.
    choices: The losses with local and with averaged weights and scales.
  """

  without_bn: Curves
  with_bn: Curves
  surface: Surface
  choices: Sequence[Choice]


def run(settings: Settings) -> Result:
  """Computes the error surfaces and the losses of averaged models.

  A client's local model has the weight of the grid with the smallest loss. The
  grid reaches from 0 to 1.5 times the largest of the weights that the labels
  need.

  Args:
    settings: The settings.

  Returns:
    The result.
  """
  clients = draw_points(settings)
  scales = np.array([points.scale for points in clients])
  largest = 1.5 * settings.weight * max(1.0, 1 / min(settings.deviations))
  grid = np.linspace(0, largest, settings.grid_size)

  def curves(client_scales: np.ndarray) -> Curves:
    return Curves(
        grid,
        np.stack(
            [
                squared_loss(points, grid, scale)
                for points, scale in zip(clients, client_scales)
            ]
        ),
    )

  def choose(name: str, weights: np.ndarray, used: np.ndarray) -> Choice:
    weights, used = (np.broadcast_to(v, scales.shape) for v in (weights, used))
    losses = [
        squared_loss(points, weight, scale)
        for points, weight, scale in zip(clients, weights, used)
    ]
    return Choice(name, weights, used, np.array(losses))

  without_bn, with_bn = curves(np.ones_like(scales)), curves(scales)
  # The grid of scales holds all clients' scales.
  scale_grid = np.linspace(0, 1.5 * scales.max(), settings.grid_size + 1)[1:]
  surface = Surface(
      grid,
      scale_grid,
      # Row by row, because each point has a value for each weight.
      np.stack([squared_loss(clients[0], grid, s) for s in scale_grid]),
  )
  ones = np.ones_like(scales)
  choices = (
      choose('local weights, no BN', without_bn.best, ones),
      choose('average weight, no BN', without_bn.best.mean(), ones),
      choose('local weights, local BN', with_bn.best, scales),
      choose('average weight, average BN', with_bn.best.mean(), scales.mean()),
      choose('average weight, local BN', with_bn.best.mean(), scales),
  )
  return Result(without_bn, with_bn, surface, choices)
