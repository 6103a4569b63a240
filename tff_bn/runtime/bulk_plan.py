"""Plans for several clients in one call of a TensorFlow function.

The cost of a client with a few small batches is not its mathematics: the call
from Python, the dataset's iterator and new variables take longer. Here one
function computes several clients, one after another in a loop, with the same
operations, so that the results have the same bits. It takes the batches of all
its clients as arrays and uses the same variables for all of them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import functools
import math
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import batch_arrays
from tff_bn.common import client_batches
from tff_bn.runtime import element_structure
from tff_bn.runtime import execution
from tff_bn.runtime import imported_graph
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import plan_stage
from tff_bn.runtime import symbols

# XLA knows fewer operations than TensorFlow.
COMPILATION_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
)

# Builds the form that takes arrays of a computation that takes a dataset, given
# by the key of its graph.
BuildForm = Callable[[bytes], tff.Computation]

_COUNT = tf.TensorSpec([], tf.int32)
_PLACES = tf.TensorSpec([None], tf.int64)


class BulkPass:
  """A pass of a plan for several clients.

  Attributes:
    clients: The function of the clients. It takes the number of clients, then
      the leaves of `plan_lib.Pass.clients`: those of the server; those of the
      clients, stacked; and for each dataset the result of `dataset_tensors`.
      It returns the clients' outputs, stacked.
    fold: The function from the number of clients and the arguments of
      `plan_lib.Pass.fold`, the clients' values stacked, to the accumulators
      after these clients.
  """

  def __init__(
      self, part: plan_lib.Pass, graph_of: '_GraphOf', is_compiled: bool
  ):
    self.clients = _clients_stage(graph_of, part, is_compiled)
    self.fold: execution.Fold = _fold_stage(part, False)
    if is_compiled:
      self.fold = _FirstThatCompiles(_fold_stage(part, True), self.fold)


class BulkPlan:
  """The passes of a plan for several clients.

  Attributes:
    passes: One entry for each of the plan's passes.
    is_compiled: Whether XLA compiles the functions, which takes seconds. All
      batches must have the same size then.
    needs_equal_batches: Whether all batches of the clients that are computed at
      once must have the same size, because values that clients keep or send
      have as many rows as a batch.
  """

  def __init__(
      self, plan: plan_lib.Plan, is_compiled: bool, build_form: BuildForm
  ):
    graph_of = _GraphOf(plan.graphs, build_form)
    self.passes = [
        BulkPass(part, graph_of, is_compiled) for part in plan.passes
    ]
    self.is_compiled = is_compiled
    specs = [
        leaf.spec
        for part in plan.passes
        for leaf in _values(part)
        if not _is_dataset(leaf)
    ]
    # They are the same for nearly all clients.
    self._sample_bytes = functools.cache(_sample_bytes)
    self._values_bytes = functools.cache(
        lambda batch_size: sum(_num_bytes(spec, batch_size) for spec in specs)
    )
    self.needs_equal_batches = is_compiled or not all(
        spec.shape.is_fully_defined() for spec in specs
    )

  def client_bytes(self, client: Mapping[symbols.Leaf, Any]) -> int:
    """Returns the size of a client's data and of the values it computes.

    `client` has its `BatchArrays` and other values by leaf.
    """
    batch_size = 1
    num_bytes = 0
    for leaf, value in client.items():
      if isinstance(value, batch_arrays.BatchArrays):
        batch_size = max([batch_size, *value.sizes.tolist()])
        num_bytes += int(np.sum(value.sizes)) * self._sample_bytes(leaf)
    return num_bytes + self._values_bytes(batch_size)


def _sample_bytes(leaf: symbols.Leaf) -> int:
  """Returns the size of a sample of a dataset."""
  return sum(_num_bytes(spec, 1) for spec in _samples_specs(leaf, False))


def is_possible(plan: plan_lib.Plan) -> bool:
  """Returns whether a plan's clients can be computed several at once.

  The computations that read their datasets must have a form that takes arrays,
  whose samples must have a known shape. Other datasets, those of
  `federated_select`, must be read in the pass that makes them.
  """
  inputs = {leaf for leaf in plan.client_inputs if _is_dataset(leaf)}
  if not inputs or not all(map(_has_sample_shape, inputs)):
    return False
  for part in plan.passes:
    for leaf in _values(part):
      if (
          _is_dataset(leaf)
          and leaf not in inputs
          or leaf.spec.shape.rank is None
      ):
        return False
    for node in _operations(part.clients):
      if inputs.intersection(node.inputs) and not _has_form(plan, node):
        return False
  return True


def _has_form(plan: plan_lib.Plan, node: symbols.Operation) -> bool:
  """Returns whether an operation has a form that takes arrays."""
  trace = node.trace
  return (
      isinstance(trace, imported_graph.Graph) and trace.key in plan.array_forms
  )


def compiled_flops(plan: plan_lib.Plan, batch_size: int) -> float:
  """Returns the operations of a step, infinite if XLA can't compile a form."""
  if any(
      isinstance(node, symbols.Selection)
      for part in plan.passes
      for node in _operations(part.clients)
  ):
    return math.inf
  functions = [form.compiled_flops for form in plan.array_forms.values()]
  return max(
      math.inf if function is None else function(batch_size)
      for function in functions
  )


