"""Batches of a dataset's samples, in a given order."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from tff_bn.common import batch_arrays
from tff_bn.common import dataset_options
from tff_bn.data import dataset as dataset_lib

# An iterator over a dataset that calls a function takes milliseconds to make,
# which is longer than a step of a small model. Up to this size, batches are
# therefore copied in their order, and no function is needed.
_MAX_COPIED_VALUES = 2**20
_MAX_COPIED_PARTS = 16

# The value of uint8 that becomes 1.
_WHITE = np.float32(255)

# The device of datasets.
_HOST = 'CPU:0'


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
  """The samples of each batch.

  Attributes:
    passes: The positions of the samples. A batch ends where its pass ends.
    batch_size: The number of samples in a batch. The last batch of a pass may
      be smaller.
    transforms: The transform of each image of all passes, of shape `[n, 2, 3]`,
      see `tff_bn.data.augmentation`; `None`: images stay as they are.
    scaling: How images are scaled after they were transformed, in place of the
      dataset's scaling. Its arrays may have the shape `[n, 1, 1, channels]`,
      for the images of all passes. `None`: as the dataset says.
  """

  passes: Sequence[np.ndarray]
  batch_size: int
  transforms: Optional[np.ndarray] = None
  scaling: Optional[dataset_lib.Scaling] = None

  def dataset(
      self,
      x: np.ndarray,
      y: np.ndarray,
      scaling: Optional[dataset_lib.Scaling] = None,
  ) -> tf.data.Dataset:
    """Builds a dataset of the batches.

    Args:
      x: All samples, uint8 or float32.
      y: Their labels. Masks of shape `[n, height, width]` are transformed as
        the images are.
      scaling: How images are scaled after they were transformed, unless the
        batches have their own scaling. Default: not.

    Returns:
      Batches of `x` as float32 (uint8 is scaled to [0, 1] first) and `y`. The
      dataset stores its batches if they take at most 4 MB and are not
      transformed. Otherwise it stores only the samples that occur in it, each
      once.
    """
    dataset = tf.data.experimental.from_variant(
        self.to_variant(x, y, scaling),
        (
            tf.TensorSpec((None, *x.shape[1:]), tf.float32),
            _label_spec(y),
        ),
    )
    arrays = self.to_arrays(x, y, scaling)
    if arrays is not None:
      batch_arrays.remember(dataset, arrays)
    return dataset

  def to_variant(
      self,
      x: np.ndarray,
      y: np.ndarray,
      scaling: Optional[dataset_lib.Scaling] = None,
  ) -> tf.Tensor:
    """Returns the variant tensor of `dataset`."""
    scaling = self.scaling or scaling
    parts = self._parts()
    shape = x.shape[1:]
    num_values = sum(map(len, parts)) * math.prod(shape)
    if (
        self.transforms is None
        and num_values <= _MAX_COPIED_VALUES
        and len(parts) <= _MAX_COPIED_PARTS
    ):
      build = _traced_slices(len(parts), shape, _label_spec(y))
      samples = _scaled(x[np.concatenate(parts)], scaling)
      ends = np.cumsum([len(indices) for indices in parts])
      arrays = [
          array
          for indices, part in zip(parts, np.split(samples, ends))
          for array in (part, y[indices])
      ]
      return _call(build, np.int64(self.batch_size), *arrays)
    order = np.concatenate(parts)
    samples, positions = np.unique(order, return_inverse=True)
    options = []
    if self.transforms is not None:
      options.append(_eight_numbers(self.transforms))
    if scaling is not None:
      options += [scaling.mean, scaling.deviation]
    return _call(
        _traced_gather(
            x.dtype.name,
            shape,
            _label_spec(y),
            is_transformed=self.transforms is not None,
            scaling_rank=0 if scaling is None else scaling.mean.ndim,
        ),
        x[samples],
        y[samples],
        positions.astype(np.int32),
        *self._ranges(parts),
        _WHITE if x.dtype == np.uint8 else np.float32(1),
        *options,
    )

  def to_arrays(
      self,
      x: np.ndarray,
      y: np.ndarray,
      scaling: Optional[dataset_lib.Scaling] = None,
  ) -> Optional[batch_arrays.BatchArrays]:
    """Returns the batches of `dataset`; `None` if images are transformed."""
    if self.transforms is not None:
      return None
    scaling = self.scaling or scaling
    parts = self._parts()
    starts, stops = self._ranges(parts) if parts else np.zeros([2, 0], np.int64)

    def load():
      order = np.concatenate([np.zeros(0, np.int64), *parts])
      return [_scaled(x[order], scaling), y[order]]

    return batch_arrays.BatchArrays(
        np.subtract(stops, starts, dtype=np.int64), load
    )

  def _parts(self) -> list[np.ndarray]:
    """Returns the passes, joined where no batch is smaller."""
    joined: list[list[np.ndarray]] = [[]]
    for indices in self.passes:
      joined[-1].append(indices)
      if len(indices) % self.batch_size:
        joined.append([])
    return [np.concatenate(part) for part in joined if part]

  def _ranges(
      self, parts: Sequence[np.ndarray]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns where in the joined parts each batch starts and stops."""
    # Lists, because NumPy is slow for a few numbers.
    ends = list(itertools.accumulate(map(len, parts)))
    starts = [
        start
        for end, indices in zip(ends, parts)
        for start in range(end - len(indices), end, self.batch_size)
    ]
    # A batch ends where the next one begins.
    stops = [*starts[1:], ends[-1]]
    return np.array(starts, np.int64), np.array(stops, np.int64)


