"""The final models of a run, as a folder.

| entry | content |
| --- | --- |
| `model.keras` | the global model, for plain Keras |
| `weights.npz` | its weights, plain arrays by the variables' names |
| `clients.npy` | what differs in the clients' own models: one record for each |
| `clients/NAME.keras` | clients' own models for plain Keras, if wanted |
| `best/` | the same for the best round, if it is kept |
| `manifest.json` | the clients, by record; each NAME; checksums of all files |

`clients.npy` is a structured array of NumPy. The fields of a record are arrays
by the variables' names. All other variables have the values of `weights.npz`.

The folder appears when it is complete. This module reads only the arrays,
because loading a Keras file can run code that it contains.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
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
from tff_bn.keras_model import raw_inputs
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import Role
from tff_bn.training import finished
from tff_bn.training import manifests
from tff_bn.training import run_entries

FORMAT = finished.MODELS_FORMAT

_KERAS_MODEL = 'model.keras'
_WEIGHTS = 'weights.npz'
_RECORDS = 'clients.npy'
_CLIENTS = 'clients'
# Enough for the names and shapes of thousands of variables.
_MAX_HEADER_SIZE = 10**6
# Merging changes the running variances and the phases, even if all clients have
# the same.
_MERGED_ROLES = (Role.MOVING_VARIANCE, Role.PERSONAL_PHASE)
# Long enough that no two clients of a run get the same name.
_HASH_DIGITS = 16
# Short enough for every file system.
_MAX_READABLE = 40


def client_file_stem(client_id: str) -> str:
  """Returns the name of a client's files, without their endings.

  It is valid in every file system: the id without special characters, and a
  hash of the id.
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
    prepare: Callable[
        [Optional[str]], Optional[raw_inputs.Preparation]
    ] = lambda client_id: None,
    like: Optional['Writer'] = None,
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
    prepare: Returns what the Keras file of a client does to samples; with None,
      of the global model. Default: nothing.
    like: A writer with the same model, whose Keras model is used again.

  Yields:
    The writer. The folder appears at the end of the `with` block, if there is
    no error.
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
          prepare,
          records,
          like,
      )
      yield writer
    if not path.stat().st_size:  # No client has own variables.
      path.unlink()
    manifests.write(
        unfinished,
        {
            'format': FORMAT,
            **description,
            'clients': writer.client_ids,
            'keras_clients': writer.stems,
            'files': dict(_checksums(unfinished)),
        },
    )


