"""The public workloads: sizes, generated data, initial weights, and turns.

Processes of other frameworks import this module with their own interpreter, so
it needs only NumPy.
"""

from collections.abc import Iterator
import dataclasses
import json
import os
import sys
import time
from typing import Any, Optional

import numpy as np

# A larger training set repeats images.
_MAX_IMAGES = 60_000
# The part of a pixel that depends on its class, and the random part.
_CLASS_RANGE, _NOISE_RANGE = 144, 112

# As in the programs.
TEST_BATCH_SIZE = 256

ROUND, TEST = EVENTS = ('round', 'test')


@dataclasses.dataclass(frozen=True)
class Workload:
  """A public workload.

  Attributes:
    name: Its name.
    kind: The architecture: `linear`, `cnn` or `cnn_bn`.
    image_shape: Height, width and channels.
    num_classes: The number of classes.
    num_clients: The number of clients.
    samples_per_client: The number of training images of each client.
    clients_per_round: The number of clients that a round samples.
    batch_size: The number of images in a batch of training.
    learning_rate: The clients' learning rate.
    test_samples: The number of test images.
    test_every: The number of rounds between two tests.
    rounds: The number of rounds to time.
    has_dropout: Whether the CNN has its dropout layers.
    seed: Determines data, weights and clients.
  """

  name: str
  kind: str
  image_shape: tuple[int, int, int]
  num_classes: int
  num_clients: int
  samples_per_client: int
  clients_per_round: int
  batch_size: int
  learning_rate: float
  test_samples: int
  test_every: int
  rounds: int
  has_dropout: bool = True
  seed: int = 0

  @property
  def steps_per_client(self) -> int:
    """The number of steps that a client makes in a round: one epoch."""
    return -(-self.samples_per_client // self.batch_size)

  @property
  def steps_per_round(self) -> int:
    """The number of steps of all clients in a round."""
    return self.clients_per_round * self.steps_per_client

  @property
  def flat_size(self) -> int:
    """The number of inputs of the first dense layer."""
    height, width, channels = self.image_shape
    if self.kind == 'linear':
      return height * width * channels
    # Two convolutions lose 2 pixels each; the pooling halves the rest.
    return ((height - 4) // 2) * ((width - 4) // 2) * 64

  def is_tested(self, round_num: int) -> bool:
    """Whether the model is tested after a round, counted from 1.

    Round 0 is the initial model.
    """
    return round_num % self.test_every == 0 or round_num == self.rounds

  def events(self) -> Iterator[str]:
    """Yields the kinds of events of a run in order."""
    yield TEST
    for round_num in range(1, self.rounds + 1):
      yield ROUND
      if self.is_tested(round_num):
        yield TEST

  def clients_of_round(self, round_num: int) -> list[int]:
    """Returns the numbers of the clients of a round, counted from 1."""
    rng = np.random.default_rng([self.seed, round_num])
    return sorted(
        rng.choice(
            self.num_clients, self.clients_per_round, replace=False
        ).tolist()
    )

  def to_json(self) -> str:
    """Returns the workload as text."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def from_json(cls, text: str) -> 'Workload':
    """Reads the text of `to_json`."""
    values = json.loads(text)
    values['image_shape'] = tuple(values['image_shape'])
    return cls(**values)


class Data:
  """Images of classes with random patterns and noise, split at random.

  Attributes:
    x_test: The test images, uint8.
    y_test: Their labels, int32.
  """

  def __init__(self, workload: Workload):
    rng = np.random.default_rng(workload.seed)
    height, width, channels = workload.image_shape
    coarse = rng.integers(
        0, _CLASS_RANGE, (workload.num_classes, 4, 4, channels), np.uint8
    )
    patterns = coarse.repeat(-(-height // 4), 1).repeat(-(-width // 4), 2)
    self._patterns = patterns[:, :height, :width]
    total = workload.num_clients * workload.samples_per_client
    self._x, self._y = self._draw(rng, min(total, _MAX_IMAGES))
    order = (
        rng.permutation(total)
        if total <= _MAX_IMAGES
        else rng.integers(0, _MAX_IMAGES, total)
    )
    self._parts = order.reshape(workload.num_clients, -1)
    self.x_test, self.y_test = self._draw(rng, workload.test_samples)

  def _draw(
      self, rng: np.random.Generator, number: int
  ) -> tuple[np.ndarray, np.ndarray]:
    y = rng.integers(0, len(self._patterns), number, np.int32)
    shape = (number, *self._patterns.shape[1:])
    x = rng.integers(0, _NOISE_RANGE, shape, np.uint8)
    x += self._patterns[y]
    return x, y

  def client(self, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a client's images, uint8, and labels."""
    part = self._parts[number]
    return self._x[part], self._y[part]

  def scaled_client(self, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a client's images, float32 between 0 and 1, and labels."""
    x, y = self.client(number)
    return scale(x), y


def scale(x: np.ndarray) -> np.ndarray:
  """Scales pixels to the range from 0 to 1, as float32."""
  return x.astype(np.float32) / 255


def initial_weights(workload: Workload) -> list[np.ndarray]:
  """Returns the model's initial weights in the order and layout of Keras.

  A layer has a kernel, drawn from Glorot's uniform distribution, and a bias. A
  batch normalization has gamma, beta, mean and variance.
  """
  rng = np.random.default_rng([workload.seed, 1])
  weights: list[np.ndarray] = []

  def add_layer(shape, normalized=False):
    window = int(np.prod(shape[:-2]))
    limit = np.sqrt(6 / (window * (shape[-2] + shape[-1])))
    outputs = shape[-1]
    weights.append(rng.uniform(-limit, limit, shape).astype(np.float32))
    weights.append(np.zeros(outputs, np.float32))
    if normalized:
      zero, one = np.zeros(outputs, np.float32), np.ones(outputs, np.float32)
      weights.extend([one, zero, zero, one])

  if workload.kind == 'linear':
    add_layer((workload.flat_size, workload.num_classes))
  else:
    has_bn = workload.kind == 'cnn_bn'
    add_layer((3, 3, workload.image_shape[-1], 32), has_bn)
    add_layer((3, 3, 32, 64), has_bn)
    add_layer((workload.flat_size, 128))
    add_layer((128, workload.num_classes))
  return weights


class Turns:
  """Waits for the process's turn, and reports how long it took.

  The parent writes a line for each turn and reads the answer, a line of JSON.
  What else the process prints goes to standard error.
  """

  def __init__(self):
    self._answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    self._start: Optional[float] = None

  def ready(self) -> None:
    """Says that the data and the model are ready."""
    self._answer(event='ready')

  def begin(self) -> None:
    """Waits for the process's turn."""
    if not sys.stdin.readline():
      sys.exit('The program that gives turns has ended.')
    self._start = time.perf_counter()

  def end(self, event: str, **values: Any) -> None:
    """Ends a turn.

    Args:
      event: What the process did, one of `EVENTS`.
      **values: Further numbers, such as the loss.
    """
    assert self._start is not None
    seconds = time.perf_counter() - self._start
    self._answer(
        event=event,
        seconds=seconds,
        **{name: float(value) for name, value in values.items()},
    )

  def _answer(self, **values: Any) -> None:
    print(json.dumps(values), file=self._answers, flush=True)
