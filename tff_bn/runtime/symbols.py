"""The graph of tensors and operations in a TFF computation.

A `Leaf` is a symbol for a tensor; a `Node` computes leaves from other leaves.
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
  """The place where an operation runs."""

  SERVER = 'server'
  CLIENTS = 'clients'


class Leaf:
  """A symbol for a tensor or a dataset.

  `name` is its place in the structure that the node computes, such as
  `weights.trainable[0]`, and empty if it is not part of a structure.
  """

  __slots__ = ('name', 'node', 'type')

  def __init__(self, node: 'Node', type_spec: tff.Type, name: str = ''):
    self.node = node
    self.type = type_spec
    self.name = name

  @property
  def spec(self) -> tf.TensorSpec:
    """The tensor's spec; a dataset is its variant tensor."""
    return element_structure.tensor_spec(self.type)


# A tree of symbols: a leaf, a struct of trees, or a function between trees.
Tree = Union[Leaf, tff.structure.Struct, Callable[[Any], Any]]


class Node:
  """An operation, an input or another source of leaves.

  Attributes:
    number: A number greater than those of all nodes that this one depends on.
    location: The place of the node's leaves.
    level: The number of the pass that computes the leaves.
    inputs: The leaves that the node depends on.
    outputs: The node's leaves.
  """

  _numbers = itertools.count()

  def __init__(
      self,
      location: Location,
      inputs: Sequence[Leaf],
      output_type: tff.Type,
      name: str = '',
  ):
    self.number = self.next_number()
    self.location = location
    self.inputs = tuple(inputs)
    self.level: int = max((leaf.node.level for leaf in self.inputs), default=0)
    self.outputs = self._leaves(output_type, name)

  def _leaves(self, type_spec: tff.Type, name: str = '') -> tuple[Leaf, ...]:
    """Returns new leaves of the node, for a value of a type."""
    return tuple(
        Leaf(self, leaf_type, leaf_name)
        for leaf_type, leaf_name in zip(
            element_structure.leaf_types(type_spec),
            element_structure.leaf_names(type_spec, name),
            strict=True,
        )
    )

  @classmethod
  def next_number(cls) -> int:
    """Returns a number greater than those of all previous nodes."""
    return next(cls._numbers)


class Input(Node):
  """A part of the argument of the computation or of an inner function."""

  def __init__(self, location: Location, type_spec: tff.Type, name: str = ''):
    super().__init__(location, (), type_spec, name)


class Operation(Node):
  """An operation of TensorFlow; `trace` maps input to output tensors."""

  def __init__(
      self,
      trace: Callable[[list[tf.Tensor]], list[tf.Tensor]],
      location: Location,
      inputs: Sequence[Leaf],
      output_type: tff.Type,
  ):
    super().__init__(location, inputs, output_type)
    self.trace = trace


class Selection(Operation):
  """An operation at a client for which the server sends slices of its values.

  Attributes:
    slices: What the server sends for it, instead of the node's inputs.
  """

  def __init__(
      self,
      trace: Callable[[list[tf.Tensor]], list[tf.Tensor]],
      inputs: Sequence[Leaf],
      output_type: tff.Type,
      slices_type: tff.Type,
  ):
    super().__init__(trace, Location.CLIENTS, inputs, output_type)
    self.slices = self._leaves(slices_type)


class Fold(Node):
  """The accumulation of the clients' values at the server.

  `accumulate` maps the accumulator, `zero` before the first client, and a
  client's `values` to the next accumulator.
  """

  def __init__(
      self,
      values: Sequence[Leaf],
      zero: Sequence[Leaf],
      accumulate: 'InnerFunction',
      total_type: tff.Type,
  ):
    super().__init__(
        Location.SERVER,
        [*values, *zero, *accumulate.captured],
        # Not the type of `zero`: an accumulator may grow.
        total_type,
    )
    # The result is available only after the pass that computes the values.
    self.level += 1
    self.values = tuple(values)
    self.zero = tuple(zero)
    self.accumulate = accumulate


@dataclasses.dataclass(frozen=True)
class InnerFunction:
  """A function that is an argument of an intrinsic, such as an accumulation.

  It computes `outputs` from its arguments `inputs` and from the leaves outside
  that it captured.
  """

  inputs: tuple[Leaf, ...]
  captured: tuple[Leaf, ...]
  outputs: tuple[Leaf, ...]

  def __call__(
      self, arguments: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Computes the tensors of `outputs`."""
    tensors = dict(zip(self.inputs, arguments))
    tensors.update(zip(self.captured, captured))
    return compute(self.outputs, tensors)


def nodes_between(known: Iterable[Leaf], outputs: Iterable[Leaf]) -> list[Node]:
  """Returns the nodes that compute `outputs` from `known`, inputs first."""
  known = set(known)
  nodes: dict[int, Node] = {}
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
  """Computes the tensors of `outputs` by running the operations before them.

  `tensors` has the tensors of known leaves, with all inputs and folds among
  them.
  """
  tensors = dict(tensors)
  for node in nodes_between(tensors, outputs):
    assert isinstance(node, Operation), node
    results = node.trace([tensors[leaf] for leaf in node.inputs])
    tensors.update(zip(node.outputs, results, strict=True))
  return [tensors[leaf] for leaf in outputs]


def flatten(tree: Tree) -> list[Leaf]:
  """Returns a tree's leaves, depth first."""
  if isinstance(tree, Leaf):
    return [tree]
  if isinstance(tree, tff.structure.Struct):
    return [leaf for part in tree for leaf in flatten(part)]
  raise NotImplementedError('TensorFlow can not take a function as a value.')


def new_inputs(
    type_spec: tff.Type, location: Location, leaves: list[Leaf]
) -> Tree:
  """Creates the symbols of an argument and appends them to `leaves`."""
  new = [
      Input(location, leaf_type, name).outputs[0]
      for leaf_type, name in zip(
          element_structure.leaf_types(type_spec),
          element_structure.leaf_names(type_spec),
          strict=True,
      )
  ]
  leaves += new
  return element_structure.unflatten(type_spec, iter(new))


def unique(leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
  """Returns the leaves in their order without duplicates."""
  return tuple(dict.fromkeys(leaves))
