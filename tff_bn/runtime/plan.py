"""What a TFF computation does, as a plan of TensorFlow functions.

A computation is evaluated once with symbols in place of tensors (see
`interpreter`), which leaves a graph of operations on tensors, each of which is
at the server or at the clients. The only way from the clients to the server is
a fold: `federated_aggregate`, to which TFF reduces all sums and means.

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
from collections.abc import Iterable, Sequence
import dataclasses

import tensorflow_federated as tff

from tff_bn.runtime import graph_cache
from tff_bn.runtime import interpreter
from tff_bn.runtime import plan_stage
from tff_bn.runtime import symbols


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

  server: plan_stage.Stage
  received: tuple[symbols.Leaf, ...]
  clients: plan_stage.Stage
  folded: tuple[symbols.Leaf, ...]
  zero: tuple[symbols.Leaf, ...]
  fold: plan_stage.Stage
  captured: tuple[symbols.Leaf, ...]
  totals: tuple[symbols.Leaf, ...]
  kept: frozenset[symbols.Leaf]
  results: tuple[symbols.Leaf, ...]


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A leaf that is sent.

  Attributes:
    pass_number: The pass in which it is sent, from 0.
    sender: The server, which sends to all clients, or each of the clients.
    leaf: The leaf.
  """

  pass_number: int
  sender: symbols.Location
  leaf: symbols.Leaf


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
      graphs: graph_cache.GraphCache,
  ):
    """Makes a plan.

    Args:
      computation: The computation.
      graphs: Where imported graphs are found.
    """
    self.server_inputs = []
    self.client_inputs = []
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
    for node in symbols.nodes_between((), [*results, *client_results]):
      if isinstance(node, symbols.Fold):
        values = [(node.level - 1, leaf) for leaf in node.values]
        sent += values
        received += values  # A client may hand back what it got.
      elif node.location is symbols.Location.CLIENTS:
        received += [(node.level, leaf) for leaf in node.inputs]
    first_use = {}
    for number, leaf in received:
      if leaf.node.location is symbols.Location.SERVER:
        first_use[leaf] = min(number, first_use.get(leaf, number))
    down = [
        Transfer(n, symbols.Location.SERVER, leaf)
        for leaf, n in first_use.items()
    ]
    up = [
        Transfer(n, symbols.Location.CLIENTS, leaf)
        for n, leaf in dict.fromkeys(sent)
    ]
    return sorted([*down, *up], key=lambda transfer: transfer.pass_number)

  def _argument(self, type_spec: tff.Type) -> symbols.Tree:
    """The symbols of an argument."""
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
    last_pass = {}  # In which a leaf of the clients is needed.
    for node in symbols.nodes_between((), self.results):
      number = node.level
      if isinstance(node, symbols.Operation):
        operations[number, node.location].append(node)
      elif isinstance(node, symbols.Fold):
        number -= 1  # It is computed in the pass before its result is there.
        folds[number].append(node)
      for leaf in node.inputs:
        users[leaf].add(node)
        if leaf.node.location is symbols.Location.CLIENTS:
          last_pass[leaf] = max(number, last_pass.get(leaf, 0))
    results = frozenset(self.results)
    kept = frozenset()
    received = set()
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
      kept = frozenset(
          leaf for leaf in (*kept, *new) if last_pass.get(leaf, 0) > number
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


def _stage(
    operations: Sequence[symbols.Node],
    users: dict[symbols.Leaf, set[symbols.Node]],
    results: frozenset[symbols.Leaf],
) -> plan_stage.Stage:
  """One function of several operations."""
  inside = set(operations)
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
  return plan_stage.Stage(inputs, totals, body)
