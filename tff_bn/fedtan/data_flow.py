"""The graph of a traced function, cut at its questions."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, NamedTuple

import tensorflow as tf

from tff_bn.keras_model import stateless_function

# These operations don't change the variable that they take.
_READING = frozenset(
    [
        'ReadVariableOp',
        'ResourceGather',
        'ResourceGatherNd',
        'VarIsInitializedOp',
        'VariableShape',
    ]
)
# These make a variable's new value of the old one and another one.
_UPDATING = {'AssignAddVariableOp': 'AddV2', 'AssignSubVariableOp': 'Sub'}
# These draw random numbers from a state that is not a variable.
_DRAWING = ('Random', 'TruncatedNormal', 'ParameterizedTrunc', 'Multinomial')
# Makes each variable of a stage its own within a computation.
_variable_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Question:
  """What is asked at the end of a stage.

  Attributes:
    kind: What the caller of `Ask` gave.
    value: What is sent, a nested structure of `tf.TensorSpec`s. The answer has
      the same structure and types.
  """

  kind: Hashable
  value: Any


class Asked(NamedTuple):
  """What a caller of `Ask` gave, as a stage returns it.

  Attributes:
    value: The values that are sent.
    sound: A bool scalar, whether they may be used.
  """

  value: Any
  sound: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """A question while the function is traced; `answer` are placeholders."""

  kind: Hashable
  value: Any
  sound: tf.Tensor
  answer: Any

  @property
  def tensors(self) -> list[tf.Tensor]:
    """All that the stage returns for the question."""
    return [*tf.nest.flatten(self.value), self.sound]

  def asked(self) -> Question:
    """Returns what the caller of the staged function learns of it."""
    return Question(
        self.kind, tf.nest.map_structure(tf.TensorSpec.from_tensor, self.value)
    )


@dataclasses.dataclass(frozen=True)
class _Source:
  """A value that a stage is given: an argument, a variable, an answer."""

  level: int
  spec: tf.TensorSpec


@dataclasses.dataclass(frozen=True)
class _Node:
  """An operation of the graph.

  Attributes:
    definition: The operation, without inputs.
    inputs: Names of tensors.
    first: Names of nodes that have to run before, in the same stage.
    level: The stage.
    specs: Of the outputs.
    can_be_repeated: Whether it gives the same result each time.
    is_repeated: Whether it is rather computed again than carried over. So are
      those that depend on nothing but variables: they are cheap.
  """

  definition: tf.compat.v1.NodeDef
  inputs: tuple[str, ...]
  first: tuple[str, ...]
  level: int
  specs: tuple[tf.TensorSpec, ...]
  can_be_repeated: bool
  is_repeated: bool


ARGUMENT, VALUE, SEED, GENERATOR = 'argument', 'value', 'seed', 'generator'


class DataFlow:
  """A traced graph without side effects: each value has one origin."""

  def __init__(
      self,
      function: tf.types.experimental.ConcreteFunction,
      variables: Sequence[stateless_function.Variable],
      requests: Sequence[Request],
  ):
    graph = function.graph
    self._graph_def = graph.as_graph_def()
    self._definitions = {node.name: node for node in self._graph_def.node}
    self._library = {
        function.signature.name: function
        for function in self._graph_def.library.function
    }
    self._sources: dict[str, _Source] = {}
    self._nodes: dict[str, _Node] = {}
    self._same: dict[str, str] = {}  # From names of tensors to their origin's.
    self._current: dict[str, str] = {}  # The values of variables.
    self._variables: dict[str, stateless_function.Capture] = {}
    self._random_numbers = itertools.count()
    self._requests: dict[str, Request] = {}  # By the names of the answers.
    self._levels: dict[Request, int] = {}  # Of the answers.
    for request in requests:
      for placeholder in tf.nest.flatten(request.answer):
        self._requests[placeholder.name] = request
    num_args = len(graph.inputs) - len(function.captured_inputs)
    for number, tensor in enumerate(graph.inputs[:num_args]):
      self._same[tensor.name] = self._source(
          f'{ARGUMENT}/{number}', tf.TensorSpec(tensor.shape, tensor.dtype)
      )
    captures = stateless_function.captures(function, variables)
    for tensor, capture in zip(graph.inputs[num_args:], captures, strict=True):
      self._capture(tensor.name, capture)
    for op in _in_order(graph.get_operations()):
      if op.outputs and op.outputs[0].name in self._requests:
        self._answer(op.outputs[0])
      elif not op.outputs or not self._is_known(op.outputs[0].name):
        self._operation(op)

  def _is_known(self, name: str) -> bool:
    return name in self._same or name in self._variables

  def _source(self, name: str, spec: tf.TensorSpec, level: int = 0) -> str:
    self._sources.setdefault(name, _Source(level, spec))
    return name

  def _capture(self, name: str, capture: stateless_function.Capture):
    match capture:
      case stateless_function.Constant(value):
        self._same[name] = self._constant(name, value)
        return
      case stateless_function.GivenVariable(variable, index):
        self._current[name] = self._source(
            f'{VALUE}/{index}', tf.TensorSpec(variable.shape, variable.dtype)
        )
      case stateless_function.OtherVariable(_, initial):
        self._current[name] = self._constant(name, initial)
      case stateless_function.RandomState(variable) if capture.is_seed:
        self._current[name] = self._source(
            f'{SEED}/{next(self._random_numbers)}',
            tf.TensorSpec(variable.shape, variable.dtype),
        )
    self._variables[name] = capture

  def _constant(self, name: str, value: Any) -> str:
    with tf.Graph().as_default():
      op = tf.constant(value).op
    return self._add(
        f'tff_bn.constant/{_node_of(name)}', op.node_def, (), specs=_specs(op)
    )

  def _add(
      self,
      name: str,
      definition: tf.compat.v1.NodeDef,
      inputs: Sequence[str],
      *,
      first: Sequence[str] = (),
      specs: Sequence[tf.TensorSpec],
      can_be_repeated: bool = True,
  ) -> str:
    """Adds a node and returns the name of its first output."""
    new = tf.compat.v1.NodeDef()
    new.CopyFrom(definition)
    new.name = name
    del new.input[:]
    # Where a stage runs is for the runtime to say.
    new.device = ''
    new.attr.pop('_class', None)
    levels = [self.level(i) for i in inputs]
    levels += [self._nodes[f].level for f in first]
    self._nodes[name] = _Node(
        new,
        tuple(inputs),
        tuple(first),
        max(levels, default=0),
        tuple(specs),
        can_be_repeated,
        can_be_repeated
        and all(self._is_repeated(i) for i in inputs)
        and all(self._nodes[f].is_repeated for f in first),
    )
    return f'{name}:0'

  def _answer(self, placeholder: tf.Tensor):
    request = self._requests[placeholder.name]
    level = 1 + max(self.level(name) for name in self.sent(request))
    self._levels[request] = level
    spec = tf.TensorSpec(placeholder.shape, placeholder.dtype)
    self._source(placeholder.name, spec, level)

  def _operation(self, op: tf.Operation):
    handles = [i.name for i in op.inputs if i.dtype == tf.resource]
    handles = [self.resolve(name) for name in handles]
    handles = [name for name in handles if name in self._variables]
    definition = self._definitions[op.name]
    if not handles:
      inputs = [self.resolve(i.name) for i in op.inputs]
      self._add(
          op.name,
          definition,
          inputs,
          specs=_specs(op),
          can_be_repeated=not op.op_def.is_stateful,
      )
      return
    handle = handles[0]
    if op.type == 'Identity':
      self._same[op.outputs[0].name] = handle
    elif op.type == 'ReadVariableOp' and not self._is_generator(handle):
      self._same[op.outputs[0].name] = self._current[handle]
    elif op.type == 'AssignVariableOp':
      self._current[handle] = self.resolve(op.inputs[1].name)
    elif op.type in _UPDATING:
      node = tf.compat.v1.NodeDef(op=_UPDATING[op.type])
      node.attr['T'].CopyFrom(definition.attr['dtype'])
      old, change = self._current[handle], self.resolve(op.inputs[1].name)
      self._current[handle] = self._add(
          op.name, node, [old, change], specs=[self._spec(old)]
      )
    else:
      self._with_own_variables(op)

  def _with_own_variables(self, op: tf.Operation):
    """Adds an operation that gets variables of its own with their values."""
    own = {}
    inputs = []
    for tensor in op.inputs:
      name = self.resolve(tensor.name)
      capture = self._variables.get(name)
      if capture is not None and name not in own:
        value = self._current.get(name)
        if self._is_generator(name):
          # Each draw has a state of its own.
          value = self._source(
              f'{GENERATOR}/{next(self._random_numbers)}',
              tf.TensorSpec([3], tf.int64),
          )
        own[name] = self._own_variable(
            f'{op.name}/variable_{len(own)}', capture.variable, value
        )
      inputs.append(own.get(name, name))
    self._add(
        op.name,
        self._definitions[op.name],
        inputs,
        specs=_specs(op),
        # It starts with the same values each time.
        can_be_repeated=not self._draws(self._definitions[op.name]),
    )
    if op.type in _READING:
      return
    for name, handle in own.items():
      variable = self._variables[name].variable
      node = tf.compat.v1.NodeDef(op='ReadVariableOp')
      node.attr['dtype'].type = variable.dtype.as_datatype_enum
      self._current[name] = self._add(
          f'{_node_of(handle)}/after',
          node,
          [handle],
          first=[op.name],
          specs=[tf.TensorSpec(variable.shape, variable.dtype)],
      )

  def _is_generator(self, handle: str) -> bool:
    """Whether a variable is a state that only random operations understand."""
    capture = self._variables[handle]
    return (
        isinstance(capture, stateless_function.RandomState)
        and not capture.is_seed
    )

  def _own_variable(self, name: str, variable: tf.Variable, value: str) -> str:
    """Adds a variable with a value, and returns the name of its handle."""
    dtype = variable.dtype.as_datatype_enum
    new = tf.compat.v1.NodeDef(op='VarHandleOp')
    new.attr['dtype'].type = dtype
    new.attr['shape'].shape.CopyFrom(variable.shape.as_proto())
    spec = tf.TensorSpec([], tf.resource)
    handle = self._add(name, new, (), specs=[spec])
    assign = tf.compat.v1.NodeDef(op='AssignVariableOp')
    assign.attr['dtype'].type = dtype
    self._add(f'{name}/assign', assign, [handle, value], specs=())
    # Not the operation itself waits for the assignment: a loop hands the handle
    # on, and TensorFlow may see that it need not wait for the loop.
    identity = tf.compat.v1.NodeDef(op='Identity')
    identity.attr['T'].type = tf.resource.as_datatype_enum
    return self._add(
        f'{name}/assigned',
        identity,
        [handle],
        first=[f'{name}/assign'],
        specs=[spec],
    )

  def resolve(self, name: str) -> str:
    """The name of the tensor that a tensor of the traced graph is."""
    if name in self._variables or name in self._requests:
      return name
    return self._same.get(name, name)

  def sent(self, request: Request) -> list[str]:
    """The names of the tensors of a question."""
    return [self.resolve(t.name) for t in request.tensors]

  def level(self, name: str) -> int:
    """The stage in which a tensor is there."""
    if name in self._sources:
      return self._sources[name].level
    return self._nodes[_node_of(name)].level

  def _is_repeated(self, name: str) -> bool:
    if name in self._sources:
      return name.startswith(VALUE)
    return self._nodes[_node_of(name)].is_repeated

  def _spec(self, name: str) -> tf.TensorSpec:
    if name in self._sources:
      return self._sources[name].spec
    return self._nodes[_node_of(name)].specs[int(name.rpartition(':')[2])]

  def _can_be_carried(self, name: str) -> bool:
    if name in self._sources:
      return True
    node = self._nodes[_node_of(name)]
    if node.is_repeated or not node.specs:
      return False  # What has no output, an assignment, goes with its variable.
    return self._spec(name).dtype not in (tf.resource, tf.variant)

  def needed_requests(
      self, outputs: Iterable[str]
  ) -> list[tuple[int, Request]]:
    """The questions whose answers are needed, each with its answer's stage."""
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
      elif name not in self._sources and _node_of(name) not in seen:
        seen.add(_node_of(name))
        node = self._nodes[_node_of(name)]
        stack += [*node.inputs, *(f'{first}:0' for first in node.first)]
    # In the order in which they were asked.
    return [
        (n, request) for request, n in self._levels.items() if request in needed
    ]

  def stage(
      self,
      number: int,
      results: Sequence[str],
      carried_on: Mapping[int, Sequence[str]],
      jit_compile: bool,
  ) -> 'Stage':
    """Collects all that a stage computes.

    Args:
      number: The stage.
      results: Names of tensors that it returns.
      carried_on: Names of tensors that it returns for each later stage.
      jit_compile: Whether XLA compiles it, if it can.

    Returns:
      The stage.
    """
    nodes, carried, sources = {}, {}, {}
    wanted = [*results, *itertools.chain(*carried_on.values())]
    stack = list(wanted)
    while stack:
      name = stack.pop()
      if self.level(name) < number and self._can_be_carried(name):
        carried[name] = None
      elif name in self._sources:
        sources[name] = None
      elif _node_of(name) not in nodes:
        node = self._nodes[_node_of(name)]
        if node.level < number and not node.can_be_repeated:
          raise ValueError(
              f'The operation {_node_of(name)!r} ({node.definition.op}) would'
              ' have to be computed once more in the backward pass, but need'
              ' not give the same result again, for instance because it draws'
              ' random numbers in a loop.'
          )
        nodes[_node_of(name)] = node
        stack += [*node.inputs, *(f'{first}:0' for first in node.first)]
    return Stage(
        graph_def=self._to_graph_def(nodes, {**carried, **sources}),
        sources=tuple(sources),
        carried=tuple(carried),
        results=tuple(results),
        specs={name: self._spec(name) for name in wanted},
        # XLA makes no variables.
        jit_compile=jit_compile
        and all(n.definition.op != 'VarHandleOp' for n in nodes.values()),
        carried_on={k: tuple(names) for k, names in carried_on.items()},
    )

  def _to_graph_def(
      self, nodes: Mapping[str, _Node], given: Iterable[str]
  ) -> tf.compat.v1.GraphDef:
    graph_def = tf.compat.v1.GraphDef()
    graph_def.versions.CopyFrom(self._graph_def.versions)
    inputs = {name: _given_name(n) for n, name in enumerate(given)}
    for node in nodes.values():
      definition = graph_def.node.add()
      definition.CopyFrom(node.definition)
      definition.input.extend(inputs.get(i, i) for i in node.inputs)
      definition.input.extend(f'^{first}' for first in node.first)
      if definition.op == 'VarHandleOp':
        shared_name = f'stage_variable_{next(_variable_numbers)}'
        definition.attr['shared_name'].s = shared_name.encode()
    self._add_functions(graph_def)
    return graph_def

  def _add_functions(self, graph_def: tf.compat.v1.GraphDef):
    """Adds the functions that a graph's operations call."""
    added = self._functions(graph_def.node)
    for function in added.values():
      graph_def.library.function.add().CopyFrom(function)
    for gradient in self._graph_def.library.gradient:
      if gradient.function_name in added:
        graph_def.library.gradient.add().CopyFrom(gradient)

  def _functions(self, nodes: Iterable[tf.compat.v1.NodeDef]) -> dict[str, Any]:
    """All functions that operations call, and that these call, by name."""
    found = {}
    stack = list(_called_functions(nodes))
    while stack:
      name = stack.pop()
      if name in self._library and name not in found:
        found[name] = self._library[name]
        stack += _called_functions(found[name].node_def)
    return found

  def _draws(self, definition: tf.compat.v1.NodeDef) -> bool:
    """Whether an operation draws random numbers inside of a function."""
    return any(
        node.op.startswith(_DRAWING)
        for function in self._functions([definition]).values()
        for node in function.node_def
    )


