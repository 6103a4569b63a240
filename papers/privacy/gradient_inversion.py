"""Reconstructs a client's pictures from its message.

Geiping, Bauermeister, Dröge, Moeller, Inverting Gradients – How Easy Is It to
Break Privacy in Federated Learning?, NeurIPS 2020 (arXiv:2003.14053): the
server searches pictures whose gradient has the same direction as the client's.
Where the client sends the statistics of its batch, the pictures must have the
same ones, as in Yin et al., See through Gradients, CVPR 2021
(arXiv:2104.07586).

The server knows the labels, and pictures of the same kind: the search starts at
the mean picture of each label, and prefers pictures that are likely under a
Gaussian distribution around it.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple, Optional

import numpy as np
from scipy import optimize
import tensorflow as tf

from tff_bn.papers.privacy import client_message
from tff_bn.papers.privacy import client_simulation
from tff_bn.papers.privacy import message_noise

# The weights of the statistics and of the prior, in relation to one minus the
# cosine between the gradients.
_STATISTICS_WEIGHT = 0.1
_PRIOR_WEIGHT = 0.05
# At the last step the prior has this share of its weight at the first one.
_PRIOR_DECAY = 0.01
# Added to the variance of each pixel: many pixels of the digits are constant.
_PIXEL_VARIANCE = 0.003
# Adam, with a cosine decay of the learning rate.
_LEARNING_RATE = 0.1
_BETA_1 = 0.9
_BETA_2 = 0.999
_TINY = 1e-12
# Of a channel in a batch, in units of the running variance.
_SMALLEST_VARIANCE = 1e-3
# The deviation of the starts around the mean pictures.
_START_DEVIATION = 0.1
# Of the squared norm of noise.
_NUM_DEVIATIONS = 3
# The error that limits the PSNR to 100 dB.
_SMALLEST_ERROR = 1e-10


class Prior:
  """What the server knows of pictures: their distribution for each label.

  Attributes:
    means: The mean picture of each label.
    precision: The inverse of the covariance of the pixels within a label.
  """

  def __init__(self, pictures: np.ndarray, labels: np.ndarray):
    """Estimates the distribution from pictures in [0, 1] of all labels."""
    self.means = np.stack(
        [pictures[labels == label].mean(0) for label in range(labels.max() + 1)]
    )
    deviations = (pictures - self.means[labels]).reshape(len(pictures), -1)
    size = deviations.shape[1]
    covariance = deviations.T @ deviations / len(pictures)
    self.precision = np.linalg.inv(
        covariance + _PIXEL_VARIANCE * np.eye(size)
    ).astype(np.float32)


class _Gradients(NamedTuple):
  """Gradients that simulated ones are compared with.

  Attributes:
    values: The gradient of each trainable variable; 0 if it is unknown.
    known: For each variable 1, or 0 if its gradient is unknown.
    weight: The weight of the comparison.
  """

  values: Sequence[np.ndarray]
  known: Sequence[np.float32]
  weight: np.float32


class Evidence(NamedTuple):
  """What a message says about a client's first step.

  Attributes:
    update: The gradients in the update.
    exchanged: The gradients of scales and shifts in FedTAN's exchanges.
    statistics: `[2, channels]` for each layer: the statistics of the batch, in
      units of the running statistics.
    statistics_weight: The weight of the statistics.
    shared: See `ClientSimulation.run`.
  """

  update: _Gradients
  exchanged: _Gradients
  statistics: Sequence[np.ndarray]
  statistics_weight: np.float32
  shared: Sequence[client_message.Shared]


class Inversion:
  """The attack on clients of one model.

  Its functions are traced once for all sizes of batches.
  """

  def __init__(
      self,
      simulation: client_simulation.ClientSimulation,
      prior: Prior,
      num_steps: int,
  ):
    """Initializes the attack with the number of steps of Adam."""
    self._simulation = simulation
    self._prior = prior
    self._num_steps = num_steps
    variables = simulation.model.trainable_variables
    nothing = client_message.ClientMessage([None] * len(variables), [], None)
    pictures = tf.TensorSpec((None, *prior.means.shape[1:]), tf.float32)
    specs = (
        tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape, tf.float32),
            self.evidence(nothing),
        ),
        pictures,
        tf.TensorSpec((None,), tf.int32),
        pictures,
    )
    self._search_fns = {
        has_own: tf.function(
            functools.partial(self._search, has_own), input_signature=specs
        )
        for has_own in (False, True)
    }

  def evidence(
      self,
      message: client_message.ClientMessage,
      noise: Optional[message_noise.Noise] = None,
  ) -> Evidence:
    """Collects what a message says.

    Args:
      message: The message.
      noise: The parameters with which it was protected; `None`: it was not.
    """
    shapes = [v.shape for v in self._simulation.model.trainable_variables]
    nothing: list[Optional[np.ndarray]] = [None] * len(shapes)
    deviations = message_noise.Deviations(0.0, 0.0, 0.0)
    if noise is not None:
      deviations = message_noise.deviations(message, noise)
    exchanged, exchanged_weight = nothing, 0.0
    statistics: Sequence[np.ndarray] = self._simulation.zero_statistics()
    statistics_weight = 0.0
    if message.exchanges is not None:
      exchanged = self._simulation.place(message.exchanges.gradients)
      exchanged_weight = _signal_share(
          [g for pair in message.exchanges.gradients for g in pair],
          deviations.exchange,
      )
      statistics = message.exchanges.statistics
      statistics_weight = _signal_share(statistics, deviations.exchange)
    elif message.statistics:
      statistics = [
          values / np.float32(layer.rate)
          for values, layer in zip(
              message.statistics, self._simulation.running, strict=True
          )
      ]
      statistics_weight = _signal_share(
          message.statistics, deviations.statistics
      )
    return Evidence(
        _gradients(
            message.update,
            shapes,
            _signal_share(message.update, deviations.update),
        ),
        _gradients(exchanged, shapes, exchanged_weight),
        statistics,
        np.float32(statistics_weight),
        self._simulation.fixed_statistics(message.exchanges),
    )

  def run(
      self,
      evidence: Evidence,
      normalization: client_simulation.Normalization,
      labels: np.ndarray,
      num_starts: int,
      rng: np.random.Generator,
  ) -> np.ndarray:
    """Reconstructs the pictures of a client.

    Args:
      evidence: What its message says.
      normalization: How it normalizes.
      labels: The labels of its pictures, in any order.
      num_starts: How often the search starts.
      rng: The generator of the starts.

    Returns:
      The pictures of the search whose message is most like the client's. If the
      message says nothing, the mean pictures of the labels.
    """
    expected = self._prior.means[labels].astype(np.float32)
    weights = (
        evidence.update.weight,
        evidence.exchanged.weight,
        evidence.statistics_weight,
    )
    if not any(weights):
      return expected
    search = self._search_fns[normalization is _BATCH]
    best, smallest = expected, np.inf
    for _ in range(num_starts):
      start = expected + _START_DEVIATION * rng.standard_normal(expected.shape)
      found, loss = search(
          evidence,
          tf.constant(expected),
          tf.constant(labels.astype(np.int32)),
          tf.constant(np.clip(start, 0, 1).astype(np.float32)),
      )
      if float(loss) < smallest:
        best, smallest = found.numpy(), float(loss)
    return best

  def _search(
      self,
      has_own_statistics: bool,
      evidence: Evidence,
      expected: tf.Tensor,
      labels: tf.Tensor,
      start: tf.Tensor,
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Minimizes the distance between messages with Adam."""
    shared = None if has_own_statistics else evidence.shared

    def loss_of(pictures, prior_weight):
      simulated = self._simulation.run(pictures, labels, shared)
      unlikeliness = self._unlikeliness(pictures - expected)
      return _distance(simulated, evidence) + prior_weight * unlikeliness

    pictures, first, second = start, tf.zeros_like(start), tf.zeros_like(start)
    for step in tf.range(1.0, self._num_steps + 1.0):
      with tf.GradientTape() as tape:
        tape.watch(pictures)
        decay = (step - 1) / self._num_steps
        prior_weight = _PRIOR_WEIGHT * tf.pow(_PRIOR_DECAY, decay)
        loss = loss_of(pictures, prior_weight)
      gradient = tape.gradient(loss, pictures)
      first = _BETA_1 * first + (1 - _BETA_1) * gradient
      second = _BETA_2 * second + (1 - _BETA_2) * tf.square(gradient)
      rate = _LEARNING_RATE * (1 + tf.cos(np.pi * step / self._num_steps)) / 2
      root = tf.sqrt(second / (1 - tf.pow(_BETA_2, step)))
      pictures -= rate * first / (1 - tf.pow(_BETA_1, step)) / (root + _TINY)
      pictures = tf.clip_by_value(pictures, 0.0, 1.0)
    return pictures, loss_of(pictures, _PRIOR_WEIGHT * _PRIOR_DECAY)

  def _unlikeliness(self, deviations: tf.Tensor) -> tf.Tensor:
    """Returns the mean squared Mahalanobis distance of pictures per pixel."""
    flat = tf.reshape(deviations, [-1, len(self._prior.precision)])
    return tf.reduce_mean(tf.matmul(flat, self._prior.precision) * flat)