def _scaled(
    x: np.ndarray, scaling: Optional[dataset_lib.Scaling]
) -> np.ndarray:
  """Scales uint8 to [0, 1], and scales this, or float32, further."""
  x = x / _WHITE if x.dtype == np.uint8 else x
  return x if scaling is None else (x - scaling.mean) / scaling.deviation


def _label_spec(y: np.ndarray) -> tf.TensorSpec:
  """Returns the type of a batch of labels."""
  return tf.TensorSpec((None, *y.shape[1:]), tf.as_dtype(y.dtype))


def _transformed(
    images: tf.Tensor, transforms: tf.Tensor, size: tuple[int, ...]
) -> tf.Tensor:
  """Transforms images `[n, height, width, channels]`; the border is 0."""
  return tf.raw_ops.ImageProjectiveTransformV3(
      images=images,
      transforms=transforms,
      output_shape=size,
      fill_value=0.0,
      interpolation='NEAREST',
      fill_mode='CONSTANT',
  )


def _eight_numbers(transforms: np.ndarray) -> np.ndarray:
  """Returns transforms as TensorFlow's kernel takes them."""
  # The last two numbers are the denominator of a projective transform.
  return np.pad(transforms.reshape([-1, 6]), ((0, 0), (0, 2)))


def _call(function: Callable[..., tf.Tensor], *arrays: Any) -> tf.Tensor:
  with tf.device(_HOST):
    return function(*map(tf.constant, arrays))


def _trace(
    function: Callable[..., tf.data.Dataset], *specs: tf.TensorSpec
) -> Callable[..., tf.Tensor]:
  """Traces a function that returns a dataset, which costs less per call."""

  def build(*arrays: tf.Tensor) -> tf.Tensor:
    dataset = dataset_options.without_optimizer(function(*arrays))
    return tf.data.experimental.to_variant(dataset)

  with tf.device(_HOST):
    return tf.function(build, autograph=False).get_concrete_function(*specs)


@functools.lru_cache
def _traced_slices(
    num_parts: int, shape: tuple[int, ...], label_spec: tf.TensorSpec
) -> Callable[..., tf.Tensor]:
  """Returns a function from a batch size and parts (x, y) to a dataset."""

  def slices(batch_size, *arrays):
    parts = [
        tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        for x, y in zip(arrays[::2], arrays[1::2])
    ]
    return functools.reduce(lambda a, b: a.concatenate(b), parts)

  part = [tf.TensorSpec((None, *shape), tf.float32), label_spec]
  return _trace(slices, tf.TensorSpec((), tf.int64), *(num_parts * part))


@functools.lru_cache
def _traced_gather(
    dtype: str,
    shape: tuple[int, ...],
    label_spec: tf.TensorSpec,
    *,
    is_transformed: bool,
    scaling_rank: int,
) -> Callable[..., tf.Tensor]:
  """Returns a function that gathers the samples of each batch.

  Its arguments are samples and their labels, the positions of these in the
  order in which they occur, where in this order each batch starts and stops,
  and the number by which the samples are divided. This is no constant, because
  TensorFlow would multiply by its inverse, which rounds differently. Optional
  arguments are the transforms of the samples, in the order in which they occur,
  and the mean and the deviation of each channel. Without these, `scaling_rank`
  is 0. With rank 4, each sample has its own, in the same order.
  """

  def gather(x, y, positions, starts, stops, divisor, *options):
    def batch(start, stop):
      chosen = positions[start:stop]
      samples = tf.cast(tf.gather(x, chosen), tf.float32) / divisor
      labels = tf.gather(y, chosen)
      if is_transformed:
        transforms = options[0][start:stop]
        samples = _transformed(samples, transforms, shape[:2])
        if are_masks:
          labels = _transformed(labels[..., tf.newaxis], transforms, shape[:2])
          labels = labels[..., 0]
      if scaling_rank:
        mean, deviation = options[-2:]
        if scaling_rank == 4:
          mean, deviation = mean[start:stop], deviation[start:stop]
        samples = (samples - mean) / deviation
      return samples, labels

    return tf.data.Dataset.from_tensor_slices((starts, stops)).map(batch)

  are_masks = label_spec.shape.rank == 3
  options = []
  if is_transformed:
    options.append(tf.TensorSpec((None, 8), tf.float32))
  if scaling_rank:
    scaling_shape = (None, 1, 1, *shape[-1:])[-scaling_rank:]
    options += 2 * [tf.TensorSpec(scaling_shape, tf.float32)]
  return _trace(
      gather,
      tf.TensorSpec((None, *shape), dtype),
      label_spec,
      tf.TensorSpec((None,), tf.int32),
      tf.TensorSpec((None,), tf.int64),
      tf.TensorSpec((None,), tf.int64),
      tf.TensorSpec((), tf.float32),
      *options,
  )
