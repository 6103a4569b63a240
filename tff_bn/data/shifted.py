"""Generated data of several tasks in domains that differ in their features.

The domains of a dataset have the same labels with the same probabilities, but
other values: a scanner's brightness and contrast, or a sensor's offset and
gain. This is the feature shift for which FedBN (Li et al., ICLR 2021) keeps
batch normalization with the clients: the statistics of one domain are wrong for
the others.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tff_bn.catalog import tasks
from tff_bn.common import seeding
from tff_bn.data import dataset as dataset_lib

_SEED = 0

_DISC_SIZE = 32
_MAX_DISCS = 3
_MAX_SQUARES = 2
_RADII = (3.0, 7.0)

_FINDING_SIZE = 16
_FINDINGS = ('line', 'ring', 'spot', 'stripes')
_FINDING_SHARE = 0.4

_NUM_STEPS = 32


class _Scanner(NamedTuple):
  """How a domain of pictures shows intensities from 0 to 1.

  Attributes:
    offset: The pixel of intensity 0.
    gain: The difference between the pixels of intensities 1 and 0. A negative
      one inverts pictures.
    noise: The standard deviation of the noise.
  """

  offset: float
  gain: float
  noise: float

  def scan(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns pictures `[n, height, width, 1]` of intensities."""
    noise = self.noise * rng.standard_normal(x.shape)
    return np.clip(self.offset + self.gain * x + noise, 0, 1)[..., np.newaxis]


_SCANNERS = {
    'bright': _Scanner(0.55, 0.4, 0.06),
    'dark': _Scanner(0.1, 0.4, 0.06),
    'contrasty': _Scanner(0.1, 0.8, 0.12),
    'inverted': _Scanner(0.9, -0.6, 0.09),
}


class _Motion(NamedTuple):
  """The signal of a class of windows.

  Attributes:
    cycles: The smallest and the largest number of cycles in a window.
    amplitude: The amplitude of the sensors.
  """

  cycles: tuple[float, float]
  amplitude: float


_MOTIONS = {
    'rest': _Motion((0.5, 1), 0.3),
    'walk': _Motion((1.5, 2.5), 0.8),
    'run': _Motion((3, 4.5), 1),
    'shake': _Motion((6, 9), 0.8),
}


class _Sensors(NamedTuple):
  """How a domain measures the signals of three sensors.

  Attributes:
    offsets: What is added to the signal of each sensor.
    gains: The factor of each sensor.
    noise: The standard deviation of the noise, relative to the gains.
  """

  offsets: tuple[float, float, float]
  gains: tuple[float, float, float]
  noise: float


_DEVICES = {
    'phone': _Sensors((0, 0, 1), (1, 1, 1), 0.6),
    'watch': _Sensors((1, -1, 0), (2, 1.5, 2), 0.6),
    'machine': _Sensors((-1, 1.5, 2), (0.4, 0.5, 0.3), 0.6),
    'vehicle': _Sensors((2, 0, -1.5), (2.5, 0.6, 1), 0.6),
}


def load_discs() -> dataset_lib.Dataset:
  """Generates pictures with discs; each pixel is background or disc.

  A picture has 1 to 3 discs with radii from 3 to 7 pixels, of random intensity,
  on a background with a random gradient and up to 2 squares, which overlap the
  discs' intensities. Each domain shows intensities in another way: bright or
  dark with little contrast, with much contrast, or inverted.

  Returns:
    Four domains of 60 training and 30 test pictures each, `[32, 32, 1]`,
    float32 in [0, 1], for the task segmentation: the class of a pixel is
    background or disc.
  """

  def draw(number, scanner, rng):
    intensities, masks = _draw_discs(number, rng)
    return scanner.scan(intensities, rng), masks

  return _load(
      'discs',
      tasks.SEGMENTATION,
      ('background', 'disc'),
      _SCANNERS,
      draw,
      num_train=60,
      num_test=30,
  )


def load_findings() -> dataset_lib.Dataset:
  """Generates pictures with any of four findings.

  A picture has each finding with probability 0.4, independently of the others,
  at a random place: a line, a ring, a spot or stripes. The domains show
  intensities as those of `load_discs`.

  Returns:
    Four domains of 200 training and 100 test pictures each, `[16, 16, 1]`,
    float32 in [0, 1], for the task multilabel with four labels.
  """

  def draw(number, scanner, rng):
    intensities, labels = _draw_findings(number, rng)
    return scanner.scan(intensities, rng), labels

  return _load(
      'findings',
      tasks.MULTILABEL,
      _FINDINGS,
      _SCANNERS,
      draw,
      num_train=200,
      num_test=100,
  )