@dataclasses.dataclass(frozen=True)
class Stage:
  """A part of the graph; all are names of tensors.

  Attributes:
    graph_def: Its operations, whose inputs may be what it is given.
    sources: What is given from outside: arguments, variables, answers.
    carried: What is given by earlier stages.
    results: What it returns.
    carried_on: What it returns for each later stage.
    specs: Of all that it returns.
    jit_compile: Whether XLA compiles it.
  """

  graph_def: tf.compat.v1.GraphDef
  sources: tuple[str, ...]
  carried: tuple[str, ...]
  results: tuple[str, ...]
  carried_on: Mapping[int, tuple[str, ...]]
  specs: Mapping[str, tf.TensorSpec]
  jit_compile: bool

  def __call__(
      self, given: Mapping[str, tf.Tensor]
  ) -> tuple[list[tf.Tensor], dict[int, list[tf.Tensor]]]:
    """Computes the stage.

    Args:
      given: The tensors that it needs, by name.

    Returns:
      What is sent or returned, and what is carried to later stages, by stage.
    """
    tensors = {name: given[name] for name in (*self.carried, *self.sources)}
    wanted = [name for name in self.specs if name not in tensors]
    used = {i for node in self.graph_def.node for i in node.input}

    def compute(*given):
      inputs = {_given_name(n): tensor for n, tensor in enumerate(given)}
      return tf.graph_util.import_graph_def(
          self.graph_def,
          # What is only passed on is in none of the operations.
          input_map={name: inputs[name] for name in used & inputs.keys()},
          return_elements=wanted,
          name='stage',
      )

    if self.jit_compile:
      compute = tf.function(compute, jit_compile=True, autograph=False)
    computed = compute(*tensors.values())
    tensors.update(zip(wanted, computed))
    for name, spec in self.specs.items():
      # More is known than TensorFlow infers of a part of the graph.
      tensors[name].set_shape(spec.shape)
    return [tensors[name] for name in self.results], {
        number: [tensors[name] for name in names]
        for number, names in self.carried_on.items()
    }


def _in_order(operations: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
  """Yields each operation after those that make its inputs."""
  seen = set()
  for operation in operations:
    # The gradient of a loop gives the loop inputs that are made after it.
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


def _given_name(number: int) -> str:
  return f'tff_bn.given_{number}:0'


def _node_of(tensor_name: str) -> str:
  return tensor_name.rpartition(':')[0]


def _specs(op: tf.Operation) -> list[tf.TensorSpec]:
  return [tf.TensorSpec(output.shape, output.dtype) for output in op.outputs]


def _called_functions(
    nodes: Iterable[tf.compat.v1.NodeDef],
) -> Iterable[str]:
  for node in nodes:
    yield node.op  # A function may be called by its name.
    for attribute in node.attr.values():
      if attribute.HasField('func'):
        yield attribute.func.name
      for function in attribute.list.func:
        yield function.name
