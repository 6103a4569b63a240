"""Predicts the classes or targets of files with the model of a run."""

from collections.abc import Iterable, Iterator, Sequence
import os
import pathlib
from typing import Any, NamedTuple, Optional

import keras
import numpy as np
import tensorflow as tf

from tff_bn.catalog import tasks
from tff_bn.common import csv_files
from tff_bn.common import files
from tff_bn.common import memory
from tff_bn.common import spelling
from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import image_headers
from tff_bn.data import images
from tff_bn.data import table_encoding
from tff_bn.data import table_files
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.training import saved_inputs
from tff_bn.training import saved_models

_BATCH_SIZE = 256
_ARRAY = '.npy'


class _Sample(NamedTuple):
  """A sample and where it is from; `row` is empty for a picture."""

  file: str
  row: str
  x: np.ndarray


def check_task(task: str, run: os.PathLike) -> None:
  """Raises a `ValueError` if predictions of a task do not fit into a table."""
  if task == tasks.SEGMENTATION:
    raise ValueError(
        f'--predict is impossible for --run={run}: its task is {task}, whose'
        ' predictions are pictures. tff-bn-train prints code that makes them.'
    )


def check_client(
    saved: saved_models.SavedModels, client: Optional[str], run: os.PathLike
) -> None:
  """Raises a `ValueError` if a run has no model of a client."""
  known = list(saved.client_ids) or list(
      saved.manifest.get(saved_inputs.CLIENTS, ())
  )
  if client is None or client in known:
    return
  if not known:
    raise ValueError(
        f'--client={client} has no effect: the clients of --run={run} have no'
        ' own models. Leave it out.'
    )
  raise ValueError(
      f'--client={client}: the run has no model of such a client, only of'
      f' {spelling.name_some(known)}.'
      f'{spelling.suggestion(client, known, are_given=True)} Without --client,'
      ' the global model is used.'
  )


def read(
    paths: Sequence[str],
    saved: saved_models.SavedModels,
    image_size: Optional[tuple[int, int]],
    client: Optional[str] = None,
) -> list[_Sample]:
  """Reads the samples in files as the model of a run takes them.

  Args:
    paths: Pictures (PNG or JPEG), tables (CSV) if the run was trained on a
      table, or NumPy arrays (.npy) of samples as the training data had them.
    saved: The run's models.
    image_size: The height and width to which the run resized its images.
    client: The client whose model takes them. Default: the global model.

  Raises:
    ValueError: If a file can't be read, or its samples do not fit the model.
  """
  manifest = saved.manifest
  encoding = table_encoding.of_manifest(saved.manifest)
  samples = [
      sample
      for path in paths
      for sample in _read(path, manifest, image_size, encoding)
  ]
  numbers = saved_inputs.scaling(manifest, client)
  if numbers is not None:
    scaling = dataset_lib.Scaling.from_json(numbers)
    samples = [
        s._replace(x=(s.x - scaling.mean) / scaling.deviation) for s in samples
    ]
  return samples


def _read(
    path: str,
    manifest: dict[str, Any],
    image_size: Optional[tuple[int, int]],
    encoding: Optional[table_encoding.TableEncoding],
) -> Iterator[_Sample]:
  """Yields the samples of a file, before the scaling of channels."""
  place = f'--predict={path}'
  file = os.path.expanduser(path)
  if os.path.isdir(file):
    raise ValueError(f'{place}: this is a folder; name the files in it.')
  # Reading from a pipe may last forever.
  if not os.path.isfile(file):
    raise ValueError(f'{place}: there is no such file.')
  shape = tuple(manifest['input_shape'])
  if path.endswith(_ARRAY):
    x = _read_array(place, file, shape, image_size)
  elif encoding is not None:
    table = table_files.read_csv_file(place, file)
    x = encoding.encode(place, table, is_later=True)
  elif len(shape) == 3:
    picture = _read_picture(place, file, shape, image_size)
    yield _Sample(path, '', _divided(picture, manifest))
    return
  else:
    raise ValueError(
        f'{place}: the samples of the run are no pictures but have the shape'
        f' {shape}; give NumPy arrays ({_ARRAY}) of them.'
    )
  for number, row in enumerate(x, start=1):
    yield _Sample(path, str(number), _divided(row, manifest))


def _divided(x: np.ndarray, manifest: dict[str, Any]) -> np.ndarray:
  """Returns a sample divided as in the training."""
  divisor = manifest['divisor']
  if divisor is None:  # It differs between the domains.
    divisor = 255 if x.dtype == np.uint8 else 1
  return x.astype(np.float32) / np.float32(divisor)


