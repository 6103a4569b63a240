"""What a TFF computation does, as a plan of TensorFlow functions.

A computation is evaluated once with symbols in place of tensors. That resolves
all lambdas, blocks, selections and structures, and leaves a graph of operations
on tensors, each of which is at the server or at the clients. The only way from
the clients to the server is a fold: `federated_aggregate`, to which TFF reduces
all sums and means.

The plan cuts the graph at the folds. Its pass p has three parts, each of which
becomes one TensorFlow function:

1.  `server`: what the server can compute from its values and from the folds of
    earlier passes.
2.  `clients`: what a client can compute from its values and the server's.
3.  `fold`: adds one client's values to the accumulators of all folds for which
    they are complete.

So a round of federated averaging is one function call and one addition for each
client, and a client's values can be dropped once they are added.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import enum
import functools
import hashlib
import itertools
import threading
from typing import Any, Union
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import element_structure
from tff_bn.runtime import imported_graph

_Struct = tff.structure.Struct
_Tensors = list[tf.Tensor]


class Location(enum.Enum):
  """Where an operation takes place."""

  SERVER = 'server'
  CLIENTS = 'clients'


class Leaf:
  """The symbol of one tensor, or of one dataset."""

  __slots__ = ('node', 'type')

  def __init__(self, node: '_Node', type_spec: tff.Type):
    self.node = node
    self.type = type_spec

  @property
  def spec(self) -> tf.TensorSpec:
    """The tensor's dtype and shape; a dataset is its variant tensor."""
    return element_structure.tensor_spec(self.type)


# A tree of symbols: a leaf, a struct of trees, or a function between trees.
_Tree = Union[Leaf, _Struct, Callable[[Any], Any]]


class _Node:
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


class _Input(_Node):
  """A part of the argument, or of the argument of an inner function."""

  def __init__(self, location: Location, type_spec: tff.Type):
    super().__init__(location, (), [type_spec])


class _Operation(_Node):
  """A call of TensorFlow.

  Attributes:
    trace: Makes the tensors of the outputs of those of the inputs.
  """

  def __init__(
      self,
      trace: Callable[[_Tensors], _Tensors],
      location: Location,
      inputs: Sequence[Leaf],
      output_types: Iterable[tff.Type],
  ):
    super().__init__(location, inputs, output_types)
    self.trace = trace


class _Fold(_Node):
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
      accumulate: '_InnerFunction',
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
class _InnerFunction:
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
  ) -> _Tensors:
    tensors = dict(zip(self.inputs, arguments))
    tensors.update(zip(self.captured, captured))
    return _compute(self.outputs, tensors)


def _operations_for(
    outputs: Iterable[Leaf], known: Iterable[Leaf]
) -> list[_Node]:
  """The nodes that lead from known leaves to outputs, in their order."""
  known = set(known)
  nodes = {}
  stack = [leaf for leaf in outputs if leaf not in known]
  while stack:
    node = stack.pop().node
    if node.number not in nodes:
      nodes[node.number] = node
      stack.extend(leaf for leaf in node.inputs if leaf not in known)
  return [nodes[number] for number in sorted(nodes)]


def _compute(
    outputs: Sequence[Leaf], tensors: dict[Leaf, tf.Tensor]
) -> _Tensors:
  """Computes leaves of others, whose tensors are given."""
  tensors = dict(tensors)
  for node in _operations_for(outputs, tensors):
    results = node.trace([tensors[leaf] for leaf in node.inputs])
    tensors.update(zip(node.outputs, results, strict=True))
  return [tensors[leaf] for leaf in outputs]


def _flatten(tree: _Tree) -> list[Leaf]:
  if isinstance(tree, Leaf):
    return [tree]
  if isinstance(tree, _Struct):
    return [leaf for part in tree for leaf in _flatten(part)]
  raise NotImplementedError('A function is no value that TensorFlow can use.')


