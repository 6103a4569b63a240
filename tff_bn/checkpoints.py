"""Checkpoints of a run that survive being killed, and being damaged."""

from collections.abc import Callable
import os
import pathlib
import shutil
from typing import Any, Optional

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import override

from tff_bn import client_state_store

_PREFIX = 'round_'
_UNUSABLE_PREFIX = 'unusable_'
_NUM_KEPT = 3


class _UnusableError(Exception):
  """A checkpoint cannot be used; another one may."""


class CheckpointManager(tff.program.ProgramStateManager):
  """Saves the server's state every few rounds, together with the clients'.

  A `tff.program.FileProgramStateManager` writes the files, and the last three
  checkpoints are kept. What it does not do is done here:

  *   A checkpoint that is damaged, or that does not fit the clients' states or
      the metrics, is set aside with a warning, and the one before it is used.
  *   The clients' states are committed before the server's state is published.
      At loading, states of later rounds are forgotten.
  *   `save` may be called at every round; it saves when a checkpoint is due.
  """

  def __init__(
      self,
      folder: pathlib.Path,
      *,
      every: int,
      last_round: int,
      store: Optional[client_state_store.ClientStateStore] = None,
      fits: Callable[[int], bool] = lambda round_num: True,
  ):
    """Creates the folder.

    Args:
      folder: Where the checkpoints are.
      every: The number of rounds between two checkpoints.
      last_round: The run's last round, which gets a checkpoint in any case.
      store: The clients' states, if clients have any.
      fits: Whether what else the run has written up to a round is complete.
    """
    self._folder = folder
    self._every = every
    self._last_round = last_round
    self._store = store
    self._fits = fits
    self._files = tff.program.FileProgramStateManager(
        os.fspath(folder),
        prefix=_PREFIX,
        keep_total=_NUM_KEPT,
        keep_first=False,
    )
    self._resumed_from: Optional[int] = None

  @property
  def resumed_from(self) -> Optional[int]:
    """The round that `load_latest` loaded; `None` if there was none."""
    return self._resumed_from

  @override
  async def get_versions(self) -> Optional[list[int]]:
    return await self._files.get_versions()

  @override
  async def load(self, version: int, structure: Any) -> Any:
    """Loads one checkpoint.

    Args:
      version: The round.
      structure: A state of the same structure, dtypes and shapes.

    Returns:
      The server's state, with NumPy leaves.

    Raises:
      ValueError: If it is the checkpoint of another model or algorithm.
    """
    return self._unflatten(await self._load_leaves(version), structure)

  async def _load_leaves(self, version: int) -> list[np.ndarray]:
    data = await self._files.load(version, 0)
    return client_state_store.decode_state(data.tobytes())

  def _unflatten(self, leaves: list[np.ndarray], structure: Any) -> Any:
    expected = [np.asarray(leaf) for leaf in tf.nest.flatten(structure)]
    if [(leaf.dtype, leaf.shape) for leaf in leaves] != [
        (leaf.dtype, leaf.shape) for leaf in expected
    ]:
      raise ValueError(
          f'{self._folder} holds checkpoints of a run with another model or'
          ' algorithm; use another folder for this run.'
      )
    # Indexing with () makes NumPy scalars, as TFF returns them, of arrays
    # without dimensions.
    return tf.nest.pack_sequence_as(structure, [leaf[()] for leaf in leaves])

  @override
  async def load_latest(self, structure: Any) -> tuple[Any, int]:
    """Loads the newest usable checkpoint, and forgets what came after it.

    Args:
      structure: A state of the same structure, dtypes and shapes.

    Returns:
      The server's state and its round, or `(None, 0)` if there is none.

    Raises:
      ValueError: If the folder holds another run's checkpoints.
    """
    self._remove_half_written()
    versions = await self.get_versions() or []
    for version in reversed(versions):
      if version > self._last_round:
        raise ValueError(
            f'--rounds={self._last_round} asks for fewer rounds than the'
            f' {version} that the run in {self._folder.parent} has; use at'
            ' least as many, or another folder.'
        )
      try:
        state = await self._load_usable(version, structure)
      except _UnusableError as e:
        self._set_aside(version, e)
        continue
      if self._store is not None:
        self._store.forget_after(version)
      self._resumed_from = version
      return state, version
    if versions:
      logging.warning(
          'No usable checkpoint is left in %s: the run starts over.',
          self._folder,
      )
    if self._store is not None:
      self._store.forget_after(-1)
    return None, 0

  async def _load_usable(self, version: int, structure: Any) -> Any:
    if not self._fits(version):
      raise _UnusableError('the metrics of its rounds are incomplete')
    if self._store is not None:
      committed = self._store.committed_round
      if committed is None or committed < version:
        raise _UnusableError("the clients' states of its round are missing")
    try:
      leaves = await self._load_leaves(version)
    # A damaged SavedModel fails in many ways, depending on what is damaged.
    except Exception as e:  # pylint: disable=broad-except
      raise _UnusableError(_reason(e)) from e
    return self._unflatten(leaves, structure)

  def _remove_half_written(self) -> None:
    """Removes what a killed run left of a checkpoint that it was writing."""
    for path in self._folder.glob(f'{_PREFIX}*'):
      if not path.name.removeprefix(_PREFIX).isdigit():
        shutil.rmtree(path)

  def _set_aside(self, version: int, error: Exception) -> None:
    """Renames a checkpoint, so that its round can be saved again."""
    path = self._folder / f'{_PREFIX}{version}'
    target = self._folder / f'{_UNUSABLE_PREFIX}{path.name}'
    logging.warning(
        'The checkpoint %s cannot be used (%s): it is kept as %s, and the one'
        ' before it is used.',
        path,
        error,
        target.name,
    )
    if target.exists():
      shutil.rmtree(target)
    os.replace(path, target)

  @override
  async def save(self, program_state: Any, version: int) -> None:
    """Saves a checkpoint if one is due.

    Args:
      program_state: The server's state.
      version: The round.
    """
    if version % self._every and version != self._last_round:
      return
    # One array instead of one for each variable: a SavedModel takes some
    # milliseconds for each, and has no checksum of the whole.
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(program_state)]
    data = np.frombuffer(client_state_store.encode_state(leaves), np.uint8)
    # A run that is killed between the two goes on from the checkpoint before
    # and forgets these states of the clients.
    if self._store is not None:
      self._store.commit(version)
    await self._files.save(data, version)
    if self._store is not None:
      self._store.prune(min(await self.get_versions()))


def _reason(error: Exception) -> str:
  lines = str(error).splitlines()
  return f'{type(error).__name__}: {lines[0]}' if lines else repr(error)
