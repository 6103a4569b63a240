"""Models that prepare raw samples themselves."""

import in_jax
import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn import BatchNormModel
from tff_bn.keras_model import raw_inputs

_RNG = np.random.default_rng(0)
_COLORS = dict(mean=(0.1, 0.2, 0.3), deviation=(0.5, 0.4, 0.03))
_PREPARATIONS = {
    'divided': raw_inputs.Preparation((4, 5, 1), divisor=16.0),
    'scaled': raw_inputs.Preparation((4, 5, 3), divisor=255, **_COLORS),
    'resized': raw_inputs.Preparation((4, 5, 3), (4, 5)),
    'rounded': raw_inputs.Preparation((4, 5, 3), (4, 5), True, 255),
    'all': raw_inputs.Preparation((4, 5, 3), (4, 5), True, 255, **_COLORS),
    'vectors': raw_inputs.Preparation(
        (3,), mean=(1e-4, 5, -3e3), deviation=(1e-5, 2, 4e2)
    ),
    'series': raw_inputs.Preparation((6, 3), divisor=2.0, **_COLORS),
}


def _model(shape):
  """Returns a model with random weights and statistics."""
  keras.utils.set_random_seed(1)
  inputs = keras.Input(shape)
  x = keras.layers.Flatten()(inputs)
  x = keras.layers.BatchNormalization()(x)
  model = keras.Model(inputs, keras.layers.Dense(4)(x))
  model.set_weights(
      [_RNG.uniform(0.5, 2, w.shape) for w in model.get_weights()]
  )
  return model


def _samples(preparation):
  if preparation.mean is not None and len(preparation.shape) == 1:
    normal = _RNG.normal(size=(7, *preparation.shape))
    x = normal * preparation.deviation + preparation.mean
  else:
    shape = preparation.shape
    if preparation.image_size is not None:
      shape = (9, 7, shape[-1])
    x = _RNG.integers(0, 256, (7, *shape))
  return x.astype(np.float32)


def _prepared(x, preparation):
  """Prepares samples in NumPy, with the resizing of TensorFlow."""
  if preparation.image_size is not None:
    x = tf.image.resize(x, preparation.image_size, antialias=True).numpy()
  if preparation.rounds:
    x = np.rint(x)
  x = x.astype(np.float64) / preparation.divisor
  if preparation.mean is not None:
    x = (x - np.array(preparation.mean)) / np.array(preparation.deviation)
  return x.astype(np.float32)


@pytest.fixture(params=_PREPARATIONS)
def preparation(request):
  return _PREPARATIONS[request.param]


def test_outputs_for_raw_samples(preparation, tmp_path):
  model = _model(preparation.shape)
  x = _samples(preparation)
  expected = model(_prepared(x, preparation)).numpy()

  raw = raw_inputs.wrap(model, preparation)
  raw.save(tmp_path / 'raw.keras')
  loaded = keras.models.load_model(tmp_path / 'raw.keras', safe_mode=True)

  for found in (raw, loaded):
    # The layers before the model must not switch it to training.
    for outputs in (found(x), found.predict(x, verbose=0)):
      np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-4)
    assert raw_inputs.is_wrapped(found)
  assert raw_inputs.unwrap(raw) is model
  alone = raw_inputs.unwrap(loaded)
  assert not raw_inputs.is_wrapped(alone)
  assert raw_inputs.unwrap(alone) is alone
  for a, b, c in zip(loaded.weights, alone.weights, model.weights, strict=True):
    assert a is b and a.path == c.path
    np.testing.assert_array_equal(a, c)


