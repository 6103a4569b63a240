"""Tests which graphs call NumPy to sort, and what they compute."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import numpy_sort
from tff_bn.runtime import imported_graph

_RANKS = [1, 3, 7]


def _sort(values, ranks):
  """Sorts in descending order, unlike NumPy, to show which one is called."""
  return -tf.sort(-values, axis=0)[ranks[0] : ranks[-1] + 1]


def _expected(values):
  """Returns the rows of the ranks, in a loop of two iterations."""
  return [*np.sort(values, axis=0)[_RANKS[0] : _RANKS[-1] + 1]] * 2


def _imported(dtype=np.float32):
  """Returns the results of a graph that sorts in a loop, and its operations."""

  @tff.tensorflow.computation(tff.TensorType(dtype, [None, 5]))
  def sort(values):
    def body(i, rows):
      ranks = tf.constant(_RANKS)
      return i + 1, rows.write(i, numpy_sort.sorted_rows(_sort, values, ranks))

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
  for num_rows in (8, 9, 300):
    values = rng.choice([-np.inf, -1.5, 0, 3e38, np.inf], (num_rows, 5))
    values = values.astype(dtype)
    (found,) = function(tf.constant(values))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, _expected(values))


@pytest.mark.parametrize('why', ['dtype', 'gpu', 'version'])
def test_else_tensorflow_sorts(why, monkeypatch):
  dtype = np.float32
  if why == 'dtype':
    dtype = np.float16
  elif why == 'version':
    monkeypatch.setattr(np, '__version__', '1.26.4')
  else:
    monkeypatch.setattr(
        tf.config, 'get_visible_devices', lambda kind: [f'{kind}:0']
    )
  function, operations = _imported(dtype)
  assert 'PyFuncStateless' not in operations
  values = np.random.default_rng(0).integers(0, 99, (300, 5)).astype(dtype)
  (found,) = function(tf.constant(values))
  np.testing.assert_array_equal(found, -np.asarray(_expected(-values)))
