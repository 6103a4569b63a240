"""Symbols that stand for tensors while a computation is evaluated.

The symbols and the operations between them are a graph: a `Leaf` is a tensor, a
`Node` produces leaves from other leaves.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import enum
import itertools
from typing import Any, Union

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import element_structure


class Location(enum.Enum):
  """Where an operation takes place."""

  SERVER = 'server'
  CLIENTS = 'clients'


class Leaf:
  """The symbol of one tensor, or of one dataset."""

  __slots__ = ('node', 'type')

  def __init__(self, node: 'Node', type_spec: tff.Type):
    self.node = node
    self.type = type_spec

  @property
  def spec(self) -> tf.TensorSpec:
    """The tensor's dtype and shape; a dataset is its variant tensor."""
    return element_structure.tensor_spec(self.type)


# A tree of symbols: a leaf, a struct of trees, or a function between trees.
Tree = Union[Leaf, tff.structure.Struct, Callable[[Any], Any]]


class Node:
  """Something that produces leaves.

  Attributes:
    number: Greater than the number of all nodes that it depends on.
    location: Where its leaves are.
    level: The pass in which they are computed.
    inputs: The leaves that it depends on.
    outputs: Its leaves.
  """

  _numbers = itertools.count()

  def __init__(
      self,
      location: Location,
      inputs: Sequence[Leaf],
      output_types: Iterable[tff.Type],
  ):
    self.number = self.next_number()
    self.location = location
    self.inputs = tuple(inputs)
    self.level = max((leaf.node.level for leaf in self.inputs), default=0)
    self.outputs = tuple(Leaf(self, t) for t in output_types)

  @classmethod
  def next_number(cls) -> int:
    """A number greater than those of all nodes so far."""
    return next(cls._numbers)


class Input(Node):
  """A part of the argument, or of the argument of an inner function."""

  def __init__(self, location: Location, type_spec: tff.Type):
    super().__init__(location, (), [type_spec])


class Operation(Node):
  """A call of TensorFlow.

  Attributes:
    trace: Makes the tensors of the outputs of those of the inputs.
  """

  def __init__(
      self,
      trace: Callable[[list[tf.Tensor]], list[tf.Tensor]],
      location: Location,
      inputs: Sequence[Leaf],
      output_types: Iterable[tff.Type],
  ):
    super().__init__(location, inputs, output_types)
    self.trace = trace


class Fold(Node):
  """The accumulation of the clients' values at the server.

  Attributes:
    values: The clients' values.
    zero: The accumulator before the first client.
    accumulate: Makes the new accumulator of the old one and a client's values.
  """

  def __init__(
      self,
      values: Sequence[Leaf],
      zero: Sequence[Leaf],
      accumulate: 'InnerFunction',
      total_types: Iterable[tff.Type],
  ):
    super().__init__(
        Location.SERVER,
        [*values, *zero, *accumulate.captured],
        # Not those of `zero`: an accumulator may grow.
        total_types,
    )
    # The values of all clients have to be there before anybody can use it.
    self.level += 1
    self.values = tuple(values)
    self.zero = tuple(zero)
    self.accumulate = accumulate


@dataclasses.dataclass(frozen=True)
class InnerFunction:
  """A function that TFF hands to an intrinsic, such as an accumulation.

  Attributes:
    inputs: The leaves that stand for its arguments.
    captured: Leaves from outside that it uses.
    outputs: Its results.
  """

  inputs: tuple[Leaf, ...]
  captured: tuple[Leaf, ...]
  outputs: tuple[Leaf, ...]

  def __call__(
      self, arguments: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Returns the tensors of `outputs`."""
    tensors = dict(zip(self.inputs, arguments))
    tensors.update(zip(self.captured, captured))
    return compute(self.outputs, tensors)


def nodes_between(known: Iterable[Leaf], outputs: Iterable[Leaf]) -> list[Node]:
  """Finds the nodes that compute leaves from others.

  Args:
    known: The leaves that are known.
    outputs: The leaves that are to be computed.

  Returns:
    The nodes, each after those on which it depends.
  """
  known = set(known)
  nodes = {}
  stack = [leaf for leaf in outputs if leaf not in known]
  while stack:
    node = stack.pop().node
    if node.number not in nodes:
      nodes[node.number] = node
      stack.extend(leaf for leaf in node.inputs if leaf not in known)
  return [nodes[number] for number in sorted(nodes)]


def compute(
    outputs: Sequence[Leaf], tensors: dict[Leaf, tf.Tensor]
) -> list[tf.Tensor]:
  """Computes leaves from others.

  Args:
    outputs: The leaves that are to be computed.
    tensors: The tensors of leaves that are known.

  Returns:
    The tensors of `outputs`.
  """
  tensors = dict(tensors)
  for node in nodes_between(tensors, outputs):
    results = node.trace([tensors[leaf] for leaf in node.inputs])
    tensors.update(zip(node.outputs, results, strict=True))
  return [tensors[leaf] for leaf in outputs]


def flatten(tree: Tree) -> list[Leaf]:
  """Returns a tree's leaves, depth first."""
  if isinstance(tree, Leaf):
    return [tree]
  if isinstance(tree, tff.structure.Struct):
    return [leaf for part in tree for leaf in flatten(part)]
  raise NotImplementedError('A function is no value that TensorFlow can use.')


def new_inputs(
    type_spec: tff.Type, location: Location, leaves: list[Leaf]
) -> Tree:
  """Makes symbols of a value that is given.

  Args:
    type_spec: The value's type.
    location: Where it is.
    leaves: A list to which the symbols are appended.

  Returns:
    The tree of the symbols.
  """
  new = [
      Input(location, leaf_type).outputs[0]
      for leaf_type in element_structure.leaf_types(type_spec)
  ]
  leaves += new
  return element_structure.unflatten(type_spec, iter(new))


def unique(leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
  """Leaves out what occurs again."""
  return tuple(dict.fromkeys(leaves))
