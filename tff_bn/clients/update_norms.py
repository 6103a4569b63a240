"""Compares the sizes of the clients' updates.

A mean has no defence against a client whose numbers are finite but far from all
others, for instance because its images are not scaled. Training then goes on
with a bad model and without a warning. So each client reports the norm of its
update, and the server compares the norms.
"""

import collections
from collections.abc import Mapping, Sequence
import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

# Changes of weights, changes of statistics, and values exchanged within the
# round have different scales, so each part is compared separately.
_PARTS = ('trainable', 'statistics', 'exchanged')


def norms(
    update: Mapping[str, Any],
    statistics_before: Sequence[tuple[tf.Tensor, tf.Tensor]],
    exchanged: tf.Tensor,
    counts: tf.Tensor,
) -> collections.OrderedDict[str, tf.Tensor]:
  """Computes the Euclidean norms of a client's update, float32 scalars.

  Args:
    update: The client's update, see `tff_bn.aggregators.ModelUpdateFactory`.
    statistics_before: The server's running means and variances, one pair for
      each entry of `update['statistics']`.
    exchanged: The norm of the values that the client sent in other exchanges of
      the round, a float scalar; 0 if there are none.
    counts: Whether the client has weight, a bool scalar.

  Returns:
    The norms of the changes of the trainable variables, of the changes of the
    running statistics, and of the exchanged values; NaN without weight.
  """
  changes = []
  for layer, (mean, variance) in zip(
      update.get('statistics', ()), statistics_before
  ):
    changes += [layer.mean - mean, layer.variance - variance]
  found = (
      _norm(tf.nest.flatten(update.get('trainable', ()))),
      _norm(changes),
      tf.cast(exchanged, tf.float32),
  )
  return collections.OrderedDict(
      (part, tf.where(counts, norm, np.float32(np.nan)))
      for part, norm in zip(_PARTS, found, strict=True)
  )


def _norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  # Other than the sum of squares, this needs no memory for the squares.
  squares = [2 * tf.nn.l2_loss(t) for t in tensors]
  zero = tf.zeros([], tf.float32)
  return tf.sqrt(tf.add_n([zero, *(tf.cast(s, tf.float32) for s in squares)]))


def compare(client_norms: tff.Value) -> tff.Value:
  """Finds the largest update, in a `tff.federated_computation`.

  Args:
    client_norms: The clients' `norms`, placed at the clients.

  Returns:
    At the server: `max_update_norm_ratio`, a float32 scalar, the largest ratio
    of a client's norm to the median norm, over clients and parts; NaN if the
    median norms are 0. And `max_update_norm_client`, an int32 scalar, the
    position of that client in the round.
  """
  no_norms, *others = _computations(client_norms.type_signature.member)
  return tff.federated_aggregate(client_norms, no_norms(), *others)


@functools.lru_cache(maxsize=1)
def _computations(norms_type: tff.Type) -> tuple[tff.Computation, ...]:
  """Builds the arguments of `tff.federated_aggregate` once."""
  matrix_type = tff.TensorType(np.float32, [None, len(_PARTS)])

  @tff.tensorflow.computation
  def no_norms():
    # TFF needs a zero with an unknown number of rows, like the later totals.
    return tf.compat.v1.placeholder_with_default(
        tf.zeros([0, len(_PARTS)]), [None, len(_PARTS)]
    )

  @tff.tensorflow.computation(matrix_type, norms_type)
  def append(rows, row):
    return tf.concat([rows, [[row[part] for part in _PARTS]]], axis=0)

  @tff.tensorflow.computation(matrix_type, matrix_type)
  def concatenate(a, b):
    return tf.concat([a, b], axis=0)

  largest_ratio = tff.tensorflow.computation(_largest_ratio, matrix_type)
  return no_norms, append, concatenate, largest_ratio


def _largest_ratio(rows: tf.Tensor) -> collections.OrderedDict[str, tf.Tensor]:
  """Computes the result of `compare` from the rows of all clients' norms."""
  counts = tf.logical_not(tf.math.is_nan(rows))
  # Clients without weight come last.
  ascending = tf.sort(tf.where(counts, rows, np.inf), axis=0)
  ranks = tf.range(tf.shape(rows)[0])[:, tf.newaxis]
  number = tf.reduce_sum(tf.cast(counts, tf.int32), axis=0)
  is_middle = tf.logical_or(
      tf.equal(ranks, (number - 1) // 2), tf.equal(ranks, number // 2)
  )
  is_middle = tf.logical_and(is_middle, ranks < number)
  median = tf.math.divide_no_nan(
      tf.reduce_sum(tf.where(is_middle, ascending, 0.0), axis=0),
      tf.reduce_sum(tf.cast(is_middle, tf.float32), axis=0),
  )
  ratios = tf.where(tf.logical_and(counts, median > 0), rows / median, -1.0)
  # The additional row makes `argmax` defined without clients.
  by_client = tf.concat([[-1.0], tf.reduce_max(ratios, axis=1)], axis=0)
  largest = tf.argmax(by_client, output_type=tf.int32)
  ratio = tf.gather(by_client, largest)
  return collections.OrderedDict(
      max_update_norm_ratio=tf.where(ratio < 0, np.float32(np.nan), ratio),
      max_update_norm_client=tf.maximum(largest - 1, 0),
  )
