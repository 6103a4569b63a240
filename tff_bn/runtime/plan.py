"""Plans: TFF computations as sequences of TensorFlow functions.

`interpreter` evaluates a computation once with symbols in place of tensors. The
result is a graph of TensorFlow operations at the server and at the clients.
Values go from the clients to the server only through folds, that is, through
`federated_aggregate`, to which TFF reduces all sums and means.

The plan cuts the graph at the folds into passes. Each pass consists of three
TensorFlow functions:

1.  `server` computes the server's operations that need no later fold.
2.  `clients` computes a client's operations from its values and the server's.
3.  `fold` adds a client's values to the accumulators of the folds.

A round of federated averaging thus takes one call of `clients` and one of
`fold` for each client, whose values can then be freed.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import imported_graph
from tff_bn.runtime import interpreter
from tff_bn.runtime import plan_stage
from tff_bn.runtime import symbols


@dataclasses.dataclass(frozen=True)
class Pass:
  """One exchange between the server and the clients.

  Attributes:
    server: The server's function, which is called first.
    received: The server's leaves that clients use in this pass for the first
      time.
    clients: The function of each client, which is called next.
    folded: The clients' leaves that are aggregated.
    zero: The leaves of the accumulators before the first client.
    folds: What is aggregated.
    fold: The function from the accumulators, `folded` and `captured` to the
      next accumulators.
    captured: The server's leaves that `fold` uses.
    totals: The leaves of the accumulators after the last client.
    kept: The clients' leaves that later passes need.
    freed: The clients' other leaves that were kept before, or are new.
    results: The clients' leaves that are results of the computation.
  """

  server: plan_stage.Stage
  received: tuple[symbols.Leaf, ...]
  clients: plan_stage.Stage
  folded: tuple[symbols.Leaf, ...]
  zero: tuple[symbols.Leaf, ...]
  folds: tuple[symbols.Fold, ...]
  fold: plan_stage.Stage
  captured: tuple[symbols.Leaf, ...]
  totals: tuple[symbols.Leaf, ...]
  kept: frozenset[symbols.Leaf]
  freed: frozenset[symbols.Leaf]
  results: tuple[symbols.Leaf, ...]


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A value that the server sends to all clients, or each client to the server.

  The first pass has the number 0.
  """

  pass_number: int
  sender: symbols.Location
  leaf: symbols.Leaf


