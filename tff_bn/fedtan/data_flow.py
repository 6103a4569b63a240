"""The data flow of a traced function, with a stage for each operation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, Optional, Union

import tensorflow as tf

from tff_bn.fedtan.function_library import FunctionLibrary
from tff_bn.fedtan.questions import Request
from tff_bn.keras_model import stateless_function

# Operations that take a variable without changing it.
_READING = frozenset(
    [
        'ReadVariableOp',
        'ResourceGather',
        'ResourceGatherNd',
        'VarIsInitializedOp',
        'VariableShape',
    ]
)
# Operations that change a variable, and how they compute its new value.
_UPDATING = {'AssignAddVariableOp': 'AddV2', 'AssignSubVariableOp': 'Sub'}
# Operations whose outputs are the shapes of their inputs.
_SHAPES = frozenset(['Shape', 'ShapeN'])

# The kinds of sources, which are the first part of a source's name.
ARGUMENT, VALUE, SEED, GENERATOR = 'argument', 'value', 'seed', 'generator'

_CapturedVariable = Union[
    stateless_function.GivenVariable,
    stateless_function.OtherVariable,
    stateless_function.RandomState,
]


@dataclasses.dataclass(frozen=True)
class _Source:
  """A value given from outside: an argument, a variable's value, an answer."""

  level: int
  spec: tf.TensorSpec


@dataclasses.dataclass(frozen=True)
class Node:
  """An operation of the graph.

  Attributes:
    definition: The operation, without inputs.
    inputs: The names of the input tensors.
    control_inputs: The names of nodes of the same stage that must run before.
    level: The first stage that can compute the operation.
    specs: The specs of the outputs.
    is_repeatable: Whether the operation gives the same result each time.
    is_recomputed: Whether to recompute the outputs in a later stage instead of
      carrying them over. True for repeatable operations that depend only on
      values of variables and on shapes, because these are cheap.
    are_shapes: Whether each output is the shape of the input at its place.
  """

  definition: tf.compat.v1.NodeDef
  inputs: tuple[str, ...]
  control_inputs: tuple[str, ...]
  level: int
  specs: tuple[tf.TensorSpec, ...]
  is_repeatable: bool
  is_recomputed: bool
  are_shapes: bool

  def dependencies(self) -> list[str]:
    """Returns the names of the tensors and nodes that must come before."""
    return [*self.inputs, *(f'{name}:0' for name in self.control_inputs)]