class GraphCache:
  """Imported graphs by their content, as long as somebody uses them.

  Computations that share a TensorFlow computation share its function.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._graphs = weakref.WeakValueDictionary()

  def get(self, computation: tff.framework.CompiledComputation) -> '_Graph':
    """Returns the graph of a TensorFlow computation."""
    imported_graph.check_is_tensorflow(computation)
    proto = computation.proto.tensorflow
    key = hashlib.sha256(proto.SerializeToString(deterministic=True)).digest()
    with self._lock:
      graph = self._graphs.get(key)
      if graph is None:
        graph = self._graphs[key] = _Graph(proto)
    return graph


class _Graph:
  """A TensorFlow computation, imported at its first use."""

  def __init__(self, proto: Any):
    self._proto = proto

  @functools.cached_property
  def _function(self) -> tf.types.experimental.ConcreteFunction:
    return imported_graph.import_graph(self._proto)

  def __call__(self, arguments: _Tensors) -> _Tensors:
    return self._function(*arguments)


# TensorFlow's tracing is not thread-safe.
_tracing_lock = threading.RLock()


def _without_grappler() -> bytes:
  """Makes a serialized `ConfigProto` that turns Grappler off."""
  config = tf.compat.v1.ConfigProto()
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return config.SerializeToString()


_WITH_GRAPPLER, _WITHOUT_GRAPPLER = b'', _without_grappler()


def _config(function: Any) -> bytes:
  """Chooses the configuration of a function's calls on a CPU.

  Grappler, TensorFlow's graph optimizer, takes a large part of the time of a
  function's first call. Later calls make up for that if the function repeats
  its operations, as local training does.

  Args:
    function: A traced function.

  Returns:
    A serialized `ConfigProto`: Grappler is on if the function has a loop.
  """
  graph = function.graph.as_graph_def()
  nodes = itertools.chain(
      graph.node, *(f.node_def for f in graph.library.function)
  )
  has_loop = any(node.op in ('While', 'StatelessWhile') for node in nodes)
  return _WITH_GRAPPLER if has_loop else _WITHOUT_GRAPPLER


class Stage:
  """A TensorFlow function of a plan, traced at its first use.

  Attributes:
    inputs: The leaves that it takes.
    outputs: The leaves that it returns.
  """

  def __init__(
      self,
      inputs: Sequence[Leaf],
      outputs: Sequence[Leaf],
      body: Callable[[_Tensors], _Tensors],
  ):
    """Initializes the stage.

    Args:
      inputs: The leaves that it takes.
      outputs: The leaves that it returns.
      body: Makes the tensors of the outputs of those of the inputs.
    """
    self.inputs = tuple(inputs)
    self.outputs = tuple(outputs)
    self._body = body
    self._dtypes = [leaf.spec.dtype for leaf in self.outputs]
    self._function: Any = None
    self._cpu_config = _WITH_GRAPPLER
    # The CPU devices for which TensorFlow has compiled the function, and a lock
    # for each device on which the first call may still be running.
    self._compiled: set[str] = set()
    self._first_calls: dict[str, threading.Lock] = {}

  def __call__(self, tensors: Sequence[tf.Tensor], device: str) -> _Tensors:
    """Computes the outputs.

    Args:
      tensors: The tensors of the inputs.
      device: Where.

    Returns:
      The tensors of the outputs.
    """
    if not self.outputs:
      return []
    if self._function is None:
      with _tracing_lock:
        if self._function is None:
          function = self._trace()
          self._cpu_config = _config(function)
          self._function = function
    function = self._function
    with tf.device(device):
      if tf.DeviceSpec.from_string(device).device_type != 'CPU':
        return function(*tensors)
      if device not in self._compiled:
        # TensorFlow compiles a function during its first call, and again for
        # each thread that calls it before that is done.
        with self._first_calls.setdefault(device, threading.Lock()):
          if device not in self._compiled:
            outputs = self._call_on_cpu(function, tensors)
            self._compiled.add(device)
            return outputs
      return self._call_on_cpu(function, tensors)

  def _call_on_cpu(
      self, function: Any, tensors: Sequence[tf.Tensor]
  ) -> _Tensors:
    # Without the function's Python signature, to check which takes longer than
    # to add up a small model. Not on a GPU, to which everything that an
    # operation takes is copied, and a dataset can't be.
    return tf.raw_ops.StatefulPartitionedCall(
        args=list(tensors),
        Tout=self._dtypes,
        f=function,
        config_proto=self._cpu_config,
    )

  def _compute(self, tensors: _Tensors) -> _Tensors:
    # What TensorFlow knows to be a shape must not be the result of a function
    # that is called as an operation.
    return [
        tf.raw_ops.DeepCopy(x=result) if result.dtype == tf.int32 else result
        for result in self._body(tensors)
    ]

  def _trace(self) -> Any:
    return tf.compat.v1.wrap_function(
        lambda *tensors: self._compute(list(tensors)),
        [leaf.spec for leaf in self.inputs],
    )


@dataclasses.dataclass(frozen=True)
class Pass:
  """One way from the server to the clients and back.

  Attributes:
    server: What the server computes first.
    received: The server's leaves that clients need from this pass on.
    clients: What each client computes then.
    folded: The clients' leaves that are added up.
    zero: The leaves of the accumulators before the first client.
    fold: Takes the accumulators, `folded` and `captured`, and returns the new
      accumulators.
    captured: The server's leaves that the accumulation uses.
    totals: The leaves of the accumulators after the last client.
    kept: The clients' leaves that later passes need.
    results: The clients' leaves that are results of the computation.
  """

  server: Stage
  received: tuple[Leaf, ...]
  clients: Stage
  folded: tuple[Leaf, ...]
  zero: tuple[Leaf, ...]
  fold: Stage
  captured: tuple[Leaf, ...]
  totals: tuple[Leaf, ...]
  kept: frozenset[Leaf]
  results: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A leaf that is sent.

  Attributes:
    pass_number: The pass in which it is sent, from 0.
    sender: The server, which sends to all clients, or each of the clients.
    leaf: The leaf.
  """

  pass_number: int
  sender: Location
  leaf: Leaf


