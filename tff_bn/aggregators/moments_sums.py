"""The aggregation of `moments_factories` as sums over the clients."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow as tf

from tff_bn.aggregators import moments_summary
from tff_bn.aggregators.moments_summary import Summary
from tff_bn.aggregators.relative_statistics import RelativeStatistics
from tff_bn.layers.batch_moments import Moments

# By dtype and name.
Sums = collections.OrderedDict[str, collections.OrderedDict[str, tf.Tensor]]


class MomentsSums:
  """Turns a client's moments into values to sum, and the sums into moments.

  With the relative mean and variance of `relative_statistics`, client i sends
  its count n_i, n_i · mean_i, n_i · variance_i and, if the spread between the
  clients matters, n_i · mean_i². Sums are exact up to rounding: a spread has an
  error of about 10⁻⁷ times the square of the mean, so the running mean should
  not be far away.
  """

  def __init__(
      self,
      value_type: Sequence[Moments],
      weight: Optional[Callable[[tf.Tensor], tf.Tensor]],
      variance: Optional[Callable[[int, Any, Any, Any], tf.Tensor]],
      num_clients: Optional[int],
      smallest_variance: float,
  ):
    """Initializes it.

    Args:
      value_type: A list of moments of types.
      weight: Maps counts to the clients' weights. Default: the counts.
      variance: Computes a layer's variance from its position, the count, and
        the aggregated variances within and between the clients. Default: the
        one within.
      num_clients: If given, all clients with values have weight 1, the sums are
        divided by this number, and no counts are sent: the sum of the counts is
        taken as very large.
      smallest_variance: The smallest variance as a share of the running one.
    """
    self._joined = moments_summary.joined_by_dtype(value_type)
    self._weight = weight
    self._variance = variance
    self._num_clients = num_clients
    self._smallest_variance = smallest_variance

  def to_sums(
      self, value: Sequence[Moments], references: Sequence[Any]
  ) -> Sums:
    """Returns the values that a client sends.

    Args:
      value: The client's moments.
      references: The shared running mean and variance of each layer.
    """
    return collections.OrderedDict(
        (layers.dtype_name, self._of_client(layers, value, references))
        for layers in self._joined
    )

  def _of_client(
      self,
      layers: moments_summary.JoinedLayers,
      value: Sequence[Moments],
      references: Sequence[Any],
  ) -> collections.OrderedDict[str, tf.Tensor]:
    client = layers.of_client(value, self._weight or (lambda count: count))
    sums: collections.OrderedDict[str, tf.Tensor] = collections.OrderedDict()
    weight = client.weight
    if self._num_clients is not None:
      weight = tf.cast(client.count > 0, weight.dtype)
    else:
      sums['count'] = client.count
      if self._weight is not None:
        sums['weight'] = weight
    relative = RelativeStatistics(*layers.join(references))
    factor = layers.per_channel(weight)
    mean = relative.of_mean(client.mean)
    sums['mean'] = factor * mean
    sums['variance'] = factor * relative.of_variance(client.within)
    if self._variance is not None:
      sums['square'] = factor * tf.math.square(mean)
    return sums

  def from_sums(self, sums: Any, references: Sequence[Any]) -> list[Moments]:
    """Returns the aggregated moments.

    Args:
      sums: The sums over all clients of the results of `to_sums`.
      references: The same as in `to_sums`.
    """
    found: dict[int, Moments] = {}
    for layers in self._joined:
      found.update(self._of_all(layers, sums[layers.dtype_name], references))
    return [moments for _, moments in sorted(found.items())]

  def _of_all(
      self,
      layers: moments_summary.JoinedLayers,
      sums: Any,
      references: Sequence[Any],
  ) -> dict[int, Moments]:
    relative = RelativeStatistics(*layers.join(references))
    counts = layers.of_nobody().count
    if self._num_clients is not None:
      weight = tf.fill(counts.shape, tf.cast(self._num_clients, counts.dtype))
      count = tf.fill(counts.shape, counts.dtype.max)
    else:
      count = sums['count']
      weight = count if self._weight is None else sums['weight']
    total = layers.per_channel(weight)

    def mean_of(name):
      # Noise can make a weight negative.
      return tf.math.divide_no_nan(sums[name], tf.maximum(total, 0))

    mean = mean_of('mean')
    between = tf.zeros_like(mean)
    if self._variance is not None:
      between = relative.spread(mean, mean_of('square'))
    summaries = layers.by_layer(
        Summary(
            weight=weight,
            count=count,
            mean=relative.to_mean(mean),
            within=relative.to_variance(mean_of('variance')),
            between=between,
        )
    )
    return {
        place: Moments(
            s.count,
            s.mean,
            RelativeStatistics(*references[place]).at_least(
                s.within
                if self._variance is None
                else self._variance(place, s.count, s.within, s.between),
                self._smallest_variance,
            ),
        )
        for place, s in summaries.items()
    }
