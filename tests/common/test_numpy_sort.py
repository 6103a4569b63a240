"""Tests which graphs call NumPy to sort, and what they compute."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import numpy_sort
from tff_bn.runtime import imported_graph


def _sort(values, sign):
  """Sorts in descending order where NumPy is not called."""
  return sign * tf.sort(sign * values, axis=0)


def _imported(dtype=np.float32):
  """Returns the results of a graph that sorts in a loop, and its operations."""

  @tff.tensorflow.computation(tff.TensorType(dtype, [None, 5]))
  def sort(values):
    def body(i, rows):
      sign = tf.constant(-1, values.dtype)
      return i + 1, rows.write(i, numpy_sort.sort_rows(_sort, values, sign))

    rows = tf.TensorArray(values.dtype, size=2, infer_shape=False)
    return tf.while_loop(lambda i, _: i < 2, body, (0, rows))[1].concat()

  graph = imported_graph.GraphCache().of(sort)
  function = tf.compat.v1.wrap_function(
      lambda values: graph([values]), [tf.TensorSpec([None, 5], dtype)]
  )
  nodes = [
      node.op
      for part in function.graph.as_graph_def().library.function
      for node in part.node_def
  ]
  return function, nodes


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_imported_graphs_call_numpy(dtype):
  function, operations = _imported(dtype)
  assert operations.count('PyFuncStateless') == 1
  rng = np.random.default_rng(0)
  for num_rows in (1, 2, 300):
    values = rng.choice([-np.inf, -1.5, 0, 3e38, np.inf], (num_rows, 5))
    values = values.astype(dtype)
    (found,) = function(tf.constant(values))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, [*np.sort(values, axis=0)] * 2)


@pytest.mark.parametrize('why', ['dtype', 'gpu'])
def test_else_tensorflow_sorts(why, monkeypatch):
  dtype = np.float32
  if why == 'dtype':
    dtype = np.float16
  else:
    monkeypatch.setattr(
        tf.config, 'get_visible_devices', lambda kind: [f'{kind}:0']
    )
  function, operations = _imported(dtype)
  assert 'PyFuncStateless' not in operations
  values = np.random.default_rng(0).integers(0, 99, (300, 5)).astype(dtype)
  (found,) = function(tf.constant(values))
  np.testing.assert_array_equal(found, [*np.sort(values, axis=0)[::-1]] * 2)
