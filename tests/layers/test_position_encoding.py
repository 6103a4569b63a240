"""Tests of the position encodings of units."""

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.layers import PositionEncoding
from tff_bn.programs import defaults


def _values(shape, dtype=np.float64):
  return np.random.default_rng(0).normal(1, 2, shape).astype(dtype)


def _expected(x, mode, amplitude, period, axis, offset=0.0):
  """Equations 2 to 5 of the paper, unit by unit."""
  result = np.moveaxis(x, axis, 0).copy()
  num_units = len(result)
  for j in range(num_units):
    sine = np.sin(2 * np.pi * period * (j + offset) / num_units)
    if mode == 'add':
      result[j] = result[j] + amplitude * sine
    else:
      result[j] = result[j] * (1 + amplitude * sine)
  return np.moveaxis(result, 0, axis)


@pytest.mark.parametrize('mode', ['add', 'multiply'])
@pytest.mark.parametrize(
    ('shape', 'axis'),
    [
        ((3, 7), -1),
        ((3, 7), 1),
        ((2, 5, 6), 2),
        ((2, 5, 6), 1),
        ((2, 3, 4, 6), -1),
        ((2, 6, 4, 3), 1),
        ((2, 3, 2, 4, 5), -2),
    ],
)
def test_values_of_any_rank_and_axis(mode, shape, axis):
  x = _values(shape)
  layer = PositionEncoding(mode, 0.3, 1.5, axis, dtype='float64')
  np.testing.assert_allclose(
      layer(x), _expected(x, mode, 0.3, 1.5, axis), rtol=1e-14
  )
  assert layer.compute_output_shape(shape) == shape
  assert not layer.weights


def test_offset_moves_the_encodings():
  x = np.zeros([1, 8])
  layer = PositionEncoding('add', 1.0, offset=2, dtype='float64')
  plain = PositionEncoding('add', 1.0, dtype='float64')
  np.testing.assert_allclose(
      layer(x), np.roll(plain(x), -2, axis=1), atol=1e-15
  )
  half = PositionEncoding('multiply', 0.5, offset=0.5, dtype='float64')
  np.testing.assert_allclose(
      half(x + 3), _expected(x + 3, 'multiply', 0.5, 1, 1, 0.5), rtol=1e-14
  )


def test_defaults_are_the_papers():
  for mode, amplitude in defaults.PAN_AMPLITUDE.items():
    layer = PositionEncoding(mode)
    assert layer.amplitude == amplitude
    assert layer.period == defaults.PAN_PERIOD
  assert defaults.PAN_AMPLITUDE == {'add': 0.05, 'multiply': 0.1}
  assert PositionEncoding().mode == 'add'
  x = _values([2, 4])
  np.testing.assert_allclose(
      PositionEncoding('multiply', dtype='float64')(x),
      x * [1, 1.1, 1, 0.9],
      rtol=1e-14,
  )


@pytest.mark.parametrize('mode', ['add', 'multiply'])
@pytest.mark.parametrize(('amplitude', 'period'), [(0, 1), (0.5, 0), (0, 0)])
def test_off_is_the_identity_to_the_bit(mode, amplitude, period):
  # Negative zeros, too, which adding a zero would change.
  x = tf.constant([[-0.0, 1e-40, 3.0, np.inf]])
  layer = PositionEncoding(mode, amplitude, period, offset=0.3)
  assert not layer.is_on
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = layer(x)
  assert y.numpy().tobytes() == x.numpy().tobytes()
  output_gradient = tf.constant([[-0.0, 1e-40, 1 / 3, 2.0]])
  gradient = tape.gradient(y, x, output_gradient)
  assert gradient.numpy().tobytes() == output_gradient.numpy().tobytes()


def test_gradients():
  x = tf.constant(_values([2, 5]))
  weights = _values([2, 5])
  for mode in ('add', 'multiply'):
    layer = PositionEncoding(mode, 0.4, dtype='float64')
    with tf.GradientTape() as tape:
      tape.watch(x)
      loss = tf.reduce_sum(layer(x) * weights)
    factor = 1 if mode == 'add' else layer.encodings(5)
    np.testing.assert_allclose(
        tape.gradient(loss, x), weights * factor, rtol=1e-14
    )


@pytest.mark.parametrize('policy', ['mixed_float16', 'mixed_bfloat16'])
def test_mixed_precision(policy):
  x = _values([3, 6], np.float32)
  layer = PositionEncoding('multiply', 0.25, dtype=policy)
  y = layer(x)
  assert y.dtype == layer.compute_dtype
  np.testing.assert_allclose(
      tf.cast(y, tf.float32),
      _expected(x, 'multiply', 0.25, 1, 1),
      rtol=2e-2,
      atol=1e-2,
  )


def test_configuration():
  layer = PositionEncoding('multiply', 0.2, 3, 1, 0.5, name='pe')
  copy = PositionEncoding.from_config(layer.get_config())
  assert copy.get_config() == layer.get_config()
  x = _values([2, 4, 3])
  np.testing.assert_array_equal(copy(x), layer(x))


def test_saved_model_and_dynamic_batch(tmp_path):
  inputs = tf.keras.Input((None, 4))
  outputs = PositionEncoding('add', 0.5)(inputs)
  model = tf.keras.Model(inputs, outputs)
  model.save(tmp_path / 'model.keras')
  loaded = tf.keras.models.load_model(tmp_path / 'model.keras')
  for shape in ((2, 3, 4), (5, 1, 4)):
    x = _values(shape, np.float32)
    np.testing.assert_array_equal(loaded(x), model(x))


def test_masks_go_through():
  model = tf.keras.Sequential(
      [tf.keras.layers.Masking(), PositionEncoding('add')]
  )
  assert model(np.ones([2, 3, 4], np.float32))._keras_mask is not None


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(mode='sub'), "mode='sub' must be one of 'add', 'multiply'"),
        (dict(amplitude=-0.1), 'amplitude=-0.1 must be'),
        (dict(amplitude=np.nan), 'amplitude=nan must be'),
        (dict(amplitude=np.inf), 'amplitude=inf must be'),
        (dict(period=-1), 'period=-1 must be'),
        (dict(period=np.nan), 'period=nan must be'),
        (dict(axis=1.5), 'axis=1.5 must be'),
        (dict(axis=(1, 2)), r'axis=\(1, 2\) must be'),
        (dict(offset=np.inf), 'offset=inf must be'),
    ],
)
def test_arguments_that_are_not_allowed(arguments, message):
  with pytest.raises(ValueError, match=message):
    PositionEncoding(**arguments)


def test_inputs_that_are_not_allowed():
  for axis in (2, -3):
    with pytest.raises(ValueError, match=f'axis={axis} of the layer'):
      PositionEncoding(axis=axis)(np.zeros([2, 3]))
  with pytest.raises(ValueError, match='static number of units, but axis=1'):
    PositionEncoding(axis=1)(tf.keras.Input((None, 4)))
