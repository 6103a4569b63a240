"""Batches of a dataset's samples, in a given order."""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tff_bn.common import dataset_options


class GatherOrder(NamedTuple):
  """Batches as ranges of a list of samples.

  Attributes:
    samples: The positions of the samples that occur, each once (int64).
    positions: Positions in `samples` (int32).
    starts: Where in `positions` each batch starts (int64).
    stops: Where in `positions` each batch stops (int64).
  """

  samples: np.ndarray
  positions: np.ndarray
  starts: np.ndarray
  stops: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
  """The samples of each batch.

  Attributes:
    passes: The positions of the samples. A batch ends where its pass ends.
    batch_size: The number of samples in a batch. The last batch of a pass may
      be smaller.
  """

  passes: Sequence[np.ndarray]
  batch_size: int

  def dataset(self, x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """Builds a dataset of the batches.

    Args:
      x: All samples, uint8 or float32.
      y: Their classes.

    Returns:
      Batches of `x` as float32 (uint8 is scaled to [0, 1]) and `y`. The dataset
      stores only the samples that occur in it, each once.
    """
    order = self.gather_order()
    if len(order.samples) == len(order.positions):
      # No sample occurs twice. Without a function to trace, such a dataset is
      # built twenty times as fast as the one below.
      chosen = np.concatenate(self.passes)
      dataset = tf.data.Dataset.from_tensor_slices((x[chosen], y[chosen]))
      dataset = dataset.batch(self.batch_size)
      if x.dtype == np.uint8:
        dataset = dataset.map(_scale)
      return dataset_options.without_optimizer(dataset)
    return gather(
        tf.constant(x[order.samples]), tf.constant(y[order.samples]), *order[1:]
    )

  def gather_order(self) -> GatherOrder:
    """Returns the batches in the form that `gather` takes."""
    order = np.concatenate(self.passes)
    samples, positions = np.unique(order, return_inverse=True)
    ends = np.cumsum([len(indices) for indices in self.passes])
    starts = np.concatenate(
        [
            np.arange(end - len(indices), end, self.batch_size)
            for end, indices in zip(ends, self.passes)
        ]
    )
    # A batch ends where the next one begins.
    stops: np.ndarray = np.append(starts[1:], len(order))
    return GatherOrder(samples, positions.astype(np.int32), starts, stops)


def gather(
    x: tf.Tensor,
    y: tf.Tensor,
    positions: tf.Tensor,
    starts: tf.Tensor,
    stops: tf.Tensor,
) -> tf.data.Dataset:
  """Builds a dataset of batches that stores each sample once.

  Args:
    x: Samples, uint8 or float32.
    y: Their classes.
    positions: Positions in `x` and `y` (int32).
    starts: Where in `positions` each batch starts (int64).
    stops: Where in `positions` each batch stops (int64).

  Returns:
    Batches of `x` as float32 (uint8 is scaled to [0, 1]) and `y`.
  """
  positions = tf.convert_to_tensor(positions)

  def batch(start, stop):
    chosen = positions[start:stop]
    return _scale(tf.gather(x, chosen), tf.gather(y, chosen))

  dataset = tf.data.Dataset.from_tensor_slices((starts, stops)).map(batch)
  return dataset_options.without_optimizer(dataset)


def _scale(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Scales uint8 to [0, 1]; keeps float32."""
  if x.dtype == tf.uint8:
    x = tf.cast(x, tf.float32) / 255
  return x, y
