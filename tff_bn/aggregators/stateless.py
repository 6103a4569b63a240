"""Aggregation processes without a state."""

from collections.abc import Callable

import tensorflow_federated as tff


def build(
    next_fn: Callable[..., tff.templates.MeasuredProcessOutput],
    *member_types: tff.Type,
) -> tff.templates.AggregationProcess:
  """Builds a process whose state is empty.

  Args:
    next_fn: Makes the process's output in a `tff.federated_computation`. It
      takes the empty state, which it returns, and the clients' values.
    *member_types: The type of a client's part of each of these values.
  """

  @tff.federated_computation
  def initialize():
    return tff.federated_value((), tff.SERVER)

  return tff.templates.AggregationProcess(
      initialize,
      tff.federated_computation(
          next_fn,
          initialize.type_signature.result,
          *(tff.FederatedType(t, tff.CLIENTS) for t in member_types),
      ),
  )
