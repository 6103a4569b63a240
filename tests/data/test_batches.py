"""Tests of batches of samples."""

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


@pytest.fixture(params=['copied', 'gathered'])
def batches(request, monkeypatch):
  """Builds batches whose datasets copy or gather their samples."""
  if request.param == 'gathered':
    monkeypatch.setattr(batches_lib, '_MAX_COPIED_VALUES', 0)
  return lambda passes, size: batches_lib.Batches(
      [np.asarray(indices) for indices in passes], size
  )


@pytest.mark.parametrize('passes', _PASSES.values(), ids=_PASSES)
def test_dataset(batches, passes):
  _check(batches(passes, 2).dataset(_X, _Y), _expected(passes, 2))
  scaled = batches(passes, 2).dataset(_X.astype(np.uint8), _Y)
  _check(scaled, _expected(passes, 2, 1 / 255))
  assert scaled.element_spec == (
      tf.TensorSpec((None, 4), tf.float32),
      tf.TensorSpec((None,), tf.int32),
  )


def test_no_samples(batches):
  dataset = batches([np.zeros(0, np.int64)], 2).dataset(_X, _Y)
  assert not list(dataset)


def test_all_shades_are_divided_by_255(batches):
  shades = np.arange(256, dtype=np.uint8)
  ((x, _),) = (
      batches([np.arange(256)], 256)
      .dataset(shades, shades.astype(np.int32))
      .as_numpy_iterator()
  )
  np.testing.assert_array_equal(x, shades / np.float32(255), strict=True)


def _calls_functions(dataset, x, y):
  graph = dataset.dataset(x, y)._as_serialized_graph().numpy()
  return b'MapDataset' in graph


def test_only_large_batches_need_a_function():
  few = batches_lib.Batches([np.asarray([1, 2, 3]), np.asarray([3, 1])], 2)
  assert not _calls_functions(few, _X, _Y)

  x = np.zeros((3, 2**16), np.uint8)
  y = np.arange(3, dtype=np.int32)
  for num_samples, is_large in ((16, False), (17, True)):
    many = batches_lib.Batches([np.zeros(num_samples, np.int64)], 4)
    assert _calls_functions(many, x, y) == is_large

  parts = 17 * [np.arange(3)]
  assert _calls_functions(batches_lib.Batches(parts, 2), _X, _Y)
  # With batches of 3, all passes are one part.
  assert not _calls_functions(batches_lib.Batches(parts, 3), _X, _Y)


def test_large_batches_store_each_sample_once():
  x = np.random.default_rng(0).random((2, 2**16), np.float32)
  batches = batches_lib.Batches([np.zeros(20, np.int64)], 4)
  dataset = batches.dataset(x, np.arange(2, dtype=np.int32))
  assert len(dataset._as_serialized_graph().numpy()) < 1.1 * x[0].nbytes


def test_functions_are_traced_once():
  for rows in ([0, 1], [4, 5, 6]):
    batches_lib.Batches([np.asarray(rows)], 2).to_variant(_X, _Y)
    traced = batches_lib._traced_slices.cache_info().misses
  batches_lib.Batches([np.asarray([7])], 1).to_variant(_X, _Y)
  assert batches_lib._traced_slices.cache_info().misses == traced
