"""The normalization layers by name."""

import keras
import numpy as np
import pytest

from tff_bn import layers
from tff_bn.catalog import models
from tff_bn.models import normalization as normalization_lib

X = np.random.default_rng(0).normal(3, 2, (5, 4, 3, 6)).astype(np.float32)


def apply(normalization, x=X):
  inputs = keras.Input(x.shape[1:])
  outputs = normalization_lib.normalize(inputs, normalization, 'norm')
  return keras.Model(inputs, outputs)(x, training=True).numpy()


def standardize(x, axis):
  mean, variance = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
  return (x - mean) / np.sqrt(variance + 1e-5)


@pytest.mark.parametrize(
    ('name', 'axis'),
    [('batch', (0, 1, 2)), ('static_batch', (0, 1, 2)), ('layer', 3)],
)
def test_equals_numpy(name, axis):
  np.testing.assert_allclose(apply(name), standardize(X, axis), atol=1e-4)


@pytest.mark.parametrize('groups', [1, 3, 6])
def test_group(groups):
  grouped = X.reshape(5, 4, 3, groups, 6 // groups)
  expected = standardize(grouped, (1, 2, 4)).reshape(X.shape)
  np.testing.assert_allclose(apply(f'group{groups}'), expected, atol=1e-4)


def test_group_of_vectors():
  x = X[:, 0, 0]
  expected = standardize(x.reshape(5, 2, 3), 2).reshape(x.shape)
  np.testing.assert_allclose(apply('group2', x), expected, atol=1e-4)


@pytest.mark.parametrize(
    'normalization',
    ['none', 'weight_standardization', 'kernel', 'fixup', 'feature'],
)
def test_no_layer(normalization):
  np.testing.assert_array_equal(apply(normalization), X)


def test_batch_renorm():
  # The running statistics are 0 and 1, the batch's about 3 and 4.
  mean, sigma = X.mean((0, 1, 2)), np.sqrt(X.var((0, 1, 2)) + 1e-5)
  expected = (X - mean) / sigma * np.minimum(sigma, 3) + np.minimum(mean, 5)
  np.testing.assert_allclose(apply('batch_renorm'), expected, atol=1e-4)


_HAS_BIAS = {
    'batch': False,
    'batch_renorm': False,
    'static_batch': False,
    'layer': False,
    'group2': False,
    'fixup': False,
    'weight_standardization': True,
    'feature': True,
    'kernel': True,
    'none': True,
}


@pytest.mark.parametrize('use_bias', [None, True, False])
@pytest.mark.parametrize('normalization', _HAS_BIAS)
def test_layers_before_a_normalization(normalization, use_bias):
  assert {*_HAS_BIAS} == {*models.NORMALIZATIONS, 'group2'}
  image, vector = keras.Input((4, 4, 3)), keras.Input((5,))
  model = keras.Model(
      [image, vector],
      [
          normalization_lib.convolve(
              image, 6, 3, normalization, use_bias=use_bias, strides=2
          ),
          normalization_lib.dense(
              vector, 7, normalization, use_bias=use_bias, name='hidden'
          ),
      ],
  )
  convolution, dense = (
      next(x for x in model.layers if isinstance(x, kind))
      for kind in (keras.layers.Conv2D, keras.layers.Dense)
  )
  strides = 3 if normalization == 'kernel' else 2
  assert (convolution.filters, convolution.strides) == (6, (strides, strides))
  assert (dense.units, dense.name) == (7, 'hidden')
  is_standardized = normalization == 'weight_standardization'
  for layer, kind in (
      (convolution, layers.WeightStandardizedConv2D),
      (dense, layers.WeightStandardizedDense),
  ):
    expected = _HAS_BIAS[normalization] if use_bias is None else use_bias
    assert layer.use_bias == expected
    assert isinstance(layer, kind) == is_standardized


def test_logits():
  x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
  plain, normalized = (
      keras.Model(
          inputs := keras.Input((4,)),
          normalization_lib.logits(
              inputs, 3, normalization, kernel_initializer='ones'
          ),
      )(x)
      for normalization in ('batch', 'feature')
  )
  sums = np.repeat(x.sum(1, keepdims=True), 3, axis=1)
  np.testing.assert_allclose(plain, sums, rtol=1e-5, atol=1e-5)
  lengths = np.linalg.norm(x, axis=1, keepdims=True)
  np.testing.assert_allclose(normalized, 2 * sums / lengths, rtol=1e-4)


def test_groups_that_do_not_divide_the_channels():
  with pytest.raises(
      ValueError,
      match='normalization=group4 .* 4 does not divide the 6 channels .*norm',
  ):
    apply('group4')


@pytest.mark.parametrize(
    'name', ['group', 'group0', 'group-1', 'group2x', 'Batch']
)
def test_unknown(name):
  with pytest.raises(
      ValueError,
      match=f"normalization='{name}' must be one of batch, layer, .*group<N>",
  ) as error:
    apply(name)
  assert ('Did you mean batch?' in str(error.value)) == (name == 'Batch')


@pytest.mark.parametrize(
    ('kernel_size', 'arguments'),
    [(3, dict(padding='same')), (3, dict(strides=2)), (1, dict(strides=2))],
)
def test_kernel_normalization_keeps_the_size_of_convolutions(
    kernel_size, arguments
):
  """The truth are windows that NumPy normalizes one by one."""
  model, plain = (
      keras.Model(
          inputs := keras.Input((5, 7, 2)),
          normalization_lib.convolve(
              inputs, 3, kernel_size, name, use_bias=False, **arguments
          ),
      )
      for name in ('kernel', 'none')
  )
  assert model.output_shape == plain.output_shape
  assert [w.shape for w in model.weights] == [w.shape for w in plain.weights]
  model.layers[1].dropout_rate = 0
  x = np.random.default_rng(0).normal(2, 1, (2, 5, 7, 2)).astype(np.float32)
  padding = int(arguments.get('padding') == 'same')
  padded = np.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
  stride = arguments.get('strides', 1)
  kernel = model.get_weights()[0]
  found = model(x).numpy()
  for row, column in np.ndindex(found.shape[1:3]):
    a, b = stride * row, stride * column
    window = padded[:, a : a + kernel_size, b : b + kernel_size]
    unit = standardize(window, (1, 2, 3))
    expected = np.einsum('nijc,ijco->no', unit, kernel)
    np.testing.assert_allclose(found[:, row, column], expected, atol=1e-4)


def test_kernel_normalization_of_the_input_of_dense_layers():
  inputs = keras.Input((6,))
  x = normalization_lib.dense(inputs, 4, 'kernel', name='hidden')
  model = keras.Model(inputs, x)
  model.layers[1].dropout_rate = 0
  x = X[:, 0, 0]
  kernel, _ = model.get_weights()
  expected = standardize(x, 1) @ kernel
  np.testing.assert_allclose(model(x), expected, atol=1e-4)
  assert [layer.name for layer in model.layers[1:]] == [
      'hidden_kernel_norm',
      'hidden',
  ]
