"""The final models of a run, as a folder.

| entry | content |
| --- | --- |
| `model.keras` | the global model, for plain Keras |
| `weights.npz` | its weights, plain arrays by the variables' names |
| `clients.npy` | what differs in the clients' own models: one record for each |
| `clients/NAME.keras` | clients' own models for plain Keras, if wanted |
| `manifest.json` | the clients, by record; each NAME; checksums of all files |

`clients.npy` is a structured array of NumPy. The fields of a record are arrays
by the variables' names. All other variables have the values of `weights.npz`.

The folder appears when it is complete. This module reads only the arrays,
because loading a Keras file can run code that it contains.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import functools
import hashlib
import pathlib
import re
import shutil
from typing import Any, BinaryIO, Optional

import keras
import numpy as np

from tff_bn.common import files
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import Role
from tff_bn.training import finished
from tff_bn.training import manifests

FORMAT = finished.MODELS_FORMAT

_KERAS_MODEL = 'model.keras'
_WEIGHTS = 'weights.npz'
_RECORDS = 'clients.npy'
_CLIENTS = 'clients'
# Enough for the names and shapes of thousands of variables.
_MAX_HEADER_SIZE = 10**6
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


@contextlib.contextmanager
def writing(
    folder: pathlib.Path,
    model: BatchNormModel,
    server_weights: ModelWeights,
    num_clients: int,
    description: Mapping[str, Any],
    *,
    saves_keras_clients: bool = False,
) -> Iterator['Writer']:
  """Writes the models of a run and replaces the folder.

  Args:
    folder: The folder of the models.
    model: The model.
    server_weights: The server's weights. Variables for which a client has these
      same arrays are not written again for each client.
    num_clients: The number of clients that have own models.
    description: Further entries of the manifest, as JSON can express them.
    saves_keras_clients: Whether to save Keras models of the clients too.

  Yields:
    The writer. The folder appears at the end of the `with` block, if there is
    no error.

  Raises:
    OSError: If a file can't be written.
  """
  remove(folder)
  with files.replacing(folder) as unfinished:
    unfinished.mkdir(parents=True)
    path = unfinished / _RECORDS
    with files.naming(path), open(path, 'wb') as records:
      writer = Writer(
          unfinished,
          model,
          server_weights,
          num_clients,
          saves_keras_clients,
          records,
      )
      yield writer
    if not path.stat().st_size:  # No client has own variables.
      path.unlink()
    manifests.write(
        unfinished,
        {
            'format': FORMAT,
            **description,
            **writer.manifest(),
            'files': dict(_checksums(unfinished)),
        },
    )


class Writer:
  """Writes the models of a run, see `writing`."""

  def __init__(
      self,
      folder: pathlib.Path,
      model: BatchNormModel,
      server_weights: ModelWeights,
      num_clients: int,
      saves_keras_clients: bool,
      records: BinaryIO,
  ):
    """Initializes the writer.

    Args:
      folder: The folder of the unfinished models.
      model: The model.
      server_weights: See `writing`.
      num_clients: See `writing`.
      saves_keras_clients: See `writing`.
      records: The file of the clients' records, empty.
    """
    self._folder = folder
    self._model = model
    self._server_values = model.from_model_weights(server_weights)
    self._num_clients = num_clients
    self._saves_keras_clients = saves_keras_clients
    self._records = records
    self._client_ids: list[str] = []
    self._stems: dict[str, str] = {}
    # The positions of the clients' own variables, once they are known.
    self._own: Optional[Sequence[int]] = None
    self._record: np.ndarray = np.zeros((), [])

  def add_client(self, client_id: str, weights: ModelWeights) -> None:
    """Writes the own variables of a client.

    Args:
      client_id: The client.
      weights: Its weights.

    Raises:
      ValueError: If the client's own variables are not the first client's.
    """
    values = self._model.from_model_weights(weights)
    own = self._own_positions(values)
    if self._own is None:
      self._own = own
      self._begin_records(values)
    elif own != self._own:
      raise ValueError(
          f'The own variables of client {client_id!r} are {self._names(own)},'
          f' but another client has {self._names(self._own)}.'
      )
    for position in own:
      self._record[self._model.variables[position].name] = values[position]
    self._records.write(self._record.tobytes())
    self._client_ids.append(client_id)
    if self._saves_keras_clients:
      self.add_keras_client(client_id, weights)

  def _own_positions(self, values: Sequence[Any]) -> list[int]:
    # Merging changes the running variances and the phases, even if all clients
    # have the same.
    merged = (Role.MOVING_VARIANCE, Role.PERSONAL_PHASE)
    return [
        position
        for position, (info, value, server_value) in enumerate(
            zip(self._model.variables, values, self._server_values)
        )
        if position not in self._model.constants
        and (value is not server_value or info.role in merged)
    ]

  def _names(self, positions: Sequence[int]) -> str:
    names = [self._model.variables[position].name for position in positions]
    return ', '.join(names) or 'none'

  def _begin_records(self, values: Sequence[Any]) -> None:
    """Writes the header of the records."""
    fields: list[Any] = []
    for position in self._own or ():
      value = np.asarray(values[position])
      name = self._model.variables[position].name
      fields.append((name, value.dtype, value.shape))
    if fields:
      self._record = np.zeros((), fields)
      np.lib.format.write_array_header_2_0(
          self._records,
          dict(
              descr=np.lib.format.dtype_to_descr(self._record.dtype),
              fortran_order=False,
              shape=(self._num_clients,),
          ),
      )

  def add_keras_client(self, client_id: str, weights: ModelWeights) -> None:
    """Saves a client's model for plain Keras."""
    self._stems[client_id] = stem = client_file_stem(client_id)
    path = self._folder / _CLIENTS / f'{stem}.keras'
    path.parent.mkdir(exist_ok=True)
    _save_keras(self._keras_model(weights), path)

  def add_global(self, weights: ModelWeights) -> None:
    """Saves the global model."""
    _save_keras(self._keras_model(weights), self._folder / _KERAS_MODEL)
    values = self._model.from_model_weights(weights)
    arrays: dict[str, Any] = {
        info.name: np.asarray(value)
        for info, value in zip(self._model.variables, values)
    }
    path = self._folder / _WEIGHTS
    with files.naming(path):
      np.savez(path, **arrays)

  @functools.cached_property
  def _built_keras_model(self) -> keras.Model:
    # One Keras model for all weights, because building it takes long.
    return self._model.to_keras()

  def _keras_model(self, weights: ModelWeights) -> keras.Model:
    values = self._model.from_model_weights(weights)
    self._built_keras_model.set_weights([np.asarray(value) for value in values])
    return self._built_keras_model

  def manifest(self) -> dict[str, Any]:
    """Returns the manifest's entries about the clients."""
    return {'clients': self._client_ids, 'keras_clients': self._stems}


