"""Measures the error of federated against centralized normalization.

The experiment of figures 1 and 2 in Guerraoui et al. 2024, "Overcoming the
Challenges of Batch Normalization in Federated Learning" (FBN). Points in the
plane are normalized by one batch normalization layer without scale and shift.
Class i of n is `N(10 (cos 2πi/n, sin 2πi/n), I)`. In each round, each of the n
clients has a new batch of the same size. The points normalized by an algorithm
are compared with batch normalization on the union of the batches.

The heterogeneity is γ-similarity, as in the paper's section 4 ("Modeling
heterogeneity"), applied to the points of each round: each class has as many
points as a client. A random share γ of all points is distributed evenly over
the clients; the other points are sorted by class and cut into one chunk per
client. With γ = 0, client i has only class i; with γ = 1, all clients have the
same distribution. The points are the same for all γ.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from tff_bn.catalog import value_types
from tff_bn.common import progress
from tff_bn.common import seeding
from tff_bn.data import splits

RADIUS = 10.0
_POINTS = value_types.Number(int, minimum=2)
# The stability constant of PyTorch's layer, which the paper's experiments use.
EPSILON = 1e-5

# Name -> description.
ALGORITHMS = {
    'naive': "with the statistics of the client's own batch",
    'fixbn': (
        'as naive in the first half of the rounds, then with the mean of the'
        " clients' running statistics, which no longer change"
    ),
    'fbn': (
        "with the previous round's running statistics, corrected for the"
        " variance of the clients' means"
    ),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings of the experiment; the defaults are the paper's.

  Attributes:
    num_clients: The number n of clients, and of classes.
    points_per_client: The number of points in a client's batch, at least 2.
    beta: The weight β of a round's statistics in the update of the running
      statistics, in (0, 1].
    rounds: The number of rounds.
    seed: The seed of the points and their distribution, at least 0.

  Raises:
    ValueError: If a number is out of its range.
  """

  num_clients: int = 10
  points_per_client: int = 30
  beta: float = 0.1
  rounds: int = 100
  seed: int = 0

  def __post_init__(self):
    value_types.POSITIVE_INTEGER.check('num_clients', self.num_clients)
    _POINTS.check('points_per_client', self.points_per_client)
    value_types.POSITIVE_INTEGER.check('rounds', self.rounds)
    value_types.SEED.check('seed', self.seed)
    value_types.POSITIVE_SHARE.check('beta', self.beta)

  @property
  def fixbn_rounds(self) -> int:
    """The number of rounds after which FixBN's statistics are fixed."""
    return (self.rounds + 1) // 2


class Statistics(NamedTuple):
  """The mean and variance of points, each of shape `[..., 2]`."""

  mean: np.ndarray
  variance: np.ndarray


# The running statistics before the first round.
INITIAL_STATISTICS = Statistics(np.zeros(2), np.ones(2))


class Round(NamedTuple):
  """The data and results of one round.

  Attributes:
    points: The clients' batches, `[num_clients, points_per_client, 2]`.
    classes: The points' classes, `[num_clients, points_per_client]`.
    centralized: The points normalized by the statistics of their union.
    normalized: The points normalized by each algorithm.
    running: The running statistics of each algorithm that has them, after the
      round.
  """

  points: np.ndarray
  classes: np.ndarray
  centralized: np.ndarray
  normalized: Mapping[str, np.ndarray]
  running: Mapping[str, Statistics]


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
  """The results for one level of heterogeneity.

  Attributes:
    gamma: The γ-similarity.
    errors: For each algorithm, the mean Euclidean distance between the points
      normalized by the algorithm and by centralized batch normalization, in
      each round: `[rounds]`.
    last_round: The last round.
  """

  gamma: float
  errors: Mapping[str, np.ndarray]
  last_round: Round

  def mean_error(self, algorithm: str) -> float:
    """Returns the mean error over all rounds, as in figure 2c."""
    return float(self.errors[algorithm].mean())

  def final_error(self, algorithm: str) -> float:
    """Returns the error of the last round."""
    return float(self.errors[algorithm][-1])


def draw_points(
    settings: Settings, gamma: float, round_num: int
) -> tuple[np.ndarray, np.ndarray]:
  """Draws the clients' batches of a round with γ-similarity `gamma`.

  Returns:
    The points, `[num_clients, points_per_client, 2]`, and their classes,
    `[num_clients, points_per_client]`.
  """
  num_clients = settings.num_clients
  rng = seeding.generator(None, settings.seed, round_num)
  classes: np.ndarray = np.repeat(
      np.arange(num_clients), settings.points_per_client
  )
  angles = 2 * np.pi * classes / num_clients
  centres = RADIUS * np.stack([np.cos(angles), np.sin(angles)], axis=1)
  points = centres + rng.standard_normal(centres.shape)
  # All sizes are equal, because the number of points is a multiple of n.
  parts = np.stack(
      splits.split_by_gamma_similarity(
          classes, num_clients, gamma, int(rng.integers(2**32))
      )
  )
  return points[parts], classes[parts]


