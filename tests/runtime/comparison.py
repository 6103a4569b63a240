"""Comparisons of the results of TFF computations, with their Python types."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


def invoke(context, computation, *args):
  """Calls a computation in a context."""
  stack = tff.framework.get_context_stack()
  with stack.install(context):
    return computation(*args)


def as_plain(value):
  """Replaces the datasets in a result by lists of their elements."""

  def convert(leaf):
    is_dataset = isinstance(leaf, tf.data.Dataset)
    return list(leaf.as_numpy_iterator()) if is_dataset else leaf

  return tf.nest.map_structure(convert, value)


def leaves(value):
  """Returns the numbers, arrays and datasets in a result, in their order."""
  struct = tff.structure.from_container((value,), recursive=True)
  return tff.structure.flatten(struct)


def assert_equal(found, expected, rtol=0.0, same_leaf_types=False, path=''):
  """Asserts that two results are equal, with the same containers.

  Args:
    found: A result.
    expected: The expected result; an array may be given as a list.
    rtol: The tolerance relative to an array's largest number or to 1, whichever
      is larger; at least the precision of the array's dtype.
    same_leaf_types: Whether leaves must have the same Python and NumPy types.
    path: The place of this part in the result.
  """
  if isinstance(found, np.ndarray) and isinstance(expected, list):
    expected = np.asarray(expected)
  if isinstance(expected, (dict, list, tuple)) or hasattr(
      expected, '__attrs_attrs__'
  ):
    assert type(found) is type(expected), path
    found, expected = _parts(found), _parts(expected)
    assert [n for n, _ in found] == [n for n, _ in expected], path
    for (name, a), (_, b) in zip(found, expected):
      assert_equal(a, b, rtol, same_leaf_types, f'{path}/{name}')
    return
  assert not isinstance(found, (dict, list, tuple)), path
  if same_leaf_types:
    assert type(found) is type(expected), path
    assert np.asarray(found).dtype == np.asarray(expected).dtype, path
  found, expected = np.asarray(found), np.asarray(expected)
  assert found.shape == expected.shape, path
  if rtol and expected.dtype.kind in 'fc' and expected.size:
    finite = np.isfinite(expected)
    scale = np.max(np.abs(expected), initial=1, where=finite)
    rtol = max(rtol, np.finfo(expected.dtype).eps)
    np.testing.assert_allclose(
        found, expected, rtol=rtol, atol=rtol * scale, err_msg=path
    )
  else:
    np.testing.assert_array_equal(found, expected, err_msg=path)


def _parts(value):
  if isinstance(value, dict):
    return list(value.items())
  if hasattr(value, '__attrs_attrs__'):
    return [(a.name, getattr(value, a.name)) for a in value.__attrs_attrs__]
  if hasattr(value, '_fields'):
    return list(zip(value._fields, value))
  return list(enumerate(value))