def _save_keras(keras_model: keras.Model, path: pathlib.Path) -> None:
  """Saves a Keras model; an `OSError` names the path."""
  with files.naming(path):
    keras_model.save(path)


def export(
    model: BatchNormModel, weights: ModelWeights, path: pathlib.Path
) -> None:
  """Saves a model for plain Keras, in one step.

  Args:
    model: The model.
    weights: Its weights.
    path: The file, which ends with `.keras`. Its folder is created if needed.

  Raises:
    OSError: If the file can't be written. An old file stays.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  # Keras needs the ending.
  unfinished = path.with_name(f'.part.{path.name}')
  with files.replacing(path, unfinished):
    _save_keras(model.to_keras(weights), unfinished)


def remove(folder: pathlib.Path) -> None:
  """Removes a folder of models, complete or not."""
  for path in (folder, files.temporary_path(folder)):
    if path.exists():
      shutil.rmtree(path)


def _checksums(folder: pathlib.Path) -> Iterator[tuple[str, str]]:
  for path in sorted(folder.rglob('*')):
    if path.is_file() and path.name != manifests.FILE_NAME:
      name = path.relative_to(folder).as_posix()
      yield name, finished.file_checksum(path)


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
    self.manifest = finished.read_models_manifest(folder)
    self._numbers: dict[str, int] = {
        client_id: n for n, client_id in enumerate(self.manifest['clients'])
    }

  @property
  def client_ids(self) -> Collection[str]:
    """The clients that have own models."""
    return self._numbers.keys()

  def check(self) -> None:
    """Checks all files.

    Raises:
      manifests.DamagedError: If a file is damaged or missing.
      OSError: If a file can't be read at present.
    """
    for name in self.manifest['files']:
      finished.check_file(self._folder, self.manifest, name)

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
    # Without own variables, the clients have the global model.
    if client_id is not None and _RECORDS in self.manifest['files']:
      name = _RECORDS
      record = self._records[self._numbers[client_id]]
      values.update(
          {field: np.array(record[field]) for field in record.dtype.names or ()}
      )
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
    with self._load(_WEIGHTS) as npz:
      return {key: npz[key] for key in npz.files}

  @functools.cached_property
  def _records(self) -> np.ndarray:
    """The clients' own weights, which stay on the disk."""
    with self._load(_RECORDS, mmap_mode='r') as records:
      return records

  @contextlib.contextmanager
  def _load(self, name: str, **options: Any) -> Iterator[Any]:
    path = finished.check_file(self._folder, self.manifest, name)
    try:
      yield np.load(
          path,
          allow_pickle=False,
          max_header_size=_MAX_HEADER_SIZE,
          **options,
      )
    # The class of the error depends on the damage.
    except Exception as error:
      raise manifests.DamagedError(f'{path} is damaged.') from error
