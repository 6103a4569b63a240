"""Vertex covers of a graph.

Reference:
  Downey and Fellows, Parameterized Complexity, 1999.
"""

import tensorflow as tf


def find_covers(
    has_edge: tf.Tensor, max_size: tf.Tensor, num_wanted: tf.Tensor
) -> tf.Tensor:
  """Finds vertex covers of a graph.

  Args:
    has_edge: The adjacency matrix, symmetric, booleans of shape `[n, n]`.
    max_size: The largest number of vertices in a cover.
    num_wanted: The number of covers after which to stop.

  Returns:
    Booleans of shape `[m, n]`: the vertices in each cover. If the search did
    not stop early, each cover of `max_size` contains one of them, or its
    complement is later in lexicographic order than one of their supersets'.
  """
  num_vertices = tf.shape(has_edge)[0]
  edges = tf.cast(has_edge, tf.float32)

  def branch(sets, covers):
    degrees = tf.where(sets, 0.0, tf.matmul(tf.cast(~sets, tf.float32), edges))
    most = tf.reduce_max(degrees, axis=1)
    is_cover = tf.equal(most, 0)
    free = tf.cast(max_size, tf.float32) - _count(sets)
    # Each further vertex covers at most as many edges as the first.
    is_open = ~is_cover & (tf.reduce_sum(degrees, axis=1) / 2 <= free * most)
    vertices = tf.argmax(degrees, axis=1)
    neighbors = tf.gather(has_edge, vertices) & ~sets
    # Of separate edges, it is best to leave out the later vertices, which are
    # the neighbors of the first ones.
    with_vertex = tf.boolean_mask(
        sets | tf.one_hot(vertices, num_vertices, True, False),
        is_open & (most > 1),
    )
    with_neighbors = tf.boolean_mask(sets | neighbors, is_open & (most <= free))
    covers = tf.concat([covers, tf.boolean_mask(sets, is_cover)], axis=0)
    return tf.concat([with_vertex, with_neighbors], axis=0), covers

  shape = tf.TensorShape([None, None])
  return tf.while_loop(
      lambda sets, covers: (tf.shape(sets)[0] > 0)
      & (tf.shape(covers)[0] < num_wanted),
      branch,
      (
          tf.zeros([1, num_vertices], tf.bool),
          tf.zeros([0, num_vertices], tf.bool),
      ),
      shape_invariants=(shape, shape),
  )[1]


def first_complement(covers: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
  """Extends covers to a size, and finds the first of the complements.

  Args:
    covers: The vertices in each cover, booleans of shape `[m, n]`.
    size: The number of vertices to have in a cover.

  Returns:
    The complement that is first in lexicographic order, booleans of shape
    `[n]`.
  """
  rest = ~covers
  # A complement is first if the cover is extended by the last vertices.
  num_kept = tf.cast(tf.shape(covers)[1] - size, tf.float32)
  rest &= tf.cumsum(tf.cast(rest, tf.float32), axis=1) <= num_kept

  def choose(is_candidate, has_vertex):
    chosen = is_candidate & has_vertex
    return tf.where(tf.reduce_any(chosen), chosen, is_candidate)

  candidates = tf.foldl(
      choose, tf.transpose(rest), tf.ones([tf.shape(rest)[0]], tf.bool)
  )
  return tf.gather(rest, tf.argmax(tf.cast(candidates, tf.int32)))


def _count(sets: tf.Tensor) -> tf.Tensor:
  return tf.reduce_sum(tf.cast(sets, tf.float32), axis=1)
