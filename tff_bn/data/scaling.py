"""Scales the pixels of images and the features of vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from tff_bn.catalog import value_types
from tff_bn.catalog.options import Option
from tff_bn.catalog.parts import Part
from tff_bn.catalog.parts import Parts
from tff_bn.catalog.parts import listing
from tff_bn.imports import lazy

if TYPE_CHECKING:
  import numpy as np

  from tff_bn.data import dataset as dataset_lib
else:
  # Programs read the entries below to parse their flags, without NumPy.
  np = lazy.Module('numpy')
  dataset_lib = lazy.Module('tff_bn.data.dataset')

# Reading in chunks keeps the float copies small.
_CHUNK = 1024
_WHITE = 255
# Greater than any value of images that were scaled to [0, 1] and then changed.
_LARGE_PIXEL = 2
# A feature is small if the largest feature is larger by more than this factor.
LARGEST_RATIO = 100
# With fewer small features, a model loses little.
_SMALL_SHARE = 0.25


def _symmetric(
    dataset: dataset_lib.Dataset, indices: np.ndarray
) -> dataset_lib.Scaling:
  del indices  # The range of pixels is known.
  shape = dataset.input_shape
  if len(shape) != 3:
    raise ValueError(
        f'pixel_scaling=symmetric is for images, but dataset={dataset.name} has'
        f' vectors of {shape[0]} features; use pixel_scaling=standardized.'
    )
  for x in (dataset.x_train, dataset.x_test):
    if x.dtype != np.uint8 and (x.min() < 0 or x.max() > 1):
      raise ValueError(
          'pixel_scaling=symmetric needs values between 0 and 1, but'
          f' dataset={dataset.name} has values from {x.min():g} to'
          f' {x.max():g}; use pixel_scaling=standardized.'
      )
  half: np.ndarray = np.full(shape[-1:], 0.5, np.float32)
  return dataset_lib.Scaling(half, half)


def _standardized(
    dataset: dataset_lib.Dataset, indices: np.ndarray
) -> dataset_lib.Scaling:
  center, spread = _moments(dataset.x_train, indices)
  deviation: np.ndarray = spread.astype(np.float32)
  # Numbers of categories are no quantities.
  categories = _category_features(dataset)
  center[categories], deviation[categories] = 0, 1
  constant = deviation == 0
  if len(dataset.input_shape) == 3 and constant.any():
    raise ValueError(
        'pixel_scaling=standardized: channel'
        f' {np.flatnonzero(constant)[0]} of the training images of'
        f' {dataset.name} is constant, so it has no standard deviation; remove'
        ' the channel, or use pixel_scaling=unit.'
    )
  # Divided by it, a value of a feature that was constant in training is 0.
  largest = np.finfo(np.float32).max
  return dataset_lib.Scaling(
      center.astype(np.float32), np.where(constant, largest, deviation)
  )


def image_scaling(
    dataset: dataset_lib.Dataset, indices: np.ndarray
) -> dataset_lib.Scaling:
  """Computes the statistics of a client's images (FedRDN).

  Args:
    dataset: The dataset.
    indices: The positions of the client's training images.

  Returns:
    The means over the images of each image's mean and of its biased standard
    deviation, for each channel.

  Raises:
    ValueError: If the samples are no images, or if a channel is constant in
      each image.
  """
  shape = dataset.input_shape
  if len(shape) != 3:
    raise ValueError(
        f'pixel_scaling={RANDOM_CLIENT} is for images, but'
        f' dataset={dataset.name} has samples of shape {shape}; use'
        ' pixel_scaling=standardized.'
    )
  center, spread = _image_moments(dataset.x_train, indices)
  if not spread.all():
    channel = np.flatnonzero(spread == 0)[0]
    raise ValueError(
        f'pixel_scaling={RANDOM_CLIENT}: channel {channel} of each'
        f' training image of a client of {dataset.name} is constant, so the'
        ' client has no standard deviation; use'
        ' pixel_scaling=standardized.'
    )
  return dataset_lib.Scaling(
      center.astype(np.float32), spread.astype(np.float32)
  )


def _category_features(dataset: dataset_lib.Dataset) -> list[int]:
  """Returns the positions of the features that are numbers of categories."""
  return [] if dataset.table is None else list(dataset.table.category_counts)


RANDOM_CLIENT = 'random_client'
# They build the scaling of a dataset, given the positions of the training
# samples from which means and deviations come. Values of type uint8 are scaled
# to [0, 1] first.
PIXEL_SCALINGS = Parts(
    Part(
        'unit',
        'values in [0, 1]; floats are used as they are',
        lambda dataset, indices: None,
    ),
    Part('symmetric', 'values in [-1, 1]; only for images', _symmetric),
    Part(
        'standardized',
        'minus the mean of the channel, or of the feature, divided by its'
        " standard deviation, over the training clients' data; embedded"
        ' categories stay as they are',
        _standardized,
    ),
    Part(
        RANDOM_CLIENT,
        'minus the mean of the channel, divided by its standard deviation; in'
        ' training, of a client that is drawn for each image, otherwise of the'
        " own client, or the clients' mean for a model without a client"
        ' (FedRDN); only for images',
        image_scaling,
    ),
)
PIXEL_SCALING = Option(
    'pixel_scaling',
    value_types.Choice(PIXEL_SCALINGS),
    'What the pixels of images, or the features of vectors, become before they'
    f' enter the model:\n{listing(PIXEL_SCALINGS)}',
    'unit',
    convert=lambda name: None if name == 'unit' else name,
)


def pixel_scaling(
    name: str, dataset: dataset_lib.Dataset, indices: np.ndarray
) -> Optional[dataset_lib.Scaling]:
  """Computes a scaling.

  Args:
    name: A key of `PIXEL_SCALINGS`.
    dataset: The dataset.
    indices: The positions of the training samples from which `standardized`
      takes its means and deviations; for `random_client`, those of one client,
      see `image_scaling`.

  Returns:
    The scaling; `None` for `unit`. A feature of vectors that is constant in
    these samples becomes 0.

  Raises:
    ValueError: If the name is unknown, if the dataset has no images with
      `symmetric` or `random_client`, or floats outside of [0, 1] with
      `symmetric`, or if a channel of images is constant with `standardized` or
      `random_client`.
  """
  PIXEL_SCALING.check(name)
  return PIXEL_SCALINGS[name].load()(dataset, indices)


def small_features(dataset: dataset_lib.Dataset) -> int:
  """Counts the features of vectors that are too small beside the largest one.

  A feature is small if its largest absolute value in the training samples is
  less than a `LARGEST_RATIO`-th of the largest feature's. The count is 0 if
  fewer than a quarter of the features are small, or if the samples are images.
  Constant features and numbers of categories do not count.
  """
  if len(dataset.input_shape) == 3:
    return 0
  x = dataset.x_train.reshape(-1, dataset.input_shape[-1])
  x = np.delete(x, _category_features(dataset), axis=-1)
  low, high = (extreme(x, axis=0).astype(float) for extreme in (np.min, np.max))
  sizes = np.maximum(-low, high)[low < high]
  if not sizes.size:
    return 0
  number = np.count_nonzero(sizes * LARGEST_RATIO < sizes.max())
  return int(number) if number >= _SMALL_SHARE * len(sizes) else 0


def has_unscaled_floats(dataset: dataset_lib.Dataset) -> bool:
  """Whether training images are floats that seem to be pixels from 0 to 255.

  They are not negative and reach far beyond 1.
  """
  x = dataset.x_train
  return bool(
      x.dtype != np.uint8
      and x.ndim == 4
      and x.min() >= 0
      and x.max() > _LARGE_PIXEL
  )


def _image_moments(
    x: np.ndarray, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the means over images of each image's mean and deviation."""
  factor = 1 / _WHITE if x.dtype == np.uint8 else 1
  sums = np.zeros([2, x.shape[-1]])
  for chunk in np.array_split(indices, -(-len(indices) // _CHUNK)):
    images = x[chunk] * np.float64(factor)
    for number, found in enumerate((images.mean((1, 2)), images.std((1, 2)))):
      sums[number] += found.sum(0)
  center, spread = sums / len(indices)
  return center, spread


def _moments(
    x: np.ndarray, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the mean and the standard deviation of each channel.

  The deviation of a constant channel is exactly 0.
  """
  axes = tuple(range(x.ndim - 1))
  chunks = np.array_split(indices, -(-len(indices) // _CHUNK))
  factor = 1 / _WHITE if x.dtype == np.uint8 else 1

  def mean(center: Any, power: int) -> np.ndarray:
    sums = [
        np.sum((x[chunk] * factor - center) ** power, axes, np.float64)
        for chunk in chunks
    ]
    return np.sum(sums, 0) / (len(indices) * np.prod(x.shape[1:-1]))

  center = mean(0, 1)
  low = np.min([np.min(x[chunk], axes) for chunk in chunks], 0)
  high = np.max([np.max(x[chunk], axes) for chunk in chunks], 0)
  # The mean of a constant is rounded.
  return center, np.where(low == high, 0, np.sqrt(mean(center, 2)))