def test_the_model_is_trained_only_when_asked(preparation):
  model = _model(preparation.shape)
  raw = raw_inputs.wrap(model, preparation)
  x = _samples(preparation)
  before = [np.array(w) for w in model.get_weights()]
  raw(x)
  for a, b in zip(before, model.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_allclose(
      raw(x, training=True),
      model(_prepared(x, preparation), training=True),
      rtol=1e-4,
      atol=1e-4,
  )


def test_pictures_of_several_sizes():
  preparation = _PREPARATIONS['all']
  model = _model(preparation.shape)
  raw = raw_inputs.wrap(model, preparation)
  for size in ((3, 4), (4, 5), (20, 6)):
    x = _RNG.integers(0, 256, (2, *size, 3)).astype(np.float32)
    np.testing.assert_allclose(
        raw(x), model(_prepared(x, preparation)), rtol=1e-5, atol=1e-4
    )


def test_weights_are_shared():
  model = _model((4, 5, 1))
  raw = raw_inputs.wrap(model, _PREPARATIONS['divided'])
  x = _samples(_PREPARATIONS['divided'])
  model.layers[-1].kernel.assign(0 * model.layers[-1].kernel)
  expected = np.tile(model.layers[-1].bias, (len(x), 1))
  np.testing.assert_array_equal(raw(x), expected)


def test_nothing_to_prepare():
  model = _model((3,))
  assert raw_inputs.wrap(model, raw_inputs.Preparation((3,))) is model
  assert raw_inputs.unwrap(model) is model
  assert not raw_inputs.is_wrapped(model)


def test_precision_of_the_preparation():
  keras.config.set_dtype_policy('mixed_bfloat16')
  try:
    model = _model((4, 5, 3))
    raw = raw_inputs.wrap(model, _PREPARATIONS['all'])
  finally:
    keras.config.set_dtype_policy('float32')
  x = _samples(_PREPARATIONS['all'])
  # In bfloat16, 200.6 would be 201.
  (layer,) = (x for x in raw.layers if x.name == 'raw_scaling')
  found = keras.Model(raw.input, layer.output)(x)
  np.testing.assert_allclose(
      found, _prepared(x, _PREPARATIONS['all']), rtol=1e-5, atol=1e-5
  )


def test_weights_enter_a_federated_model():
  model = _model((4, 5, 3))
  federated = BatchNormModel(
      lambda: _model((4, 5, 3)),
      (
          tf.TensorSpec((None, 4, 5, 3), tf.float32),
          tf.TensorSpec((None,), tf.int32),
      ),
      lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )
  raw = raw_inputs.wrap(model, _PREPARATIONS['all'])
  for a, b in zip(
      tf.nest.flatten(federated.from_keras(raw)),
      tf.nest.flatten(federated.from_keras(model)),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ('name', 'mean', 'deviation', 'is_same'),
    [
        ('all', *_COLORS.values(), True),
        ('all', (0.1, 0.2, 0.31), _COLORS['deviation'], False),
        ('all', _COLORS['mean'], (0.5, 0.4, 0.04), False),
        ('all', (0.1,), (0.5,), False),
        ('all', (0.1, 0.2), (0.5, 0.4), False),
        ('all', None, None, False),
        ('divided', None, None, True),
        ('divided', (0,), (1,), True),
        ('divided', (0.5,), (0.5,), False),
        ('resized', None, None, True),
        ('vectors', (1e-4, 5, -3e3), (1e-5, 2, 4e2), True),
        ('vectors', (1e-4, 5, -3e3), (2e-5, 2, 4e2), False),
    ],
)
def test_same_scaling(name, mean, deviation, is_same):
  preparation = _PREPARATIONS[name]
  raw = raw_inputs.wrap(_model(preparation.shape), preparation)
  assert raw_inputs.scales_as(raw, mean, deviation) == is_same


_IN_JAX = """
for name in sys.argv[1:]:
  model = keras.models.load_model(f'{name}.keras')
  x = np.load(f'{name}.npy')
  np.save(f'{name}_called.npy', model(x))
  np.save(f'{name}_predicted.npy', model.predict(x, verbose=0))
"""


@pytest.mark.slow
def test_without_tensorflow(tmp_path):
  expected = {}
  names = ['all']
  for name in names:
    preparation = _PREPARATIONS[name]
    model, x = _model(preparation.shape), _samples(preparation)
    raw_inputs.wrap(model, preparation).save(tmp_path / f'{name}.keras')
    np.save(tmp_path / f'{name}.npy', x)
    expected[name] = model(_prepared(x, preparation)).numpy()
  in_jax.run(_IN_JAX, tmp_path, *names)
  for name in names:
    for kind in ('called', 'predicted'):
      np.testing.assert_allclose(
          np.load(tmp_path / f'{name}_{kind}.npy'),
          expected[name],
          rtol=1e-5,
          atol=1e-4,
      )
