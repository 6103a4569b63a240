"""The identity of a run, which must be the same when it is continued."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from tff_bn.imports import versions
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.training import checkpoint_files
from tff_bn.training import manifests


@dataclasses.dataclass(frozen=True)
class RunIdentity:
  """The inputs on which the results of a run depend.

  Attributes:
    settings: The settings by name, as JSON can express them. Settings that may
      change when a run is continued, such as `rounds`, are left out.
    data: The fingerprint of the clients' data.
    process: A checksum of the process's types; one of the server's initial
      state without the model: hyperparameters, optimizers and aggregators; and
      one of the variables that training cannot change, if there are any. Other
      differences between processes are not detected.
  """

  settings: Mapping[str, Any]
  data: str
  process: Mapping[str, str]

  @functools.cached_property
  def checksum(self) -> str:
    """A hexadecimal checksum of the identity."""
    return manifests.checksum(dataclasses.asdict(self))

  def differences(self, manifest: Mapping[str, Any]) -> list[str]:
    """Describes each difference from the run that wrote a manifest."""
    other = manifest['run']
    found = [
        f'{name} ({_was(other["settings"].get(name))}, now'
        f' {_was(self.settings.get(name))})'
        for name in dict.fromkeys((*self.settings, *other['settings']))
        if other['settings'].get(name) != self.settings.get(name)
    ]
    if other['data'] != self.data:
      found.append("the clients' data (other samples, clients or order)")
    if other['process']['types'] != self.process['types']:
      found.append('the model or the algorithm')
    elif other['process']['initial'] != self.process['initial']:
      found.append(
          'hyperparameters of the algorithm, such as the learning rate or the'
          ' noise'
      )
    elif other['process'].get('constants') != self.process.get('constants'):
      found.append(
          'weights that training cannot change, such as those of frozen layers'
          " (they are not in checkpoints; keras_model_fn must return the run's)"
      )
    return found

  def to_manifest(self) -> dict[str, Any]:
    """Returns the entries of a checkpoint's manifest that identify the run."""
    return {'run': dataclasses.asdict(self), 'versions': versions.versions()}


def _was(value: Any) -> str:
  return 'not set' if value is None else str(value)


def describe_process(
    process: Any, initial_state: Any, model: BatchNormModel
) -> dict[str, str]:
  """Describes a process with this model for a `RunIdentity`.

  Returns:
    The checksums `types` and `initial`, and `constants` if the model has any.
  """
  types = str(getattr(process.next, 'type_signature', type(process).__name__))
  # Without the initial model: weights drawn without a seed differ each time,
  # and a continued run does not use them.
  parts = [
      getattr(initial_state, name, ())
      for name in ('distributor', 'client_work', 'aggregator', 'finalizer')
  ]
  leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(parts)]
  description = {
      'types': hashlib.sha256(types.encode()).hexdigest(),
      'initial': checkpoint_files.arrays_checksum(leaves),
  }
  if model.constants:
    values = model.from_model_weights(model.initial_weights)
    # NumPy has no buffers of dtypes such as bfloat16, only their bytes.
    description['constants'] = checkpoint_files.arrays_checksum(
        [
            np.frombuffer(values[position].tobytes(), np.uint8)
            for position in sorted(model.constants)
        ]
    )
  return description


def changed_versions(manifest: Mapping[str, Any]) -> Sequence[str]:
  """Describes the changes of the code since a manifest was written."""
  then = manifest['versions']
  return [
      f'{name} {then.get(name, "unknown")[:12]} → {version[:12]}'
      for name, version in versions.versions().items()
      if then.get(name) != version
  ]
