"""Runs plans: the server's part and the aggregation of client values."""

import abc
from collections.abc import Callable, Generator, Mapping, Sequence
import contextlib
from typing import Any, Optional

import tensorflow as tf

from tff_bn.runtime import arguments
from tff_bn.runtime import client_part
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import symbols


class Clients(abc.ABC):
  """The clients of one invocation of a plan."""

  @abc.abstractmethod
  def compute(self, number: int) -> Generator[Sequence[Any], None, None]:
    """Computes all clients' part of a pass, after all passes before it.

    Args:
      number: The number of the pass.

    Yields:
      For each client, in order, the values to aggregate: the arrays or tensors
      of the leaves in the pass's `folded` that are placed at clients.
    """

  @abc.abstractmethod
  def results(self, leaf: symbols.Leaf) -> list[Any]:
    """Returns each client's value of a leaf as a result for the caller.

    Args:
      leaf: A leaf of the computation's result.
    """


# Creates the clients from their values, in the order of the plan's
# `client_inputs`, and a mapping to which each pass adds the server's tensors.
ClientsFn = Callable[
    [Sequence[Sequence[Any]], Mapping[symbols.Leaf, Any]], Clients
]


class Execution:
  """One invocation of a plan."""

  def __init__(
      self,
      plan: plan_lib.Plan,
      argument: arguments.Argument,
      clients_fn: ClientsFn,
      server_device: str,
  ):
    """Initializes the invocation.

    Args:
      plan: The plan.
      argument: The argument.
      clients_fn: Creates the clients.
      server_device: The full name of the server's device.
    """
    self._plan = plan
    clients = argument.clients or []
    self._num_clients = len(clients)
    self._server_device = server_device
    self._server = {
        leaf: client_part.to_tensor(value, server_device)
        for leaf, value in zip(plan.server_inputs, argument.server, strict=True)
    }
    self._clients: Optional[Clients] = None
    if clients:
      self._clients = clients_fn(clients, self._server)

  def run(self) -> None:
    """Computes all passes."""
    for number, part in enumerate(self._plan.passes):
      tensors = part.server(
          [self._server[leaf] for leaf in part.server.inputs],
          self._server_device,
      )
      self._server.update(zip(part.server.outputs, tensors))
      totals = self._compute_totals(number)
      self._server.update(zip(part.totals, totals))

  def server_result(self, leaf: symbols.Leaf) -> Any:
    """Returns the server's value of a leaf."""
    return arguments.to_python(self._server[leaf], leaf.type)

  def client_results(self, leaf: symbols.Leaf) -> list[Any]:
    """Returns each client's value of a leaf."""
    if leaf in self._server:
      return [self.server_result(leaf) for _ in range(self._num_clients)]
    return self._clients.results(leaf) if self._clients else []

  def _compute_totals(self, number: int) -> list[tf.Tensor]:
    """Computes all clients' part of a pass and aggregates their values."""
    part = self._plan.passes[number]
    totals = [self._server[leaf] for leaf in part.zero]
    if not self._clients:
      return totals
    if not (part.clients.outputs or part.totals or part.results):
      return totals
    captured = [self._server[leaf] for leaf in part.captured]
    with contextlib.closing(self._clients.compute(number)) as computed:
      for values in computed:
        remaining = iter(values)
        folded = [
            self._server[leaf]
            if leaf in self._server
            else self._to_server(next(remaining))
            for leaf in part.folded
        ]
        totals = part.fold([*totals, *folded, *captured], self._server_device)
    return totals

  def _to_server(self, value: Any) -> tf.Tensor:
    if isinstance(value, tf.Tensor) and value.device == self._server_device:
      return value
    with tf.device(self._server_device):
      return tf.identity(value)
