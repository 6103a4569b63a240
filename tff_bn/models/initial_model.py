"""Starts from a saved Keras model."""

from collections.abc import Callable
import functools
import os
from typing import Any, Optional

import keras
import numpy as np

# Keras needs the classes of this package to load models.
from tff_bn import layers as _  # noqa: F401
from tff_bn.catalog import models
from tff_bn.catalog import tasks
from tff_bn.common import files
from tff_bn.common import user_functions
from tff_bn.data import dataset as dataset_lib
from tff_bn.keras_model import copying
from tff_bn.keras_model import raw_inputs
from tff_bn.models import building

# How many means and deviations an error shows.
_MAX_NUMBERS = 3


def initial_model_fn(
    path: str | os.PathLike[str],
    input_shape: tuple[int, ...],
    num_outputs: int,
    batch_norm_momentum: Optional[float] = None,
    frozen_layers: Optional[str] = None,
    *,
    task: str = tasks.CLASSIFICATION,
    sha256: Optional[str] = None,
) -> Callable[[], keras.Model]:
  """Returns a function that builds copies of a saved model with its weights.

  The weights include running statistics. Layers that are not trainable in the
  file stay frozen. If the file takes raw samples, as the files of a run do by
  default, its last layer is the model, which takes scaled samples.

  The file is loaded here once, in the safe mode of Keras. It may contain layers
  of Keras and of this package, and classes that are registered by
  `keras.saving.register_keras_serializable`.

  Args:
    path: A file that ends in `.keras`, as `model.save` writes it.
    input_shape: The shape of one sample.
    num_outputs: The number of outputs, see `build_model_fn`.
    batch_norm_momentum: The momentum of the running statistics of all batch
      normalization layers. Default: the momentum in the file.
    frozen_layers: A regular expression for layers that are not trained, see
      `tff_bn.freeze_layers`. Default: no other layers than in the file.
    task: A key of `tff_bn.catalog.tasks.TASKS`. It decides the shape of the
      model's output.
    sha256: The SHA-256 that the file must have, in hexadecimal digits. Default:
      any.

  Returns:
    A function without arguments that returns a new `keras.Model`, which is not
    compiled.

  Raises:
    ValueError: If the file is missing, has another checksum or can't be loaded,
      or its model does not fit the data or another argument.
  """
  path = os.fspath(path)
  subject = _subject(path)
  building.check_task(task)
  for option, value in (
      (models.INITIAL_MODEL, path),
      (models.INITIAL_MODEL_SHA256, sha256),
      (models.BATCH_NORM_MOMENTUM, batch_norm_momentum),
      (models.FROZEN_LAYERS, frozen_layers),
  ):
    if value is not None:
      option.check(value)
  try:
    models.INITIAL_MODEL.values.load(path)
  except ValueError as error:
    raise ValueError(f'{subject}: {error}') from error
  path = os.path.expanduser(path)
  if sha256 is not None:
    found = files.checksum(path)
    if found != sha256:
      raise ValueError(
          f'{subject}: the file has changed. Its SHA-256 is {found}, not'
          f' {sha256}.'
      )
  initial = raw_inputs.unwrap(_load(subject, path))
  building.check_outputs(subject, initial, input_shape, num_outputs, task)

  def model_fn() -> keras.Model:
    model = copying.copy_model(initial)
    building.adapt(subject, model, batch_norm_momentum, frozen_layers)
    return model

  model_fn()
  return model_fn


def check_scaling(
    path: str | os.PathLike[str], scaling: Optional[dataset_lib.Scaling]
) -> None:
  """Checks that a file that takes raw samples scales them as a run does.

  Otherwise the model would get other values than in its training. Files that
  take the samples of the training do not say how these were scaled.

  Args:
    path: The file.
    scaling: The scaling of the run's dataset.

  Raises:
    ValueError: If the file scales the samples in another way.
  """
  subject = _subject(path)
  model = _load(subject, os.path.expanduser(path))
  if not raw_inputs.is_wrapped(model):
    return
  mean = None if scaling is None else scaling.mean
  deviation = None if scaling is None else scaling.deviation
  if not raw_inputs.scales_as(model, mean, deviation):
    how = 'does not scale them'
    if scaling is not None:
      how = (
          f'subtracts {_brief(scaling.mean)} and divides by'
          f' {_brief(scaling.deviation)}'
      )
    raise ValueError(
        f'{subject}: the file takes raw samples and scales their channels or'
        f' features in another way than this run, which {how}. Use the'
        ' `pixel_scaling` and the data of the run that wrote the file, or start'
        ' from the model alone: the file of a run with export=training, or'
        ' keras.models.load_model(FILE).layers[-1].save(OTHER_FILE).'
    )


def _subject(path: str | os.PathLike[str]) -> str:
  return f'initial_model={os.fspath(path)}'


def _brief(values: np.ndarray) -> str:
  texts = [f'{value:g}' for value in values[:_MAX_NUMBERS]]
  return ', '.join([*texts, '…'] if len(values) > _MAX_NUMBERS else texts)


def _load(subject: str, path: str) -> keras.Model:
  """Loads a model in the safe mode of Keras."""
  try:
    model = _load_file(path, files.checksum(path))
  # Keras raises errors of many kinds.
  except Exception as error:
    raise ValueError(
        f'{subject}: Keras cannot load the file in its safe mode'
        f' ({user_functions.brief(error)}). Its layers must be of Keras or of'
        ' tff_bn, and no keras.layers.Lambda with a function of Python.'
    ) from error
  if not isinstance(model, keras.Model):
    raise ValueError(
        f'{subject}: the file holds a {type(model).__name__}, not a'
        ' keras.Model.'
    )
  return model


@functools.lru_cache(maxsize=1)
def _load_file(path: str, checksum: str) -> Any:
  """Loads a file with this checksum; nobody may change what is returned.

  A large model takes seconds, and the check of the scaling and each run of a
  comparison need it.
  """
  del checksum  # A file that changed is loaded again.
  return keras.saving.load_model(path, compile=False, safe_mode=True)
