"""Trains, converts and saves models, with any backend of Keras.

As a program, it takes the names of the models and prints the numbers that it
found, so that another process can compare them.
"""

import json
import sys
import tempfile

import keras
from keras import ops
import numpy as np

import tff_bn
from tff_bn.layers import BatchRenormalization
from tff_bn.layers import FeatureNormalization
from tff_bn.layers import FederatedBatchNormalization
from tff_bn.layers import KernelNormalization
from tff_bn.layers import PositionEncoding
from tff_bn.layers import ScalarBias
from tff_bn.layers import ScalarMultiplier
from tff_bn.layers import StaticBatchNormalization
from tff_bn.layers import WeightStandardizedConv2D
from tff_bn.layers import WeightStandardizedDense
from tff_bn.layers import all_layers
from tff_bn.layers import batch_moments
from tff_bn.layers import batch_norm_layers

_LAYERS = keras.layers
_FOUND = {}


def _keep(name, values):
  """Adds numbers to the result."""
  assert name not in _FOUND, name
  values = [np.asarray(ops.convert_to_numpy(x), 'float64') for x in values]
  assert all(np.isfinite(x).all() for x in values), name
  _FOUND[name] = [x.ravel().tolist() for x in values]


def _random(*shape, seed=0):
  values = np.random.default_rng(seed).normal(1, 2, shape)
  return values.astype('float32')


def _randomize(model):
  """Gives weights that don't depend on the backend's generator."""
  rng = np.random.default_rng(1)
  for variable in model.weights:
    values = rng.uniform(0.5, 1.5, variable.shape)
    if len(variable.shape) > 1:
      values = (values - 1) / np.sqrt(np.prod(variable.shape[:-1]))
    variable.assign(values.astype('float32'))
  return model


@keras.saving.register_keras_serializable('backends_example')
class Block(_LAYERS.Layer):
  """Layers in attributes, lists and models."""

  def __init__(self, units, **kwargs):
    super().__init__(**kwargs)
    self.units = units
    self.dense = _LAYERS.Dense(units)
    self.norms = [
        _LAYERS.BatchNormalization(momentum=0.7),
        _LAYERS.BatchNormalization(scale=False),
    ]
    self.model = keras.Sequential(
        [_LAYERS.Dense(units), _LAYERS.BatchNormalization(momentum=0.6)]
    )

  def get_config(self):
    return {**super().get_config(), 'units': self.units}

  def call(self, inputs, training=None):
    x = self.norms[0](self.dense(inputs), training=training)
    return self.norms[1](self.model(x, training=training), training=training)


def _sequential():
  return keras.Sequential(
      [
          keras.Input((6, 6, 2)),
          _LAYERS.Conv2D(4, 3, use_bias=False),
          FederatedBatchNormalization(momentum=0.5),
          PositionEncoding('multiply', personal_share=0.5),
          _LAYERS.ReLU(),
          _LAYERS.GlobalAveragePooling2D(),
          _LAYERS.Dense(1),
      ],
      name='sequential',
  )


def _alternatives():
  """The layers that replace batch normalization."""
  return keras.Sequential(
      [
          keras.Input((6, 6, 2)),
          WeightStandardizedConv2D(4, 3),
          BatchRenormalization(momentum=0.5, r_max=1.2),
          _LAYERS.ReLU(),
          KernelNormalization(3, dropout_rate=0),
          _LAYERS.Conv2D(4, 3, strides=3),
          StaticBatchNormalization(),
          ScalarBias(),
          ScalarMultiplier(),
          _LAYERS.Flatten(),
          WeightStandardizedDense(5, activation='tanh'),
          FeatureNormalization(),
          _LAYERS.Dense(1),
      ],
      name='alternatives',
  )


def _functional():
  """Two inputs, a mask, operators, a shared layer, a nested model, a block."""
  a, b = keras.Input((5, 4), name='a'), keras.Input((3,), name='b')
  x = _LAYERS.Masking()(a)
  x = FederatedBatchNormalization(momentum=0.5, name='masked')(x)
  x = _LAYERS.GlobalAveragePooling1D()(x) * 2.0
  h = keras.Input((3,))
  inner = keras.Model(
      h,
      FederatedBatchNormalization(momentum=0.8)(
          _LAYERS.Dense(3, activation='tanh')(h)
      ),
      name='inner',
  )
  y = inner(inner(b))
  x = _LAYERS.Concatenate()([x, ops.reshape(y, (-1, 3)), y[:, :2]])
  x = Block(4, name='block')(x)
  return keras.Model({'a': a, 'b': b}, _LAYERS.Dense(1)(x), name='functional')


