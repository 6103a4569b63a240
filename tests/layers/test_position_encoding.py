"""The position encodings of units against the paper's equations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn.catalog import models
from tff_bn.layers import PositionEncoding


def _values(shape, dtype=np.float64):
  return np.random.default_rng(0).normal(1, 2, shape).astype(dtype)


def _expected(x, mode, amplitude, period, axis, offset=0.0):
  """Computes equations 2 to 5 of the paper, unit by unit."""
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


def test_offset_shifts_the_encodings():
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


def test_defaults_equal_the_paper():
  for mode, amplitude in (('add', 0.05), ('multiply', 0.1)):
    layer = PositionEncoding(mode)
    assert layer.amplitude == amplitude
    assert layer.period == models.PAN_PERIOD.default
  assert PositionEncoding().mode == 'add'
  x = _values([2, 4])
  np.testing.assert_allclose(
      PositionEncoding('multiply', dtype='float64')(x),
      x * [1, 1.1, 1, 0.9],
      rtol=1e-14,
  )


@pytest.mark.parametrize('mode', ['add', 'multiply'])
@pytest.mark.parametrize(('amplitude', 'period'), [(0, 1), (0.5, 0)])
def test_off_is_exactly_the_identity(mode, amplitude, period):
  # Adding 0 would change a negative zero.
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


def test_mixed_precision():
  x = _values([3, 6], np.float32)
  layer = PositionEncoding('multiply', 0.25, dtype='mixed_bfloat16')
  y = layer(x)
  assert y.dtype == layer.compute_dtype
  np.testing.assert_allclose(
      tf.cast(y, tf.float32),
      _expected(x, 'multiply', 0.25, 1, 1),
      rtol=2e-2,
      atol=1e-2,
  )


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(mode='sub'), "mode='sub' must be one of 'add', 'multiply'"),
        (dict(amplitude=-0.1), 'amplitude=-0.1 must be'),
        (dict(amplitude=np.inf), 'amplitude=inf must be'),
        (dict(period=-1), 'period=-1 must be'),
        (dict(period=np.nan), 'period=nan must be'),
        (dict(axis=1.5), 'axis=1.5 must be'),
        (dict(axis=(1, 2)), r'axis=\(1, 2\) must be'),
        (dict(offset=np.inf), 'offset=inf must be'),
        (dict(personal_share=-0.1), 'personal_share=-0.1 must be'),
        (dict(personal_share=1.01), 'personal_share=1.01 must be'),
        (dict(personal_share=np.nan), 'personal_share=nan must be'),
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
    PositionEncoding(axis=1)(keras.Input((None, 4)))


class TestPersonalEncodings:

  @pytest.mark.parametrize('mode', ['add', 'multiply'])
  @pytest.mark.parametrize(
      ('share', 'num_units', 'num_personal'),
      [(1.0, 7, 7), (0.3, 6, 2), (0.5, 5, 2)],
  )
  def test_values(self, mode, share, num_units, num_personal):
    layer = PositionEncoding(
        mode, 0.3, 1.5, 1, 0.25, personal_share=share, dtype='float64'
    )
    x = _values((3, num_units, 4))
    layer(x)
    assert layer.num_personal(num_units) == num_personal
    (phase,) = layer.weights
    assert not layer.trainable_weights
    assert phase.shape == ()
    assert phase.dtype == tf.float32
    assert phase.numpy() == 0
    for turns in (0.0, 0.375, -1.25, 0.9):
      phase.assign(turns)
      turns = float(phase.numpy())
      expected = x.copy()
      for j in range(num_units):
        turn = 1.5 * (j + 0.25) / num_units
        if j >= num_units - num_personal:
          turn += turns
        sine = 0.3 * np.sin(2 * np.pi * turn)
        expected[:, j] = (
            x[:, j] + sine if mode == 'add' else x[:, j] + (x[:, j] * sine)
        )
      np.testing.assert_allclose(layer(x), expected, rtol=1e-13, atol=1e-14)
      encodings = layer.encodings(num_units, turns).reshape([1, -1, 1])
      found = x + encodings if mode == 'add' else x * encodings
      np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-14)

  @pytest.mark.parametrize('dtype', ['float32', 'mixed_float16'])
  @pytest.mark.parametrize('mode', ['add', 'multiply'])
  def test_shared_encodings_are_exactly_the_same(self, mode, dtype):
    x = _values((5, 9), np.float32)
    layer = PositionEncoding(
        mode, 0.3, 1.7, offset=0.1, personal_share=0.4, dtype=dtype
    )
    plain = PositionEncoding(mode, 0.3, 1.7, offset=0.1, dtype=dtype)
    expected = plain(x).numpy()
    np.testing.assert_array_equal(layer(x), expected)
    np.testing.assert_array_equal(layer.encodings(9), plain.encodings(9))
    layer.personal_phase.assign(0.3)
    found = layer(x).numpy()
    np.testing.assert_array_equal(found[:, :5], expected[:, :5])
    assert np.all(found[:, 5:] != expected[:, 5:])

  @pytest.mark.parametrize(
      'arguments',
      [
          dict(),
          dict(personal_share=0.1),  # Of four units.
          dict(personal_share=1, amplitude=0),
          dict(personal_share=1, period=0),
      ],
  )
  def test_no_weight_without_personal_units(self, arguments):
    layer = PositionEncoding('multiply', **arguments)
    x = _values((2, 4), np.float32)
    expected = PositionEncoding('multiply', layer.amplitude, layer.period)(x)
    np.testing.assert_array_equal(layer(x), expected)
    assert not layer.weights
    assert layer.personal_phase is None
    assert layer.num_personal(4) == 0
    np.testing.assert_array_equal(layer.encodings(4, 0.3), layer.encodings(4))

  @pytest.mark.parametrize('policy', ['mixed_float16', 'mixed_bfloat16'])
  def test_mixed_precision(self, policy):
    # In 16 bits the phase would be 0.25.
    phase = np.float32(0.25 + 2**-13)
    layer = PositionEncoding(
        'add', 1.0, 0.5, personal_share=1, dtype=policy, name='encoding'
    )
    layer(np.zeros([1, 4], np.float32))
    layer.personal_phase.assign(phase)

    @tf.function
    def own_encodings():
      return layer._own_encodings(4)

    assert own_encodings().dtype == tf.float64
    np.testing.assert_allclose(
        own_encodings(),
        np.sin(2 * np.pi * (0.5 * np.arange(4) / 4 + np.float64(phase))),
        atol=1e-15,
    )
    y = layer(np.zeros([1, 4], np.float32))
    assert y.dtype == layer.compute_dtype
    np.testing.assert_allclose(
        tf.cast(y, tf.float64)[0], own_encodings(), rtol=2**-8, atol=2**-12
    )
