"""Portions of the clients of an invocation: one client, or several at once."""

import abc
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from tff_bn.common import batch_arrays
from tff_bn.common import joined_tensors
from tff_bn.runtime import bulk_plan
from tff_bn.runtime import client_part
from tff_bn.runtime import execution
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import symbols


@dataclasses.dataclass(frozen=True)
class Portion:
  """Clients that are computed together: one client, or several at once.

  Attributes:
    plan: The plan.
    clients: The numbers of the clients.
    bulk: The plan for several clients. `None` for a single client that is
      computed by itself.
  """

  plan: plan_lib.Plan
  clients: range
  bulk: Optional[bulk_plan.BulkPlan] = None

  def computed(self, number: int, folded: Iterable[Any]) -> execution.Computed:
    """Returns what is aggregated after a pass, from `Output.folded`."""
    if self.bulk is None:
      return execution.Computed(list(folded), self.plan.passes[number].fold)
    return execution.Computed(
        list(folded),
        self.bulk.passes[number].fold,
        [tf.constant(len(self.clients))],
    )

  def by_client(self, value: Any) -> list[Any]:
    """Returns each client's value, given one of `Output.results` in Python."""
    if self.bulk is None:
      return [value]
    # Copies, which don't keep the values of all clients in memory.
    return [v.copy() if isinstance(v, np.ndarray) else v for v in value]


class Output(NamedTuple):
  """A portion's tensors after a pass, stacked if it has several clients.

  Attributes:
    folded: The tensors of the pass's `folded`, except for the server's leaves.
    results: The tensors of the pass's `results`.
  """

  folded: dict[symbols.Leaf, tf.Tensor]
  results: dict[symbols.Leaf, tf.Tensor]


class Computer(abc.ABC):
  """Computes a portion on a device.

  Attributes:
    shares: Each client's share of the portion's time.
  """

  shares: np.ndarray

  @abc.abstractmethod
  def compute(self, number: int) -> Output:
    """Computes the clients' part of a pass, after all passes before it."""


class OneClient(Computer):
  """Computes a single client."""

  def __init__(
      self,
      plan: plan_lib.Plan,
      part: client_part.ClientPart,
      values: Sequence[Any],
  ):
    """Initializes it with the values of `plan.client_inputs`."""
    self.shares = np.ones(1)
    self._plan = plan
    self._part = part
    # The values before the first pass, and the tensors for later passes.
    self._values: Optional[Sequence[Any]] = values
    self._kept: dict[symbols.Leaf, tf.Tensor] = {}

  def compute(self, number: int) -> Output:
    """See the base class."""
    tensors = self._kept
    if self._values is not None:
      tensors, self._values = self._part.begin(self._values), None
    self._part.compute(tensors, number)
    plan = self._plan.passes[number]
    self._kept = {leaf: tensors[leaf] for leaf in plan.kept}
    return Output(
        {leaf: tensors[leaf] for leaf in plan.folded if leaf in tensors},
        {leaf: tensors[leaf] for leaf in plan.results},
    )


class SeveralClients(Computer):
  """Computes several clients with one function."""

  def __init__(
      self,
      plan: plan_lib.Plan,
      portion: Portion,
      part: client_part.ClientPart,
      values: Sequence[Sequence[Any]],
  ):
    """Initializes it.

    Args:
      plan: The plan.
      portion: The clients.
      part: Has the server's values on the device.
      values: For each leaf of `plan.client_inputs`, the clients' values, or
        these stacked in an array. Datasets are `BatchArrays`.
    """
    sizes = np.ones(len(portion.clients))
    for column in values:
      if _are_batches(column):
        sizes += [len(arrays.sizes) for arrays in column]
    self.shares = sizes / sum(sizes)
    assert portion.bulk is not None
    self._plan = plan
    self._bulk = portion.bulk
    self._part = part
    self._count = tf.constant(len(portion.clients))
    # The values before the first pass, and the tensors for later passes.
    self._values: Optional[Sequence[Sequence[Any]]] = values
    self._kept: dict[symbols.Leaf, list[Any]] = {}

  def _begin(
      self, values: Sequence[Sequence[Any]]
  ) -> dict[symbols.Leaf, list[Any]]:
    """Returns the clients' stacked values, or their batches."""
    return {
        leaf: (
            bulk_plan.dataset_tensors(column, self._bulk.is_compiled)
            if _are_batches(column)
            else [joined_tensors.stacked(column)]
        )
        for leaf, column in zip(self._plan.client_inputs, values, strict=True)
    }

  def compute(self, number: int) -> Output:
    """See the base class."""
    tensors = self._kept
    if self._values is not None:
      tensors, self._values = self._begin(self._values), None
    outputs = self._part.call(
        self._bulk.passes[number].clients, [self._count], tensors
    )
    tensors.update((leaf, [output]) for leaf, output in outputs.items())
    plan = self._plan.passes[number]
    self._kept = {leaf: tensors[leaf] for leaf in plan.kept}
    return Output(
        {leaf: tensors[leaf][0] for leaf in plan.folded if leaf in tensors},
        {leaf: tensors[leaf][0] for leaf in plan.results},
    )


def _are_batches(values: Sequence[Any]) -> bool:
  """Returns whether the clients' values of a leaf are datasets."""
  return isinstance(values[0], batch_arrays.BatchArrays)


class PortionedClients(execution.Clients):
  """Clients that are computed in portions."""

  def __init__(self, plan: plan_lib.Plan, num_clients: int):
    self._plan = plan
    self._seconds = np.zeros(num_clients)
    self._results: list[dict[symbols.Leaf, Any]] = [
        {} for _ in range(num_clients)
    ]

  @property
  def seconds(self) -> Sequence[float]:
    """See the base class."""
    return self._seconds.tolist()

  def results(self, leaf: symbols.Leaf) -> list[Any]:
    """See the base class."""
    return [results[leaf] for results in self._results]

  def _finish(
      self,
      portion: Portion,
      results: Mapping[symbols.Leaf, Any],
      seconds: np.ndarray,
  ) -> None:
    """Takes note of a portion's `Output.results`, in Python, and its time."""
    clients = portion.clients
    self._seconds[clients.start : clients.stop] += seconds
    for leaf, value in results.items():
      for client, own in zip(clients, portion.by_client(value), strict=True):
        self._results[client][leaf] = own
