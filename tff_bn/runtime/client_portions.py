"""Portions of the clients of an invocation: one client, or several at once."""

import abc
from collections.abc import Mapping, Sequence
import time
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from tff_bn.common import batch_arrays
from tff_bn.runtime import arguments
from tff_bn.runtime import bulk_plan
from tff_bn.runtime import client_part
from tff_bn.runtime import execution
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import symbols


class Portion(abc.ABC):
  """Some clients, which one thread computes.

  Attributes:
    seconds: How long each of the clients was computed.
    results: Each client's values of leaves of the computation's result.
  """

  def __init__(self, part: client_part.ClientPart, sizes: Sequence[int]):
    """Initializes the portion; the time is divided by the clients' `sizes`."""
    self._part = part
    self._sizes = np.asarray(sizes)
    self.seconds = np.zeros(len(sizes))
    self.results: list[dict[symbols.Leaf, Any]] = [{} for _ in sizes]

  def compute(self, number: int) -> execution.Computed:
    """Computes the clients' part of a pass, after all passes before it."""
    start = time.monotonic()
    computed = self._compute(number)
    seconds = time.monotonic() - start
    self.seconds = self.seconds + seconds * self._sizes / sum(self._sizes)
    return computed

  @abc.abstractmethod
  def _compute(self, number: int) -> execution.Computed:
    """See `compute`."""


class OneClient(Portion):
  """A single client."""

  def __init__(
      self,
      plan: plan_lib.Plan,
      part: client_part.ClientPart,
      values: Sequence[Any],
  ):
    super().__init__(part, [1])
    self._plan = plan
    self._values = values
    # The tensors for later passes; `None` before the first pass.
    self._kept: Optional[dict[symbols.Leaf, tf.Tensor]] = None

  def _compute(self, number: int) -> execution.Computed:
    """See the base class."""
    tensors = self._kept
    if tensors is None:
      tensors = self._part.begin(self._values)
    self._part.compute(tensors, number)
    plan = self._plan.passes[number]
    for leaf in plan.results:
      self.results[0][leaf] = arguments.to_python(tensors[leaf], leaf.type)
    self._kept = {leaf: tensors[leaf] for leaf in plan.kept}
    folded = [tensors[leaf] for leaf in plan.folded if leaf in tensors]
    return execution.Computed(folded, plan.fold)


class SeveralClients(Portion):
  """Several clients, which one function computes."""

  def __init__(
      self,
      plan: plan_lib.Plan,
      bulk_plans: Sequence[bulk_plan.BulkPlan],
      part: client_part.ClientPart,
      values: Sequence[Mapping[symbols.Leaf, Any]],
  ):
    """Initializes the portion.

    Args:
      plan: The plan.
      bulk_plans: The plans for several clients, of which the first one is taken
        that TensorFlow can compile.
      part: Has the server's values on the device.
      values: Each client's values by leaf.
    """
    super().__init__(part, [1 + _num_batches(client) for client in values])
    self._plan = plan
    self._bulk, *self._others = bulk_plans
    self._values = values
    self._kept: Optional[dict[symbols.Leaf, list[Any]]] = None

  def _begin(self) -> dict[symbols.Leaf, list[Any]]:
    """Returns the clients' stacked values, or their batches."""
    return {
        leaf: _joined(
            [values[leaf] for values in self._values], self._bulk.is_compiled
        )
        for leaf in self._plan.client_inputs
    }

  def _compute(self, number: int) -> execution.Computed:
    """See the base class."""
    plan = self._plan.passes[number]
    count = tf.constant(len(self._values))
    if self._kept is None:
      tensors, outputs = self._first_outputs(number, count)
    else:
      tensors = self._kept
      stage = self._bulk.passes[number].clients
      outputs = self._part.call(stage, [count], tensors)
    tensors.update((leaf, [output]) for leaf, output in outputs.items())
    for leaf in plan.results:
      stacked = arguments.to_python(tensors[leaf][0], leaf.type)
      for results, value in zip(self.results, stacked, strict=True):
        # A copy, which does not keep the values of all clients in memory.
        results[leaf] = value.copy() if leaf.spec.shape.rank else value
    self._kept = {leaf: tensors[leaf] for leaf in plan.kept}
    folded = [tensors[leaf][0] for leaf in plan.folded if leaf in tensors]
    return execution.Computed(folded, self._bulk.passes[number].fold, [count])

  def _first_outputs(
      self, number: int, count: tf.Tensor
  ) -> tuple[dict[symbols.Leaf, list[Any]], dict[symbols.Leaf, tf.Tensor]]:
    """Returns the clients' values, and the outputs of the first pass."""
    tensors = self._begin()
    try:
      stage = self._bulk.passes[number].clients
      return tensors, self._part.call(stage, [count], tensors)
    except bulk_plan.COMPILATION_ERRORS:
      if not self._others:
        raise
      self._bulk.has_failed = True
      self._bulk, *self._others = self._others
      return self._first_outputs(number, count)


def _num_batches(client: Mapping[symbols.Leaf, Any]) -> int:
  return sum(
      len(value.sizes)
      for value in client.values()
      if isinstance(value, batch_arrays.BatchArrays)
  )


def _joined(values: Sequence[Any], equal_sizes: bool) -> list[Any]:
  """Returns the tensors of a leaf for several clients."""
  if isinstance(values[0], batch_arrays.BatchArrays):
    return bulk_plan.dataset_tensors(values, equal_sizes)
  if any(isinstance(value, tf.Tensor) for value in values):
    return [tf.stack(values)]
  # Not `tf.stack`, which converts a list of 64-bit numbers to 32 bits.
  return [tf.constant(np.stack(values))]
