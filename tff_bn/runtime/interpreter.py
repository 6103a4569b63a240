"""Evaluates TFF computations with symbols in place of tensors.

The evaluation resolves all lambdas, blocks, selections and structures. The
result is a graph of operations on tensors, see `symbols`.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import itertools
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import element_structure
from tff_bn.runtime import imported_graph
from tff_bn.runtime import secure_intrinsics
from tff_bn.runtime import symbols


class Interpreter:
  """Evaluates TFF's computations with symbols."""

  def __init__(self, graphs: imported_graph.GraphCache):
    self._graphs = graphs
    self._location = symbols.Location.SERVER
    # What TFF replaces intrinsics with, by their protos. FedTAN has hundreds.
    self._bodies: dict[bytes, Any] = {}

  @contextlib.contextmanager
  def _at(self, location: symbols.Location) -> Iterator[None]:
    previous, self._location = self._location, location
    try:
      yield
    finally:
      self._location = previous

  def evaluate(self, proto: Any, environment: dict[str, Any]) -> Any:
    """Evaluates a computation.

    Args:
      proto: The computation's proto. TFF's building blocks would be slower:
        they build the types of all parts, most of which are not needed.
      environment: The values of the names in the computation.

    Returns:
      The computation's value: a tree of symbols or a function between trees.
    """
    match proto.WhichOneof('computation'):
      case 'reference':
        return environment[proto.reference.name]
      case 'selection':
        source = self.evaluate(proto.selection.source, environment)
        return source[proto.selection.index]
      case 'struct':
        return tff.structure.Struct(
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
      case 'tensorflow' | 'xla':
        return self._compiled(proto)
    block = tff.framework.ComputationBuildingBlock.from_proto(proto)
    match block:
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
    key = proto.SerializeToString(deterministic=True)
    if key not in self._bodies:
      self._bodies[key] = _body(proto)
    return self.evaluate(self._bodies[key], {})

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
      trace: Callable[[list[tf.Tensor]], list[tf.Tensor]],
      inputs: Sequence[symbols.Leaf],
      result_type: tff.Type,
  ) -> symbols.Tree:
    """Creates an operation at the current location; returns its outputs."""
    node = symbols.Operation(trace, self._location, inputs, result_type)
    return element_structure.unflatten(result_type, iter(node.outputs))

  def _compiled(self, proto: Any) -> Callable[[Any], symbols.Tree]:
    # TFF's building block would copy the graph to find a name for it.
    graph = self._graphs.get(proto)
    type_signature = tff.types.deserialize_type(proto.type)

    def call(argument):
      inputs = [] if argument is None else symbols.flatten(argument)
      return self._operation(graph, inputs, type_signature.result)

    return call

  def _literal(self, block: tff.framework.Literal) -> symbols.Tree:
    spec = element_structure.tensor_spec(block.type_signature)

    def trace(_):
      return [tf.constant(block.value, spec.dtype, spec.shape)]

    return self._operation(trace, (), block.type_signature)

  def _inner_function(
      self, function: Callable[[Any], symbols.Tree], argument_type: tff.Type
  ) -> symbols.InnerFunction:
    """Evaluates a function with new symbols as its arguments."""
    first = symbols.Node.next_number()
    inputs: list[symbols.Leaf] = []
    argument = symbols.new_inputs(argument_type, self._location, inputs)
    outputs = symbols.flatten(function(argument))
    captured = symbols.unique(
        leaf
        for leaf in itertools.chain(
            outputs,
            *(
                node.inputs
                for node in symbols.nodes_between(inputs, outputs)
                if node.number > first
            ),
        )
        if leaf.node.number < first
    )
    return symbols.InnerFunction(tuple(inputs), captured, tuple(outputs))

  # Intrinsics. Each method takes the intrinsic's argument and serialized type.
  # A federated value is the tree of the server's or of one client's values.
  # Each leaf knows its location, and clients can use all leaves of the server.

  def _federated_apply(self, argument: Any, _: Any) -> symbols.Tree:
    function, value = argument
    return function(value)

  # The server computes the result once for all clients.
  _federated_map_all_equal = _federated_apply

  def _federated_map(self, argument: Any, _: Any) -> symbols.Tree:
    with self._at(symbols.Location.CLIENTS):
      return self._federated_apply(argument, _)

  def _federated_eval_at_server(self, argument: Any, _: Any) -> symbols.Tree:
    return argument(None)

  def _federated_eval_at_clients(self, argument: Any, _: Any) -> symbols.Tree:
    with self._at(symbols.Location.CLIENTS):
      return argument(None)

  def _same(self, argument: Any, _: Any) -> symbols.Tree:
    return argument

  _federated_broadcast = _same
  _federated_value_at_clients = _same
  _federated_value_at_server = _same
  _federated_zip_at_clients = _same
  _federated_zip_at_server = _same

  def _federated_aggregate(
      self, argument: Any, type_proto: Any
  ) -> symbols.Tree:
    type_signature = tff.types.deserialize_type(type_proto)
    value, zero, accumulate, _, report = argument
    accumulate_type = type_signature.parameter[2]
    total_type = accumulate_type.parameter[0]
    fold = symbols.Fold(
        symbols.flatten(value),
        symbols.flatten(zero),
        self._inner_function(accumulate, accumulate_type.parameter),
        total_type,
    )
    total = element_structure.unflatten(total_type, iter(fold.outputs))
    return report(total)

  def _federated_select(self, argument: Any, type_proto: Any) -> symbols.Tree:
    type_signature = tff.types.deserialize_type(type_proto)
    keys, _, value, function = argument
    key_type = type_signature.parameter[3].parameter[1]
    values = symbols.flatten(value)
    element_type = type_signature.result.member.element
    with self._at(symbols.Location.CLIENTS):
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

      slices_type = tff.types.structure_from_tensor_type_tree(
          lambda t: tff.TensorType(t.dtype, [*keys.type.shape, *t.shape]),
          element_type,
      )
      node = symbols.Selection(
          trace,
          [keys, *values, *select.captured],
          type_signature.result.member,
          tff.to_type(slices_type),
      )
      return element_structure.unflatten(
          type_signature.result.member, iter(node.outputs)
      )

  def _sequence_map(self, argument: Any, type_proto: Any) -> symbols.Tree:
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

  def _sequence_reduce(self, argument: Any, type_proto: Any) -> symbols.Tree:
    type_signature = tff.types.deserialize_type(type_proto)
    sequence, zero, function = argument
    element_type = type_signature.parameter[0].element
    zero = symbols.flatten(zero)
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

  def _sequence_sum(self, argument: Any, type_proto: Any) -> symbols.Tree:
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


def _body(proto: Any) -> Any:
  """Returns the proto of the computation that replaces an intrinsic."""
  uri = proto.intrinsic.uri
  block = tff.framework.ComputationBuildingBlock.from_proto(proto)
  if uri in secure_intrinsics.URIS:
    comp = secure_intrinsics.replaced(
        tff.framework.ConcreteComputation.from_building_block(block)
    )
    return tff.framework.ConcreteComputation.get_proto(comp)
  body, is_reduced = tff.tensorflow.replace_intrinsics_with_bodies(block)
  if not is_reduced:
    raise NotImplementedError(f'The intrinsic {uri!r} can not run in process.')
  return body.proto
