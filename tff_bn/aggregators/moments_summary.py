"""Weighted moments of sets of clients, for `moments_factories`."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_bn.layers.batch_moments import Moments


class Summary(NamedTuple):
  """Weighted moments of a set of clients.

  Attributes:
    weight: The sum of the weights, of the shape of `count`.
    count: The sum of the counts.
    mean: The weighted mean of the means.
    within: The weighted mean of the variances.
    between: The weighted variance of the means.
  """

  weight: Any
  count: Any
  mean: Any
  within: Any
  between: Any


class JoinedLayers:
  """Layers with moments of one dtype, summarized as vectors of all channels.

  A deep model has many layers with few channels: an operation on one vector is
  traced and started only once.
  """

  def __init__(self, layers: Mapping[int, Moments]):
    """Initializes it with moments of types, by their place in the list."""
    self._layers = layers
    self._count_sizes = [math.prod(t.count.shape) for t in layers.values()]
    self._sizes = [math.prod(t.mean.shape) for t in layers.values()]
    (self._dtype,) = {t.mean.dtype for t in layers.values()}
    # The position of each channel's count. Only masks can make the counts of a
    # layer's channels differ.
    starts = np.cumsum([0, *self._count_sizes[:-1]])
    self._count_of_channel = np.concatenate(
        [
            start + np.arange(size) % num_counts
            for start, num_counts, size in zip(
                starts, self._count_sizes, self._sizes, strict=True
            )
        ]
    ).astype(np.int32)

  @property
  def dtype_name(self) -> str:
    """The name of the dtype of the moments."""
    return tf.as_dtype(self._dtype).name

  def per_channel(self, counts: tf.Tensor) -> tf.Tensor:
    """Returns the count of each channel from the joined counts of layers."""
    return tf.gather(counts, self._count_of_channel)

  def join(self, statistics: Sequence[Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """Joins the means and the variances of a list of pairs of all layers."""
    mean, variance = (
        tf.concat([tf.reshape(x, [-1]) for x in field], axis=0)
        for field in zip(
            *(statistics[place] for place in self._layers), strict=True
        )
    )
    return mean, variance

  def of_nobody(self) -> Summary:
    """Returns the summary of no clients."""
    counts = tf.zeros([sum(self._count_sizes)], self._dtype)
    channels = tf.zeros([sum(self._sizes)], self._dtype)
    return Summary(counts, counts, channels, channels, channels)

  def of_client(
      self,
      value: Sequence[Moments],
      weight: Callable[[tf.Tensor], tf.Tensor],
  ) -> Summary:
    """Returns the summary of a client: zeros for layers with count 0 or NaN.

    Args:
      value: The client's moments of all layers.
      weight: Maps counts to weights.
    """
    count, mean, variance = (
        tf.concat([tf.reshape(x, [-1]) for x in field], axis=0)
        for field in zip(*(value[place] for place in self._layers), strict=True)
    )
    is_found = count > 0
    count = tf.where(is_found, count, tf.zeros_like(count))
    is_found = self.per_channel(is_found)
    zeros = tf.zeros_like(mean)
    return Summary(
        weight=weight(count),
        count=count,
        mean=tf.where(is_found, mean, zeros),
        within=tf.where(is_found, variance, zeros),
        between=zeros,
    )

  def merge(self, a: Summary, b: Summary) -> Summary:
    """Merges the summaries of disjoint sets of clients.

    `tff_bn.layers.batch_moments.merge_moments` does the same, but adds the
    spread within and between the sets.
    """
    weight = a.weight + b.weight
    share = self.per_channel(tf.math.divide_no_nan(b.weight, weight))
    rest = 1 - share
    difference = b.mean - a.mean
    return Summary(
        weight=weight,
        count=a.count + b.count,
        mean=tf.where(
            tf.math.is_finite(difference),
            a.mean + share * difference,
            # The difference overflowed, but the mean does not.
            rest * a.mean + share * b.mean,
        ),
        within=rest * a.within + share * b.within,
        between=rest * a.between + share * b.between
        # 0 if one of them has no weight, even if the square overflows.
        + tf.math.multiply_no_nan(tf.math.square(difference), share * rest),
    )

  def by_layer(self, summary: Summary) -> dict[int, Summary]:
    """Returns the summary of each layer, by its place in the list."""
    fields = []
    for name, vector in summary._asdict().items():
      is_count = name in ('weight', 'count')
      parts = tf.split(vector, self._count_sizes if is_count else self._sizes)
      fields.append(
          [
              tf.reshape(part, (t.count if is_count else t.mean).shape)
              for part, t in zip(parts, self._layers.values(), strict=True)
          ]
      )
    return {
        place: Summary(*layer)
        for place, layer in zip(
            self._layers, zip(*fields, strict=True), strict=True
        )
    }


def joined_by_dtype(value_type: Sequence[Moments]) -> list[JoinedLayers]:
  """Joins the layers of each dtype, of a list of moments of types."""
  layers: dict[Any, dict[int, Moments]] = {}
  for place, layer in enumerate(value_type):
    layers.setdefault(layer.mean.dtype, {})[place] = layer
  return [JoinedLayers(group) for group in layers.values()]
