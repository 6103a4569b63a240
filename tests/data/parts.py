"""What splits must fulfil."""

import numpy as np


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
