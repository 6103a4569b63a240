"""The final models of a run, as a folder.

| entry | content |
| --- | --- |
| `model.keras` | the global model, for plain Keras |
| `weights.npz` | its weights, plain arrays by the variables' names |
| `clients/NAME.keras` | a client's own model, for plain Keras |
| `clients/NAME.npz` | its weights, if they differ from the global model's |
| `manifest.json` | the NAME of each client; checksums of all files |

The folder appears when it is complete. This module reads only the arrays,
because loading a Keras file can run code that it contains.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
import functools
import hashlib
import io
import pathlib
import re
import shutil
import types
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
# Short enough for every file system.
_MAX_READABLE = 40


def client_file_stem(client_id: str) -> str:
  """Returns the name of a client's files, without their endings.

  Args:
    client_id: The client.

  Returns:
    A name that is valid in every file system: the id without special
    characters, and a hash of the id.
  """
  readable = re.sub('[^A-Za-z0-9_-]+', '_', client_id)[:_MAX_READABLE]
  digest = hashlib.sha256(client_id.encode()).hexdigest()
  return f'{readable}-{digest[:_HASH_DIGITS]}'


def write(
    folder: pathlib.Path,
    model: BatchNormModel,
    weights: ModelWeights,
    client_weights: Iterable[tuple[str, ModelWeights]] = (),
    description: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
  """Writes the models of a run and replaces the folder.

  Args:
    folder: The folder of the models.
    model: The model.
    weights: The weights of the global model.
    client_weights: The ids and weights of the clients that have own models.
    description: Further entries of the manifest, as JSON can express them.

  Raises:
    OSError: If a file can't be written.
  """
  remove(folder)
  with files.replacing(folder) as unfinished:
    unfinished.mkdir(parents=True)
    global_values = _values(model, weights)
    # One Keras model for all weights, because building it takes long.
    keras_model = model.to_keras(weights)
    _save_keras(keras_model, unfinished / _KERAS_MODEL)
    _save_arrays(model, dict(enumerate(global_values)), unfinished / _WEIGHTS)
    clients = {}
    for client_id, own_weights in client_weights:
      (unfinished / _CLIENTS).mkdir(exist_ok=True)
      clients[client_id] = stem = client_file_stem(client_id)
      values = _values(model, own_weights)
      keras_model.set_weights(values)
      _save_keras(keras_model, unfinished / _CLIENTS / f'{stem}.keras')
      own = {
          position: value
          for position, value in enumerate(values)
          if value.tobytes() != global_values[position].tobytes()
      }
      _save_arrays(model, own, unfinished / _CLIENTS / f'{stem}.npz')
    manifest = {
        'format': FORMAT,
        **description,
        'clients': clients,
        'files': dict(_checksums(unfinished)),
    }
    manifests.write(unfinished, manifest)


def _values(model: BatchNormModel, weights: ModelWeights) -> list[np.ndarray]:
  return [np.asarray(v) for v in model.from_model_weights(weights)]


def _save_keras(keras_model: keras.Model, path: pathlib.Path) -> None:
  with files.naming(path):
    keras_model.save(path)


def _save_arrays(
    model: BatchNormModel, values: Mapping[int, np.ndarray], path: pathlib.Path
) -> None:
  arrays: dict[str, Any] = {
      model.variables[position].name: value
      for position, value in values.items()
  }
  with files.naming(path):
    np.savez(path, **arrays)


def remove(folder: pathlib.Path) -> None:
  """Removes a folder of models, complete or not."""
  for path in (folder, files.temporary_path(folder)):
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
    manifest: The content of `manifest.json`.
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
    """The clients that have own models."""
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
    path = self._folder / name
    try:
      data = path.read_bytes()
    except FileNotFoundError as error:
      raise manifests.DamagedError(f'{path} is missing.') from error
    if hashlib.sha256(data).hexdigest() != self._files.get(name):
      raise manifests.DamagedError(f'{path} was changed after the run.')
    return data

  def weights(
      self, model: BatchNormModel, client_id: Optional[str] = None
  ) -> ModelWeights:
    """Reads the weights of a model.

    Args:
      model: The model, built as in the run.
      client_id: The client whose own model to read. Default: the global model.

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
          f' the settings of the run describe: {wrong} is'
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
    except Exception as error:
      raise manifests.DamagedError(
          f'{self._folder / name} is damaged.'
      ) from error