class Writer:
  """Writes the models of a run, see `writing`.

  Attributes:
    client_ids: The clients in the order of their records.
    stems: The names of the clients' Keras files, without the ending.
  """

  def __init__(
      self,
      folder: pathlib.Path,
      model: BatchNormModel,
      server_weights: ModelWeights,
      num_clients: int,
      saves_keras_clients: bool,
      prepare: Callable[[Optional[str]], Optional[raw_inputs.Preparation]],
      records: BinaryIO,
      like: Optional['Writer'],
  ):
    self._folder = folder
    self._model = model
    self._server_values = model.from_model_weights(server_weights)
    self._num_clients = num_clients
    self._saves_keras_clients = saves_keras_clients
    self._prepare = prepare
    self._records = records
    self._like = like
    # What the last Keras file does to samples, and its model.
    self._last_saved: Optional[
        tuple[Optional[raw_inputs.Preparation], keras.Model]
    ] = None
    self.client_ids: list[str] = []
    self.stems: dict[str, str] = {}
    # The own variables of each client, once they are known: the names, dtypes
    # and shapes.
    self._fields: Optional[list[Any]] = None

  def add_client(self, client_id: str, weights: ModelWeights) -> None:
    """Writes the own variables of a client: the same as the first client's."""
    own = {
        info.name: np.asarray(value)
        for position, (info, value, server_value) in enumerate(
            zip(
                self._model.variables,
                self._model.from_model_weights(weights),
                self._server_values,
            )
        )
        if position not in self._model.constants
        and (value is not server_value or info.role in _MERGED_ROLES)
    }
    fields: list[Any] = [(name, v.dtype, v.shape) for name, v in own.items()]
    if self._fields is None:
      self._fields = fields
      self._write_header()
    elif fields != self._fields:
      others = ', '.join(name for name, *_ in self._fields)
      raise ValueError(
          f'The own variables of client {client_id!r} are'
          f' {", ".join(own) or "none"}, but another client has'
          f' {others or "none"}.'
      )
    record: np.ndarray = np.zeros((), fields)
    for name, value in own.items():
      record[name] = value
    self._records.write(record.tobytes())
    self.client_ids.append(client_id)
    if self._saves_keras_clients:
      self.add_keras_client(client_id, weights)

  def _write_header(self) -> None:
    """Writes the header of the records, if they have fields."""
    if self._fields:
      np.lib.format.write_array_header_2_0(
          self._records,
          dict(
              descr=np.lib.format.dtype_to_descr(np.dtype(self._fields)),
              fortran_order=False,
              shape=(self._num_clients,),
          ),
      )

  def add_keras_client(self, client_id: str, weights: ModelWeights) -> None:
    """Saves a client's model for plain Keras."""
    self.stems[client_id] = stem = client_file_stem(client_id)
    path = self._folder / _CLIENTS / f'{stem}.keras'
    path.parent.mkdir(exist_ok=True)
    self._save_keras(weights, path, client_id)

  def add_global(self, weights: ModelWeights) -> None:
    """Saves the global model."""
    self._save_keras(weights, self._folder / _KERAS_MODEL, None)
    values = self._model.from_model_weights(weights)
    arrays: dict[str, Any] = {
        info.name: np.asarray(value)
        for info, value in zip(self._model.variables, values)
    }
    path = self._folder / _WEIGHTS
    with files.naming(path):
      np.savez(path, **arrays)

  @property
  def best_folder(self) -> pathlib.Path:
    """The folder for the models of the best round."""
    return self._folder / run_entries.BEST

  @functools.cached_property
  def _keras_model(self) -> keras.Model:
    # One Keras model for all weights, because building it takes long.
    if self._like is not None:
      return self._like._keras_model
    return self._model.to_keras()

  def _save_keras(
      self, weights: ModelWeights, path: pathlib.Path, client_id: Optional[str]
  ) -> None:
    values = self._model.from_model_weights(weights)
    self._keras_model.set_weights([np.asarray(value) for value in values])
    saved_model = self._saved_model(self._prepare(client_id))
    with files.naming(path):
      saved_model.save(path)

  def _saved_model(
      self, preparation: Optional[raw_inputs.Preparation]
  ) -> keras.Model:
    """Returns the Keras model of a file, which shares its weights."""
    if self._like is not None:
      return self._like._saved_model(preparation)
    # Usually, all files prepare samples alike.
    if self._last_saved is None or self._last_saved[0] != preparation:
      self._last_saved = (
          preparation,
          _prepared(self._keras_model, preparation),
      )
    return self._last_saved[1]


def _prepared(
    keras_model: keras.Model, preparation: Optional[raw_inputs.Preparation]
) -> keras.Model:
  if preparation is None:
    return keras_model
  return raw_inputs.wrap(keras_model, preparation)


def export(
    model: BatchNormModel,
    weights: ModelWeights,
    path: pathlib.Path,
    preparation: Optional[raw_inputs.Preparation] = None,
) -> None:
  """Saves a model for plain Keras, in one step.

  The path ends with `.keras`, and its folder is created if needed. If the file
  can't be written, an old file stays. With a `preparation`, the file takes raw
  samples.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  # Keras needs the ending.
  unfinished = path.with_name(f'.part.{path.name}')
  with files.replacing(path, unfinished):
    _prepared(model.to_keras(weights), preparation).save(unfinished)


def remove(folder: pathlib.Path) -> None:
  """Removes a folder of models, complete or not."""
  for path in (folder, files.temporary_path(folder)):
    if path.exists():
      shutil.rmtree(path)


def _checksums(folder: pathlib.Path) -> Iterator[tuple[str, str]]:
  for path in sorted(folder.rglob('*')):
    if path.is_file() and path.name != manifests.FILE_NAME:
      name = path.relative_to(folder).as_posix()
      yield name, files.checksum(path)


class SavedModels:
  """Reads the models of a run.

  Attributes:
    manifest: The content of `manifest.json`.
  """

  def __init__(self, folder: pathlib.Path):
    """Reads the manifest in the models' folder.

    It raises the same errors as `finished.read_models_manifest`.
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
    """Raises a `manifests.DamagedError` if a file is damaged or missing."""
    for name in self.manifest['files']:
      finished.check_file(self._folder, self.manifest, name)

  def weights(
      self, model: BatchNormModel, client_id: Optional[str] = None
  ) -> ModelWeights:
    """Reads the weights of the global model, or of a client's own model.

    `model` is built as in the run.

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
      # Copied at once: each access to a field on the disk takes longer.
      record = np.array(self._records[self._numbers[client_id]])
      values.update(
          {field: record[field] for field in record.dtype.names or ()}
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
