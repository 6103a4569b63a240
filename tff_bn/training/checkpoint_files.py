"""Checkpoints as files: plain arrays and a manifest.

A checkpoint is a folder `round_N` with two files:

*   `state.npz`: the arrays, written by `numpy.savez`, without pickles.
*   `manifest.json`: the version of this format, the round, checksums of the
    arrays and of the manifest itself, and further entries.

The folder appears when it is complete.
"""

from collections.abc import Mapping, Sequence
import errno
import hashlib
import os
import pathlib
import re
import shutil
from typing import Any

import numpy as np

from tff_bn.common import files
from tff_bn.training import manifests

FORMAT = 1

_STATE = 'state.npz'
_FINISHED_NAME = re.compile(r'round_(0|[1-9][0-9]*)')
# A folder that a program was writing or removing when it was killed.
_UNFINISHED_NAME = re.compile(r'\.round_[0-9]+\.part')


def arrays_checksum(arrays: Sequence[np.ndarray]) -> str:
  """Returns a hexadecimal checksum of every bit, the dtypes and the shapes."""
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(f'{array.dtype.str}{array.shape}'.encode())
    digest.update(np.ascontiguousarray(array).data)
  return digest.hexdigest()


class CheckpointFolder:
  """A folder of checkpoints of rounds, which need not exist."""

  def __init__(self, path: pathlib.Path):
    self.path = path

  def _path(self, round_num: int) -> pathlib.Path:
    return self.path / f'round_{round_num}'

  def _names(self) -> list[str]:
    # `glob` would interpret special characters in the folder's name.
    try:
      return os.listdir(self.path)
    except FileNotFoundError:
      return []

  def rounds(self) -> list[int]:
    """Returns the rounds that have a checkpoint, in ascending order."""
    matches = [_FINISHED_NAME.fullmatch(name) for name in self._names()]
    return sorted(int(match[1]) for match in matches if match)

  def remove_unfinished(self) -> None:
    """Removes the incomplete checkpoints of a program that was killed."""
    for name in self._names():
      if _UNFINISHED_NAME.fullmatch(name):
        shutil.rmtree(self.path / name)

  def write(
      self,
      round_num: int,
      arrays: Sequence[np.ndarray],
      manifest: Mapping[str, Any],
  ) -> None:
    """Writes a checkpoint of arrays of numbers or booleans.

    If it raises an error, no part of the checkpoint remains. `manifest` has
    further entries of the manifest, as JSON can express them.
    """
    for array in arrays:
      if array.dtype.kind not in 'biufc':
        raise TypeError(
            f'A checkpoint holds numeric arrays, not {array.dtype}.'
        )
    named: dict[str, Any] = {f'array_{i}': a for i, a in enumerate(arrays)}
    manifest = {
        'format': FORMAT,
        'round': round_num,
        'arrays': arrays_checksum(arrays),
        **manifest,
    }
    with files.replacing(self._path(round_num)) as unfinished:
      unfinished.mkdir(parents=True)
      np.savez(unfinished / _STATE, **named)
      manifests.write(unfinished, manifest)

  def read_manifest(self, round_num: int) -> dict[str, Any]:
    """Reads and checks a checkpoint's manifest.

    Raises:
      DamagedError: If the manifest is damaged or missing.
      ValueError: If the checkpoint has another format.
      OSError: If it can't be read at present.
    """
    path = self._path(round_num)
    try:
      manifest = manifests.read(path, FORMAT)
    except manifests.DamagedError as error:
      if (path / 'saved_model.pb').exists():
        raise ValueError(
            f'{path} has the format of an earlier version of tff_bn, which this'
            ' version cannot read; start the run over in another folder.'
        ) from error
      raise
    if manifest['round'] != round_num:
      raise manifests.DamagedError(
          f'{path} holds the checkpoint of round {manifest["round"]}.'
      )
    return manifest

  def read(self, round_num: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Reads and checks a checkpoint's arrays and manifest.

    It raises the same errors as `read_manifest`.
    """
    manifest = self.read_manifest(round_num)
    path = self._path(round_num) / _STATE
    try:
      # Not as bytes first: a large model would be in memory twice.
      with files.naming(path), np.load(path, allow_pickle=False) as npz:
        arrays = [npz[f'array_{i}'] for i in range(len(npz.files))]
    except FileNotFoundError as error:
      raise manifests.DamagedError(f'{path} is missing.') from error
    # The class of the error depends on the damage.
    except Exception as error:
      # With a wrong position in the file, seeking is an invalid argument.
      if isinstance(error, OSError) and error.errno != errno.EINVAL:
        raise
      raise manifests.DamagedError(f'{path} is damaged.') from error
    if arrays_checksum(arrays) != manifest['arrays']:
      raise manifests.DamagedError(f'{path} was changed.')
    return arrays, manifest

  def remove(self, round_num: int) -> None:
    """Removes a checkpoint, which disappears in one step."""
    unfinished = files.temporary_path(self._path(round_num))
    os.rename(self._path(round_num), unfinished)
    shutil.rmtree(unfinished)

  def set_aside(self, round_num: int) -> pathlib.Path:
    """Renames a checkpoint, so that its round can be saved again.

    Returns:
      The new path.
    """
    path = self._path(round_num)
    target = path.with_name(f'unusable_{path.name}')
    if target.exists():
      shutil.rmtree(target)
    os.rename(path, target)
    return target