_BATCH = client_simulation.Normalization.BATCH


def _signal_share(
    arrays: Sequence[Optional[np.ndarray]], deviation: float
) -> float:
  """Estimates which share of a squared norm is not noise.

  It is 0 if noise alone could well have this norm.
  """
  known = [a for a in arrays if a is not None]
  total = sum(float(np.sum(np.square(a))) for a in known)
  size = sum(a.size for a in known)
  # The mean and some deviations of the squared norm of the noise.
  noise = deviation**2 * (size + _NUM_DEVIATIONS * np.sqrt(2 * size))
  return max(0.0, 1 - noise / total) if total else 0.0


def _gradients(
    values: Sequence[Optional[np.ndarray]],
    shapes: Sequence[tuple[int, ...]],
    weight: float,
) -> _Gradients:
  return _Gradients(
      [
          np.zeros(shape, np.float32) if value is None else value
          for value, shape in zip(values, shapes, strict=True)
      ],
      [np.float32(value is not None) for value in values],
      np.float32(weight),
  )


def _distance(
    simulated: client_simulation.Simulated, evidence: Evidence
) -> tf.Tensor:
  """Returns how much a simulated client differs from the real one."""
  distance = tf.zeros([])
  for mine, seen in zip(simulated.statistics, evidence.statistics, strict=True):
    # The variance of the batch, which noise may have made negative.
    variance = tf.maximum(1 + seen[1], _SMALLEST_VARIANCE)
    mean_error, variance_error = tf.unstack(tf.square(mine - seen))
    distance += tf.reduce_mean(
        mean_error / variance + variance_error / tf.square(variance)
    )
  distance *= _STATISTICS_WEIGHT * evidence.statistics_weight
  for known in (evidence.update, evidence.exchanged):
    distance += known.weight * (1 - _cosine(simulated.gradients, known))
  return distance


