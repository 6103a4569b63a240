"""The function library of a TensorFlow graph."""

from collections.abc import Iterable, Iterator

import tensorflow as tf

# Operations that draw random numbers from a state that is not a variable.
_DRAWING = ('Random', 'TruncatedNormal', 'ParameterizedTrunc', 'Multinomial')


class FunctionLibrary:
  """Finds the functions that operations call."""

  def __init__(self, graph_def: tf.compat.v1.GraphDef):
    self._library = graph_def.library
    self._functions = {
        function.signature.name: function
        for function in graph_def.library.function
    }

  def add_called_functions(self, graph_def: tf.compat.v1.GraphDef) -> None:
    """Adds to a graph the functions that its operations call, with gradients.

    Args:
      graph_def: A graph of operations without a library; changed in place.
    """
    called = self._called(graph_def.node)
    for name in called:
      graph_def.library.function.add().CopyFrom(self._functions[name])
    for gradient in self._library.gradient:
      if gradient.function_name in called:
        graph_def.library.gradient.add().CopyFrom(gradient)

  def draws_random_numbers(self, node: tf.compat.v1.NodeDef) -> bool:
    """Whether a function that `node` calls draws random numbers."""
    return any(
        inner.op.startswith(_DRAWING)
        for name in self._called([node])
        for inner in self._functions[name].node_def
    )

  def _called(self, nodes: Iterable[tf.compat.v1.NodeDef]) -> dict[str, None]:
    """The names of the functions called directly or by other functions."""
    found: dict[str, None] = {}
    stack = list(_referenced_names(nodes))
    while stack:
      name = stack.pop()
      if name in self._functions and name not in found:
        found[name] = None
        stack += _referenced_names(self._functions[name].node_def)
    return found


def _referenced_names(nodes: Iterable[tf.compat.v1.NodeDef]) -> Iterator[str]:
  for node in nodes:
    yield node.op  # An operation can be a function's name.
    for attribute in node.attr.values():
      if attribute.HasField('func'):
        yield attribute.func.name
      for function in attribute.list.func:
        yield function.name
