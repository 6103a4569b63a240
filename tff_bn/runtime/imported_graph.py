"""Imports the TensorFlow graphs of TFF computations."""

from collections.abc import Callable, Iterator, Sequence
import functools
import hashlib
import itertools
import threading
from typing import Any, Optional
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import numpy_sort

# With this name, a `VarHandleOp` creates a new variable each time it runs
# (`ResourceHandle::ANONYMOUS_NAME` in TensorFlow), so that concurrent calls
# don't share variables.
_ANONYMOUS = b'cd2c89b7-88b7-44c8-ad83-06c2a9158347'
# For lookup tables, separate operations do the same.
_ANONYMOUS_TABLES = {
    'HashTableV2': 'AnonymousHashTable',
    'MutableHashTableV2': 'AnonymousMutableHashTable',
    'MutableHashTableOfTensorsV2': 'AnonymousMutableHashTableOfTensors',
    'MutableDenseHashTableV2': 'AnonymousMutableDenseHashTable',
}
_SHARING_ATTRIBUTES = ('container', 'shared_name', 'use_node_name_sharing')
_RESOURCES = frozenset(['VarHandleOp', *_ANONYMOUS_TABLES.values()])

# TensorFlow copies the constants of a function several times while it prepares
# the first call. Constants of at least this size become inputs instead.
_LARGE_CONSTANT_BYTES = 2**16

# All functions of a process share one namespace in TensorFlow, but the graphs
# of different computations reuse names.
_import_numbers = itertools.count()


class GraphCache:
  """Weak references to graphs, by the hash of their content.

  A TensorFlow graph that several computations contain is read once.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._graphs: weakref.WeakValueDictionary[bytes, Graph] = (
        weakref.WeakValueDictionary()
    )

  def of(self, computation: tff.Computation) -> 'Graph':
    """Returns the graph of a `tff.tensorflow.computation`."""
    return self.get(tff.framework.ConcreteComputation.get_proto(computation))

  def get(self, computation: Any) -> 'Graph':
    """Returns the graph of a TensorFlow computation, given its proto.

    Raises:
      NotImplementedError: If it is not a computation of TensorFlow.
    """
    kind = computation.WhichOneof('computation')
    if kind != 'tensorflow':
      raise NotImplementedError(
          f'A computation of kind {kind!r} can not run in process; only a'
          ' tff.tensorflow.computation can.'
      )
    proto = computation.tensorflow
    key = hashlib.sha256(proto.SerializeToString(deterministic=True)).digest()
    with self._lock:
      graph = self._graphs.get(key)
      if graph is None:
        graph = self._graphs[key] = Graph(proto, key)
    return graph


class Graph:
  """The graph of a TensorFlow computation, read on its first use.

  Attributes:
    key: The hash of its content.
  """

  def __init__(self, proto: Any, key: bytes):
    self._proto = proto
    self.key = key

  @functools.cached_property
  def _imported(self) -> 'ImportedGraph':
    return ImportedGraph(self._proto)

  def __call__(self, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Maps input to output tensors in the graph that is being built.

    The variables and tables are new in each run of the graph.
    """
    return self._imported.call(arguments)

  def new_variables(self) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Creates variables for `call_with`.

    Returns:
      Their handles, and the operations that initialize them, which XLA needs.
    """
    handles, assignments = [], []
    for dtype, shape in self._imported.variable_specs():
      handle = tf.raw_ops.VarHandleOp(
          dtype=dtype, shape=shape, shared_name=_ANONYMOUS
      )
      handles.append(handle)
      assignments.append(
          tf.raw_ops.AssignVariableOp(
              resource=handle, value=tf.zeros(shape, dtype)
          )
      )
    return handles, assignments

  def call_with(
      self, variables: Sequence[tf.Tensor], arguments: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Maps input to output tensors in the graph that is being built.

    The computation assigns the variables before it reads them, so that several
    calls, one after another, can use the same ones.
    """
    return self._imported.call(arguments, variables)


def tensor_names(binding: Any) -> list[str]:
  """Returns the names, depth first, of a `TensorFlow.Binding`'s tensors."""
  match binding.WhichOneof('binding'):
    case 'tensor':
      return [binding.tensor.tensor_name]
    case 'sequence':
      return [binding.sequence.variant_tensor_name]
    case 'struct':
      return [
          name
          for element in binding.struct.element
          for name in tensor_names(element)
      ]
  return []


