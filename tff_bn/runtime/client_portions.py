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

  def __init__(
      self,
      plan: plan_lib.Plan,
      part: client_part.ClientPart,
      values: Sequence[Any],
  ):
    """Initializes the computer.

    Args:
      plan: The plan.
      part: Has the server's values on the device.
      values: The portion's value of each leaf of `plan.client_inputs`.
    """
    self._plan = plan
    self._part = part
    # The values before the first pass, and the tensors that later ones need.
    self._values: Optional[Sequence[Any]] = values
    self._tensors: dict[symbols.Leaf, Any] = {}

  def compute(self, number: int) -> Output:
    """Computes the clients' part of a pass, after all passes before it."""
    tensors = self._tensors
    if self._values is not None:
      for leaf, value in zip(
          self._plan.client_inputs, self._values, strict=True
      ):
        tensors[leaf] = self._begin(value)
      self._values = None
    tensors.update(self._compute(number, tensors))
    part = self._plan.passes[number]
    output = Output(
        {leaf: tensors[leaf] for leaf in part.folded if leaf in tensors},
        {leaf: tensors[leaf] for leaf in part.results},
    )
    for leaf in part.freed:
      del tensors[leaf]
    return output

  @abc.abstractmethod
  def _begin(self, value: Any) -> Any:
    """Returns the tensor, or the tensors, of a value before the first pass."""

  @abc.abstractmethod
  def _compute(
      self, number: int, tensors: Mapping[symbols.Leaf, Any]
  ) -> dict[symbols.Leaf, tf.Tensor]:
    """Computes the outputs of a pass from the tensors of earlier ones."""


class OneClient(Computer):
  """Computes a single client, given its values."""

  shares = np.ones(1)

  def _begin(self, value: Any) -> tf.Tensor:
    return client_part.to_tensor(value, self._part.device)

  def _compute(
      self, number: int, tensors: Mapping[symbols.Leaf, Any]
  ) -> dict[symbols.Leaf, tf.Tensor]:
    return self._part.call(self._plan.passes[number].clients, (), tensors)


class SeveralClients(Computer):
  """Computes several clients with one function.

  It is given their values as a sequence, or stacked in an array. Datasets are
  `BatchArrays`.
  """

  def __init__(
      self,
      plan: plan_lib.Plan,
      portion: Portion,
      part: client_part.ClientPart,
      values: Sequence[Sequence[Any]],
  ):
    """Initializes it; see the base class for `plan`, `part` and `values`."""
    super().__init__(plan, part, values)
    sizes = np.ones(len(portion.clients))
    for column in values:
      if _are_batches(column):
        sizes += [len(arrays.sizes) for arrays in column]
    self.shares = sizes / sum(sizes)
    assert portion.bulk is not None
    self._bulk = portion.bulk
    self._count = tf.constant(len(portion.clients))

  def _begin(self, value: Sequence[Any]) -> Any:
    if _are_batches(value):
      return bulk_plan.dataset_tensors(value, self._bulk.is_compiled)
    return joined_tensors.stacked(value)

  def _compute(
      self, number: int, tensors: Mapping[symbols.Leaf, Any]
  ) -> dict[symbols.Leaf, tf.Tensor]:
    stage = self._bulk.passes[number].clients
    return self._part.call(stage, [self._count], tensors)


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
