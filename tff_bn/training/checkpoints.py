"""Checkpoints of a run, robust to kills and to damaged files."""

from collections.abc import Callable, Collection, Mapping
import pathlib
from typing import Any, Optional

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import override

from tff_bn.training import checkpoint_files
from tff_bn.training import client_metrics as client_metrics_lib
from tff_bn.training import client_state_codec
from tff_bn.training import client_state_store
from tff_bn.training import manifests
from tff_bn.training import metrics_log
from tff_bn.training.run_identity import RunIdentity
from tff_bn.training.run_identity import changed_versions

_NUM_KEPT = 3


def check_run(folder: pathlib.Path, identity: RunIdentity) -> None:
  """Raises a `ValueError` if a folder has checkpoints of another run.

  The folder need not exist. Checkpoints of another format are an error, too.
  """
  files = checkpoint_files.CheckpointFolder(folder)
  for version in reversed(files.rounds()):
    try:
      _check_run(files, version, identity)
      return
    except manifests.DamagedError:
      continue


def _check_run(
    files: checkpoint_files.CheckpointFolder,
    version: int,
    identity: RunIdentity,
) -> None:
  differences = identity.differences(files.read_manifest(version))
  if differences:
    raise ValueError(
        f'{files.path.parent} holds a run that differs in'
        f' {", ".join(differences)}. Use another folder.'
    )


