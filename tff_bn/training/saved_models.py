"""The models that a run ends with, as a folder.

| entry | content |
| --- | --- |
| `model.keras` | the global model, for plain Keras |
| `weights.npz` | its weights, plain arrays by the variables' names |
| `clients/NAME.keras` | a client's own model, for plain Keras |
| `clients/NAME.npz` | its weights, if they differ from the global model's |
| `manifest.json` | which client has which NAME; checksums of all files |

The folder appears when it is complete. What is read here are the arrays alone:
a Keras file can hold code, which loading it would run.
"""

from collections.abc import Collection, Iterator, Mapping
import functools
import hashlib
import io
import os
import pathlib
import re
import shutil
from typing import Any, Optional

import keras
import numpy as np

from tff_bn.common import files
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.training import manifests

FORMAT = 1

_KERAS_MODEL = 'model.keras'
_WEIGHTS = 'weights.npz'
_CLIENTS = 'clients'
# Long enough that no two clients of a run get the same name.
_HASH_DIGITS = 16
# So short that every file system takes it.
_MAX_READABLE = 40


def client_file_stem(client_id: str) -> str:
  """The name of a client's files, without their endings.

  Args:
    client_id: The client.

  Returns:
    A name that every file system takes, whatever the id: what it can show of
    the id, and a hash of it.
  """
  readable = re.sub('[^A-Za-z0-9_-]+', '_', client_id)[:_MAX_READABLE]
  digest = hashlib.sha256(client_id.encode()).hexdigest()
  return f'{readable}-{digest[:_HASH_DIGITS]}'


class Writer:
  """Writes the models of a run."""

  def __init__(
      self,
      folder: pathlib.Path,
      model: BatchNormModel,
      description: Mapping[str, Any],
  ):
    """Initializes the writer.

    Args:
      folder: The folder of the models; replaced by `publish`.
      model: The model.
      description: What the manifest holds besides, as JSON can express it.
    """
    self._folder = folder
    self._model = model
    self._description = dict(description)
    self._clients: dict[str, str] = {}
    self._global_values: list[np.ndarray] = []
    self._keras_model: Optional[keras.Model] = None

  @property
  def _unfinished(self) -> pathlib.Path:
    return self._folder.with_name(f'.{self._folder.name}.part')

  def write_global(self, weights: ModelWeights) -> None:
    """Writes the global model.

    Args:
      weights: Its weights.
    """
    remove(self._folder)
    self._unfinished.mkdir(parents=True)
    self._global_values = self._values(weights)
    self._keras_model = self._model.to_keras(weights)
    self._save('', _KERAS_MODEL, _WEIGHTS, dict(enumerate(self._global_values)))

  def write_client(self, client_id: str, weights: ModelWeights) -> None:
    """Writes a client's own model, after the global one.

    Args:
      client_id: The client.
      weights: Its weights.
    """
    (self._unfinished / _CLIENTS).mkdir(exist_ok=True)
    stem = client_file_stem(client_id)
    self._clients[client_id] = stem
    values = self._values(weights)
    # One Keras model for all, because building one takes long.
    self._keras_model.set_weights(values)
    own = {
        position: value
        for position, value in enumerate(values)
        if value.tobytes() != self._global_values[position].tobytes()
    }
    self._save(_CLIENTS, f'{stem}.keras', f'{stem}.npz', own)

  def publish(self) -> None:
    """Makes the folder appear."""
    manifest = {
        'format': FORMAT,
        **self._description,
        'clients': self._clients,
        'files': dict(_checksums(self._unfinished)),
    }
    manifests.write(self._unfinished, manifest)
    os.replace(self._unfinished, self._folder)
    files.sync_folder(self._folder.parent)

  def _values(self, weights: ModelWeights) -> list[np.ndarray]:
    return [np.asarray(v) for v in self._model.from_model_weights(weights)]

  def _save(
      self,
      subfolder: str,
      keras_name: str,
      arrays_name: str,
      values: Mapping[int, np.ndarray],
  ) -> None:
    folder = self._unfinished / subfolder
    with files.naming(folder / keras_name):
      self._keras_model.save(folder / keras_name)
      with open(folder / keras_name, 'rb') as file:
        os.fsync(file.fileno())
    arrays = {self._model.variables[p].name: v for p, v in values.items()}
    path = folder / arrays_name
    with files.naming(path), open(path, 'wb') as file:
      np.savez(file, **arrays)
      files.sync(file)