class ImportedGraph:
  """The graph of a computation, changed so that it can be imported."""

  def __init__(self, computation: Any):
    """Initializes it from the `tensorflow` field of the computation's proto."""
    self._results = tensor_names(computation.result)
    self._token = computation.session_token_tensor_name
    graph_def = tf.compat.v1.GraphDef()
    graph_def.ParseFromString(computation.graph_def.value)
    _rename_functions(graph_def, f'__tff_bn_{next(_import_numbers)}')
    self._parameters = _given_names(
        graph_def, tensor_names(computation.parameter)
    )
    for node in _all_nodes(graph_def):
      _make_private(node)
    # A GPU is faster than NumPy, and keeps constants in its own memory.
    has_gpu = bool(tf.config.get_visible_devices('GPU'))
    if not has_gpu:
      numpy_sort.use_in(graph_def, _all_nodes(graph_def))
    if computation.initialize_op:
      _initialize_first(graph_def, computation.initialize_op)
    # Keras leaves unused placeholders behind, which nothing feeds.
    self._kept = _ancestors(graph_def, self._results)
    _delete_nodes(graph_def, lambda node: node.name not in self._kept)
    # The values of the constants that become inputs, by name.
    self._constants = {} if has_gpu else _taken_constants(graph_def)
    self._graph_def = graph_def

  def _variables(self) -> list[Any]:
    return [n for n in self._graph_def.node if n.op == 'VarHandleOp']

  def variable_specs(self) -> list[tuple[tf.DType, tf.TensorShape]]:
    """Returns the dtype and the shape of each variable."""
    return [
        (
            tf.as_dtype(node.attr['dtype'].type),
            tf.TensorShape(node.attr['shape'].shape),
        )
        for node in self._variables()
    ]

  def call(
      self,
      arguments: Sequence[tf.Tensor],
      variables: Optional[Sequence[tf.Tensor]] = None,
  ) -> list[tf.Tensor]:
    """Imports the graph into the one that is being built.

    Args:
      arguments: The parameter's tensors, depth first, where a dataset is its
        variant tensor.
      variables: The handles of given variables. Default: each run of the graph
        creates its variables, and destroys them after the results.

    Returns:
      The result's tensors, as `arguments`.
    """
    feeds = self._feeds(arguments)
    handles = [f'{node.name}:0' for node in self._variables()]
    if variables is not None:
      feeds.update(zip(handles, variables, strict=True))
      handles = []
    graph_def = tf.compat.v1.GraphDef()
    graph_def.CopyFrom(self._graph_def)
    replaced = set(map(_node_name, feeds))
    _delete_nodes(graph_def, lambda node: node.name in replaced)
    # Other nodes are only in control dependencies.
    used = {f'{i}:0' for node in graph_def.node for i in node.input}
    # The tensors may be of a graph outside of a loop.
    capture = tf.compat.v1.get_default_graph().capture
    outputs = tf.graph_util.import_graph_def(
        graph_def,
        input_map={
            name: capture(tensor)
            for name, tensor in feeds.items()
            if name in used or name in self._results
        },
        return_elements=self._results + handles,
    )
    num_results = len(self._results)
    return destroy_after(outputs[num_results:], outputs[:num_results])

  def _feeds(self, arguments: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    feeds = {
        name: argument
        for name, argument in zip(self._parameters, arguments, strict=True)
        if _node_name(name) in self._kept
    }
    feeds.update(self._constants)
    if self._token and _node_name(self._token) in self._kept:
      feeds[self._token] = tf.constant('')
    return feeds


def destroy_after(
    variables: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Returns the outputs, after which variables, by handle, are destroyed."""
  if not variables:
    return list(outputs)
  # A group in between, because an edge from every output to every variable
  # takes seconds to compile for a deep model.
  with tf.control_dependencies([tf.group(*outputs)]):
    destroyed = [
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
        for handle in variables
    ]
  with tf.control_dependencies([tf.group(*destroyed)]):
    return [tf.identity(output) for output in outputs]


def _delete_nodes(
    graph_def: tf.compat.v1.GraphDef, is_deleted: Callable[[Any], bool]
) -> None:
  """Deletes nodes of the graph, but not of its functions."""
  places = [n for n, node in enumerate(graph_def.node) if is_deleted(node)]
  deleted = {f'loc:@{graph_def.node[n].name}'.encode() for n in places}
  for place in reversed(places):
    del graph_def.node[place]
  for node in graph_def.node:
    # Nothing can be put on the device of a node that is gone.
    if '_class' in node.attr and deleted.intersection(
        node.attr['_class'].list.s
    ):
      del node.attr['_class']


def _given_names(
    graph_def: tf.compat.v1.GraphDef, parameters: Sequence[str]
) -> list[str]:
  """Returns the names by which a graph gets its parameters' tensors.

  A parameter for which operations wait stays in the graph, as the identity of
  another one.
  """
  nodes = {node.name: node for node in graph_def.node}
  waited_for = _waited_for(graph_def)
  names = []
  for name in parameters:
    node = nodes[_node_name(name)]
    if node.name in waited_for:
      name = f'{node.name}.given:0'
      node.CopyFrom(
          tf.compat.v1.NodeDef(
              name=node.name,
              op='Identity',
              input=[_node_name(name)],
              attr={'T': node.attr['dtype']},
          )
      )
    names.append(name)
  return names


def _waited_for(graph_def: tf.compat.v1.GraphDef) -> set[str]:
  """Returns the nodes whose end others wait for, without their values."""
  return {
      _node_name(i)
      for node in graph_def.node
      for i in node.input
      if i.startswith('^')
  }


def _taken_constants(
    graph_def: tf.compat.v1.GraphDef,
) -> dict[str, tf.Tensor]:
  """Takes large constants out of a graph, but not out of its functions.

  Returns:
    Their values by the names of their tensors.
  """
  # Nothing can wait for a node that is gone.
  waited_for = _waited_for(graph_def)

  def is_taken(node):
    return (
        node.op == 'Const'
        and node.name not in waited_for
        and len(node.attr['value'].tensor.tensor_content)
        >= _LARGE_CONSTANT_BYTES
    )

  with tf.init_scope(), tf.device('CPU:0'):
    constants = {
        f'{node.name}:0': tf.constant(
            tf.make_ndarray(node.attr['value'].tensor)
        )
        for node in graph_def.node
        if is_taken(node)
    }
  _delete_nodes(graph_def, is_taken)
  return constants


def _node_name(name: str) -> str:
  """Returns the name of the node of a tensor or control input."""
  return name.lstrip('^').split(':')[0]


def _ancestors(
    graph_def: tf.compat.v1.GraphDef, names: Sequence[str]
) -> set[str]:
  """Returns the nodes of tensors and all nodes and inputs they depend on."""
  nodes = {node.name: node for node in graph_def.node}
  found: set[str] = set()
  stack = [_node_name(name) for name in names]
  while stack:
    name = stack.pop()
    if name not in found:
      found.add(name)
      if name in nodes:
        stack.extend(_node_name(i) for i in nodes[name].input)
  return found


def _all_nodes(graph_def: tf.compat.v1.GraphDef) -> Iterator[Any]:
  yield from graph_def.node
  for function in graph_def.library.function:
    yield from function.node_def


def _rename_functions(graph_def: tf.compat.v1.GraphDef, suffix: str) -> None:
  """Appends a suffix to the names of the graph's own functions."""
  library = graph_def.library
  names = {
      function.signature.name: function.signature.name + suffix
      for function in library.function
  }
  for node in _all_nodes(graph_def):
    node.op = names.get(node.op, node.op)
    for value in node.attr.values():
      if value.HasField('func'):
        value.func.name = names.get(value.func.name, value.func.name)
      for function in value.list.func:
        function.name = names.get(function.name, function.name)
  for function in library.function:
    function.signature.name = names[function.signature.name]
  for gradient in library.gradient:
    for field in ('function_name', 'gradient_func'):
      name = getattr(gradient, field)
      setattr(gradient, field, names.get(name, name))


def _make_private(node: Any) -> None:
  """Makes an operation create new variables or tables in each call."""
  if node.op == 'VarHandleOp':
    node.attr['shared_name'].s = _ANONYMOUS
  elif node.op in _ANONYMOUS_TABLES:
    node.op = _ANONYMOUS_TABLES[node.op]
    for name in _SHARING_ATTRIBUTES:
      if name in node.attr:
        del node.attr[name]


def _initialize_first(
    graph_def: tf.compat.v1.GraphDef, initialize_op: str
) -> None:
  """Makes the users of variables and tables wait for their initialization."""
  nodes = {node.name: node for node in graph_def.node}
  initializing = _ancestors(graph_def, [initialize_op])
  # Control inputs at all nodes would prevent fusions, and TensorFlow's oneDNN
  # layout pass would abort the process at some nodes.
  resources = {n for n in initializing if nodes[n].op in _RESOURCES}
  for node in graph_def.node:
    if node.name not in initializing and any(
        _node_name(i) in resources for i in node.input
    ):
      node.input.append(f'^{_node_name(initialize_op)}')