_MODELS = {
    'functional': (_functional, {'a': _random(19, 5, 4), 'b': _random(19, 3)}),
    'alternatives': (_alternatives, _random(19, 6, 6, 2)),
}
_MODELS['functional'][1]['a'][::3, 3:] = 0


def _compile(model):
  model.compile(keras.optimizers.SGD(0.01), 'mse')


def _encode(model):
  """Shifts the personal encodings, which start as the shared ones."""
  for layer in all_layers(model):
    if isinstance(layer, PositionEncoding) and layer.personal_phase is not None:
      layer.personal_phase.assign(0.3)


def _outputs(model, x):
  # Faster than to compile `predict` for each model.
  return ops.convert_to_numpy(model(x))


def _check_same(found, expected, x):
  for a, b in zip(found.get_weights(), expected.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_allclose(
      _outputs(found, x), _outputs(expected, x), rtol=1e-5, atol=1e-6
  )


def _check_model(name, folder):
  build, x = _MODELS[name]
  y = _random(19, 1, seed=3)
  model = build()
  _compile(_randomize(model))
  # The last batch is smaller.
  history = model.fit(
      x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
  ).history
  predicted = _outputs(model, x)
  _keep(f'{name} losses', history['loss'])
  _keep(f'{name} predicted', [predicted])
  _keep(f'{name} weights', model.weights)

  model.save(f'{folder}/{name}.keras')
  model.save_weights(f'{folder}/{name}.weights.h5')
  loaded = keras.models.load_model(f'{folder}/{name}.keras')
  other = build()
  other.load_weights(f'{folder}/{name}.weights.h5')
  for same in (loaded, other):
    _check_same(same, model, x)

  for to in ('federated', 'batch', 'batch_renorm'):
    converted = tff_bn.convert_batch_norm(model, to)
    kinds = {type(layer).__name__ for layer in batch_norm_layers(converted)}
    assert len(kinds) == 1, kinds
    assert len(batch_norm_layers(converted)) == len(batch_norm_layers(model))
    paths = [[w.path for w in each.weights] for each in (converted, model)]
    assert paths[0] == paths[1]
    np.testing.assert_allclose(
        _outputs(converted, x), predicted, rtol=1e-5, atol=1e-5
    )
    if to != 'federated':
      continue
    converted.save(f'{folder}/converted.keras')
    loaded = keras.models.load_model(f'{folder}/converted.keras')
    assert {
        type(layer).__name__ for layer in batch_norm_layers(loaded)
    } == kinds
    _check_same(loaded, converted, x)
    converted.save_weights(f'{folder}/converted.weights.h5')
    again = tff_bn.convert_batch_norm(converted, to)
    _randomize(again)
    again.load_weights(f'{folder}/converted.weights.h5')
    _check_same(again, converted, x)

  hybrid = tff_bn.convert_batch_norm(model, 'hybrid')
  _compile(hybrid)
  hybrid.fit(x, y, batch_size=8, shuffle=False, verbose=0)
  _keep(f'{name} hybrid', hybrid.weights)
  back = tff_bn.convert_batch_norm(hybrid, 'batch')
  assert len(back.weights) == len(model.weights) < len(hybrid.weights)
  np.testing.assert_allclose(
      _outputs(back, x), _outputs(hybrid, x), rtol=1e-5, atol=1e-5
  )

  _check_other_norms(name, model, predicted)

  plain = build()
  _randomize(plain)
  for mode in ('add', 'multiply'):
    encoded = tff_bn.add_position_encodings(plain, mode, personal_share=0.5)
    assert len(encoded.weights) > len(plain.weights)
    _encode(encoded)
    _keep(f'{name} {mode}', [_outputs(encoded, x)])
    encoded.save(f'{folder}/encoded.keras')
    loaded = keras.models.load_model(f'{folder}/encoded.keras')
    _check_same(loaded, encoded, x)


def _check_other_norms(name, model, predicted):
  """Group and layer normalization, and frozen batch normalization."""
  x = _MODELS[name][1]
  for to, arguments in (
      ('group', {'groups': 1}),
      ('layer', {}),
      ('frozen', {}),
  ):
    converted = tff_bn.convert_batch_norm(model, to, **arguments)
    norms = batch_norm_layers(converted)
    assert not any(norm.trainable for norm in norms)
    assert bool(norms) == (to == 'frozen')
    outputs = ops.convert_to_numpy(converted(x, training=True))
    if norms:
      np.testing.assert_allclose(outputs, predicted, rtol=1e-5, atol=1e-5)
    _keep(f'{name} {to}', [outputs])


def _check_mixed_precision(policy):
  layer = FederatedBatchNormalization(momentum=0.5, dtype=policy)
  encoding = PositionEncoding('multiply', personal_share=0.5, dtype=policy)
  x = ops.cast(1000 + 30 * _random(64, 50, 4), layer.compute_dtype)
  outputs = encoding(layer(x, training=True))
  assert keras.backend.standardize_dtype(outputs.dtype) == layer.compute_dtype
  assert {w.dtype for w in layer.weights} == {'float32'}
  assert encoding.personal_phase.dtype == 'float32'
  _keep(f'{policy} statistics', layer.weights)

  keras.config.set_dtype_policy(policy)
  model = _sequential()
  keras.config.set_dtype_policy('float32')
  _randomize(model)
  x = _MODELS['alternatives'][1]
  assert np.isfinite(ops.convert_to_numpy(model(x, training=True))).all()
  assert {w.dtype for w in model.weights} == {'float32'}
  # Convolutions in 16 bits are not the same everywhere.
  encoded = tff_bn.add_position_encodings(model)
  for layer in all_layers(encoded):
    if isinstance(layer, PositionEncoding):
      assert layer.compute_dtype == policy.removeprefix('mixed_')


def _check_alternatives():
  model = _randomize(_alternatives())
  x = _random(19, 6, 6, 2)
  _keep('alternatives', [model(x, training=True), model(x), *model.weights])


def _check_layers():
  _check_alternatives()
  x = _random(4, 7, 3)
  mask = np.arange(28).reshape(4, 7) % 3 > 0
  for axis, given in ((1, None), (-1, mask), (-1, np.zeros_like(mask))):
    layer = FederatedBatchNormalization(axis, momentum=0.7)
    outputs = [layer(x, training=True, mask=given) for _ in range(2)]
    name = f'layer {axis} {None if given is None else given.sum()}'
    _keep(name, [*outputs, *layer.weights])
  layer = FederatedBatchNormalization(axis=0)
  layer(x[0, 0], training=True)
  _keep('one value', layer.weights)
  frozen = FederatedBatchNormalization(trainable=False)
  frozen(x, training=True)
  np.testing.assert_array_equal(
      ops.convert_to_numpy(frozen.moving_mean), np.zeros(3)
  )
  # Large means.
  large = (1000 + 0.1 * _random(600, 3)).astype('float32')
  parts = [batch_moments.batch_moments(large[i::2]) for i in range(2)]
  merged = batch_moments.merge_moments(*parts)
  for found in (merged, batch_moments.batch_moments(large)):
    np.testing.assert_allclose(
        ops.convert_to_numpy(found.variance),
        large.astype('float64').var(0),
        rtol=1e-3,
    )
    assert float(found.count) == 600


def check(names):
  """Returns what the layers and the named models compute, by name."""
  _FOUND.clear()
  _check_layers()
  with tempfile.TemporaryDirectory() as folder:
    for name in names:
      _check_model(name, folder)
  _check_mixed_precision('mixed_bfloat16')
  return dict(_FOUND)


def main(*names):
  assert keras.backend.backend() == 'jax'
  # All that imports them. Keras imports TensorFlow to save models.
  assert tff_bn.convert_batch_norm and tff_bn.add_position_encodings
  assert 'tensorflow' not in sys.modules
  found = check(names)
  assert 'tensorflow_federated' not in sys.modules
  message = ''
  try:
    tff_bn.convert_batch_norm(_sequential(), 'synchronized')
  except ValueError as error:
    message = str(error)
  assert 'needs the TensorFlow backend' in message
  print(json.dumps(found))


if __name__ == '__main__':
  main(*sys.argv[1:])