def remove(folder: pathlib.Path) -> None:
  """Removes a folder of models, also one that was not finished."""
  for path in (folder, folder.with_name(f'.{folder.name}.part')):
    if path.exists():
      shutil.rmtree(path)


def _checksums(folder: pathlib.Path) -> Iterator[tuple[str, str]]:
  for path in sorted(folder.rglob('*')):
    if path.is_file() and path.name != manifests.FILE_NAME:
      name = path.relative_to(folder).as_posix()
      yield name, hashlib.sha256(path.read_bytes()).hexdigest()


class SavedModels:
  """Reads the models of a run.

  Attributes:
    manifest: What `manifest.json` holds.
  """

  def __init__(self, folder: pathlib.Path):
    """Reads the manifest.

    Args:
      folder: The folder of the models.

    Raises:
      manifests.DamagedError: If the manifest is damaged or missing.
      ValueError: If the folder has another format.
      OSError: If the manifest can't be read at present.
    """
    self._folder = folder
    try:
      self.manifest = manifests.read(folder, FORMAT)
    except manifests.DamagedError as error:
      if (folder / manifests.FILE_NAME).exists():
        raise
      raise manifests.DamagedError(
          f'{error} Without it, as in runs of earlier versions of tff_bn, the'
          ' models cannot be read.'
      ) from error
    self._clients: dict[str, str] = self.manifest['clients']
    self._files: dict[str, str] = self.manifest['files']

  @property
  def client_ids(self) -> Collection[str]:
    """The clients that have models of their own."""
    return self._clients.keys()

  def check(self) -> None:
    """Checks all files.

    Raises:
      manifests.DamagedError: If a file is damaged or missing.
      OSError: If a file can't be read at present.
    """
    for name in self._files:
      self._read(name)

  def _read(self, name: str) -> bytes:
    try:
      data = (self._folder / name).read_bytes()
    except FileNotFoundError as error:
      raise manifests.DamagedError(
          f'{self._folder / name} is missing.'
      ) from error
    if hashlib.sha256(data).hexdigest() != self._files.get(name):
      raise manifests.DamagedError(
          f'{self._folder / name} is not as the run has written it.'
      )
    return data

  def weights(
      self, model: BatchNormModel, client_id: Optional[str] = None
  ) -> ModelWeights:
    """Reads the weights of a model.

    Args:
      model: The model, built as the run has built it.
      client_id: The client whose own model it is. Default: the global model.

    Returns:
      The weights.

    Raises:
      manifests.DamagedError: If a file is damaged or missing.
      ValueError: If the weights do not fit the model.
      OSError: If a file can't be read at present.
    """
    values = dict(self._global_arrays)
    name = _WEIGHTS
    if client_id is not None:
      name = f'{_CLIENTS}/{self._clients[client_id]}.npz'
      values.update(self._arrays(name))
    found = {n: (v.shape, v.dtype) for n, v in values.items()}
    expected = {
        v.name: (v.shape, v.dtype.as_numpy_dtype) for v in model.variables
    }
    if found != expected:
      wrong = next(
          n for n in (*expected, *found) if found.get(n) != expected.get(n)
      )
      raise ValueError(
          f'{self._folder / name} does not have the weights of the model that'
          f' the flags of the run describe: {wrong} is'
          f' {found.get(wrong, "missing")}, but should be'
          f' {expected.get(wrong, "missing")}.'
      )
    return model.to_model_weights([values[v.name] for v in model.variables])

  @functools.cached_property
  def _global_arrays(self) -> dict[str, np.ndarray]:
    return self._arrays(_WEIGHTS)

  def _arrays(self, name: str) -> dict[str, np.ndarray]:
    data = self._read(name)
    try:
      with np.load(io.BytesIO(data), allow_pickle=False) as npz:
        return {key: npz[key] for key in npz.files}
    except Exception as error:  # pylint: disable=broad-except
      raise manifests.DamagedError(
          f'{self._folder / name} is damaged.'
      ) from error


def is_intact(folder: pathlib.Path) -> bool:
  """Whether a folder has the models of a run, none of them damaged.

  Args:
    folder: The folder; it need not exist.

  Returns:
    Whether it has.

  Raises:
    OSError: If a file can't be read at present.
  """
  try:
    SavedModels(folder).check()
  except ValueError:
    return False
  return True