def load_sensor_windows() -> dataset_lib.Dataset:
  """Generates windows of three sensors in four kinds of motion.

  The kind of motion determines the frequency and the amplitude of sine waves,
  whose phases are random. The sensors of each domain have other offsets and
  gains.

  Returns:
    Four domains of 120 training and 60 test series each, `[32 steps, 3
    features]`, float32, with balanced labels: rest, walk, run and shake.
  """
  return _load(
      'sensor_windows',
      tasks.CLASSIFICATION,
      tuple(_MOTIONS),
      _DEVICES,
      _draw_windows,
      num_train=120,
      num_test=60,
  )


def _load(
    name: str,
    task: str,
    class_names: tuple[str, ...],
    domains: Mapping[str, NamedTuple],
    draw: Callable[..., tuple[np.ndarray, np.ndarray]],
    *,
    num_train: int,
    num_test: int,
) -> dataset_lib.Dataset:
  """Builds a dataset of domains of the same size.

  Args:
    name: The dataset's name.
    task: Its task.
    class_names: The names of its classes or labels.
    domains: What `draw` gets for each domain.
    draw: Returns samples and labels, given their number, a domain and a
      generator.
    num_train: The number of training samples of each domain.
    num_test: The number of test samples of each domain.
  """
  rng = seeding.generator(None, _SEED)

  def draw_all(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = zip(*(draw(number, domain, rng) for domain in domains.values()))
    domain: np.ndarray = np.repeat(np.arange(len(x), dtype=np.int32), number)
    return np.concatenate(x).astype(np.float32), np.concatenate(y), domain

  x_train, y_train, domain_train = draw_all(num_train)
  x_test, y_test, domain_test = draw_all(num_test)
  return dataset_lib.create_dataset(
      name,
      x_train,
      y_train,
      x_test,
      y_test,
      num_classes=len(class_names),
      task=task,
      is_series=True,
      class_names=class_names,
      domain_train=domain_train,
      domain_test=domain_test,
      domain_names=tuple(domains),
  )


def _draw_discs(
    number: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
  """Draws intensities and masks, both `[number, size, size]`."""
  rows, columns = np.indices((_DISC_SIZE, _DISC_SIZE))
  x: np.ndarray = np.empty((number, _DISC_SIZE, _DISC_SIZE))
  masks: np.ndarray = np.zeros(x.shape, np.int32)
  for picture, mask in zip(x, masks):
    slopes = rng.uniform(-0.5, 0.5, 2)
    picture[:] = 0.25 + (slopes[0] * rows + slopes[1] * columns) / _DISC_SIZE
    for _ in range(rng.integers(0, _MAX_SQUARES, endpoint=True)):
      top, left = rng.integers(0, _DISC_SIZE - 8, 2)
      side = rng.integers(4, 8, endpoint=True)
      picture[top : top + side, left : left + side] = rng.uniform(0.3, 0.8)
    for _ in range(rng.integers(1, _MAX_DISCS, endpoint=True)):
      row, column = rng.uniform(0, _DISC_SIZE, 2)
      distances = np.hypot(rows - row, columns - column)
      inside = distances <= rng.uniform(*_RADII)
      picture[inside] = rng.uniform(0.5, 1)
      mask[inside] = 1
  return x, masks


def _draw_findings(
    number: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
  """Draws intensities `[number, size, size]` and labels `[number, 4]`."""
  rows, columns = np.indices((_FINDING_SIZE, _FINDING_SIZE))
  labels = (rng.random((number, len(_FINDINGS))) < _FINDING_SHARE).astype(
      np.int32
  )
  x: np.ndarray = np.zeros((number, _FINDING_SIZE, _FINDING_SIZE))
  for picture, present in zip(x, labels):
    for kind in rng.permutation(len(_FINDINGS)):
      row, column = rng.integers(3, _FINDING_SIZE - 3, 2)
      down, right = rows - row, columns - column
      distances = np.hypot(down, right)
      is_near = np.maximum(np.abs(down), np.abs(right)) <= 3
      shape = (
          is_near & (down == right),
          (distances > 1.8) & (distances < 3.2),
          distances < 1.8,
          is_near & (columns % 2 == 0),
      )[kind]
      intensity = rng.uniform(0.5, 1)
      if present[kind]:
        picture[shape] = intensity
  return x, labels


def _draw_windows(
    number: int, sensors: _Sensors, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
  """Draws series `[number, steps, 3]` and the labels of their motions."""
  y = rng.permutation(np.arange(number) % len(_MOTIONS))
  motions = [list(_MOTIONS.values())[label] for label in y]
  cycles = np.array([rng.uniform(*motion.cycles) for motion in motions])
  amplitudes = np.array([motion.amplitude for motion in motions])
  phases = rng.uniform(0, 2 * np.pi, (number, 1, 3))
  times = np.arange(_NUM_STEPS)[:, np.newaxis] / _NUM_STEPS
  angles = 2 * np.pi * cycles[:, np.newaxis, np.newaxis] * times + phases
  signal = amplitudes[:, np.newaxis, np.newaxis] * np.sin(angles)
  signal = signal + sensors.noise * rng.standard_normal(signal.shape)
  return np.array(sensors.offsets) + np.array(sensors.gains) * signal, y