class DataFlow:
  """A traced graph without side effects.

  Tensors are known by their names in the traced graph. Reads and assignments of
  variables disappear: `resolve` maps each read to the tensor with the value.

  The level of a tensor is the first stage that can compute it: an answer has
  the level after the level of its question.

  Attributes:
    library: The functions of the graph.
    versions: The graph's versions, as in a `GraphDef`.
  """

  def __init__(
      self,
      function: tf.types.experimental.ConcreteFunction,
      variables: Sequence[stateless_function.Variable],
      requests: Sequence[Request],
  ):
    """Analyzes a graph with questions in the order in which they are asked.

    The caller gives the values of `variables`.
    """
    graph = function.graph
    graph_def = graph.as_graph_def()
    self.library = FunctionLibrary(graph_def)
    self.versions = graph_def.versions
    self._definitions = {node.name: node for node in graph_def.node}
    self._sources: dict[str, _Source] = {}
    self._nodes: dict[str, Node] = {}
    self._variables: dict[str, _CapturedVariable] = {}  # By handle.
    self._current: dict[str, str] = {}  # From handles to current values.
    self._aliases: dict[str, str] = {}
    self._random_numbers = itertools.count()
    self._requests: dict[str, Request] = {}  # By the names of the answers.
    self._answer_levels: dict[Request, int] = {}
    for request in requests:
      for placeholder in tf.nest.flatten(request.answer):
        self._requests[placeholder.name] = request
    num_args = len(graph.inputs) - len(function.captured_inputs)
    for number, tensor in enumerate(graph.inputs[:num_args]):
      self._aliases[tensor.name] = self._add_source(
          f'{ARGUMENT}/{number}', _spec_of(tensor)
      )
    captures = stateless_function.captures(function, variables)
    for tensor, capture in zip(graph.inputs[num_args:], captures, strict=True):
      self._add_capture(tensor.name, capture)
    for op in _in_order(graph.get_operations()):
      name = op.outputs[0].name if op.outputs else None
      if name in self._requests:
        self._add_answer(op.outputs[0])
      elif name not in self._aliases and name not in self._variables:
        self._add_operation(op)

  def _add_source(self, name: str, spec: tf.TensorSpec, level: int = 0) -> str:
    self._sources.setdefault(name, _Source(level, spec))
    return name

  def _add_capture(
      self, name: str, capture: stateless_function.Capture
  ) -> None:
    if isinstance(capture, stateless_function.Constant):
      self._aliases[name] = self._add_constant(name, capture.value)
      return
    self._variables[name] = capture
    spec = _spec_of(capture.variable)
    match capture:
      case stateless_function.GivenVariable(_, index):
        self._current[name] = self._add_source(f'{VALUE}/{index}', spec)
      case stateless_function.OtherVariable(_, initial):
        self._current[name] = self._add_constant(name, initial)
      case stateless_function.RandomState() if capture.is_seed:
        number = next(self._random_numbers)
        self._current[name] = self._add_source(f'{SEED}/{number}', spec)

  def _add_constant(self, name: str, value: Any) -> str:
    with tf.Graph().as_default():
      op = tf.constant(value).op
    return self._add_node(
        f'tff_bn.constant/{node_of(name)}', op.node_def, (), specs=_specs(op)
    )

  def _add_node(
      self,
      name: str,
      definition: tf.compat.v1.NodeDef,
      inputs: Sequence[str],
      *,
      control_inputs: Sequence[str] = (),
      specs: Sequence[tf.TensorSpec],
      is_repeatable: bool = True,
  ) -> str:
    """Adds a node and returns the name of its first output."""
    new = tf.compat.v1.NodeDef()
    new.CopyFrom(definition)
    new.name = name
    del new.input[:]
    # The runtime chooses the device.
    new.device = ''
    new.attr.pop('_class', None)
    before = [self._nodes[n] for n in control_inputs]
    levels = [self.level(n) for n in inputs]
    is_recomputed = (
        is_repeatable
        and all(
            self._is_recomputed(n) or self.shape_of(n) is not None
            for n in inputs
        )
        and all(node.is_recomputed for node in before)
    )
    self._nodes[name] = Node(
        definition=new,
        inputs=tuple(inputs),
        control_inputs=tuple(control_inputs),
        level=max([*levels, *(node.level for node in before)], default=0),
        specs=tuple(specs),
        is_repeatable=is_repeatable,
        is_recomputed=is_recomputed,
        are_shapes=definition.op in _SHAPES and not is_recomputed,
    )
    return f'{name}:0'

  def _add_answer(self, placeholder: tf.Tensor) -> None:
    request = self._requests[placeholder.name]
    level = 1 + max(self.level(name) for name in self.sent(request))
    self._answer_levels[request] = level
    self._add_source(placeholder.name, _spec_of(placeholder), level)

  def _add_operation(self, op: tf.Operation) -> None:
    resources = [
        self.resolve(tensor.name)
        for tensor in op.inputs
        if tensor.dtype == tf.resource
    ]
    handles = [name for name in resources if name in self._variables]
    definition = self._definitions[op.name]
    if not handles:
      self._add_node(
          op.name,
          definition,
          [self.resolve(tensor.name) for tensor in op.inputs],
          specs=_specs(op),
          is_repeatable=not op.op_def.is_stateful,
      )
      return
    handle = handles[0]
    if op.type == 'Identity':
      self._aliases[op.outputs[0].name] = handle
    elif op.type == 'ReadVariableOp' and not self._is_generator(handle):
      self._aliases[op.outputs[0].name] = self._current[handle]
    elif op.type == 'AssignVariableOp':
      self._current[handle] = self.resolve(op.inputs[1].name)
    elif op.type in _UPDATING:
      node = tf.compat.v1.NodeDef(op=_UPDATING[op.type])
      node.attr['T'].CopyFrom(definition.attr['dtype'])
      old, change = self._current[handle], self.resolve(op.inputs[1].name)
      self._current[handle] = self._add_node(
          op.name, node, [old, change], specs=[self.spec(old)]
      )
    else:
      self._add_operation_with_new_variables(op)

  def _add_operation_with_new_variables(self, op: tf.Operation) -> None:
    """Adds an operation, with a new variable for each one that it takes."""
    new_handles: dict[str, str] = {}
    inputs = []
    for tensor in op.inputs:
      name = self.resolve(tensor.name)
      if name in self._variables and name not in new_handles:
        new_handles[name] = self._add_variable(
            f'{op.name}/variable_{len(new_handles)}', name
        )
      inputs.append(new_handles.get(name, name))
    definition = self._definitions[op.name]
    self._add_node(
        op.name,
        definition,
        inputs,
        specs=_specs(op),
        # Its variables have the same values at each execution.
        is_repeatable=not self.library.draws_random_numbers(definition),
    )
    if op.type in _READING:
      return
    for name, handle in new_handles.items():
      spec = _spec_of(self._variables[name].variable)
      node = tf.compat.v1.NodeDef(op='ReadVariableOp')
      node.attr['dtype'].type = spec.dtype.as_datatype_enum
      self._current[name] = self._add_node(
          f'{node_of(handle)}/after',
          node,
          [handle],
          control_inputs=[op.name],
          specs=[spec],
      )

  def _is_generator(self, handle: str) -> bool:
    """Whether a variable is a state that only random operations understand."""
    capture = self._variables[handle]
    return (
        isinstance(capture, stateless_function.RandomState)
        and not capture.is_seed
    )

  def _add_variable(self, name: str, old_handle: str) -> str:
    """Adds a variable with a captured one's value and returns its handle."""
    variable = self._variables[old_handle].variable
    if self._is_generator(old_handle):
      # Each draw has a state of its own.
      value = self._add_source(
          f'{GENERATOR}/{next(self._random_numbers)}', _spec_of(variable)
      )
    else:
      value = self._current[old_handle]
    dtype = variable.dtype.as_datatype_enum
    new = tf.compat.v1.NodeDef(op='VarHandleOp')
    new.attr['dtype'].type = dtype
    new.attr['shape'].shape.CopyFrom(variable.shape.as_proto())
    specs = [tf.TensorSpec([], tf.resource)]
    handle = self._add_node(name, new, (), specs=specs)
    assign = tf.compat.v1.NodeDef(op='AssignVariableOp')
    assign.attr['dtype'].type = dtype
    self._add_node(f'{name}/assign', assign, [handle, value], specs=())
    # An identity waits for the assignment, not the operation itself: a loop
    # only passes the handle on, and TensorFlow may drop its control inputs.
    identity = tf.compat.v1.NodeDef(op='Identity')
    identity.attr['T'].type = tf.resource.as_datatype_enum
    return self._add_node(
        f'{name}/assigned',
        identity,
        [handle],
        control_inputs=[f'{name}/assign'],
        specs=specs,
    )

  def resolve(self, name: str) -> str:
    """Returns the name of the source or output that equals a tensor."""
    if name in self._variables or name in self._requests:
      return name
    return self._aliases.get(name, name)

  def sent(self, request: Request) -> list[str]:
    """Returns the names of the tensors that a question sends."""
    return [self.resolve(t.name) for t in request.tensors]

  def is_source(self, name: str) -> bool:
    """Whether a tensor is given from outside."""
    return name in self._sources

  def node(self, name: str) -> Node:
    """Returns the node that computes a tensor, which must not be a source."""
    return self._nodes[node_of(name)]

  def level(self, name: str) -> int:
    """Returns the first stage that knows or can compute a tensor."""
    if name in self._sources:
      return self._sources[name].level
    return self.node(name).level

  def spec(self, name: str) -> tf.TensorSpec:
    """Returns the spec of a tensor."""
    if name in self._sources:
      return self._sources[name].spec
    return self.node(name).specs[int(name.rpartition(':')[2])]

  def shape_of(self, name: str) -> Optional[tf.TensorShape]:
    """Returns the shape that a tensor contains, as far as it is known.

    `None` if the tensor is not the shape of another one, or of unknown length.
    """
    if name in self._sources or not self.node(name).are_shapes:
      return None
    place = int(name.rpartition(':')[2])
    shape = self.spec(self.node(name).inputs[place]).shape
    return None if shape.rank is None else shape

  def _is_recomputed(self, name: str) -> bool:
    if name in self._sources:
      return name.startswith(VALUE)
    return self.node(name).is_recomputed

  def can_be_carried(self, name: str) -> bool:
    """Whether a later stage gets a tensor from the stage that computes it."""
    if name in self._sources:
      return True
    node = self.node(name)
    if node.is_recomputed or not node.specs:
      return False  # An assignment has no output and stays with its variable.
    return self.spec(name).dtype not in (tf.resource, tf.variant)

  def needed_requests(self, outputs: Iterable[str]) -> Mapping[Request, int]:
    """Returns the questions whose answers tensors depend on, as asked.

    The values are the levels of the answers.
    """
    needed = set()
    seen = set()
    stack = list(outputs)
    while stack:
      name = stack.pop()
      if name in self._requests:
        request = self._requests[name]
        if request not in needed:
          needed.add(request)
          stack += self.sent(request)
      elif name not in self._sources and node_of(name) not in seen:
        seen.add(node_of(name))
        stack += self.node(name).dependencies()
    return {
        request: level
        for request, level in self._answer_levels.items()
        if request in needed
    }


def node_of(tensor_name: str) -> str:
  """Returns the name of the node in a tensor's name."""
  return tensor_name.rpartition(':')[0]


def _in_order(operations: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
  """Yields each operation after the operations that compute its inputs."""
  seen = set()
  for operation in operations:
    # The gradient of a loop makes inputs of the loop after the loop itself.
    stack = [operation]
    while stack:
      op = stack[-1]
      before = [i.op for i in op.inputs if i.op not in seen]
      if before:
        stack += before
        continue
      stack.pop()
      if op not in seen:
        seen.add(op)
        yield op


def _specs(op: tf.Operation) -> list[tf.TensorSpec]:
  return [_spec_of(output) for output in op.outputs]


def _spec_of(value: Union[tf.Tensor, tf.Variable]) -> tf.TensorSpec:
  return tf.TensorSpec(value.shape, value.dtype)
