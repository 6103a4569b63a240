"""Measures what clients' messages say about their labels and pictures."""

from collections.abc import Callable, Sequence
import dataclasses
import enum
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.catalog import algorithms as catalog
from tff_bn.common import progress
from tff_bn.common import seeding
from tff_bn.data import digits
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.models import building
from tff_bn.papers.privacy import client_message
from tff_bn.papers.privacy import client_simulation
from tff_bn.papers.privacy import gradient_inversion
from tff_bn.papers.privacy import label_attack
from tff_bn.papers.privacy import message_noise
from tff_bn.papers.privacy import recorded_round
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.runtime import plan_context

_MODEL = 'small_cnn'
_LEARNING_RATE = 0.1
# Of the distribution of a client's shares of labels.
_DIRICHLET_ALPHA = 0.5
LABEL_BATCH_SIZE = 32
# The clients that the attacker simulates, for each one that it attacks.
_SIMULATED_PER_CLIENT = 3

# How clients of each algorithm normalize in training.
NORMALIZATIONS = {
    'fedavg': client_simulation.Normalization.BATCH,
    'silobn': client_simulation.Normalization.BATCH,
    'fedbn': client_simulation.Normalization.BATCH,
    'fbn': client_simulation.Normalization.RUNNING,
    'fedtan': client_simulation.Normalization.SHARED,
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings of the analysis, see the flags of `tff-bn-analyze leakage`."""

  algorithms: Sequence[str]
  batch_sizes: Sequence[int]
  num_clients: int
  num_attacked: int
  num_label_clients: int
  num_steps: int
  num_starts: int
  noise: message_noise.Noise
  seed: int


class LabelResult(NamedTuple):
  """The errors of the inferred shares of labels.

  Attributes:
    algorithm: The algorithm.
    has_noise: Whether the messages are protected.
    source: The part of the message: `update`, `statistics` or `everything`.
    errors: The total variation distance for each client.
    chance: The same of the mean shares of all clients.
  """

  algorithm: str
  has_noise: bool
  source: str
  errors: np.ndarray
  chance: np.ndarray


class PictureResult(NamedTuple):
  """The reconstructed pictures of clients with batches of one size.

  Attributes:
    algorithm: The algorithm.
    has_noise: Whether the messages are protected.
    true_pictures: `[clients, batch, height, width, 1]`.
    pictures: The reconstructed ones, in the order of the true ones.
    psnr: `[clients, batch]`, in dB.
    baseline: The PSNR of the mean pictures of the labels.
  """

  algorithm: str
  has_noise: bool
  true_pictures: np.ndarray
  pictures: np.ndarray
  psnr: np.ndarray
  baseline: np.ndarray

  @property
  def batch_size(self) -> int:
    """The number of pictures of a client."""
    return self.true_pictures.shape[1]


class Result(NamedTuple):
  """The results of both attacks."""

  labels: Sequence[LabelResult]
  pictures: Sequence[PictureResult]


class _Pictures(NamedTuple):
  """Pictures and their labels; for clients, with an axis of clients first."""

  x: np.ndarray
  y: np.ndarray


class _Purpose(enum.IntEnum):
  """The purposes of the random generators."""

  SPLIT = 0
  CLIENTS = 1
  LABEL_CLIENTS = 2
  SIMULATED = 3
  NOISE = 4
  STARTS = 5


def run(settings: Settings) -> Result:
  """Runs both attacks on each algorithm.

  One half of the digits belongs to the clients, the other half to the attacker.
  All messages are those of the first round of a model with random weights, with
  one step of SGD.
  """
  data = digits.load_digits()
  order = _generator(settings, _Purpose.SPLIT).permutation(len(data.x_train))
  victims, public = (
      _Pictures(data.x_train[half], data.y_train[half])
      for half in np.array_split(order, 2)
  )
  keras.utils.set_random_seed(settings.seed)
  model = BatchNormModel(
      building.build_model_fn(_MODEL, data.input_shape, data.num_outputs),
      input_spec=(
          tf.TensorSpec((None, *data.input_shape), tf.float32),
          tf.TensorSpec((None,), tf.int32),
      ),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
  )
  attacks = _Attacks(settings, model, victims, public)
  labels, pictures = [], []
  with plan_context.installed(recorded_round.RecordingContext()) as context:
    for algorithm in settings.algorithms:
      process = catalog.find(algorithm).builder()(
          model,
          tff.learning.optimizers.build_sgdm(_LEARNING_RATE),
          local_steps=1,
      )

      def messages(clients, process=process):
        return _messages(context, process, model, clients)

      with progress.saying(f'{algorithm}: labels'):
        labels += attacks.infer_labels(algorithm, messages)
      for batch_size in settings.batch_sizes:
        with progress.saying(f'{algorithm}: pictures, batches of {batch_size}'):
          pictures += attacks.invert(algorithm, batch_size, messages)
  return Result(labels, pictures)


def _generator(settings: Settings, *numbers: int) -> np.random.Generator:
  return seeding.generator(None, settings.seed, *numbers)


def _messages(
    context: recorded_round.RecordingContext,
    process: Process,
    model: BatchNormModel,
    clients: _Pictures,
) -> list[client_message.ClientMessage]:
  """Runs the first round of clients and returns what each one sends."""
  state = process.initialize()
  datasets = [
      tf.data.Dataset.from_tensors((x, y.astype(np.int32)))
      for x, y in zip(*clients)
  ]
  if isinstance(process, StatefulLearningProcess):
    states = [process.initialize_client(state)] * len(datasets)
    process.next(state, states, datasets)
  else:
    process.next(state, datasets)
  reader = client_message.Reader(model)
  return [
      reader.read(context.recording, number) for number in range(len(datasets))
  ]


_Messages = Callable[[_Pictures], Sequence[client_message.ClientMessage]]


class _Attacks:
  """Both attacks on clients of one model."""

  def __init__(
      self,
      settings: Settings,
      model: BatchNormModel,
      victims: _Pictures,
      public: _Pictures,
  ):
    """Initializes them with the pictures of the clients and of the attacker."""
    self._settings = settings
    self._victims = victims
    self._public = public
    self._num_labels = int(public.y.max()) + 1
    self._prior = gradient_inversion.Prior(*public)
    self._inversion = gradient_inversion.Inversion(
        client_simulation.ClientSimulation(model.keras_model),
        self._prior,
        settings.num_steps,
    )

  def infer_labels(
      self, algorithm: str, messages: _Messages
  ) -> list[LabelResult]:
    """Infers the shares of labels of clients with different shares."""
    settings = self._settings
    number = settings.num_label_clients
    simulated, victims = (
        _draw_skewed(pictures, number_of_clients, _generator(settings, purpose))
        for pictures, number_of_clients, purpose in (
            (self._public, _SIMULATED_PER_CLIENT * number, _Purpose.SIMULATED),
            (self._victims, number, _Purpose.LABEL_CLIENTS),
        )
    )
    known_shares, true_shares = map(self._shares, (simulated.y, victims.y))
    known, seen = messages(simulated), messages(victims)
    mean_shares = known_shares.mean(0)
    chance = label_attack.total_variation(mean_shares, true_shares)
    results = []
    for noise in (None, settings.noise):
      rng = _generator(settings, _Purpose.NOISE)
      known_features, seen_features = (
          [_features(message_noise.protect(m, noise, rng)) for m in part]
          for part in (known, seen)
      )
      for source in known_features[0]:
        model = label_attack.fit(
            np.stack([f[source] for f in known_features]), known_shares
        )
        shares = model.predict(np.stack([f[source] for f in seen_features]))
        results.append(
            LabelResult(
                algorithm,
                noise is not None,
                source,
                label_attack.total_variation(shares, true_shares),
                chance,
            )
        )
    return results

  def _shares(self, labels: np.ndarray) -> np.ndarray:
    """Returns the shares of labels of clients, `[clients, labels]`."""
    return (labels[..., np.newaxis] == np.arange(self._num_labels)).mean(1)

  def invert(
      self, algorithm: str, batch_size: int, messages: _Messages
  ) -> list[PictureResult]:
    """Reconstructs the pictures of some clients of a round."""
    settings = self._settings
    rng = _generator(settings, _Purpose.CLIENTS, batch_size)
    shape = (settings.num_clients, batch_size)
    chosen = rng.integers(len(self._victims.y), size=shape)
    clients = _Pictures(self._victims.x[chosen], self._victims.y[chosen])
    seen = messages(clients)[: settings.num_attacked]
    results = []
    for noise in (None, settings.noise):
      rng = _generator(settings, _Purpose.NOISE, batch_size)
      found, psnr, baseline = [], [], []
      for number, (message, x, y) in enumerate(zip(seen, *clients)):
        pictures = self._inversion.run(
            self._inversion.evidence(
                message_noise.protect(message, noise, rng), noise
            ),
            NORMALIZATIONS[algorithm],
            y,
            settings.num_starts,
            _generator(settings, _Purpose.STARTS, batch_size, number),
        )
        found.append(gradient_inversion.in_true_order(pictures, x))
        psnr.append(gradient_inversion.psnr(pictures, x))
        baseline.append(gradient_inversion.psnr(self._prior.means[y], x))
      results.append(
          PictureResult(
              algorithm,
              noise is not None,
              clients.x[: settings.num_attacked],
              np.stack(found),
              np.stack(psnr),
              np.stack(baseline),
          )
      )
    return results


def _draw_skewed(
    pictures: _Pictures, num_clients: int, rng: np.random.Generator
) -> _Pictures:
  """Draws clients whose shares of labels have a Dirichlet distribution."""
  by_label = [
      np.flatnonzero(pictures.y == label)
      for label in range(pictures.y.max() + 1)
  ]
  chosen = []
  for _ in range(num_clients):
    shares = rng.dirichlet(np.full(len(by_label), _DIRICHLET_ALPHA))
    counts = rng.multinomial(LABEL_BATCH_SIZE, shares)
    chosen.append(
        np.concatenate(
            [rng.choice(i, n) for i, n in zip(by_label, counts, strict=True)]
        )
    )
  return _Pictures(pictures.x[chosen], pictures.y[chosen])


def _features(
    message: client_message.ClientMessage,
) -> dict[str, np.ndarray]:
  """Returns what the attack on labels uses, by the part of the message."""
  bias = message.update[-1]
  assert bias is not None  # No algorithm keeps it with the clients.
  parts = dict(update=label_attack.features_of([bias]))
  statistics = list(message.statistics)
  if message.exchanges is not None:
    # The statistics in FedTAN's update are those of all clients together.
    statistics = [
        *message.exchanges.statistics,
        *(g for pair in message.exchanges.gradients for g in pair),
    ]
  if statistics:
    parts['statistics'] = label_attack.features_of(statistics)
    parts['everything'] = np.concatenate(list(parts.values()))
  return parts
