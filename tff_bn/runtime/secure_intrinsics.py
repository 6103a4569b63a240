"""TFF's secure sums, which the runtimes here compute without cryptography."""

import threading
from typing import Any
import warnings

import tensorflow_federated as tff

from tff_bn.common import unused_assertions

URIS = frozenset(
    [
        'federated_secure_modular_sum',
        'federated_secure_select',
        'federated_secure_sum',
        'federated_secure_sum_bitwidth',
    ]
)
_warned = threading.Event()


def replaced(
    comp: tff.framework.ConcreteComputation,
) -> tff.framework.ConcreteComputation:
  """Returns a computation with plain sums in place of secure ones."""
  _warn_of_insecurity()
  unused_assertions.silence()
  return tff.backends.test.replace_secure_intrinsics_with_bodies(comp)


def occur_in(proto: Any) -> bool:
  """Whether the proto of a computation has secure sums."""
  serialized = proto.SerializeToString()
  return any(uri.encode() in serialized for uri in URIS)


def _warn_of_insecurity() -> None:
  """Warns once in a process that the sums have no cryptography."""
  if _warned.is_set():
    return
  _warned.set()
  warnings.warn(
      'Secure aggregation is simulated here: the sums are right, but computed'
      ' without cryptography.',
      stacklevel=2,
  )
