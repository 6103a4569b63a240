"""Sorting by NumPy, in graphs that must not depend on it.

NumPy sorts with vector instructions; TensorFlow does not. But the graphs of
TFF's computations also run in processes without Python. So they contain a
function of TensorFlow, whose calls a process with Python can replace.
"""

from collections.abc import Callable, Iterable
import functools
from typing import Any

import numpy as np
import tensorflow as tf

_NAME = 'tff_bn.sort_rows'
# The attribute of a function in which TensorFlow keeps this name.
_ATTRIBUTE = '_implements'
# The operation that calls a function without side effects.
_CALL = 'PartitionedCall'
_TYPES = ('Tin', 'Tout')
# From this version on, NumPy sorts with vector instructions on processors
# without AVX-512, too.
_VECTORIZED_VERSION = '2.0.0'
# NumPy has no vector instructions for others.
_DTYPES = (tf.float32, tf.float64)


def sorted_rows(
    in_tensorflow: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    values: tf.Tensor,
    ranks: tf.Tensor,
) -> tf.Tensor:
  """Returns rows of a matrix whose columns are in ascending order.

  Args:
    in_tensorflow: Computes the same in processes without Python, given the
      other arguments. Only the rows of the given ranks must be in their places;
      the rows between two of them may be in any order.
    values: The matrix, without NaN.
    ranks: int32 of shape `[r]`. The result has the rows of the first rank to
      the last one.
  """
  if values.dtype not in _DTYPES:
    return in_tensorflow(values, ranks)
  return tf.function(
      in_tensorflow, autograph=False, experimental_implements=_NAME
  )(values, ranks)


def use_in(graph_def: tf.compat.v1.GraphDef, nodes: Iterable[Any]) -> None:
  """Makes the calls of `sorted_rows` in a graph call NumPy.

  Args:
    graph_def: The graph, which is changed.
    nodes: The nodes of the graph and of its functions.
  """
  names = {
      function.signature.name
      for function in graph_def.library.function
      if _ATTRIBUTE in function.attr
      and function.attr[_ATTRIBUTE].s == _NAME.encode()
  }
  if not names or np.lib.NumpyVersion(np.__version__) < _VECTORIZED_VERSION:
    return
  for node in nodes:
    if node.op == _CALL and node.attr['f'].func.name in names:
      types = {name: node.attr[name] for name in _TYPES}
      node.CopyFrom(
          tf.compat.v1.NodeDef(
              name=node.name,
              op=_numpy_call().type,
              input=node.input,
              attr={**types, 'token': _numpy_call().node_def.attr['token']},
          )
      )


@functools.cache
def _numpy_call() -> tf.Operation:
  """Returns an operation of a graph that calls NumPy.

  The function stays known to TensorFlow as long as the graph exists.
  """

  def sort(values, ranks):
    return np.sort(values, axis=0)[ranks[0] : ranks[-1] + 1]

  with tf.Graph().as_default():
    values, ranks = tf.zeros([1, 1]), tf.zeros([1], tf.int32)
    return tf.numpy_function(
        sort, [values, ranks], values.dtype, stateful=False
    ).op
