"""Scaled weight standardization against NumPy, forward and backward."""

import keras
import numpy as np
import pytest
import random_values
import tensorflow as tf

from tff_bn.layers import WeightStandardizedConv1D
from tff_bn.layers import WeightStandardizedConv2D
from tff_bn.layers import WeightStandardizedDense

_RELU_GAIN = np.sqrt(2 / (1 - 1 / np.pi))

_CASES = {
    'dense': (WeightStandardizedDense, (3,), [5, 4], {}),
    'dense_activation': (
        WeightStandardizedDense,
        (3,),
        [5, 2, 4],
        dict(activation='relu', use_bias=False),
    ),
    'conv': (WeightStandardizedConv2D, (3, 2), [2, 5, 4, 3], {}),
    'conv_strided': (
        WeightStandardizedConv2D,
        (3, (3, 2)),
        [2, 7, 6, 3],
        dict(strides=2, padding='same', use_bias=False),
    ),
    'conv_1d': (WeightStandardizedConv1D, (3, 2), [2, 5, 4], {}),
    'conv_1d_causal': (
        WeightStandardizedConv1D,
        (4, 3),
        [2, 9, 3],
        dict(padding='causal', dilation_rate=2, activation='relu'),
    ),
    'conv_1d_strided': (
        WeightStandardizedConv1D,
        (4, 3),
        [2, 9, 6],
        dict(padding='same', strides=2, groups=2, use_bias=False),
    ),
    'conv_groups': (
        WeightStandardizedConv2D,
        (4, 2),
        [2, 5, 4, 6],
        dict(groups=2, activation='relu'),
    ),
}
_parametrize = pytest.mark.parametrize(
    ('layer_class', 'arguments', 'shape', 'options'),
    _CASES.values(),
    ids=_CASES,
)


def _built(layer_class, arguments, shape, options, dtype='float64'):
  layer = layer_class(*arguments, dtype=dtype, **options)
  layer.build([None, *shape[1:]])
  for variable in layer.weights:
    values = random_values.inputs(variable.shape, len(variable.shape))
    variable.assign(values)
  return layer


def _standardize(kernel, gain):
  """Returns the kernel in NumPy."""
  flat = kernel.reshape(-1, kernel.shape[-1])
  fan_in = len(flat)
  standardized = (flat - flat.mean(0)) / (flat.std(0) * np.sqrt(fan_in))
  return (gain * standardized).reshape(kernel.shape)


def _standardize_backward(kernel, gain, d_standardized):
  """Returns the gradients of the kernel and the gain in NumPy."""
  flat = kernel.reshape(-1, kernel.shape[-1])
  upstream = d_standardized.reshape(flat.shape)
  deviation = flat - flat.mean(0)
  length = np.sqrt((deviation**2).sum(0))
  normal = deviation / length
  d_gain = (upstream * normal).sum(0)
  d_deviation = gain / length * (upstream - normal * d_gain)
  return (d_deviation - d_deviation.mean(0)).reshape(kernel.shape), d_gain


@_parametrize
def test_forward_and_backward(layer_class, arguments, shape, options):
  """Keras's layer with the standardized kernel is the reference."""
  layer = _built(layer_class, arguments, shape, options)
  base = getattr(keras.layers, layer_class.__name__.split('ized')[1])
  reference = base(*arguments, dtype='float64', **options)
  reference.build([None, *shape[1:]])
  kernel, gain = layer.kernel.numpy(), layer.gain.numpy()
  reference.kernel.assign(_standardize(kernel, gain))
  if layer.use_bias:
    reference.bias.assign(layer.bias)
  np.testing.assert_allclose(
      layer.standardized_kernel(), reference.kernel, rtol=1e-10
  )
  x = tf.Variable(random_values.inputs(shape))
  with tf.GradientTape(persistent=True) as tape:
    outputs = layer(x), reference(x)
    dy = random_values.inputs(outputs[0].shape, 5)
    targets = [tf.reduce_sum(output * dy) for output in outputs]
  np.testing.assert_allclose(*outputs, rtol=1e-9, atol=1e-9)
  variables = [x, layer.kernel, layer.gain]
  dx, d_kernel, d_gain = tape.gradient(targets[0], variables)
  expected_dx, d_standardized = tape.gradient(targets[1], [x, reference.kernel])
  np.testing.assert_allclose(dx, expected_dx, rtol=1e-8, atol=1e-8)
  for found, wanted in zip(
      (d_kernel, d_gain),
      _standardize_backward(kernel, gain, d_standardized.numpy()),
  ):
    np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-8)


def test_relu_after_the_layer_gives_variance_1():
  keras.utils.set_random_seed(0)
  layer = WeightStandardizedDense(400, activation='relu')
  x = np.random.default_rng(0).normal(size=(500, 300)).astype(np.float32)
  assert np.var(layer(x)) == pytest.approx(1, rel=0.05)
  np.testing.assert_allclose(layer.gain, np.full(400, _RELU_GAIN), rtol=1e-6)


def test_constant_kernels_give_zeros_and_finite_gradients():
  layer = WeightStandardizedDense(2, kernel_initializer='ones', use_bias=False)
  x = tf.Variable(random_values.inputs([3, 4]).astype('f'))
  with tf.GradientTape() as tape:
    output = layer(x)
    target = tf.reduce_sum(output)
  np.testing.assert_array_equal(output, np.zeros([3, 2]))
  for gradient in tape.gradient(target, layer.trainable_weights):
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ('name', 'policy'),
    [('dense', 'mixed_float16'), ('conv_groups', 'mixed_bfloat16')],
)
def test_mixed_precision(name, policy):
  layer_class, arguments, shape, options = _CASES[name]
  layer = _built(layer_class, arguments, shape, options, policy)
  exact = _built(layer_class, arguments, shape, options)
  # The deviations would be lost in 16 bits.
  kernel = exact.kernel.numpy()
  exact.kernel.assign(1000 + kernel)
  layer.kernel.assign(1000 + kernel)
  x = random_values.inputs(shape)
  output = layer(tf.cast(x, layer.compute_dtype))
  assert output.dtype == layer.compute_dtype
  expected = exact(x).numpy()
  np.testing.assert_allclose(
      tf.cast(output, tf.float64), expected, atol=0.03 * np.abs(expected).max()
  )
  assert {v.dtype for v in layer.weights} == {'float32'}


@pytest.mark.parametrize(
    ('layer', 'shape'),
    [
        (WeightStandardizedDense(3, name='one'), [2, 1]),
        (WeightStandardizedConv2D(3, 1, name='one'), [2, 4, 4, 1]),
        (WeightStandardizedConv2D(4, 1, groups=4, name='one'), [2, 4, 4, 4]),
    ],
)
def test_a_single_weight_for_each_output_is_an_error(layer, shape):
  with pytest.raises(ValueError, match="'one' needs at least 2 weights"):
    layer(np.ones(shape))
