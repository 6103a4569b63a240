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
# NumPy has no vector instructions for others.
_DTYPES = (tf.float32, tf.float64)


def sort_rows(
    in_tensorflow: Callable[..., tf.Tensor],
    values: tf.Tensor,
    *others: tf.Tensor,
) -> tf.Tensor:
  """Returns a matrix, which has no NaN, with each column in ascending order.

  Args:
    in_tensorflow: Computes the same in processes without Python, given the
      other arguments. It may leave rows that are not needed in any order.
    values: The matrix.
    *others: Further arguments of `in_tensorflow`.
  """
  if values.dtype not in _DTYPES:
    return in_tensorflow(values, *others)
  return tf.function(
      in_tensorflow, autograph=False, experimental_implements=_NAME
  )(values, *others)


def use_in(graph_def: tf.compat.v1.GraphDef, nodes: Iterable[Any]) -> None:
  """Makes the calls of `sort_rows` in a graph call NumPy.

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
  if not names:
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

  def sort(values, *others):
    del others
    return np.sort(values, axis=0)

  with tf.Graph().as_default():
    values = tf.zeros([1, 1])
    return tf.numpy_function(sort, [values], values.dtype, stateful=False).op
