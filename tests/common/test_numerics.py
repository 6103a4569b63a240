"""Tests of functions of nested structures of tensors."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.common import numerics

# A large tensor is passed through a branch of the graph.
_SIZES = {'small': 3, 'large': 300}


def _structure(sizes, sign):
  return collections.OrderedDict(
      matrix=sign * tf.ones([sizes[0], 300]),
      others=(sign * tf.ones([sizes[1], 300], tf.float64), tf.constant(sign)),
  )


def _compile(compute, jit_compile):
  return tf.function(compute, autograph=False, jit_compile=jit_compile)


@pytest.mark.parametrize('jit_compile', [False, True])
@pytest.mark.parametrize('sizes', [(3, 3), (3, 300), (300, 300)])
def test_where(sizes, jit_compile):
  positive, negative = _structure(sizes, 1), _structure(sizes, -1)
  where = _compile(numerics.where, jit_compile)
  zero = _compile(numerics.where_or_zero, jit_compile)
  for condition, expected in ((True, positive), (False, negative)):
    condition = tf.constant(condition)
    found = where(condition, positive, negative)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
    found = zero(condition, positive)
    tf.nest.map_structure(
        lambda x, y: np.testing.assert_array_equal(x, np.maximum(y, 0)),
        found,
        expected,
    )


@pytest.mark.parametrize('size', _SIZES.values(), ids=_SIZES)
def test_nan_of_the_other_structure_is_ignored(size):
  sound, lost = tf.ones([size, 300]), tf.fill([size, 300], np.nan)
  where = _compile(numerics.where, False)
  for condition in (True, False):
    a, b = (sound, lost) if condition else (lost, sound)
    np.testing.assert_array_equal(where(tf.constant(condition), a, b), sound)
  found = _compile(numerics.where_or_zero, False)(tf.constant(False), lost)
  np.testing.assert_array_equal(found, tf.zeros_like(lost))


def test_another_structure_is_refused():
  a, b = (tf.ones([2]),), (tf.ones([2]), tf.ones([2]))
  with pytest.raises(ValueError, match='same'):
    numerics.where(tf.constant(True), a, b)


@pytest.mark.parametrize('size', _SIZES.values(), ids=_SIZES)
def test_order_of_items_is_kept(size):
  """Large tensors and small ones are computed apart."""
  items = [tf.fill([n, 300], float(i)) for i, n in enumerate([size, 3, size])]
  choose = _compile(
      lambda condition: numerics.choose(
          condition,
          lambda items: [item + 1 for item in items],
          lambda items: [-item for item in items],
          items,
      ),
      False,
  )
  found = choose(tf.constant(True))
  assert [int(x[0, 0]) for x in found] == [1, 2, 3]
  found = choose(tf.constant(False))
  assert [int(x[0, 0]) for x in found] == [0, -1, -2]


def test_large_tensors_are_not_copied():
  """And only those are computed that the condition selects."""
  calls = []

  def compute(name, x):
    tf.py_function(lambda: calls.append(name), [], [])
    return x

  @tf.function(autograph=False)
  def chosen(condition, x):
    return numerics.choose(
        condition,
        lambda xs: [compute('true', x) for x in xs],
        lambda xs: [compute('false', x) for x in xs],
        [x],
    )

  x = tf.ones([300, 300])
  (found,) = chosen(tf.constant(True), x)
  assert calls == ['true']
  assert np.shares_memory(*(np.from_dlpack(_Shared(t)) for t in (found, x)))


class _Shared:
  """A tensor with NumPy's interface of shared memory."""

  def __init__(self, tensor):
    self._tensor = tensor

  def __dlpack__(self, **_):
    return tf.experimental.dlpack.to_dlpack(self._tensor)

  def __dlpack_device__(self):
    return 1, 0  # Memory of the CPU.
