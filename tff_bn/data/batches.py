"""Batches of samples of a dataset, and the order in which they come."""

from collections.abc import Sequence
import dataclasses

import numpy as np
import tensorflow as tf

from tff_bn.common import dataset_options


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
  """Which samples are in which batch.

  Attributes:
    passes: Positions of samples; a batch never reaches over the end of a pass.
    batch_size: Samples in a batch; the last of each pass may have fewer.
  """

  passes: Sequence[np.ndarray]
  batch_size: int

  def dataset(self, x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """The batches.

    Args:
      x: All samples, uint8 or float32.
      y: Their classes.

    Returns:
      Batches of `x` as float32 (uint8 is scaled to [0, 1]) and `y`. The dataset
      holds the samples that occur in it, each once, and no others.
    """
    samples, *order = self.gather_order()
    if len(samples) == len(order[0]):
      # No sample occurs twice. Without a function to trace, such a dataset is
      # built twenty times as fast as the one below.
      chosen = np.concatenate(self.passes)
      dataset = tf.data.Dataset.from_tensor_slices((x[chosen], y[chosen]))
      dataset = dataset.batch(self.batch_size)
      if x.dtype == np.uint8:
        dataset = dataset.map(_scale)
      return dataset_options.without_optimizer(dataset)
    return gather(tf.constant(x[samples]), tf.constant(y[samples]), *order)

  def gather_order(
      self,
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The batches as ranges of a list of positions, for `gather`.

    Returns:
      The samples that occur, each once (int64); positions in these (int32); and
      where in this list each batch starts and where it stops (int64).
    """
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
    stops = np.append(starts[1:], len(order))
    return samples, positions.astype(np.int32), starts, stops


def gather(
    x: tf.Tensor,
    y: tf.Tensor,
    positions: tf.Tensor,
    starts: tf.Tensor,
    stops: tf.Tensor,
) -> tf.data.Dataset:
  """Puts batches together, without a copy of samples that occur again.

  Args:
    x: Samples, uint8 or float32.
    y: Their classes.
    positions: int32, positions in `x` and `y`.
    starts: int64, where in `positions` each batch starts.
    stops: int64, where it stops.

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
  """Scales uint8 to [0, 1]; leaves float32 as it is."""
  if x.dtype == tf.uint8:
    x = tf.cast(x, tf.float32) / 255
  return x, y
