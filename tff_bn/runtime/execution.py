"""Runs plans: the server's part and the aggregation of client values."""

import abc
from collections.abc import Callable, Generator, Sequence
import contextlib
import dataclasses
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import arguments
from tff_bn.runtime import client_part
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import symbols

# A function from tensors, and the full name of a device, to tensors on it, such
# as a `plan_stage.Stage`.
Fold = Callable[[Sequence[tf.Tensor], str], list[tf.Tensor]]


class NotCompiledError(Exception):
  """XLA cannot compile a part of the clients' work.

  Then the whole invocation is computed again without XLA. Nothing in it is then
  computed in another way than in later invocations, or after a resume.
  """


@dataclasses.dataclass(frozen=True)
class Computed:
  """The values of one or several clients that are aggregated.

  Attributes:
    values: The arrays or tensors of the leaves in the pass's `folded` that are
      placed at clients.
    fold: The function that adds them to the accumulators, see
      `plan_lib.Pass.fold`.
    first: The arguments of `fold` before the accumulators.
  """

  values: Sequence[Any]
  fold: Fold
  first: Sequence[tf.Tensor] = ()


class Clients(abc.ABC):
  """The clients of one invocation of a plan."""

  @property
  @abc.abstractmethod
  def seconds(self) -> Sequence[float]:
    """How long each client was computed."""

  @abc.abstractmethod
  def compute(self, number: int) -> Generator[Computed, None, None]:
    """Computes all clients' part of a pass, after all passes before it.

    It yields their values to aggregate, in the order of the clients.
    """

  @abc.abstractmethod
  def results(self, leaf: symbols.Leaf) -> list[Any]:
    """Returns each client's value of a leaf of the computation's result."""


@dataclasses.dataclass(frozen=True)
class Invocation:
  """A computation with the values of its argument.

  `values` has each client's values, in the order of `plan.client_inputs`.
  `server` has the server's tensors by leaf; `Execution` adds the tensors of
  each pass.
  """

  computation: tff.framework.ConcreteComputation
  plan: plan_lib.Plan
  values: Sequence[Sequence[Any]]
  server: dict[symbols.Leaf, Any]


class Execution:
  """Runs the passes of an invocation, with the server's part on one device."""

  def __init__(
      self,
      invocation: Invocation,
      clients: Optional[Clients],
      server_device: str,
  ):
    self._plan = invocation.plan
    self._num_clients = len(invocation.values)
    self._server = invocation.server
    self._clients = clients
    self._server_device = server_device

  def run(self) -> None:
    """Computes all passes."""
    for number, part in enumerate(self._plan.passes):
      tensors = part.server(
          [self._server[leaf] for leaf in part.server.inputs],
          self._server_device,
      )
      self._server.update(zip(part.server.outputs, tensors))
      self._server.update(zip(part.totals, self._compute_totals(number)))

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
      for clients in computed:
        remaining = iter(clients.values)
        folded = [
            self._server[leaf]
            if leaf in self._server
            else client_part.to_tensor(next(remaining), self._server_device)
            for leaf in part.folded
        ]
        totals = clients.fold(
            [*clients.first, *totals, *folded, *captured], self._server_device
        )
    return totals
