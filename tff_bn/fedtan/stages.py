"""A function that waits for answers from outside, cut into stages.

Synchronized batch normalization stops at every layer: a client sends what it
knows of its batch and goes on with the answer, in the forward and again in the
backward pass. TFF has no way to wait inside of a client's TensorFlow code. So
the function is traced as a whole, forward and backward pass in one graph, and
the graph is cut: a stage is all that can be computed with the answers that are
there. What a later stage needs of an earlier one is carried over, and nothing
is computed twice.

Questions that do not depend on each other's answers, as in parallel branches of
a model, are asked at the same time. So the number of stages is the depth of the
graph in questions, not their number. Questions whose answers nothing needs are
not asked at all.

The stages are free of side effects: variables become inputs and outputs.
"""

import collections
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
import dataclasses
import itertools
from typing import Any, NamedTuple, Optional, Union

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


# Asks a question: takes its kind, a nested structure of tensors, and a bool
# scalar that says whether the values may be used (default: yes); returns the
# answer.
Ask = Callable[..., Any]


class Asked(NamedTuple):
  """What a caller of `Ask` gave, as a stage returns it.

  Attributes:
    value: The values that are sent.
    sound: A bool scalar, whether they may be used.
  """

  value: Any
  sound: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class _Request:
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


class StagedFunction:
  """A traced function in stages, to be called inside TFF computations.

  Attributes:
    questions: For each stage but the last, the questions at its end.
    is_random: Whether the function draws random numbers, and so needs a seed.
  """

  def __init__(
      self,
      fn: Callable[..., Any],
      variables: Sequence[stateless_function.Variable],
      *specs: Any,
      jit_compile: bool = False,
  ):
    """Traces and cuts the function.

    Args:
      fn: The function of an `Ask` and the arguments. May read and assign any
        variable; should return the values of those that the caller wants back.
      variables: The variables whose values the caller gives. Others start with
        the value that they have now.
      *specs: `tf.TensorSpec`s, or nested structures of them, of the arguments.
      jit_compile: Whether XLA compiles the stages.

    Raises:
      ValueError: If a question is asked inside of a loop, a condition or a
        function, or the function uses a resource other than a variable.
    """
    requests = []

    def ask(kind, value, sound=True):
      value = tf.nest.map_structure(tf.identity, value)
      sound = tf.identity(sound)
      answer = tf.nest.map_structure(
          lambda v: tf.compat.v1.placeholder(v.dtype, v.shape), value
      )
      requests.append(_Request(kind, value, sound, answer))
      return answer

    @tf.function
    def traced(*args):
      # TensorFlow traces a function that makes a variable a second time.
      requests.clear()
      return fn(ask, *args)

    function = traced.get_concrete_function(*specs)
    graph = function.graph
    if any(
        tensor.graph is not graph
        for request in requests
        for tensor in request.tensors
    ):
      raise ValueError(
          'A question is asked inside of a loop, a condition or a function.'
      )
    flow = _DataFlow(function, variables, requests)
    self._structure = function.structured_outputs
    outputs = [flow.resolve(tensor.name) for tensor in graph.outputs]
    needed = flow.needed_requests(outputs)
    last = max((level for level, _ in needed), default=0)
    self._requests = [
        [request for level, request in needed if level == number + 1]
        for number in range(last)
    ]
    self.questions = tuple(
        tuple(request.asked() for request in at_end)
        for at_end in self._requests
    )
    self._flow = flow
    self._stages = self._cut(outputs, jit_compile)
    self.is_random = any(
        name.startswith((_SEED, _GENERATOR)) for name in self._stages[0].sources
    )

  @property
  def num_stages(self) -> int:
    """The number of stages."""
    return len(self._stages)

  def sources_of(self, number: int) -> list[int]:
    """The numbers of the stages from which a stage carries something over."""
    return sorted(
        {self._flow.level(name) for name in self._stages[number].carried}
    )

  def targets_of(self, number: int) -> list[int]:
    """The numbers of the stages for which a stage returns something."""
    return sorted(self._stages[number].carried_on)

  def _cut(self, outputs: Sequence[str], jit_compile: bool) -> list['_Stage']:
    flow = self._flow
    stages = []
    # From the last one back: what a stage returns is what later ones need.
    wanted = collections.defaultdict(dict)
    for number in reversed(range(len(self._requests) + 1)):
      if number == len(self._requests):
        results = list(outputs)
      else:
        results = [
            name
            for request in self._requests[number]
            for name in flow.sent(request)
        ]
      stage = flow.stage(number, results, wanted[number], jit_compile)
      for name in stage.carried:
        wanted[flow.level(name)].setdefault(number, []).append(name)
      stages.append(stage)
    return stages[::-1]

  def start(
      self,
      values: Sequence[tf.Tensor],
      *args: Any,
      seed: Optional[tf.Tensor] = None,
  ) -> tuple[Union[list[Asked], Any], Mapping[int, list[tf.Tensor]]]:
    """Calls the first stage inside a graph.

    Args:
      values: The values that `variables` have at the start.
      *args: The arguments, of the traced types.
      seed: An int64 vector of 2 elements: the numbers that determine all random
        draws. Needed if `is_random`.

    Returns:
      See `proceed`.
    """
    given = {}
    for name in self._stages[0].sources:
      kind, number = name.split('/')
      number = int(number)
      if kind == _ARGUMENT:
        given[name] = tf.nest.flatten(args)[number]
      elif kind == _VALUE:
        given[name] = values[number]
      elif kind == _SEED:
        given[name] = stateless_function.seed_state(seed, number)
      else:
        given[name] = stateless_function.generator_state(seed, number)
    return self._call(0, given)

  def proceed(
      self,
      number: int,
      answers: Sequence[Any],
      carried: Mapping[int, Sequence[tf.Tensor]],
  ) -> tuple[Union[list[Asked], Any], Mapping[int, list[tf.Tensor]]]:
    """Calls a stage after the first inside a graph.

    Args:
      number: The stage.
      answers: The answers to `questions[number - 1]`.
      carried: For each of `sources_of(number)`, what that stage returned for
        this one.

    Returns:
      What is asked in `questions[number]`, or what the function returns if it
      is the last stage; and what it carries over to each later stage.
    """
    stage = self._stages[number]
    given = {}
    for request, answer in zip(
        self._requests[number - 1], answers, strict=True
    ):
      for placeholder, tensor in zip(
          tf.nest.flatten(request.answer), tf.nest.flatten(answer), strict=True
      ):
        given[placeholder.name] = tensor
    for source in self.sources_of(number):
      names = [n for n in stage.carried if self._flow.level(n) == source]
      given.update(zip(names, carried[source], strict=True))
    return self._call(number, given)

  def _call(
      self, number: int, given: Mapping[str, tf.Tensor]
  ) -> tuple[Any, Mapping[int, list[tf.Tensor]]]:
    results, carried = self._stages[number](given)
    if number == len(self._requests):
      return tf.nest.pack_sequence_as(self._structure, results), carried
    results = iter(results)
    return [
        Asked(
            tf.nest.map_structure(lambda _: next(results), request.value),
            next(results),
        )
        for request in self._requests[number]
    ], carried


