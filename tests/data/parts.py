"""Datasets whose samples tell their positions, and what splits must fulfil."""

import numpy as np

from tff_bn.data import dataset as dataset_lib


def numbered(
    num_train=97, num_test=40, num_classes=4, dtype=np.float32, **groups
):
  """Returns a dataset in which each sample is its position."""
  sizes = num_train, num_test
  x = [np.arange(size, dtype=dtype)[:, np.newaxis] for size in sizes]
  y = [np.arange(size) % num_classes for size in sizes]
  return dataset_lib.create_dataset('numbers', x[0], y[0], x[1], y[1], **groups)


def label_counts(parts, labels, num_classes):
  return np.array(
      [np.bincount(labels[part], minlength=num_classes) for part in parts]
  )


def assert_cover(parts, num_samples):
  """Every sample is in exactly one part, and each part is increasing."""
  np.testing.assert_array_equal(
      np.sort(np.concatenate(parts)), np.arange(num_samples)
  )
  for part in parts:
    assert (np.diff(part) > 0).all()