def batch_statistics(points: np.ndarray) -> Statistics:
  """Computes the statistics of batches of shape `[..., points, 2]`."""
  return Statistics(points.mean(axis=-2), points.var(axis=-2))


def normalize(points: np.ndarray, statistics: Statistics) -> np.ndarray:
  """Normalizes points `[..., 2]` by statistics that broadcast to them."""
  return (points - statistics.mean) / np.sqrt(statistics.variance + EPSILON)


def normalize_locally(points: np.ndarray) -> np.ndarray:
  """Normalizes each client's batch by the batch's statistics."""
  mean, variance = batch_statistics(points)
  return normalize(
      points, Statistics(mean[:, np.newaxis], variance[:, np.newaxis])
  )


def normalize_centrally(points: np.ndarray) -> np.ndarray:
  """Normalizes all clients' batches by the statistics of their union."""
  return normalize(points, batch_statistics(points.reshape(-1, 2)))


def update_naive(
    running: Statistics, points: np.ndarray, beta: float
) -> Statistics:
  """Averages the clients' running statistics of Algorithm 1.

  The statistics have shape `[2]`, and `points` has the clients' batches,
  `[num_clients, points_per_client, 2]`.
  """
  size = points.shape[1]
  mean, variance = batch_statistics(points)
  unbiased = size / (size - 1) * variance
  return Statistics(
      (1 - beta) * running.mean + beta * mean.mean(axis=0),
      (1 - beta) * running.variance + beta * unbiased.mean(axis=0),
  )


def update_fbn(
    running: Statistics, points: np.ndarray, beta: float
) -> Statistics:
  """Updates FBN's running statistics: Algorithm 2, lines 4 to 10.

  They equal the running statistics of centralized batch normalization on the
  union of the batches. See `update_naive` for the shapes.
  """
  size = points.shape[0] * points.shape[1]
  unbiased = size / (size - 1)
  mean, variance = batch_statistics(points)
  client_mean = (1 - beta) * running.mean + beta * mean
  client_variance = (1 - beta) * running.variance + beta * unbiased * variance
  new_mean = client_mean.mean(axis=0)
  return Statistics(
      new_mean,
      client_variance.mean(axis=0)
      + unbiased / beta * ((client_mean - new_mean) ** 2).mean(axis=0),
  )


def run_round(
    settings: Settings,
    gamma: float,
    round_num: int,
    running: Mapping[str, Statistics],
) -> Round:
  """Normalizes the points of one round by all algorithms.

  `running` has the running statistics before the round, see `Round`.
  """
  points, classes = draw_points(settings, gamma, round_num)
  beta = settings.beta
  naive = normalize_locally(points)
  fbn = normalize(points, running['fbn'])
  fixbn, fixbn_running = naive, running['fixbn']
  if round_num < settings.fixbn_rounds:
    fixbn_running = update_naive(fixbn_running, points, beta)
  else:
    fixbn = normalize(points, fixbn_running)
  return Round(
      points,
      classes,
      normalize_centrally(points),
      normalized=dict(naive=naive, fixbn=fixbn, fbn=fbn),
      running=dict(
          fixbn=fixbn_running, fbn=update_fbn(running['fbn'], points, beta)
      ),
  )


def run(settings: Settings, gamma: float) -> Result:
  """Runs the experiment at one level of heterogeneity.

  Args:
    settings: The settings.
    gamma: The γ-similarity in [0, 1].

  Returns:
    The errors of all rounds, and the last round.

  Raises:
    ValueError: If gamma is outside [0, 1].
  """
  errors = {algorithm: np.empty(settings.rounds) for algorithm in ALGORITHMS}
  running: Mapping[str, Statistics] = dict(
      fixbn=INITIAL_STATISTICS, fbn=INITIAL_STATISTICS
  )
  for round_num in progress.counting(settings.rounds, f'γ = {gamma:g}: round'):
    this_round = run_round(settings, gamma, round_num, running)
    running = this_round.running
    for algorithm, normalized in this_round.normalized.items():
      distances = np.linalg.norm(normalized - this_round.centralized, axis=-1)
      errors[algorithm][round_num] = distances.mean()
  return Result(gamma, errors, this_round)


def run_levels(settings: Settings, gammas: Sequence[float]) -> list[Result]:
  """Runs the experiment at several levels of heterogeneity; see `run`."""
  return [
      run(settings, gammas[number])
      for number in progress.counting(len(gammas), 'level')
  ]
