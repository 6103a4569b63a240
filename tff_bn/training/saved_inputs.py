"""Which inputs the saved Keras files of a run take. Imports no Keras."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

from tff_bn.training import run_entries

if TYPE_CHECKING:
  from tff_bn.keras_model import raw_inputs

# The entry of the manifest: a key of `run_entries.EXPORT`.
ENTRY = 'keras_inputs'
# The entries with the scaling of the global model and of each client.
SCALING = 'pixel_scaling'
CLIENTS = 'client_pixel_scaling'


def choose(manifest: Mapping[str, Any], export: str) -> str:
  """Returns which inputs the files of a run can take.

  Args:
    manifest: The manifest of the run's models, without this entry.
    export: Which inputs are wanted, a key of `run_entries.EXPORT`.
  """
  return run_entries.TRAINING if obstacle(manifest) else export


def obstacle(manifest: Mapping[str, Any]) -> Optional[str]:
  """Returns why no file can take the raw samples of a run; None if it can."""
  if 'divisor' not in manifest or manifest['input_shape'] is None:
    return 'it is not known how the samples were prepared'
  if manifest['divisor'] is None:
    return "the domains' values were divided by different numbers"
  return None


def takes_raw(manifest: Mapping[str, Any]) -> bool:
  """Whether the Keras files of a run take raw samples.

  Those of earlier versions, whose manifest has no such entry, do not.
  """
  return manifest.get(ENTRY) == run_entries.RAW


def scaling(
    manifest: Mapping[str, Any], client_id: Optional[str] = None
) -> Optional[dict[str, Any]]:
  """Returns the scaling of a client's model, or of the global model.

  It has the arguments of `tff_bn.data.dataset.Scaling`; None: no scaling.
  """
  own = manifest.get(CLIENTS, {})
  return own.get(client_id) or manifest.get(SCALING)


def preparation(
    manifest: Mapping[str, Any], client_id: Optional[str] = None
) -> 'Optional[raw_inputs.Preparation]':
  """Returns what the Keras file of a model does to samples; None: nothing.

  Args:
    manifest: The manifest of the run's models.
    client_id: The client whose model it is. Default: the global model.
  """
  if not takes_raw(manifest):
    return None
  from tff_bn.keras_model import raw_inputs

  image_size = manifest['image_size']
  return raw_inputs.Preparation(
      shape=tuple(manifest['input_shape']),
      image_size=None if image_size is None else tuple(image_size),
      rounds=manifest['is_uint8'],
      divisor=manifest['divisor'],
      **(scaling(manifest, client_id) or {}),
  )
