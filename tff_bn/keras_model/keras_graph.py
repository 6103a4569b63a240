"""The graph of calls in a functional Keras model."""

from collections.abc import Mapping
import dataclasses
from typing import Any, Union

import keras
from keras import tree


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
  """One call of a layer in a functional model.

  Attributes:
    layer: The layer. Functions of `keras.ops` and operators such as `x * 2` are
      calls of a `keras.Operation`, which has a `name` but no weights.
    inputs: The symbolic tensors among the arguments, in order.
    args: The positional arguments, with symbolic tensors inside.
    kwargs: The keyword arguments, with symbolic tensors inside.
    outputs: The symbolic tensors that the call returned.
  """

  layer: Union[keras.Layer, keras.Operation]
  inputs: list[keras.KerasTensor]
  args: tuple[Any, ...]
  kwargs: dict[str, Any]
  outputs: list[keras.KerasTensor]

  def repeat(
      self,
      layer: Union[keras.Layer, keras.Operation],
      tensors: Mapping[int, keras.KerasTensor],
  ) -> list[keras.KerasTensor]:
    """Calls another layer with other tensors, by the `id`s of the inputs."""

    def replaced(value):
      # Arguments can also be constants.
      return tensors.get(id(value), value)

    return tree.flatten(
        layer(
            *tree.map_structure(replaced, self.args),
            **tree.map_structure(replaced, self.kwargs),
        )
    )


def calls(model: keras.Model) -> list[Call]:
  """Lists the calls of layers in a functional model, inputs before outputs.

  The model may be a `Sequential` that is connected to an input. Calls of its
  `InputLayer`s are left out. A nested model is one call.
  """
  known = {id(tensor) for tensor in model.inputs}
  seen = set()
  found: list[Call] = []
  stack = [(tensor, False) for tensor in reversed(model.outputs)]
  while stack:
    tensor, is_done = stack.pop()
    if id(tensor) in known:
      continue
    node = _node(tensor)
    if is_done:
      found.append(_call(node))
      known.update(id(output) for output in node.outputs)
    elif id(node) not in seen:
      seen.add(id(node))
      stack.append((tensor, True))
      stack += [(x, False) for x in reversed(node.input_tensors)]
  return found


def producer(tensor: keras.KerasTensor) -> Call:
  """Returns the call that returned a symbolic tensor.

  A `keras.Input` comes from a call of its `InputLayer`.
  """
  return _call(_node(tensor))


def _node(tensor: keras.KerasTensor) -> Any:
  # Keras has no public access to the call of a tensor.
  operation, node_index, _ = tensor._keras_history
  return operation._inbound_nodes[node_index]


def _call(node: Any) -> Call:
  return Call(
      layer=node.operation,
      inputs=list(node.input_tensors),
      args=tuple(node.arguments.args),
      kwargs=dict(node.arguments.kwargs),
      outputs=list(node.outputs),
  )
