"""Plans for several clients in one call of a TensorFlow function.

The cost of a client with a few small batches is not its mathematics: the call
from Python, the dataset's iterator and new variables take longer. Here one
function computes several clients, one after another in a loop, with the same
operations, so that the results have the same bits. It takes the batches of all
its clients as arrays and uses the same variables for all of them.
"""

from collections.abc import Sequence
import math
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import client_batches
from tff_bn.runtime import client_dataset
from tff_bn.runtime import element_structure
from tff_bn.runtime import imported_graph
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import plan_stage
from tff_bn.runtime import symbols

_COUNT = tf.TensorSpec([], tf.int32)
_INT64_VECTOR = tf.TensorSpec([None], tf.int64)
# The tensors of a dataset's leaf after those of its samples: where the batches
# of all clients begin and end, each client's first batch, and their number.
_PLACES = [_INT64_VECTOR, _INT64_VECTOR, _INT64_VECTOR]


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

  def __init__(self, plan: plan_lib.Plan, part: plan_lib.Pass):
    self.clients = _clients_stage(plan, part)
    self.fold = _fold_stage(part)


class BulkPlan:
  """The passes of a plan for several clients.

  Attributes:
    passes: One entry for each of the plan's passes.
    needs_equal_batches: Whether all batches of the clients that are computed at
      once must have the same size, because values that clients keep or send
      have as many rows as a batch.
  """

  def __init__(self, plan: plan_lib.Plan):
    self.passes = [BulkPass(plan, part) for part in plan.passes]
    self._shapes = [
        (leaf.spec.shape, leaf.spec.dtype.size)
        for part in plan.passes
        for leaf in _values(part)
        if not _is_dataset(leaf)
    ]
    self.needs_equal_batches = not all(
        shape.is_fully_defined() for shape, _ in self._shapes
    )

  def client_bytes(self, batch_size: int) -> int:
    """Returns the size of the values of one client, apart from its data."""
    return sum(
        math.prod(batch_size if d is None else d for d in shape) * size
        for shape, size in self._shapes
    )


def is_possible(plan: plan_lib.Plan) -> bool:
  """Returns whether a plan's clients can be computed several at once.

  The computations that read their datasets must have a form that takes arrays,
  and no other value may be a dataset.
  """
  inputs = {leaf for leaf in plan.client_inputs if _is_dataset(leaf)}
  if not inputs:
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
      read = [leaf for leaf in node.inputs if _is_dataset(leaf)]
      if read and not (inputs.issuperset(read) and _form(plan, node)):
        return False
  return True


def _values(part: plan_lib.Pass) -> set[symbols.Leaf]:
  """Returns the leaves of a client that a pass computes, or keeps."""
  return {*part.clients.outputs, *part.kept, *part.results}


def dataset_tensors(data: Sequence[client_dataset.BatchArrays]) -> list[Any]:
  """Returns the tensors of a dataset's leaf for several clients."""
  sizes = [len(arrays.sizes) for arrays in data]
  bounds = np.cumsum([0, *np.concatenate([arrays.sizes for arrays in data])])
  firsts = np.cumsum([0, *sizes])[:-1]
  return [
      *map(np.concatenate, zip(*(arrays.samples for arrays in data))),
      bounds.astype(np.int64),
      firsts.astype(np.int64),
      np.asarray(sizes, np.int64),
  ]


def _is_dataset(leaf: symbols.Leaf) -> bool:
  return isinstance(leaf.type, tff.SequenceType)


def _operations(stage: plan_stage.Stage) -> list[symbols.Operation]:
  nodes = symbols.nodes_between(stage.inputs, stage.outputs)
  assert all(isinstance(node, symbols.Operation) for node in nodes)
  return nodes  # type: ignore[return-value]


def _form(plan: plan_lib.Plan, node: symbols.Operation) -> Optional[Any]:
  """Returns the form of an operation that takes arrays, if it has one."""
  if not isinstance(node.trace, imported_graph.Graph):
    return None
  return plan.array_forms.get(node.trace.key)


def _dataset_specs(leaf: symbols.Leaf) -> list[tf.TensorSpec]:
  """Returns the specs of `dataset_tensors`."""
  batch = map(
      element_structure.tensor_spec,
      element_structure.leaf_types(leaf.type.element),
  )
  samples = client_batches.samples_spec(list(batch))
  return [*samples, *_PLACES]


def _clients_stage(
    plan: plan_lib.Plan, part: plan_lib.Pass
) -> plan_stage.Stage:
  stage = part.clients
  operations = _operations(stage)

  def specs(leaf):
    if _is_dataset(leaf):
      return _dataset_specs(leaf)
    if leaf.node.location is symbols.Location.SERVER:
      return [leaf.spec]
    return [tf.TensorSpec([None, *leaf.spec.shape], leaf.spec.dtype)]

  def body(tensors):
    count, *rest = tensors
    rest = iter(rest)
    given = {leaf: [next(rest) for _ in specs(leaf)] for leaf in stage.inputs}
    functions = [_Function(plan, node) for node in operations]
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
        arguments = [t for leaf in node.inputs for t in values[leaf]]
        for leaf, result in zip(node.outputs, function(arguments), strict=True):
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
    return imported_graph.destroy_after(
        [v for function in functions for v in function.variables],
        [array.stack() for array in arrays],
    )

  return plan_stage.Stage(
      stage.inputs,
      stage.outputs,
      body,
      [_COUNT, *(spec for leaf in stage.inputs for spec in specs(leaf))],
  )


class _Function:
  """An operation inside of the loop, with its variables outside."""

  def __init__(self, plan: plan_lib.Plan, node: symbols.Operation):
    self.variables: list[tf.Tensor] = []
    self._call = node.trace
    form = _form(plan, node)
    if form is not None:
      graph = plan.graphs.of(form.build())
    elif isinstance(node.trace, imported_graph.Graph):
      graph = node.trace
    else:
      return
    self.variables = graph.new_variables()
    self._call = lambda tensors: graph.call_with(self.variables, tensors)

  def __call__(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    return self._call(tensors)


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


def _fold_stage(part: plan_lib.Pass) -> plan_stage.Stage:
  stage = part.fold
  totals = stage.outputs
  is_stacked = [
      position >= len(totals) and leaf.node.location is symbols.Location.CLIENTS
      for position, leaf in enumerate(stage.inputs)
  ]

  def body(tensors):
    count, *tensors = tensors

    def add(number, totals):
      rest = [
          tf.gather(tensor, number) if stacked else tensor
          for tensor, stacked in zip(tensors, is_stacked)
      ][len(totals) :]
      return number + 1, stage.body([*totals, *rest])

    _, results = tf.while_loop(
        lambda number, _: number < count,
        add,
        (tf.constant(0), tensors[: len(totals)]),
        shape_invariants=(
            tf.TensorShape([]),
            [leaf.spec.shape for leaf in totals],
        ),
        parallel_iterations=1,
    )
    return results

  specs = [
      tf.TensorSpec([None, *leaf.spec.shape], leaf.spec.dtype)
      if stacked
      else leaf.spec
      for leaf, stacked in zip(stage.inputs, is_stacked)
  ]
  return plan_stage.Stage(stage.inputs, totals, body, [_COUNT, *specs])