def _read_array(
    place: str,
    file: str,
    shape: tuple[int, ...],
    image_size: Optional[tuple[int, int]],
) -> np.ndarray:
  try:
    # Unpickling could run code.
    x = np.load(file, allow_pickle=False)
  # A damaged file may raise anything.
  except Exception as error:
    raise ValueError(f'{place} is no readable array ({error}).') from error
  if len(shape) == 3 and x.ndim == 3 and shape[-1] == 1:
    x = x[..., np.newaxis]
  if x.dtype.kind not in 'biuf':
    raise ValueError(f'{place} has the dtype {x.dtype}; samples are numbers.')
  if image_size is not None and x.ndim == 4:
    x = x if x.dtype == np.uint8 else x.astype(np.float32)
    x = images.resize_array(x, image_size)
  if x.shape[1:] != shape or not len(x):
    raise ValueError(
        f'{place} has the shape {x.shape}; it must be [samples,'
        f' {", ".join(map(str, shape))}], with at least one sample.'
    )
  if not np.isfinite(x).all():
    raise ValueError(f'{place} has values that are NaN or infinite.')
  return x


def _read_picture(
    place: str,
    file: str,
    shape: tuple[int, ...],
    image_size: Optional[tuple[int, int]],
) -> np.ndarray:
  """Reads a picture as uint8 of the shape of the model's input."""
  channels = shape[-1]
  if channels not in (1, 3):
    raise ValueError(
        f'{place}: the model takes {channels} channels, but pictures have 1 or'
        f' 3; give NumPy arrays ({_ARRAY}).'
    )
  no_picture = ValueError(f'{place} is no readable PNG or JPEG image.')
  try:
    with open(file, 'rb') as opened:
      size = image_headers.read_size(opened)
  except (OSError, ValueError) as error:
    raise no_picture from error
  memory.check_fits(f'{place}: the pixels', 3 * size[0] * size[1])
  try:
    picture = tf.io.decode_image(
        tf.io.read_file(file), channels, expand_animations=False
    )
  except tf.errors.OpError as error:
    raise no_picture from error
  if image_size is not None:
    picture = images.resize(picture, image_size)
  if tuple(picture.shape) != shape:
    raise ValueError(
        f'{place} has {size[0]}x{size[1]} pixels, but the model of the run'
        f' takes {shape[0]}x{shape[1]}; the run has no --image_size to which it'
        ' would be resized.'
    )
  return picture.numpy()


def predict(
    saved: saved_models.SavedModels,
    model: BatchNormModel,
    client: Optional[str],
    samples: Sequence[_Sample],
) -> np.ndarray:
  """Returns the outputs of the model for all samples."""
  own = client if client in saved.client_ids else None
  keras_model = model.to_keras(saved.weights(model, own))
  x = np.stack([sample.x for sample in samples])
  return keras_model.predict(x, batch_size=_BATCH_SIZE, verbose=0)


def write(
    path: pathlib.Path,
    samples: Iterable[_Sample],
    outputs: np.ndarray,
    manifest: dict[str, Any],
) -> list[str]:
  """Writes predictions into a CSV file; returns the predicted texts."""
  titles, cells = _table(manifest, outputs)
  rows = [
      (sample.file, sample.row, *row) for sample, row in zip(samples, cells)
  ]
  files.replace(path, csv_files.to_csv(('file', 'row', *titles), rows))
  return [str(row[0]) for row in cells]


def _table(
    manifest: dict[str, Any], outputs: np.ndarray
) -> tuple[list[str], list[list[Any]]]:
  """Returns the columns of the predictions, and the cells of each sample."""
  task = manifest['task']
  outputs = outputs.reshape(len(outputs), -1).astype(np.float64)
  if task == tasks.REGRESSION:
    titles = ['predicted']
    if outputs.shape[1] > 1:
      titles = [f'predicted_{n + 1}' for n in range(outputs.shape[1])]
    return titles, outputs.tolist()
  if task == tasks.CLASSIFICATION:
    shares = keras.ops.convert_to_numpy(keras.ops.softmax(outputs))
    labels = outputs.argmax(axis=1)
  else:
    shares = keras.ops.convert_to_numpy(keras.ops.sigmoid(outputs))
    labels = (outputs > 0).astype(int)
  if task == tasks.BINARY:
    shares = np.concatenate([1 - shares, shares], axis=1)
    labels = labels[:, 0]
  names = manifest['class_names'] or classes.numbers(shares.shape[1])
  if task == tasks.MULTILABEL:
    predicted = [
        ' '.join(name for name, yes in zip(names, row) if yes) for row in labels
    ]
  else:
    predicted = [names[label] for label in labels]
  return (
      ['predicted', *(f'probability of {name}' for name in names)],
      [[text, *row.tolist()] for text, row in zip(predicted, shares)],
  )