def _values(part: plan_lib.Pass) -> set[symbols.Leaf]:
  """Returns the leaves of a client that a pass computes, or keeps."""
  return {*part.clients.outputs, *part.kept, *part.results}


def dataset_tensors(
    data: Sequence[batch_arrays.BatchArrays], equal_sizes: bool
) -> list[Any]:
  """Returns the tensors of a dataset's leaf for several clients.

  They are the samples, where the batches of all clients begin and end (not with
  `equal_sizes`), each client's first batch, and its number of batches.
  """
  if not equal_sizes:
    samples, *places = batch_arrays.join(data)
    return [*samples, *places]
  # XLA compiles a function for each number of batches.
  total = sum(len(arrays.sizes) for arrays in data)
  length = 2 ** math.ceil(math.log2(total))
  samples, _, firsts, sizes = batch_arrays.join(data, length)
  return [*samples, firsts, sizes]


def _is_dataset(leaf: symbols.Leaf) -> bool:
  return isinstance(leaf.type, tff.SequenceType)


def _has_sample_shape(leaf: symbols.Leaf) -> bool:
  """Returns whether all samples of a dataset have the same known shape."""
  return all(
      t.shape is not None and len(t.shape) > 0 and None not in t.shape[1:]
      for t in element_structure.leaf_types(leaf.type.element)
  )


def _operations(stage: plan_stage.Stage) -> list[symbols.Operation]:
  nodes = symbols.nodes_between(stage.inputs, stage.outputs)
  assert all(isinstance(node, symbols.Operation) for node in nodes)
  return nodes  # type: ignore[return-value]


class _GraphOf:
  """Finds the graphs of operations."""

  def __init__(self, graphs: imported_graph.GraphCache, build_form: BuildForm):
    self._graphs, self._build_form = graphs, build_form

  def __call__(self, node: symbols.Operation) -> Optional[imported_graph.Graph]:
    """Returns the graph of an operation; if it reads data, of its form."""
    trace = node.trace
    if not isinstance(trace, imported_graph.Graph):
      return None
    if any(
        _is_dataset(leaf) and isinstance(leaf.node, symbols.Input)
        for leaf in node.inputs
    ):
      return self._graphs.of(self._build_form(trace.key))
    return trace


def _num_bytes(spec: tf.TensorSpec, unknown: int) -> int:
  """Returns the size of a tensor, with a length for each unknown one."""
  return spec.dtype.size * math.prod(
      unknown if length is None else length for length in spec.shape
  )


def _samples_specs(
    leaf: symbols.Leaf, equal_sizes: bool
) -> list[tf.TensorSpec]:
  batch = map(
      element_structure.tensor_spec,
      element_structure.leaf_types(leaf.type.element),
  )
  return list(client_batches.samples_spec(list(batch), equal_sizes))


def _dataset_specs(
    leaf: symbols.Leaf, equal_sizes: bool
) -> list[tf.TensorSpec]:
  """Returns the specs of `dataset_tensors`."""
  samples = _samples_specs(leaf, equal_sizes)
  return [*samples, *((2 if equal_sizes else 3) * [_PLACES])]


def _clients_stage(
    graph_of: _GraphOf, part: plan_lib.Pass, is_compiled: bool
) -> plan_stage.Stage:
  stage = part.clients
  operations = _operations(stage)

  def specs(leaf):
    if _is_dataset(leaf):
      return _dataset_specs(leaf, is_compiled)
    if leaf.node.location is symbols.Location.SERVER:
      return [leaf.spec]
    return [tf.TensorSpec([None, *leaf.spec.shape], leaf.spec.dtype)]

  def body(tensors):
    functions = [_Function(node, graph_of(node)) for node in operations]

    def loop(count, *tensors):
      rest = iter(tensors)
      given = {leaf: [next(rest) for _ in specs(leaf)] for leaf in stage.inputs}
      arrays = [
          tf.TensorArray(
              leaf.spec.dtype, size=count, element_shape=leaf.spec.shape
          )
          for leaf in stage.outputs
      ]

      def client(number, arrays):
        values = {
            leaf: _of_client(leaf, tensors, number)
            for leaf, tensors in given.items()
        }
        for node, function in zip(operations, functions):
          results = function([t for leaf in node.inputs for t in values[leaf]])
          for leaf, result in zip(node.outputs, results, strict=True):
            values[leaf] = [result]
        return number + 1, [
            array.write(number, values[leaf][0])
            for array, leaf in zip(arrays, stage.outputs)
        ]

      _, arrays = tf.while_loop(
          lambda number, _: number < count,
          client,
          (tf.constant(0), arrays),
          # The clients use the same variables.
          parallel_iterations=1,
      )
      return [array.stack() for array in arrays]

    with tf.control_dependencies([a for f in functions for a in f.assignments]):
      outputs = _compiled(loop, is_compiled)(*tensors)
    return imported_graph.destroy_after(
        [v for f in functions for v in f.variables], outputs
    )

  return plan_stage.Stage(
      stage.inputs,
      stage.outputs,
      body,
      [_COUNT, *(spec for leaf in stage.inputs for spec in specs(leaf))],
  )


