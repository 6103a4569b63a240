"""Sums over clients by TFF's secure aggregation."""

import collections
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import stateless
from tff_bn.aggregators import summed_update
from tff_bn.catalog import privacy
from tff_bn.common import unused_assertions


class SecureSums(summed_update.RoundSums):
  """Sums all that clients send with `tff.aggregators.SecureSumFactory`.

  A client's values are clipped to bounds and rounded to one of 2³² numbers
  between them, so a sum over n clients has an error of at most n · bound / 2³²,
  besides float32's rounding. With the largest weight W and the largest count N,
  the bounds are

  *   [0, W] for the weight, and ±W · `update_bound` for weighted updates;
  *   [0, N] for counts, and ±N · `statistics_bound` for statistics;
  *   ±W · `statistics_bound` for the values of FedTAN's exchanges, but those
      of fused moments have the bound of statistics.

  Measurements: for each of these kinds, those of `SecureSumFactory`, in which
  `secure_upper_clipped_count` and `secure_lower_clipped_count` are the numbers
  of clients with a value out of bounds.
  """

  def __init__(
      self,
      *,
      weight_bound: float,
      count_bound: float,
      update_bound: float = privacy.UPDATE_BOUND.default,
      statistics_bound: float = privacy.STATISTICS_BOUND.default,
  ):
    """Initializes the factory.

    Args:
      weight_bound: W, the largest weight of a client.
      count_bound: N, the largest number of values of a channel that a client's
        statistics describe.
      update_bound: The largest absolute value of an update of a variable.
      statistics_bound: The largest absolute value of relative statistics, see
        `tff_bn.aggregators.relative_statistics`, and of values of exchanges.

    Raises:
      TypeError: If an argument is no number.
      ValueError: If an argument is not positive.
    """
    for option, value in (
        (privacy.UPDATE_BOUND, update_bound),
        (privacy.STATISTICS_BOUND, statistics_bound),
        (privacy.WEIGHT_BOUND, weight_bound),
        (privacy.COUNT_BOUND, count_bound),
    ):
      option.check(value, self)
    self._bounds = {
        'weight': (0.0, float(weight_bound)),
        'update': _around_zero(weight_bound * update_bound),
        'count': (0.0, float(count_bound)),
        'statistics': _around_zero(count_bound * statistics_bound),
        'exchange': _around_zero(weight_bound * statistics_bound),
    }

  def exchange_factories(self, num_exchanges):
    """See the base class."""
    return [self] * num_exchanges

  def update_factory(self, num_exchanges):
    """See the base class."""
    return self

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the aggregation process for a structure of sums."""
    unused_assertions.silence()
    names: Any = None

    @tff.tensorflow.computation(value_type)
    def to_kinds(value):
      nonlocal names
      names = _names(value)
      kinds: collections.OrderedDict[str, Any] = collections.OrderedDict()
      for name, tensor in zip(tf.nest.flatten(names), tf.nest.flatten(value)):
        kinds.setdefault(name, []).append(tensor)
      return kinds

    kinds_type = to_kinds.type_signature.result

    @tff.tensorflow.computation(kinds_type)
    def from_kinds(kinds):
      rest = {name: iter(tensors) for name, tensors in kinds.items()}
      flat = [next(rest[name]) for name in tf.nest.flatten(names)]
      return tf.nest.pack_sequence_as(names, flat)

    processes = {
        name: tff.aggregators.SecureSumFactory(
            *reversed(self._bounds[name.partition('_')[0]])
        ).create(kind_type)
        for name, kind_type in tff.structure.iter_elements(kinds_type)
    }

    def next_fn(state, value):
      kinds = tff.federated_map(to_kinds, value)
      outputs = collections.OrderedDict(
          (name, process.next(process.initialize(), kinds[name]))
          for name, process in processes.items()
      )
      result, measurements = (
          tff.federated_zip(
              collections.OrderedDict(
                  (name, getattr(output, field))
                  for name, output in outputs.items()
              )
          )
          for field in ('result', 'measurements')
      )
      return tff.templates.MeasuredProcessOutput(
          state, tff.federated_map(from_kinds, result), measurements
      )

    return stateless.build(next_fn, value_type)


def _around_zero(bound: float) -> tuple[float, float]:
  return -bound, bound


def _names(value: Any, kind: str = '') -> Any:
  """Returns the kind and dtype of each tensor, in a structure of this form."""
  if isinstance(value, Mapping):
    if kind == 'exchange' and 'count' in value:
      kind = 'statistics'
    return collections.OrderedDict(
        (
            name,
            _names(
                part,
                name if name in ('weight', 'count') or not kind else kind,
            ),
        )
        for name, part in value.items()
    )
  if isinstance(value, (list, tuple)):
    return [_names(part, kind) for part in value]
  return f'{kind}_{value.dtype.name}'