class Plan:
  """The passes that compute a TFF computation.

  Attributes:
    server_inputs: The leaves of the argument that are at the server or equal
      for all clients, depth first.
    client_inputs: The leaves of the argument that differ between clients, depth
      first.
    passes: The passes, at least one.
    results: The leaves of the result, depth first.
    graphs: The cache of the computation's graphs.
    array_forms: For the computations of clients that have one, the form that
      takes batches as arrays, by the key of their graph.
    portioning: See `portioning.of`.
  """

  def __init__(
      self,
      computation: tff.framework.ConcreteComputation,
      graphs: imported_graph.GraphCache,
  ):
    self.server_inputs: list[symbols.Leaf] = []
    self.client_inputs: list[symbols.Leaf] = []
    self.graphs = graphs
    self.portioning: Any = None
    self.array_forms = {
        graphs.of(form.computation).key: form
        for form in getattr(computation, 'array_forms', ())
    }
    proto = tff.framework.ConcreteComputation.get_proto(computation)
    function = interpreter.Interpreter(graphs).evaluate(proto, {})
    type_signature = computation.type_signature
    argument = None
    if type_signature.parameter is not None:
      argument = self._argument(type_signature.parameter)
    result = function(argument) if callable(function) else function
    self.results = tuple(symbols.flatten(result))
    self.passes = self._passes()

  def transfers(
      self,
      results: Iterable[symbols.Leaf],
      client_results: Iterable[symbols.Leaf] = (),
  ) -> list[Transfer]:
    """Returns the values that must be sent to compute some of `self.results`.

    Clients receive `client_results`, which are further leaves of the result.
    The transfers are in their order. A client sends a value once in each pass
    that aggregates it; the server sends a value once. Of the values that
    `federated_select` slices, it sends the slices.
    """
    client_results = tuple(client_results)
    received = [(leaf.node.level, leaf) for leaf in client_results]
    sent = []
    slices = []
    for node in symbols.nodes_between((), [*results, *client_results]):
      if isinstance(node, symbols.Fold):
        values = [(node.level - 1, leaf) for leaf in node.values]
        sent += values
        received += values  # A client may return the server's values.
      elif isinstance(node, symbols.Selection):
        slices += [(node.level, leaf) for leaf in node.slices]
      elif node.location is symbols.Location.CLIENTS:
        received += [(node.level, leaf) for leaf in node.inputs]
    first_use: dict[symbols.Leaf, int] = {}
    for number, leaf in received:
      if leaf.node.location is symbols.Location.SERVER:
        first_use[leaf] = min(number, first_use.get(leaf, number))
    down = [
        Transfer(n, symbols.Location.SERVER, leaf)
        for leaf, n in [*first_use.items(), *((leaf, n) for n, leaf in slices)]
    ]
    up = [
        Transfer(n, symbols.Location.CLIENTS, leaf)
        for n, leaf in dict.fromkeys(sent)
    ]
    return sorted([*down, *up], key=lambda transfer: transfer.pass_number)

  def _argument(self, type_spec: tff.Type) -> symbols.Tree:
    """Creates the symbols of an argument of the computation."""
    location, leaves = symbols.Location.SERVER, self.server_inputs
    if isinstance(type_spec, tff.FederatedType):
      if type_spec.placement is tff.CLIENTS and not type_spec.all_equal:
        location, leaves = symbols.Location.CLIENTS, self.client_inputs
      type_spec = type_spec.member
    elif isinstance(type_spec, tff.StructType):
      return tff.structure.Struct(
          [
              (name, self._argument(element))
              for name, element in tff.structure.iter_elements(type_spec)
          ]
      )
    return symbols.new_inputs(type_spec, location, leaves)

  def _passes(self) -> tuple[Pass, ...]:
    operations = collections.defaultdict(list)  # By pass and location.
    folds = collections.defaultdict(list)  # By pass.
    users = collections.defaultdict(set)  # The nodes that need a leaf.
    last_pass: dict[symbols.Leaf, int] = {}  # By leaf of the clients.
    for node in symbols.nodes_between((), self.results):
      number = node.level
      if isinstance(node, symbols.Operation):
        operations[number, node.location].append(node)
      elif isinstance(node, symbols.Fold):
        number -= 1  # The pass before the one that can use the result.
        folds[number].append(node)
      for leaf in node.inputs:
        users[leaf].add(node)
        if leaf.node.location is symbols.Location.CLIENTS:
          last_pass[leaf] = max(number, last_pass.get(leaf, 0))
    results = frozenset(self.results)
    kept: frozenset[symbols.Leaf] = frozenset()
    received: set[symbols.Leaf] = set()
    passes = []
    for number in range(1 + max((n for n, _ in operations), default=0)):
      server, clients = (
          _stage(operations[number, location], users, results)
          for location in (symbols.Location.SERVER, symbols.Location.CLIENTS)
      )
      sent = tuple(
          leaf
          for leaf in clients.inputs
          if leaf.node.location is symbols.Location.SERVER
          and leaf not in received
      )
      received.update(sent)
      new = clients.outputs
      if number == 0:
        new = (*self.client_inputs, *new)
      known = kept.union(new)
      kept = frozenset(
          leaf for leaf in known if last_pass.get(leaf, 0) > number
      )
      folded = symbols.unique(
          leaf for fold in folds[number] for leaf in fold.values
      )
      captured = symbols.unique(
          leaf for fold in folds[number] for leaf in fold.accumulate.captured
      )
      passes.append(
          Pass(
              server=server,
              received=sent,
              clients=clients,
              folded=folded,
              zero=tuple(leaf for fold in folds[number] for leaf in fold.zero),
              folds=tuple(folds[number]),
              fold=_fold_stage(folds[number], folded, captured),
              captured=captured,
              totals=tuple(
                  leaf for fold in folds[number] for leaf in fold.outputs
              ),
              kept=kept,
              freed=known - kept,
              results=tuple(leaf for leaf in new if leaf in results),
          )
      )
    return tuple(passes)


def _stage(
    operations: Sequence[symbols.Operation],
    users: dict[symbols.Leaf, set[symbols.Node]],
    results: frozenset[symbols.Leaf],
) -> plan_stage.Stage:
  """Joins operations into one function."""
  inside: set[symbols.Node] = set(operations)
  outputs = [
      leaf
      for node in operations
      for leaf in node.outputs
      if leaf in results or not users[leaf] <= inside
  ]
  inputs = symbols.unique(
      leaf
      for node in operations
      for leaf in node.inputs
      if leaf.node not in inside
  )
  return plan_stage.Stage(
      inputs,
      outputs,
      lambda tensors: symbols.compute(outputs, dict(zip(inputs, tensors))),
  )


def _fold_stage(
    folds: Sequence[symbols.Fold],
    folded: Sequence[symbols.Leaf],
    captured: Sequence[symbols.Leaf],
) -> plan_stage.Stage:
  """Joins folds into one function that adds a client's values to them."""
  totals = [leaf for fold in folds for leaf in fold.outputs]
  inputs = [*totals, *folded, *captured]
  return plan_stage.Stage(
      inputs,
      totals,
      lambda tensors: fold_all(folds, dict(zip(inputs, tensors))),
  )


def fold_all(
    folds: Iterable[symbols.Fold], tensors: Mapping[symbols.Leaf, tf.Tensor]
) -> list[tf.Tensor]:
  """Returns the next accumulators of folds, in a graph.

  Args:
    folds: The folds.
    tensors: The accumulators, by the leaf of the fold's result; a client's
      values; and the captured values.
  """
  return [
      total
      for fold in folds
      for total in fold.accumulate(
          [tensors[leaf] for leaf in (*fold.outputs, *fold.values)],
          [tensors[leaf] for leaf in fold.accumulate.captured],
      )
  ]