def _cosine(gradients: Sequence[tf.Tensor], seen: _Gradients) -> tf.Tensor:
  """Returns the cosine between the known gradients and simulated ones."""

  def dot(left, right):
    return tf.add_n(
        [
            known * tf.reduce_sum(a * b)
            for a, b, known in zip(left, right, seen.known, strict=True)
        ]
    )

  norms = dot(gradients, gradients) * dot(seen.values, seen.values)
  return dot(gradients, seen.values) * tf.math.rsqrt(norms + _TINY)


def psnr(pictures: np.ndarray, true_pictures: np.ndarray) -> np.ndarray:
  """Returns the peak signal-to-noise ratio of each true picture, in dB.

  The reconstructed pictures are assigned to the true ones so that the sum of
  the squared errors is the smallest.

  Args:
    pictures: Reconstructed pictures with values in [0, 1].
    true_pictures: As many true ones.
  """
  return 10 * np.log10(
      1 / np.maximum(_matched(pictures, true_pictures)[1], _SMALLEST_ERROR)
  )


def in_true_order(
    pictures: np.ndarray, true_pictures: np.ndarray
) -> np.ndarray:
  """Returns each true picture's reconstruction, assigned as in `psnr`."""
  return pictures[_matched(pictures, true_pictures)[0]]


def _matched(
    pictures: np.ndarray, true_pictures: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the number and the mean squared error of each reconstruction."""
  axes = tuple(range(2, pictures.ndim + 1))
  errors = np.square(true_pictures[:, np.newaxis] - pictures).mean(axes)
  rows, columns = optimize.linear_sum_assignment(errors)
  return columns, errors[rows, columns]
