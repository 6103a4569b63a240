"""Tests of both implementations of batches."""

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.data import batches as batches_lib

_X = np.arange(40, dtype=np.float32).reshape(10, 4)
_Y = np.arange(10, dtype=np.int32)


def _expected(passes, batch_size, scale=1.0):
  return [
      (_X[part] * scale, _Y[part])
      for indices in passes
      for part in np.split(
          np.asarray(indices), range(batch_size, len(indices), batch_size)
      )
  ]


def _check(dataset, expected):
  got = list(dataset.as_numpy_iterator())
  assert len(got) == len(expected)
  for (x, y), (expected_x, expected_y) in zip(got, expected):
    assert x.dtype == np.float32
    assert y.dtype == np.int32
    np.testing.assert_allclose(x, expected_x, rtol=1e-6)
    np.testing.assert_array_equal(y, expected_y)


_PASSES = {
    'one pass': [[7, 2, 5, 0, 9]],
    'a sample twice': [[7, 2, 7, 0, 9]],
    'passes with short ends': [[1, 2, 3], [3, 1, 2]],
    'one batch': [[4, 3]],
}


@pytest.mark.parametrize('passes', _PASSES.values(), ids=_PASSES)
def test_dataset(passes):
  passes = [np.asarray(indices) for indices in passes]
  batches = batches_lib.Batches(passes, 2)

  _check(batches.dataset(_X, _Y), _expected(passes, 2))
  scaled = batches.dataset(_X.astype(np.uint8), _Y)
  _check(scaled, _expected(passes, 2, 1 / 255))
  assert scaled.element_spec[0].dtype == tf.float32


@pytest.mark.parametrize('passes', _PASSES.values(), ids=_PASSES)
def test_gather_is_the_same(passes):
  passes = [np.asarray(indices) for indices in passes]
  samples, *order = batches_lib.Batches(passes, 2).gather_order()

  assert len(set(samples)) == len(samples)
  assert set(samples) == set(np.concatenate(passes))
  _check(
      batches_lib.gather(tf.constant(_X[samples]), _Y[samples], *order),
      _expected(passes, 2),
  )
  _check(
      batches_lib.gather(
          tf.constant(_X[samples].astype(np.uint8)), _Y[samples], *order
      ),
      _expected(passes, 2, 1 / 255),
  )
