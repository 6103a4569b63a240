"""Small stand-ins for TensorFlow computations while TFF composes others.

TFF serializes and parses a computation again for each computation around it:
about ten times for a client's part of a round. That takes seconds for a graph
with a frozen backbone. Stand-ins have no graph, and the composed computation
gets the graphs at the end.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow_federated as tff

_Computation = tff.framework.ConcreteComputation


class StandIns:
  """Makes stand-ins for some computations, and replaces them again."""

  def __init__(self) -> None:
    self._originals: list[tff.Computation] = []

  def of(self, computation: tff.Computation) -> tff.Computation:
    """Returns a stand-in for a `tff.tensorflow.computation`.

    It has the same type, but can't be called.
    """
    proto = _Computation.get_proto(computation)
    small = type(proto)(type=proto.type)
    small.tensorflow.cache_key.id = len(self._originals)
    self._originals.append(computation)
    return _computation(small, computation)

  def replaced(self, computation: tff.Computation) -> tff.Computation:
    """Returns a computation with the originals in place of the stand-ins.

    Args:
      computation: A `tff.federated_computation`, whose TensorFlow computations
        without a graph are stand-ins of this object.
    """
    proto = type(_Computation.get_proto(computation))()
    proto.CopyFrom(_Computation.get_proto(computation))
    for part in _compiled(proto):
      if not part.tensorflow.HasField('graph_def'):
        original = self._originals[part.tensorflow.cache_key.id]
        part.CopyFrom(_Computation.get_proto(original))
    return _computation(proto, computation)


def _computation(proto: Any, annotated: tff.Computation) -> tff.Computation:
  """Returns the computation of a proto; its type has names of containers."""
  return _Computation(
      computation_proto=proto,
      context_stack=tff.framework.get_context_stack(),
      annotated_type=annotated.type_signature,
  )


def _compiled(proto: Any) -> Iterator[Any]:
  """Yields the protos of all TensorFlow computations in a computation's."""
  kind = proto.WhichOneof('computation')
  if kind is None:
    return
  value = getattr(proto, kind)
  match kind:
    case 'tensorflow':
      yield proto
    case 'call':
      yield from _compiled(value.function)
      yield from _compiled(value.argument)
    case 'lambda':
      yield from _compiled(value.result)
    case 'block':
      for local in value.local:
        yield from _compiled(local.value)
      yield from _compiled(value.result)
    case 'struct':
      for element in value.element:
        yield from _compiled(element.value)
    case 'selection':
      yield from _compiled(value.source)
