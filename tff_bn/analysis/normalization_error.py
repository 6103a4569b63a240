"""How far federated normalization is from the centralized one.

The experiment of figures 1 and 2 in Guerraoui et al. 2024, "Overcoming the
Challenges of Batch Normalization in Federated Learning" (FBN). Points in the
plane are normalized by one batch normalization layer without scale and shift:
class i of n is `N(10 (cos 2πi/n, sin 2πi/n), I)`, and in each round each of the
n clients has a fresh batch of the same size. What an algorithm makes of the
points is compared with batch normalization on the union of the batches.

Heterogeneity is γ-similarity, as in the paper's section 4 ("Modeling
heterogeneity"), applied to the points of each round: there are as many of each
class as a client has points; a share γ of all of them is drawn at random and
dealt to the clients evenly, the others are sorted by class and cut into one
chunk for each client. With γ = 0, client i has class i and nothing else; with
γ = 1 all clients have the same distribution. All γ have the same points, so
that nothing but their distribution over the clients makes the difference.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from tff_bn.common import seeding
from tff_bn.data import splits

RADIUS = 10.0
# The stability constant of PyTorch's layer, which the paper's experiments use.
EPSILON = 1e-5

# Name -> how it normalizes.
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
  """The experiment; the defaults are the paper's.

  Attributes:
    num_clients: The number n of clients, and of classes.
    points_per_client: The number of points in a client's batch, at least 2.
    beta: The share β in (0, 1] of a round's statistics in the running ones.
    rounds: The number of rounds.
    seed: Decides the points and who gets them; not negative.

  Raises:
    ValueError: If a number is out of its range.
  """

  num_clients: int = 10
  points_per_client: int = 30
  beta: float = 0.1
  rounds: int = 100
  seed: int = 0

  def __post_init__(self):
    for name, minimum in (
        ('num_clients', 1),
        ('points_per_client', 2),
        ('rounds', 1),
        ('seed', 0),
    ):
      if getattr(self, name) < minimum:
        raise ValueError(
            f'{name}={getattr(self, name)} is too small; use at least'
            f' {minimum}.'
        )
    if not 0 < self.beta <= 1:
      raise ValueError(
          f'beta={self.beta} must be greater than 0 and at most 1.'
      )

  @property
  def fixbn_rounds(self) -> int:
    """The number of rounds after which FixBN's statistics are fixed."""
    return (self.rounds + 1) // 2


class Statistics(NamedTuple):
  """Means and variances over points, of shape `[..., 2]`."""

  mean: np.ndarray
  variance: np.ndarray


# What running statistics are before the first round.
INITIAL_STATISTICS = Statistics(np.zeros(2), np.ones(2))


class Round(NamedTuple):
  """What happens in one round.

  Attributes:
    points: The clients' batches, `[num_clients, points_per_client, 2]`.
    classes: The points' classes, `[num_clients, points_per_client]`.
    centralized: The points as normalized by their union's statistics.
    normalized: For each algorithm, the points as it normalizes them.
    running: For each algorithm that has them, the running statistics after the
      round.
  """

  points: np.ndarray
  classes: np.ndarray
  centralized: np.ndarray
  normalized: Mapping[str, np.ndarray]
  running: Mapping[str, Statistics]


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
  """What came of one heterogeneity level.

  Attributes:
    gamma: The γ-similarity.
    errors: For each algorithm and round, the mean Euclidean distance between
      the points as the algorithm and as centralized batch normalization
      normalizes them: `[rounds]`.
    last_round: The last round.
  """

  gamma: float
  errors: Mapping[str, np.ndarray]
  last_round: Round

  def mean_error(self, algorithm: str) -> float:
    """The mean error over all rounds, as in figure 2c."""
    return float(self.errors[algorithm].mean())

  def final_error(self, algorithm: str) -> float:
    """The error of the last round."""
    return float(self.errors[algorithm][-1])


def draw_points(
    settings: Settings, gamma: float, round_num: int
) -> tuple[np.ndarray, np.ndarray]:
  """Draws the clients' batches of a round.

  Args:
    settings: The experiment.
    gamma: The γ-similarity in [0, 1].
    round_num: The round, not negative.

  Returns:
    The points, `[num_clients, points_per_client, 2]`, and their classes,
    `[num_clients, points_per_client]`.

  Raises:
    ValueError: If gamma is outside [0, 1].
  """
  num_clients = settings.num_clients
  rng = seeding.generator(None, settings.seed, round_num)
  classes = np.repeat(np.arange(num_clients), settings.points_per_client)
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
  """Means and biased variances of batches of shape `[..., points, 2]`."""
  return Statistics(points.mean(axis=-2), points.var(axis=-2))


def normalize(points: np.ndarray, statistics: Statistics) -> np.ndarray:
  """Normalizes points `[..., 2]` with statistics of a shape like theirs."""
  mean, variance = statistics
  return (points - mean) / np.sqrt(variance + EPSILON)


def normalize_locally(points: np.ndarray) -> np.ndarray:
  """Normalizes each client's batch with its own statistics."""
  mean, variance = batch_statistics(points)
  return normalize(
      points, Statistics(mean[:, np.newaxis], variance[:, np.newaxis])
  )


def normalize_centrally(points: np.ndarray) -> np.ndarray:
  """Normalizes all clients' batches with the statistics of their union."""
  return normalize(points, batch_statistics(points.reshape(-1, 2)))


def update_naive(
    running: Statistics, points: np.ndarray, beta: float
) -> Statistics:
  """The means of the running statistics that the clients would have.

  Args:
    running: The shared running statistics, `[2]`.
    points: The clients' batches, `[num_clients, points_per_client, 2]`.
    beta: The share of the batches' statistics.

  Returns:
    The new running statistics, `[2]`: those of Algorithm 1, averaged.
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
  """Algorithm 2, lines 4 to 10.

  Args:
    running: The shared running statistics, `[2]`.
    points: The clients' batches, `[num_clients, points_per_client, 2]`.
    beta: The share of the batches' statistics.

  Returns:
    The new running statistics, `[2]`: those of centralized batch normalization
    on the union of the batches.
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
  """Normalizes one round's points with all algorithms.

  Args:
    settings: The experiment.
    gamma: The γ-similarity in [0, 1].
    round_num: The round, from 0.
    running: The running statistics before the round: a `Round`'s.

  Returns:
    The round.
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
  """Runs the experiment at one heterogeneity level.

  Args:
    settings: The experiment.
    gamma: The γ-similarity in [0, 1].

  Returns:
    The errors of all rounds, and the last round.

  Raises:
    ValueError: If gamma is outside [0, 1].
  """
  errors = {algorithm: np.empty(settings.rounds) for algorithm in ALGORITHMS}
  running = dict(fixbn=INITIAL_STATISTICS, fbn=INITIAL_STATISTICS)
  for round_num in range(settings.rounds):
    this_round = run_round(settings, gamma, round_num, running)
    running = this_round.running
    for algorithm, normalized in this_round.normalized.items():
      distances = np.linalg.norm(normalized - this_round.centralized, axis=-1)
      errors[algorithm][round_num] = distances.mean()
  return Result(gamma, errors, this_round)


def run_levels(settings: Settings, gammas: Sequence[float]) -> list[Result]:
  """Runs the experiment at several heterogeneity levels; see `run`."""
  return [run(settings, gamma) for gamma in gammas]
