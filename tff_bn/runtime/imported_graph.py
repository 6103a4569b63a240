"""Imports the TensorFlow graphs of TFF computations as functions."""

from collections.abc import Iterator, Sequence
import functools
import hashlib
import itertools
import threading
from typing import Any
import weakref

import tensorflow as tf
import tensorflow_federated as tff

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

# All functions of a process share one namespace in TensorFlow, but the graphs
# of different computations reuse names.
_import_numbers = itertools.count()


class GraphCache:
  """Weak references to imported graphs, by the hash of their content.

  Computations that contain the same TensorFlow graph share its function.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._graphs: weakref.WeakValueDictionary[bytes, _Graph] = (
        weakref.WeakValueDictionary()
    )

  def get(self, computation: tff.framework.CompiledComputation) -> '_Graph':
    """Returns the function of a TensorFlow computation.

    Raises:
      NotImplementedError: If it is not a computation of TensorFlow.
    """
    kind = computation.proto.WhichOneof('computation')
    if kind != 'tensorflow':
      raise NotImplementedError(
          f'A computation of kind {kind!r} can not run in process; only a'
          ' tff.tensorflow.computation can.'
      )
    proto = computation.proto.tensorflow
    key = hashlib.sha256(proto.SerializeToString(deterministic=True)).digest()
    with self._lock:
      graph = self._graphs.get(key)
      if graph is None:
        graph = self._graphs[key] = _Graph(proto)
    return graph


class _Graph:
  """The function of a TensorFlow computation, imported on its first call."""

  def __init__(self, proto: Any):
    self._proto = proto

  @functools.cached_property
  def _function(self) -> tf.types.experimental.ConcreteFunction:
    return import_graph(self._proto)

  def __call__(self, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
    return self._function(*arguments)


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


def import_graph(
    computation: Any,
) -> tf.types.experimental.ConcreteFunction:
  """Imports the graph of a TFF computation as a TensorFlow function.

  Args:
    computation: The `tensorflow` field of the computation's proto.

  Returns:
    A function from the parameter's tensors to the list of the result's tensors,
    both depth first, where a dataset is its variant tensor. Each call creates
    new variables and tables.
  """
  parameters = tensor_names(computation.parameter)
  results = tensor_names(computation.result)
  graph_def = tf.compat.v1.GraphDef()
  graph_def.ParseFromString(computation.graph_def.value)
  specs = _parameter_specs(graph_def, parameters)
  _rename_functions(graph_def, f'__tff_bn_{next(_import_numbers)}')
  for node in _all_nodes(graph_def):
    _make_private(node)
  if computation.initialize_op:
    _initialize_first(graph_def, computation.initialize_op)
  # Keras leaves unused placeholders behind, which nothing feeds.
  kept = _ancestors(graph_def, results)
  unused = [n for n, node in enumerate(graph_def.node) if node.name not in kept]
  for position in reversed(unused):
    del graph_def.node[position]
  variables = [
      f'{node.name}:0' for node in graph_def.node if node.op == 'VarHandleOp'
  ]
  token = computation.session_token_tensor_name

  def call(*args):
    feeds = {
        name: arg
        for name, arg in zip(parameters, args)
        if _node_name(name) in kept
    }
    if token and _node_name(token) in kept:
      feeds[token] = tf.constant('')
    outputs = tf.graph_util.import_graph_def(
        graph_def,
        input_map=feeds,
        return_elements=results + variables,
        name='',
    )
    outputs, handles = outputs[: len(results)], outputs[len(results) :]
    if not handles:
      return outputs
    with tf.control_dependencies(outputs):
      destroyed = [
          tf.raw_ops.DestroyResourceOp(
              resource=handle, ignore_lookup_error=True
          )
          for handle in handles
      ]
    with tf.control_dependencies(destroyed):
      return [tf.identity(output) for output in outputs]

  return tf.compat.v1.wrap_function(call, specs)


def _node_name(name: str) -> str:
  """Returns the name of the node of a tensor or control input."""
  return name.lstrip('^').split(':')[0]


def _ancestors(
    graph_def: tf.compat.v1.GraphDef, names: Sequence[str]
) -> set[str]:
  """Returns the nodes of tensors and all nodes that they depend on."""
  nodes = {node.name: node for node in graph_def.node}
  found: set[str] = set()
  stack = [_node_name(name) for name in names]
  while stack:
    name = stack.pop()
    if name not in found:
      found.add(name)
      stack.extend(_node_name(i) for i in nodes[name].input)
  return found


def _all_nodes(graph_def: tf.compat.v1.GraphDef) -> Iterator[Any]:
  yield from graph_def.node
  for function in graph_def.library.function:
    yield from function.node_def


def _parameter_specs(
    graph_def: tf.compat.v1.GraphDef, names: Sequence[str]
) -> list[tf.TensorSpec]:
  nodes = {node.name: node for node in graph_def.node}
  specs = []
  for name in names:
    attributes = nodes[_node_name(name)].attr
    shape = None
    if 'shape' in attributes:
      shape = tf.TensorShape(attributes['shape'].shape)
    specs.append(tf.TensorSpec(shape, tf.as_dtype(attributes['dtype'].type)))
  return specs


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
