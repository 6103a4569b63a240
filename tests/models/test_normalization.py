"""The normalization layers by name."""

import keras
import numpy as np
import pytest

from tff_bn.models import names
from tff_bn.models import normalization as normalization_lib

X = np.random.default_rng(0).normal(3, 2, (5, 4, 3, 6)).astype(np.float32)


def apply(normalization, x=X):
  inputs = keras.Input(x.shape[1:])
  outputs = normalization_lib.normalize(inputs, normalization, 'norm')
  return keras.Model(inputs, outputs)(x, training=True).numpy()


def standardize(x, axis):
  mean, variance = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
  return (x - mean) / np.sqrt(variance + 1e-5)


def test_batch():
  np.testing.assert_allclose(
      apply('batch'), standardize(X, (0, 1, 2)), atol=1e-4
  )


def test_layer():
  np.testing.assert_allclose(apply('layer'), standardize(X, 3), atol=1e-4)


@pytest.mark.parametrize('groups', [1, 2, 3, 6])
def test_group(groups):
  grouped = X.reshape(5, 4, 3, groups, 6 // groups)
  expected = standardize(grouped, (1, 2, 4)).reshape(X.shape)
  np.testing.assert_allclose(apply(f'group{groups}'), expected, atol=1e-4)


def test_group_of_vectors():
  x = X[:, 0, 0]
  expected = standardize(x.reshape(5, 2, 3), 2).reshape(x.shape)
  np.testing.assert_allclose(apply('group2', x), expected, atol=1e-4)


def test_none():
  np.testing.assert_array_equal(apply('none'), X)


def test_groups_that_do_not_divide_the_channels():
  with pytest.raises(
      ValueError,
      match='normalization=group4 .* 4 does not divide the 6 channels .*norm',
  ):
    apply('group4')


@pytest.mark.parametrize(
    'name', ['bath', 'group', 'group0', 'group-1', 'group2x', 'Batch', '']
)
def test_unknown(name):
  assert not names.is_other_normalization(name)
  with pytest.raises(
      ValueError,
      match=f'normalization={name} is unknown; .*batch, layer, .*group<N>',
  ) as error:
    apply(name)
  assert ('Did you mean batch?' in str(error.value)) == (
      name in ('bath', 'Batch')
  )