_ARGUMENT, _VALUE, _SEED, _GENERATOR = 'argument', 'value', 'seed', 'generator'


class _DataFlow:
  """A traced graph without side effects: each value has one origin."""

  def __init__(
      self,
      function: tf.types.experimental.ConcreteFunction,
      variables: Sequence[stateless_function.Variable],
      requests: Sequence[_Request],
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
    self._requests: dict[str, _Request] = {}  # By the names of the answers.
    self._levels: dict[_Request, int] = {}  # Of the answers.
    for request in requests:
      for placeholder in tf.nest.flatten(request.answer):
        self._requests[placeholder.name] = request
    num_args = len(graph.inputs) - len(function.captured_inputs)
    for number, tensor in enumerate(graph.inputs[:num_args]):
      self._same[tensor.name] = self._source(
          f'{_ARGUMENT}/{number}', tf.TensorSpec(tensor.shape, tensor.dtype)
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
            f'{_VALUE}/{index}', tf.TensorSpec(variable.shape, variable.dtype)
        )
      case stateless_function.OtherVariable(_, initial):
        self._current[name] = self._constant(name, initial)
      case stateless_function.RandomState(variable) if capture.is_seed:
        self._current[name] = self._source(
            f'{_SEED}/{next(self._random_numbers)}',
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
              f'{_GENERATOR}/{next(self._random_numbers)}',
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

  def sent(self, request: _Request) -> list[str]:
    """The names of the tensors of a question."""
    return [self.resolve(t.name) for t in request.tensors]

  def level(self, name: str) -> int:
    """The stage in which a tensor is there."""
    if name in self._sources:
      return self._sources[name].level
    return self._nodes[_node_of(name)].level

  def _is_repeated(self, name: str) -> bool:
    if name in self._sources:
      return name.startswith(_VALUE)
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
  ) -> list[tuple[int, _Request]]:
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
  ) -> '_Stage':
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
    return _Stage(
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
class _Stage:
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