class Plan:
  """What a computation does.

  Attributes:
    server_inputs: The leaves of the argument that are at the server, or the
      same for all clients, depth first.
    client_inputs: The leaves of the argument that differ between clients, depth
      first.
    passes: The passes, at least one.
    results: The leaves of the result, depth first.
  """

  def __init__(
      self,
      computation: tff.framework.ConcreteComputation,
      graphs: GraphCache,
  ):
    """Makes a plan.

    Args:
      computation: The computation.
      graphs: Where imported graphs are found.
    """
    self.server_inputs = []
    self.client_inputs = []
    interpreter = _Interpreter(graphs)
    proto = tff.framework.ConcreteComputation.get_proto(computation)
    function = interpreter.evaluate(proto, {})
    type_signature = computation.type_signature
    argument = None
    if type_signature.parameter is not None:
      argument = self._argument(type_signature.parameter)
    result = function(argument) if callable(function) else function
    self.results = tuple(_flatten(result))
    self.passes = self._passes()

  def transfers(
      self, results: Iterable[Leaf], client_results: Iterable[Leaf] = ()
  ) -> list[Transfer]:
    """What the server and the clients send each other for certain results.

    Args:
      results: Leaves of the result.
      client_results: Further ones, which clients get.

    Returns:
      The transfers in their order. A client sends a value once in each pass in
      which it is added up; the server sends a value once.
    """
    client_results = tuple(client_results)
    received = [(leaf.node.level, leaf) for leaf in client_results]
    sent = []
    for node in _operations_for([*results, *client_results], ()):
      if isinstance(node, _Fold):
        values = [(node.level - 1, leaf) for leaf in node.values]
        sent += values
        received += values  # A client may hand back what it got.
      elif node.location is Location.CLIENTS:
        received += [(node.level, leaf) for leaf in node.inputs]
    first_use = {}
    for number, leaf in received:
      if leaf.node.location is Location.SERVER:
        first_use[leaf] = min(number, first_use.get(leaf, number))
    down = [Transfer(n, Location.SERVER, leaf) for leaf, n in first_use.items()]
    up = [
        Transfer(n, Location.CLIENTS, leaf) for n, leaf in dict.fromkeys(sent)
    ]
    return sorted([*down, *up], key=lambda transfer: transfer.pass_number)

  def _argument(self, type_spec: tff.Type) -> _Tree:
    """The symbols of an argument."""
    location, leaves = Location.SERVER, self.server_inputs
    if isinstance(type_spec, tff.FederatedType):
      if type_spec.placement is tff.CLIENTS and not type_spec.all_equal:
        location, leaves = Location.CLIENTS, self.client_inputs
      type_spec = type_spec.member
    elif isinstance(type_spec, tff.StructType):
      return _Struct(
          [
              (name, self._argument(element))
              for name, element in tff.structure.iter_elements(type_spec)
          ]
      )
    return _inputs(type_spec, location, leaves)

  def _passes(self) -> tuple[Pass, ...]:
    operations = collections.defaultdict(list)  # By pass and location.
    folds = collections.defaultdict(list)  # By pass.
    users = collections.defaultdict(set)  # The nodes that need a leaf.
    last_pass = {}  # In which a leaf of the clients is needed.
    for node in _operations_for(self.results, ()):
      number = node.level
      if isinstance(node, _Operation):
        operations[number, node.location].append(node)
      elif isinstance(node, _Fold):
        number -= 1  # It is computed in the pass before its result is there.
        folds[number].append(node)
      for leaf in node.inputs:
        users[leaf].add(node)
        if leaf.node.location is Location.CLIENTS:
          last_pass[leaf] = max(number, last_pass.get(leaf, 0))
    results = frozenset(self.results)
    kept = frozenset()
    received = set()
    passes = []
    for number in range(1 + max((n for n, _ in operations), default=0)):
      server, clients = (
          _stage(operations[number, location], users, results)
          for location in (Location.SERVER, Location.CLIENTS)
      )
      sent = tuple(
          leaf
          for leaf in clients.inputs
          if leaf.node.location is Location.SERVER and leaf not in received
      )
      received.update(sent)
      new = clients.outputs
      if number == 0:
        new = (*self.client_inputs, *new)
      kept = frozenset(
          leaf for leaf in (*kept, *new) if last_pass.get(leaf, 0) > number
      )
      folded = _unique(leaf for fold in folds[number] for leaf in fold.values)
      captured = _unique(
          leaf for fold in folds[number] for leaf in fold.accumulate.captured
      )
      passes.append(
          Pass(
              server=server,
              received=sent,
              clients=clients,
              folded=folded,
              zero=tuple(leaf for fold in folds[number] for leaf in fold.zero),
              fold=_fold_stage(folds[number], folded, captured),
              captured=captured,
              totals=tuple(
                  leaf for fold in folds[number] for leaf in fold.outputs
              ),
              kept=kept,
              results=tuple(leaf for leaf in new if leaf in results),
          )
      )
    return tuple(passes)


