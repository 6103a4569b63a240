"""How large a client's update is, compared with the other clients' updates.

A mean has no defence against a client whose numbers are finite but far from all
others, for instance because its images are not scaled. Training goes on, and
nobody is told why the model is bad. So each client reports how far its update
moves the model and the statistics, and the server compares.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

# Changes of weights, changes of statistics, and values of exchanges within the
# round are of different sizes, so each is compared by itself.
_PARTS = ('trainable', 'statistics', 'exchanged')


def norms(
    update: Mapping[str, Any],
    statistics_before: Sequence[tuple[tf.Tensor, tf.Tensor]],
    exchanged: tf.Tensor,
    counts: tf.Tensor,
) -> collections.OrderedDict[str, tf.Tensor]:
  """The Euclidean norms of a client's update.

  Args:
    update: What the client sends, see `tff_bn.aggregators.ModelUpdateFactory`.
    statistics_before: The running means and variances that the server has, one
      pair for each entry of `update['statistics']`.
    exchanged: The norm of the values that it sent in other exchanges of the
      round, a float scalar; 0 if there are none.
    counts: Whether the client counts among the others, a bool scalar.

  Returns:
    The norms of the changes of the trainable variables, of the changes of the
    running statistics, and of what was exchanged: float32 scalars, NaN if the
    client does not count.
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
  squares = [tf.reduce_sum(tf.math.square(t)) for t in tensors]
  zero = tf.zeros([], tf.float32)
  return tf.sqrt(tf.add_n([zero, *(tf.cast(s, tf.float32) for s in squares)]))


def compare(client_norms: tff.Value) -> tff.Value:
  """Finds the largest update; for use in a `tff.federated_computation`.

  Args:
    client_norms: What `norms` returned, placed at the clients.

  Returns:
    At the server, `max_update_norm_ratio`, a float32 scalar: the largest ratio
    of a client's norm to the median norm, of the part for which it is largest;
    NaN if the median norms are 0. And `max_update_norm_client`, an int32
    scalar: which client of the round it is, counted from 0.
  """
  matrix_type = tff.TensorType(np.float32, [None, len(_PARTS)])

  @tff.tensorflow.computation
  def no_norms():
    # TFF wants a zero of an unknown number of rows, as later totals have.
    return tf.compat.v1.placeholder_with_default(
        tf.zeros([0, len(_PARTS)]), [None, len(_PARTS)]
    )

  @tff.tensorflow.computation(matrix_type, client_norms.type_signature.member)
  def append(rows, row):
    return tf.concat([rows, [[row[part] for part in _PARTS]]], axis=0)

  @tff.tensorflow.computation(matrix_type, matrix_type)
  def concatenate(a, b):
    return tf.concat([a, b], axis=0)

  @tff.tensorflow.computation(matrix_type)
  def report(rows):
    return _largest_ratio(rows)

  return tff.federated_aggregate(
      client_norms, no_norms(), append, concatenate, report
  )


def _largest_ratio(rows: tf.Tensor) -> collections.OrderedDict[str, tf.Tensor]:
  """What `compare` returns, of norms in the order of the clients."""
  counts = tf.logical_not(tf.math.is_nan(rows))
  # Clients that do not count come last.
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
  # With a row in front, so that there is one.
  by_client = tf.concat([[-1.0], tf.reduce_max(ratios, axis=1)], axis=0)
  largest = tf.argmax(by_client, output_type=tf.int32)
  ratio = tf.gather(by_client, largest)
  return collections.OrderedDict(
      max_update_norm_ratio=tf.where(ratio < 0, np.float32(np.nan), ratio),
      max_update_norm_client=tf.maximum(largest - 1, 0),
  )