def _compiled(function: Callable[..., Any], is_compiled: bool) -> Any:
  """Lets XLA compile a function, if `is_compiled`."""
  if not is_compiled:
    return function
  return tf.function(function, jit_compile=True, autograph=False)


class _Function:
  """An operation inside of the loop, with its variables outside."""

  def __init__(
      self, node: symbols.Operation, graph: Optional[imported_graph.Graph]
  ):
    self._node, self._graph = node, graph
    self.variables: list[tf.Tensor] = []
    self.assignments: list[tf.Operation] = []
    if graph is not None:
      self.variables, self.assignments = graph.new_variables()

  def __call__(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    if self._graph is None:
      return self._node.trace(tensors)
    return self._graph.call_with(self.variables, tensors)


def _of_client(
    leaf: symbols.Leaf, tensors: list[tf.Tensor], number: tf.Tensor
) -> list[tf.Tensor]:
  """Returns a client's tensors of a leaf."""
  if _is_dataset(leaf):
    *shared, firsts, sizes = tensors
    return [*shared, firsts[number], sizes[number]]
  if leaf.node.location is symbols.Location.SERVER:
    return tensors
  return [tf.gather(tensors[0], number)]


def _fold_stage(part: plan_lib.Pass, is_compiled: bool) -> plan_stage.Stage:
  inputs, totals = part.fold.inputs, part.fold.outputs
  stacked = {
      leaf
      for leaf in part.folded
      if leaf.node.location is symbols.Location.CLIENTS
  }
  # XLA has no arrays that grow.
  compiled = [fold for fold in part.folds if is_compiled and _has_size(fold)]
  others = [fold for fold in part.folds if fold not in compiled]

  def body(tensors):
    count, *tensors = tensors
    values = dict(zip(inputs, tensors))
    results: dict[symbols.Leaf, tf.Tensor] = {}
    for folds, must_compile in ((compiled, True), (others, False)):
      if folds:
        fold = _Fold(folds, stacked)
        arguments = [values[leaf] for leaf in fold.inputs]
        results.update(
            zip(fold.totals, _compiled(fold, must_compile)(count, *arguments))
        )
    return [results[leaf] for leaf in totals]

  specs = [
      tf.TensorSpec([None, *leaf.spec.shape], leaf.spec.dtype)
      if leaf in stacked
      else leaf.spec
      for leaf in inputs
  ]
  return plan_stage.Stage(inputs, totals, body, [_COUNT, *specs])


def _has_size(fold: symbols.Fold) -> bool:
  return all(leaf.spec.shape.is_fully_defined() for leaf in fold.outputs)


class _Fold:
  """Adds the values of several clients to accumulators, in a graph.

  Attributes:
    inputs: The leaves of the arguments after the number of clients.
    totals: The accumulators' leaves.
  """

  def __init__(
      self,
      folds: Sequence[symbols.Fold],
      stacked: Collection[symbols.Leaf],
  ):
    """Initializes it; the values of the leaves `stacked` are stacked."""
    self._folds = folds
    self._stacked = stacked
    self.totals = [leaf for fold in folds for leaf in fold.outputs]
    self.inputs = symbols.unique(
        [
            *self.totals,
            *(leaf for fold in folds for leaf in fold.values),
            *(leaf for fold in folds for leaf in fold.accumulate.captured),
        ]
    )

  def __call__(self, count: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Returns the accumulators."""
    values = dict(zip(self.inputs, tensors))

    def add(number, totals):
      given = {
          leaf: tf.gather(tensor, number) if leaf in self._stacked else tensor
          for leaf, tensor in values.items()
      }
      given.update(zip(self.totals, totals))
      return number + 1, plan_lib.fold_all(self._folds, given)

    _, results = tf.while_loop(
        lambda number, _: number < count,
        add,
        (tf.constant(0), [values[leaf] for leaf in self.totals]),
        shape_invariants=(
            tf.TensorShape([]),
            [leaf.spec.shape for leaf in self.totals],
        ),
        parallel_iterations=1,
    )
    return results


class _FirstThatCompiles:
  """The first of several forms of a function that TensorFlow can compile."""

  def __init__(self, *stages: plan_stage.Stage):
    self._stages = list(stages)

  def __call__(
      self, tensors: Sequence[tf.Tensor], device: str
  ) -> list[tf.Tensor]:
    """Calls it; see `plan_stage.Stage`."""
    try:
      return self._stages[0](tensors, device)
    except COMPILATION_ERRORS:
      if len(self._stages) == 1:
        raise
      del self._stages[0]
      return self(tensors, device)