def _inputs(
    type_spec: tff.Type, location: Location, leaves: list[Leaf]
) -> _Tree:
  """New symbols of a value, which are appended to `leaves`."""
  new = [
      _Input(location, leaf_type).outputs[0]
      for leaf_type in element_structure.leaf_types(type_spec)
  ]
  leaves += new
  return element_structure.unflatten(type_spec, iter(new))


def _unique(leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
  return tuple(dict.fromkeys(leaves))


def _stage(
    operations: Sequence[_Node],
    users: dict[Leaf, set[_Node]],
    results: frozenset[Leaf],
) -> Stage:
  """One function of several operations."""
  inside = set(operations)
  outputs = [
      leaf
      for node in operations
      for leaf in node.outputs
      if leaf in results or not users[leaf] <= inside
  ]
  inputs = _unique(
      leaf
      for node in operations
      for leaf in node.inputs
      if leaf.node not in inside
  )
  return Stage(
      inputs,
      outputs,
      lambda tensors: _compute(outputs, dict(zip(inputs, tensors))),
  )


def _fold_stage(
    folds: Sequence[_Fold],
    folded: Sequence[Leaf],
    captured: Sequence[Leaf],
) -> Stage:
  """One function that adds a client's values to several accumulators."""
  totals = [leaf for fold in folds for leaf in fold.outputs]

  def body(tensors):
    accumulators, rest = tensors[: len(totals)], tensors[len(totals) :]
    given = dict(zip([*folded, *captured], rest))
    results = []
    for fold in folds:
      start = len(results)
      results += fold.accumulate(
          [
              *accumulators[start : start + len(fold.outputs)],
              *(given[leaf] for leaf in fold.values),
          ],
          [given[leaf] for leaf in fold.accumulate.captured],
      )
    return results

  inputs = [*totals, *folded, *captured]
  return Stage(inputs, totals, body)


def intrinsics(proto: Any) -> Iterator[str]:
  """Yields the names of the intrinsics in a serialized computation.

  Args:
    proto: The computation.

  Yields:
    Their names; those that occur several times, several times.
  """
  match proto.WhichOneof('computation'):
    case 'intrinsic':
      yield proto.intrinsic.uri
    case 'selection':
      yield from intrinsics(proto.selection.source)
    case 'struct':
      for element in proto.struct.element:
        yield from intrinsics(element.value)
    case 'call':
      yield from intrinsics(proto.call.function)
      if proto.call.HasField('argument'):
        yield from intrinsics(proto.call.argument)
    case 'lambda':
      yield from intrinsics(getattr(proto, 'lambda').result)
    case 'block':
      for local in proto.block.local:
        yield from intrinsics(local.value)
      yield from intrinsics(proto.block.result)


class _Interpreter:
  """Evaluates TFF's computations with symbols."""

  def __init__(self, graphs: GraphCache):
    self._graphs = graphs
    self._location = Location.SERVER

  @contextlib.contextmanager
  def _at(self, location: Location) -> Iterator[None]:
    previous, self._location = self._location, location
    try:
      yield
    finally:
      self._location = previous

  def evaluate(self, proto: Any, environment: dict[str, Any]) -> Any:
    """Evaluates a computation.

    Args:
      proto: Its serialized form, which TFF has in any case. The types of most
        of its parts are not needed, and to build them takes the most time.
      environment: The values of the names that occur in it.

    Returns:
      Its value.
    """
    match proto.WhichOneof('computation'):
      case 'reference':
        return environment[proto.reference.name]
      case 'selection':
        source = self.evaluate(proto.selection.source, environment)
        return source[proto.selection.index]
      case 'struct':
        return _Struct(
            [
                (
                    element.name or None,
                    self.evaluate(element.value, environment),
                )
                for element in proto.struct.element
            ]
        )
      case 'call':
        function = self.evaluate(proto.call.function, environment)
        argument = None
        if proto.call.HasField('argument'):
          argument = self.evaluate(proto.call.argument, environment)
        return function(argument)
      case 'lambda':
        return self._lambda(getattr(proto, 'lambda'), environment)
      case 'block':
        environment = dict(environment)
        for local in proto.block.local:
          environment[local.name] = self.evaluate(local.value, environment)
        return self.evaluate(proto.block.result, environment)
      case 'intrinsic':
        return self._intrinsic(proto)
    block = tff.framework.ComputationBuildingBlock.from_proto(proto)
    match block:
      case tff.framework.CompiledComputation():
        return self._compiled(block)
      case tff.framework.Literal():
        return self._literal(block)
      case tff.framework.Placement():
        return block.uri
    raise NotImplementedError(
        f'A {type(block).__name__} can not run in process.'
    )

  def _intrinsic(self, proto: Any) -> Callable[[Any], Any]:
    uri = proto.intrinsic.uri
    intrinsic = getattr(self, f'_{uri}', None)
    if intrinsic is not None:
      return lambda argument: intrinsic(argument, proto.type)
    block = tff.framework.ComputationBuildingBlock.from_proto(proto)
    body, is_reduced = tff.tensorflow.replace_intrinsics_with_bodies(block)
    if not is_reduced:
      raise NotImplementedError(
          f'The intrinsic {uri!r} can not run in process.'
      )
    return self.evaluate(body.proto, {})

  def _lambda(
      self, proto: Any, environment: dict[str, Any]
  ) -> Callable[[Any], Any]:
    def call(argument):
      inner = environment
      if proto.parameter_name:
        inner = {**environment, proto.parameter_name: argument}
      return self.evaluate(proto.result, inner)

    return call

  def _operation(
      self,
      trace: Callable[[_Tensors], _Tensors],
      inputs: Sequence[Leaf],
      result_type: tff.Type,
  ) -> _Tree:
    """An operation at the place where the evaluation is."""
    node = _Operation(
        trace, self._location, inputs, element_structure.leaf_types(result_type)
    )
    return element_structure.unflatten(result_type, iter(node.outputs))

  def _compiled(
      self, block: tff.framework.CompiledComputation
  ) -> Callable[[Any], _Tree]:
    graph = self._graphs.get(block)

    def call(argument):
      inputs = [] if argument is None else _flatten(argument)
      return self._operation(graph, inputs, block.type_signature.result)

    return call

  def _literal(self, block: tff.framework.Literal) -> _Tree:
    spec = element_structure.tensor_spec(block.type_signature)

    def trace(_):
      return [tf.constant(block.value, spec.dtype, spec.shape)]

    return self._operation(trace, (), block.type_signature)

  def _inner_function(
      self, function: Callable[[Any], _Tree], argument_type: tff.Type
  ) -> _InnerFunction:
    """Evaluates a function for itself."""
    first = _Node.next_number()
    inputs = []
    argument = _inputs(argument_type, self._location, inputs)
    outputs = _flatten(function(argument))
    captured = _unique(
        leaf
        for leaf in itertools.chain(
            outputs,
            *(
                node.inputs
                for node in _operations_for(outputs, inputs)
                if node.number > first
            ),
        )
        if leaf.node.number < first
    )
    return _InnerFunction(tuple(inputs), captured, tuple(outputs))

  # Intrinsics. Each gets its argument and its serialized type. A federated
  # value is the tree of what the server, or each client, has: its leaves say
  # where they are, and what is at the server reaches clients wherever they use
  # it.

  def _federated_apply(self, argument: Any, _: Any) -> _Tree:
    function, value = argument
    return function(value)

  # Computed once, for all clients.
  _federated_map_all_equal = _federated_apply

  def _federated_map(self, argument: Any, _: Any) -> _Tree:
    with self._at(Location.CLIENTS):
      return self._federated_apply(argument, _)

  def _federated_eval_at_server(self, argument: Any, _: Any) -> _Tree:
    return argument(None)

  def _federated_eval_at_clients(self, argument: Any, _: Any) -> _Tree:
    with self._at(Location.CLIENTS):
      return argument(None)

  def _same(self, argument: Any, _: Any) -> _Tree:
    return argument

  _federated_broadcast = _same
  _federated_value_at_clients = _same
  _federated_value_at_server = _same
  _federated_zip_at_clients = _same
  _federated_zip_at_server = _same

  def _federated_aggregate(self, argument: Any, type_proto: Any) -> _Tree:
    type_signature = tff.types.deserialize_type(type_proto)
    value, zero, accumulate, _, report = argument
    accumulate_type = type_signature.parameter[2]
    total_type = accumulate_type.parameter[0]
    fold = _Fold(
        _flatten(value),
        _flatten(zero),
        self._inner_function(accumulate, accumulate_type.parameter),
        element_structure.leaf_types(total_type),
    )
    total = element_structure.unflatten(total_type, iter(fold.outputs))
    return report(total)

  def _federated_select(self, argument: Any, type_proto: Any) -> _Tree:
    type_signature = tff.types.deserialize_type(type_proto)
    keys, _, value, function = argument
    key_type = type_signature.parameter[3].parameter[1]
    values = _flatten(value)
    element_type = type_signature.result.member.element
    with self._at(Location.CLIENTS):
      select = self._inner_function(
          function, type_signature.parameter[3].parameter
      )

      def trace(tensors):
        keys, tensors = tensors[0], tensors[1:]
        values_, captured = tensors[: len(values)], tensors[len(values) :]
        dataset = element_structure.map_dataset(
            tf.data.Dataset.from_tensor_slices(keys),
            key_type,
            element_type,
            lambda key: select([*values_, *key], captured),
        )
        return [tf.data.experimental.to_variant(dataset)]

      return self._operation(
          trace,
          [keys, *values, *select.captured],
          type_signature.result.member,
      )

  def _sequence_map(self, argument: Any, type_proto: Any) -> _Tree:
    type_signature = tff.types.deserialize_type(type_proto)
    function, sequence = argument
    element_type = type_signature.parameter[1].element
    mapped = self._inner_function(function, element_type)

    def trace(tensors):
      variant, *captured = tensors
      dataset = element_structure.map_dataset(
          element_structure.from_variant(variant, element_type),
          element_type,
          type_signature.result.element,
          lambda element: mapped(element, captured),
      )
      return [tf.data.experimental.to_variant(dataset)]

    return self._operation(
        trace, [sequence, *mapped.captured], type_signature.result
    )

  def _sequence_reduce(self, argument: Any, type_proto: Any) -> _Tree:
    type_signature = tff.types.deserialize_type(type_proto)
    sequence, zero, function = argument
    element_type = type_signature.parameter[0].element
    zero = _flatten(zero)
    reduce = self._inner_function(
        function, type_signature.parameter[2].parameter
    )

    def trace(tensors):
      variant, tensors = tensors[0], tensors[1:]
      initial, captured = tensors[: len(zero)], tensors[len(zero) :]
      return element_structure.reduce_dataset(
          element_structure.from_variant(variant, element_type),
          element_type,
          initial,
          lambda leaves: reduce(leaves, captured),
      )

    return self._operation(
        trace, [sequence, *zero, *reduce.captured], type_signature.result
    )

  def _sequence_sum(self, argument: Any, type_proto: Any) -> _Tree:
    type_signature = tff.types.deserialize_type(type_proto)
    element_type = type_signature.parameter.element

    def trace(tensors):
      initial = [
          tf.zeros(t.shape, tf.as_dtype(t.dtype))
          for t in element_structure.leaf_types(element_type)
      ]
      size = len(initial)
      return element_structure.reduce_dataset(
          element_structure.from_variant(tensors[0], element_type),
          element_type,
          initial,
          lambda leaves: list(map(tf.add, leaves[:size], leaves[size:])),
      )

    return self._operation(trace, [argument], type_signature.result)