class CheckpointManager(tff.program.ProgramStateManager):
  """Saves the server's state every few rounds, and loads the newest checkpoint.

  *   The manifest of a checkpoint identifies the run, and contains the rows of
      `metrics.csv` up to its round and a checksum of the clients' states. A
      checkpoint is used only if it belongs to the run and to these states.
  *   A damaged checkpoint is set aside with a warning, and the one before it is
      used. If none is left, or a file can't be read at present, loading raises
      an error and changes nothing.
  *   The clients' states are committed before the server's state is published.
      Loading forgets states of later rounds.
  *   `save` may be called in every round; it saves when a checkpoint is due.
  *   The manager keeps the last three checkpoints, the last one from which
      clients were able to train, the last one with a finite model, and those of
      `kept_rounds`.
  """

  def __init__(
      self,
      folder: pathlib.Path,
      *,
      every: int,
      last_round: int,
      identity: RunIdentity,
      log: metrics_log.MetricsLog,
      client_metrics: Optional[client_metrics_lib.ClientMetrics] = None,
      store: Optional[client_state_store.ClientStateStore] = None,
      failed_rounds: Callable[[Any], int] = lambda state: 0,
      is_finite: Callable[[Any], bool] = lambda state: True,
      kept_rounds: Callable[[], Collection[int]] = lambda: (),
  ):
    """Initializes the manager and writes nothing.

    Args:
      folder: The folder of the checkpoints.
      every: The number of rounds between two checkpoints.
      last_round: The run's last round, which always has a checkpoint.
      identity: Identifies the run.
      log: The run's metrics.
      client_metrics: The results of single clients.
      store: The clients' states, if clients have any.
      failed_rounds: Returns the number of failed rounds in a row up to a state.
      is_finite: Returns whether a state's model is finite.
      kept_rounds: Returns rounds whose checkpoints are needed at the end. It is
        asked after each round, and may name the last one.
    """
    self._files = checkpoint_files.CheckpointFolder(folder)
    self._every = every
    self._last_round = last_round
    self._identity = identity
    self._log = log
    self._client_metrics = client_metrics
    self._store = store
    self._failed_rounds = failed_rounds
    self._is_finite = is_finite
    self._kept_rounds = kept_rounds
    # The round that `load_latest` loaded; `None` if it loaded none.
    self.resumed_from: Optional[int] = None
    # The last state that was given to `save`, with its round.
    self._latest: Optional[tuple[Any, int]] = None
    self._saved_round: Optional[int] = None

  @override
  async def get_versions(self) -> Optional[list[int]]:
    return self._files.rounds() or None

  @override
  async def load(self, version: int, structure: Any) -> Any:
    """Loads the server's state after round `version`, with NumPy leaves.

    Raises:
      DamagedError: If the checkpoint is damaged.
      ValueError: If it belongs to another run, or `structure` has another
        structure, or other dtypes or shapes.
    """
    return self._load(version, structure)[0]

  def _load(self, version: int, structure: Any) -> tuple[Any, dict[str, Any]]:
    _check_run(self._files, version, self._identity)
    leaves, manifest = self._files.read(version)
    expected = [np.asarray(leaf) for leaf in tf.nest.flatten(structure)]
    if [(leaf.dtype, leaf.shape) for leaf in leaves] != [
        (leaf.dtype, leaf.shape) for leaf in expected
    ]:
      raise ValueError(
          f'{self._files.path} holds checkpoints of a run with another model or'
          ' algorithm; use another folder for this run.'
      )
    # Indexing with () turns arrays without dimensions into NumPy scalars, which
    # TFF returns too.
    state = tf.nest.pack_sequence_as(structure, [leaf[()] for leaf in leaves])
    return state, manifest

  @override
  async def load_latest(self, structure: Any) -> tuple[Any, int]:
    """Loads the newest usable checkpoint, and forgets all later states.

    Returns:
      The server's state and its round, or `(None, 0)` if the run has not begun.

    Raises:
      ValueError: If the folder holds another run, or none of its checkpoints
        can be used.
      OSError: If a file can't be read at present.
    """
    self._files.remove_unfinished()
    rounds = self._files.rounds()
    if not rounds:
      self._check_has_not_begun()
      if self._store is not None:
        self._store.forget_after(-1)
      return None, 0
    if rounds[-1] > self._last_round:
      raise ValueError(
          f'rounds={self._last_round} asks for fewer rounds than the'
          f' {rounds[-1]} that the run in {self._files.path.parent} has; use at'
          ' least as many, or another folder.'
      )
    unusable: dict[int, Exception] = {}
    for version in reversed(rounds):
      try:
        state, manifest = self._load(version, structure)
        self._check_client_states(version, manifest)
      except (
          manifests.DamagedError,
          client_state_codec.CorruptStateError,
      ) as error:
        unusable[version] = error
        continue
      if version == 0 and unusable:
        break  # The run would start over unnoticed.
      self._resume(version, manifest, unusable)
      self._latest = (state, version)
      return state, version
    reasons = [f'round {number}: {error}' for number, error in unusable.items()]
    raise ValueError(
        f'No checkpoint in {self._files.path} can be used'
        f' ({"; ".join(reasons)}). Nothing was changed. Put back an intact copy'
        ' of the run, or start it over in another folder.'
    )

  def _check_has_not_begun(self) -> None:
    """Raises a `ValueError` if the run had checkpoints that are missing now."""
    # Before the first checkpoint, only the row of round 0 is written and only
    # the states of round 0 are committed.
    has_states = self._store is not None and self._store.committed_round
    if has_states or self._log.has_rows_after(0):
      raise ValueError(
          f'{self._files.path.parent} holds a run, but {self._files.path} has'
          ' none of its checkpoints. Nothing was changed. Put them back, or'
          ' start over in another folder.'
      )

  def _check_client_states(
      self, version: int, manifest: dict[str, Any]
  ) -> None:
    if self._store is None:
      return
    found = self._store.checksum(version, verify=True)
    if found != manifest['client_states']:
      raise client_state_codec.CorruptStateError(
          "the clients' states do not belong to its round: some in"
          f' {self._store.path} were changed or removed, or are of another copy'
          ' of the run'
      )

  def _resume(
      self,
      version: int,
      manifest: dict[str, Any],
      unusable: Mapping[int, Exception],
  ) -> None:
    # First, because this may raise an error, and then nothing may be changed.
    self._log.restore(manifest['metrics'])
    if self._client_metrics is not None:
      self._client_metrics.restore(manifest.get('client_metrics', ()))
    for number, error in unusable.items():
      logging.warning(
          'The checkpoint of round %d cannot be used (%s). It is kept as %s,'
          ' and the one before it is used.',
          number,
          error,
          self._files.set_aside(number),
      )
    for change in changed_versions(manifest):
      logging.warning(
          'The run was started with another version: %s. The results may differ'
          ' from the results of an uninterrupted run.',
          change,
      )
    if self._store is not None:
      self._store.forget_after(version)
    self.resumed_from = version
    self._saved_round = version

  def load_kept(self, version: int, structure: Any) -> Any:
    """Loads the server's state after a round of `kept_rounds`."""
    return self._load(version, structure)[0]

  @override
  async def save(self, program_state: Any, version: int) -> None:
    """Saves the server's state after round `version` if a checkpoint is due."""
    self._latest = (program_state, version)
    if (
        version % self._every == 0
        or version == self._last_round
        or version in self._kept_rounds()
    ):
      self._save(program_state, version)

  @property
  def latest(self) -> tuple[Any, int]:
    """The last state that was loaded or given to `save`, with its round."""
    assert self._latest is not None  # Round 0 is saved before round 1 begins.
    return self._latest

  def save_latest(self) -> Optional[int]:
    """Saves the last round, even if no checkpoint is due.

    Returns:
      The last saved round; `None` if there is none.
    """
    if self._latest is not None:
      state, version = self._latest
      # If a client has already trained in the next round, its state of this
      # round is no longer stored.
      has_states = (
          self._store is None or (self._store.newest_round or 0) <= version
      )
      is_new = self._saved_round is None or self._saved_round < version
      if has_states and is_new:
        self._save(state, version)
    return self._saved_round

  def _save(self, state: Any, version: int) -> None:
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(state)]
    manifest = {
        **self._identity.to_manifest(),
        'metrics': self._log.rows_until(version),
        'finite': self._is_finite(state),
    }
    if self._client_metrics is not None:
      manifest['client_metrics'] = self._client_metrics.rows_until(version)
    # A run that is killed between the two steps continues from the checkpoint
    # before and forgets these states of the clients.
    if self._store is not None:
      self._store.commit(version)
      manifest['client_states'] = self._store.checksum(version)
    self._files.write(version, leaves, manifest)
    self._saved_round = version
    self._prune(version, self._failed_rounds(state), manifest['finite'])

  def _prune(self, newest: int, num_failed: int, is_finite: bool) -> None:
    """Removes the checkpoints that are no longer needed."""
    rounds = self._files.rounds()
    kept = {*rounds[-_NUM_KEPT:], *(set(rounds) & set(self._kept_rounds()))}
    # Clients trained in the round after the last of these.
    proven = [r for r in rounds if r < newest - num_failed]
    kept.update(proven[-1:])
    if not is_finite:
      finite = (r for r in reversed(rounds) if self._has_finite_model(r))
      kept.update([next(finite, newest)])
    for version in rounds:
      if version not in kept:
        self._files.remove(version)
    if self._store is not None:
      self._store.prune(min(kept))

  def _has_finite_model(self, version: int) -> bool:
    try:
      return self._files.read_manifest(version)['finite']
    except manifests.DamagedError:
      return False
