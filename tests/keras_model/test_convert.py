"""Tests of converting the batch normalization layers of Keras models."""

import types

import convertible_models
import keras
import numpy as np
import pytest
import tensorflow as tf

import tff_bn
from tff_bn import layers
from tff_bn.layers import converted_layer

keras_layers = keras.layers
_TARGETS = ('federated', 'batch', 'synchronized', 'hybrid', 'batch_renorm')

# The arguments that only this class has.
_LIMITS = {'batch_renorm': dict(r_max=3.0, d_max=5.0)}


def _kind(layer):
  """The value of `to` for the class of a layer."""
  if type(layer) is layers.FederatedBatchNormalization:
    assert not layer.synchronized
    return 'federated'
  if type(layer) is layers.HybridBatchNormalization:
    return 'hybrid'
  if type(layer) is layers.BatchRenormalization:
    return 'batch_renorm'
  assert type(layer) is keras_layers.BatchNormalization
  return 'synchronized' if layer.synchronized else 'batch'


def _kinds(model):
  return {_kind(layer) for layer in layers.batch_norm_layers(model)}


def _sequential():
  return keras.Sequential(
      [
          keras.Input([6, 6, 2], name='pixels'),
          keras_layers.Conv2D(3, 3, use_bias=False),
          keras_layers.BatchNormalization(momentum=0.7, name='bn1'),
          keras_layers.ReLU(),
          keras_layers.Flatten(),
          keras_layers.BatchNormalization(scale=False, name='bn2'),
          keras_layers.Dense(2, name='logits'),
      ],
      name='sequential_model',
  )


def _functional():
  """A residual block, a shared layer, two inputs and two outputs."""
  images = keras.Input([6, 6, 3], name='images')
  vectors = keras.Input([4], name='vectors')
  shared = keras_layers.BatchNormalization(epsilon=0.01, name='shared')
  x = keras_layers.Conv2D(3, 3, padding='same')(shared(images))
  x = keras_layers.Add()([shared(x), images])
  x = keras_layers.GlobalAveragePooling2D()(x) * 2.0
  v = keras_layers.Dense(3)(vectors)
  v = keras_layers.BatchNormalization(center=False, name='of_vectors')(v)
  x = keras_layers.Concatenate()([x, v])
  return keras.Model(
      {'images': images, 'vectors': vectors},
      {'a': keras_layers.Dense(2, name='a')(x), 'b': v},
      name='two_by_two',
  )


def _assert_same_outputs(found, expected):
  keras.tree.assert_same_structure(found, expected)
  for a, b in zip(keras.tree.flatten(found), keras.tree.flatten(expected)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def _common_weights(model):
  """Returns the weights that do not depend on the class of the layers."""
  return [v for v in model.weights if v.name != 'mixing']


def _assert_same_values(found, expected):
  for a, b in zip(
      _common_weights(found), _common_weights(expected), strict=True
  ):
    assert (a.name, a.trainable) == (b.name, b.trainable)
    np.testing.assert_array_equal(a, b)


def _assert_same_weights(found, expected):
  _assert_same_values(found, expected)
  found, expected = _common_weights(found), _common_weights(expected)
  assert [v.path for v in found] == [v.path for v in expected]


def _norms(model):
  return {layer.name: layer for layer in layers.batch_norm_layers(model)}


@pytest.mark.parametrize(
    ('build', 'x', 'to'),
    [
        (_sequential, convertible_models.random_data(8, 6, 6, 2), 'federated'),
        (
            _functional,
            {
                'images': convertible_models.random_data(8, 6, 6, 3),
                'vectors': convertible_models.random_data(8, 4),
            },
            'federated',
        ),
        *(
            (
                convertible_models.nested,
                convertible_models.random_data(8, 5, 3),
                to,
            )
            for to in _TARGETS
        ),
    ],
)
def test_converts_every_layer_and_keeps_the_rest(build, x, to):
  model = convertible_models.randomize(build())
  before = model.get_weights()
  expected = model(x)

  converted = tff_bn.convert_batch_norm(model, to)
  back = tff_bn.convert_batch_norm(converted, 'batch')

  assert converted.name == model.name
  assert type(converted) is type(model)
  assert [
      (type(a), a.name) for a in converted.layers if not layers.is_batch_norm(a)
  ] == [(type(a), a.name) for a in model.layers if not layers.is_batch_norm(a)]
  old, new = _norms(model), _norms(converted)
  assert list(new) == list(old)
  assert _kinds(converted) == {to}
  assert _kinds(model) == _kinds(back) == {'batch'}
  for name, layer in new.items():
    assert layer.get_config() == {
        **old[name].get_config(),
        'synchronized': to == 'synchronized',
        **_LIMITS.get(to, {}),
    }
  assert back.get_config() == model.get_config()
  for copy in (converted, back):
    _assert_same_weights(copy, model)
    _assert_same_outputs(copy(x), expected)
  # The copies are independent.
  convertible_models.randomize(converted, 5)
  for copy in (model, back):
    for a, b in zip(copy.get_weights(), before, strict=True):
      np.testing.assert_array_equal(a, b)
  # Training changes the statistics of both in the same way.
  _assert_same_outputs(back(x, training=True), model(x, training=True))
  for a, b in zip(back.get_weights(), model.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_shared_layers_stay_shared():
  converted = tff_bn.convert_batch_norm(
      convertible_models.randomize(convertible_models.nested())
  )
  norms = layers.batch_norm_layers(converted)
  assert len(norms) == len(_norms(converted)) == 4
  wrapped = converted.get_layer('wrapped').layer
  assert wrapped is converted.get_layer('bare')
  middle = converted.get_layer('middles').layer
  assert middle.get_layer('inner') is converted.get_layer('inner')


@pytest.mark.parametrize('to', ['federated', 'hybrid'])
def test_trainable_flags_are_kept(to):
  model = convertible_models.randomize(convertible_models.nested())
  outer = _norms(model)
  outer['innermost'].trainable = False
  model.get_layer('middles').layer.get_layer('middle_bn').trainable = False
  model.get_layer('without').layers[0].trainable = False
  model.get_layer('bare').trainable = False
  converted = tff_bn.convert_batch_norm(model, to)
  _assert_same_weights(converted, model)
  pairs = zip(
      layers.all_layers(converted), layers.all_layers(model), strict=True
  )
  for a, b in pairs:
    assert (a.name, a.trainable) == (b.name, b.trainable)
  num_trainable = sum(v.trainable for v in _common_weights(converted))
  assert num_trainable == len(model.trainable_weights)

  # The flags survive the way back.
  back = tff_bn.convert_batch_norm(converted, 'batch')
  _assert_same_weights(back, model)

  model.trainable = False
  model.get_layer('without').trainable = True
  converted = tff_bn.convert_batch_norm(model, to)
  assert not converted.trainable
  assert converted.get_layer('without').trainable
  _assert_same_weights(converted, model)


def test_dtype_policies_are_kept():
  model = keras.Sequential(
      [
          keras.Input([4]),
          keras_layers.BatchNormalization(dtype='mixed_bfloat16'),
          keras_layers.Dense(3, dtype='mixed_bfloat16'),
          keras_layers.BatchNormalization(dtype='float64'),
      ]
  )
  converted = tff_bn.convert_batch_norm(convertible_models.randomize(model))
  assert [layer.compute_dtype for layer in converted.layers] == [
      'bfloat16',
      'bfloat16',
      'float64',
  ]
  _assert_same_weights(converted, model)
  np.testing.assert_array_equal(
      converted(convertible_models.random_data(6, 4)),
      model(convertible_models.random_data(6, 4)),
  )


def test_the_new_model_is_not_compiled():
  model = _sequential()
  model.compile('sgd', 'mse')
  converted = tff_bn.convert_batch_norm(model)
  assert not converted.compiled
  assert model.compiled


@pytest.mark.parametrize('first', ['dense', 'nested', 'embedding'])
def test_called_sequential_model_without_input(first):
  norm = keras_layers.BatchNormalization(name='first_norm')
  layer, x = {
      'dense': (keras_layers.Dense(3), convertible_models.random_data(2, 4)),
      'nested': (
          keras.Sequential([norm]),
          convertible_models.random_data(2, 4, 3),
      ),
      'embedding': (keras_layers.Embedding(5, 3), np.array([[0, 1], [4, 2]])),
  }[first]
  model = keras.Sequential([layer, keras_layers.BatchNormalization()])
  model(x)
  convertible_models.randomize(model)
  converted = tff_bn.convert_batch_norm(model)
  # Keras forgets that it has built a nested model inside another one.
  assert [v.path.split('/')[-2:] for v in converted.weights] == [
      v.path.split('/')[-2:] for v in model.weights
  ]
  for a, b in zip(converted.get_weights(), model.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)
  for batch in (x, x[:1]):
    _assert_same_outputs(converted(batch), model(batch))


def test_unbuilt_sequential_model():
  model = keras.Sequential(
      [keras_layers.Dense(3), keras_layers.BatchNormalization()]
  )
  model.layers[0].trainable = False
  converted = tff_bn.convert_batch_norm(model)
  assert not converted.built
  assert converted(convertible_models.random_data(2, 4)).shape == [2, 3]
  assert _kinds(converted) == {'federated'}
  assert not converted.layers[0].trainable


def test_state_of_preprocessing_layers_is_copied():
  words = keras.Input([], dtype=tf.string)
  numbers = keras.Input([1])
  lookup = keras_layers.StringLookup(output_mode='one_hot')
  lookup.adapt(['b', 'a', 'b', 'c'])
  text = keras_layers.TextVectorization(output_mode='tf_idf')
  text.adapt(['b a', 'c', 'b c d'])
  norm = keras_layers.Normalization()
  norm.adapt(convertible_models.random_data(9, 1))
  x = keras_layers.Concatenate()([lookup(words), text(words), norm(numbers)])
  x = keras_layers.BatchNormalization()(x)
  model = keras.Model([words, numbers], x)
  converted = tff_bn.convert_batch_norm(model)
  data = [tf.constant(['a', 'c', 'e']), tf.constant([[1.0], [2.0], [3.0]])]
  _assert_same_outputs(converted(data), model(data))


class _WithDefaults(keras_layers.BatchNormalization):
  """Changes a default, as in many projects."""

  def __init__(self, momentum=0.9, **kwargs):
    super().__init__(momentum=momentum, **kwargs)


def test_subclass_with_other_defaults_is_converted():
  model = keras.Sequential([keras.Input([4]), _WithDefaults()])
  converted = tff_bn.convert_batch_norm(convertible_models.randomize(model))
  assert _kinds(converted) == {'federated'}
  assert converted.layers[0].momentum == 0.9
  _assert_same_weights(converted, model)


class _OwnTrainStep(keras.Model):

  def train_step(self, data):
    del data
    return {'own': 1.0}


def test_functional_model_with_its_own_train_step_keeps_its_class():
  inputs = keras.Input([4])
  model = _OwnTrainStep(inputs, keras_layers.BatchNormalization()(inputs))
  converted = tff_bn.convert_batch_norm(convertible_models.randomize(model))
  assert type(converted) is _OwnTrainStep
  _assert_same_weights(converted, model)


def test_shares_of_hybrid_layers():
  hybrid = tff_bn.convert_batch_norm(
      convertible_models.randomize(_sequential()), 'hybrid'
  )
  for layer in layers.batch_norm_layers(hybrid):
    np.testing.assert_array_equal(layer.mixing, np.zeros(layer.mixing.shape))
  convertible_models.randomize(hybrid)
  # A copy of the same class keeps them.
  again = tff_bn.convert_batch_norm(hybrid, 'hybrid')
  for a, b in zip(again.weights, hybrid.weights, strict=True):
    np.testing.assert_array_equal(a, b)
  federated = tff_bn.convert_batch_norm(hybrid, 'federated')
  assert _kinds(federated) == {'federated'}
  _assert_same_weights(federated, hybrid)


def test_limits_of_batch_renormalization():
  model = keras.Sequential(
      [keras.Input([4]), layers.BatchRenormalization(r_max=1.5, d_max=0.5)]
  )
  again = tff_bn.convert_batch_norm(
      convertible_models.randomize(model), 'batch_renorm'
  )
  (layer,) = layers.batch_norm_layers(again)
  assert (layer.r_max, layer.d_max) == (1.5, 0.5)
  _assert_same_weights(again, model)
  for to in ('federated', 'batch', 'hybrid'):
    other = tff_bn.convert_batch_norm(model, to)
    assert _kinds(other) == {to}
    _assert_same_outputs(
        other(convertible_models.random_data(5, 4)),
        model(convertible_models.random_data(5, 4)),
    )
  back = tff_bn.convert_batch_norm(other, 'batch_renorm')
  (layer,) = layers.batch_norm_layers(back)
  assert (layer.r_max, layer.d_max) == (3, 5)


@pytest.mark.slow
def test_a_model_of_keras_applications():
  model = keras.applications.MobileNetV2(
      weights=None,
      input_shape=(32, 32, 3),
      classes=3,
      classifier_activation=None,
  )
  x = np.random.default_rng(0).uniform(0, 255, (2, 32, 32, 3)).astype('f')
  expected = model(x).numpy()
  converted = tff_bn.convert_batch_norm(model)
  assert _kinds(converted) == {'federated'}
  _assert_same_weights(converted, model)
  np.testing.assert_allclose(converted(x), expected, rtol=1e-5, atol=1e-6)
  encoded = tff_bn.add_position_encodings(model, amplitude=0)
  np.testing.assert_array_equal(encoded(x), expected)
  assert len(encoded.weights) == len(model.weights)
  encoded = tff_bn.add_position_encodings(converted, 'multiply')
  assert np.abs(encoded(x) - expected).max() > 0.01 * np.abs(expected).max()


def _converted_classes(model):
  return [
      layer
      for layer in layers.all_layers(model)
      if isinstance(layer, converted_layer.ConvertedLayer)
  ]


@pytest.mark.parametrize(
    ('kind', 'to'),
    [
        *(
            pytest.param(kind, 'federated', marks=pytest.mark.slow)
            if kind == 'containers'
            else (kind, 'federated')
            for kind in convertible_models.HOLDERS
        ),
        ('wrapper', 'hybrid'),
        ('argument with its own', 'batch_renorm'),
    ],
)
def test_custom_classes_keep_converted_layers(tmp_path, kind, to):
  build, x, num_derived = convertible_models.HOLDERS[kind]
  model = convertible_models.randomize(build())
  first, *others = layers.batch_norm_layers(model)
  first.trainable = not others
  converted = tff_bn.convert_batch_norm(model, to)
  assert _kinds(model) == {'batch'}
  _assert_same_values(converted, model)
  _assert_same_outputs(converted(x), model(x))
  for a, b in zip(
      layers.all_layers(converted), layers.all_layers(model), strict=True
  ):
    assert a.trainable == b.trainable
    assert a.name == b.name or isinstance(b, keras_layers.InputLayer)
  if to == 'hybrid':
    convertible_models.randomize(converted)
  assert len(_converted_classes(converted)) == num_derived
  weights = converted.get_weights()
  expected = np.asarray(converted(x, training=True))
  updated = converted.get_weights()
  converted.set_weights(weights)
  assert np.abs(expected - model(x, training=True)).max() > 0.1
  with keras.saving.CustomObjectScope(convertible_models.HOLDER_CLASSES):
    converted.save(tmp_path / 'model.keras')
    loaded = keras.models.load_model(tmp_path / 'model.keras')
    clone = keras.models.clone_model(converted)
  clone.set_weights(weights)
  filled = tff_bn.convert_batch_norm(model, to)
  converted.save_weights(tmp_path / 'model.weights.h5')
  filled.load_weights(tmp_path / 'model.weights.h5')
  for other in (loaded, clone, filled):
    assert _kinds(other) == {to}
    assert isinstance(other, type(model))
    np.testing.assert_allclose(other(x, training=True), expected, 1e-5, 1e-5)
    for a, b in zip(other.get_weights(), updated, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  # A loaded model can be converted, too. The original classes make its layers.
  back = tff_bn.convert_batch_norm(loaded, 'batch')
  assert _kinds(back) == {'batch'}
  assert not _converted_classes(back)
  _assert_same_values(back, loaded)
  assert [type(a) for a in layers.all_layers(back)] == [
      type(a) for a in layers.all_layers(model)
  ]
  back.set_weights(build().get_weights())
  with keras.saving.CustomObjectScope(convertible_models.HOLDER_CLASSES):
    assert not _converted_classes(keras.models.clone_model(back))


def test_parts_of_converted_layers_keep_them(tmp_path):
  model = convertible_models.randomize(
      convertible_models.stack(convertible_models.InContainers())
  )
  converted = tff_bn.convert_batch_norm(model)
  part = convertible_models.stack(converted.layers[0].several[0])
  part.save(tmp_path / 'part.keras')
  with keras.saving.CustomObjectScope(convertible_models.HOLDER_CLASSES):
    loaded = keras.models.load_model(tmp_path / 'part.keras')
  assert _kinds(loaded) == {'federated'}
  x = convertible_models.random_data(8, 4)
  np.testing.assert_allclose(
      loaded(x, training=True), part(x, training=True), 1e-5, 1e-5
  )


def test_arguments_and_flags_of_converted_layers_are_kept():
  converted = tff_bn.convert_batch_norm(
      convertible_models.stack(convertible_models.InContainers()),
      'batch_renorm',
  )
  norms = _norms(converted)
  assert len(norms) == 7
  for i, norm in enumerate(norms.values()):
    norm.momentum, norm.r_max, norm.trainable = 0.1 * i, 2.0 + i, i % 2 == 0
  with keras.saving.CustomObjectScope(convertible_models.HOLDER_CLASSES):
    clone = keras.models.clone_model(converted)
  assert [norm.get_config() for norm in _norms(clone).values()] == [
      norm.get_config() for norm in norms.values()
  ]
  # The layer has no configuration of its own class for these values.
  assert clone.layers[0].get_config().keys() > {'converted_batch_norm', 'name'}


def test_saved_with_another_version_of_the_class():
  converted = tff_bn.convert_batch_norm(
      convertible_models.stack(convertible_models.AutoConfig())
  )
  config = converted.layers[0].get_config()
  norms = config['converted_batch_norm']['layers']
  config['converted_batch_norm']['layers'] = [*norms, *norms]
  with pytest.raises(
      ValueError, match='AutoConfig makes 1 .* has 2: .*another version'
  ):
    type(converted.layers[0]).from_config(config)


class Activated(keras.Model):
  """Keras keeps no arguments of models without `get_config`."""

  def __init__(self, activation='relu', units=4, rate=0.0, **kwargs):
    super().__init__(**kwargs)
    self.norm = keras_layers.BatchNormalization()
    self.inner = keras.Sequential([keras_layers.Dense(4, activation)])
    self.dense = keras_layers.Dense(units)
    self.rate = rate

  def call(self, x):
    return self.dense(self.inner(self.norm(x))) * (1 - self.rate)


@pytest.mark.parametrize(
    ('arguments', 'message', 'is_nested'),
    [
        (
            {'activation': 'tanh'},
            "activation of .* would be 'relu' instead of",
            False,
        ),
        ({'units': 3}, 'units of .* would be 4 instead of 3', False),
        ({'rate': 0.5}, 'rate of .* would be 0.0 instead of 0.5', True),
    ],
)
def test_lost_arguments_are_an_error(arguments, message, is_nested):
  model = Activated(**arguments, name='activated')
  model(convertible_models.random_data(2, 4))
  if is_nested:
    model = convertible_models.stack(model)
  with pytest.raises(
      ValueError, match=f"'activated' .*{message}.* Give Activated a `get_conf"
  ):
    tff_bn.convert_batch_norm(model)


def test_default_arguments_need_no_configuration():
  model = Activated('relu')
  model(convertible_models.random_data(2, 4))
  converted = tff_bn.convert_batch_norm(convertible_models.randomize(model))
  _assert_same_outputs(
      converted(convertible_models.random_data(8, 4)),
      model(convertible_models.random_data(8, 4)),
  )


def test_functions_are_copied(recwarn):
  factor = 3.0

  def squared(x):
    return x * x

  inputs = keras.Input([4])
  x = keras_layers.Lambda(
      lambda x, shift: x * factor + shift + tf.ones([4]),
      output_shape=lambda shape: shape,
      arguments={'shift': 0.5},
  )(inputs)
  x = keras_layers.Dense(4, activation=lambda x: keras.ops.tanh(x) * 2)(x)
  x = keras_layers.TimeDistributed(keras_layers.Lambda(lambda x: x + factor))(
      x[:, None]
  )[:, 0]
  x = keras_layers.Activation(squared)(x)
  x = keras_layers.BatchNormalization()(x)
  model = convertible_models.randomize(
      keras.Model(inputs, keras_layers.Dense(2)(x))
  )
  data = convertible_models.random_data(8, 4)
  for copy in (
      tff_bn.convert_batch_norm(model),
      tff_bn.add_position_encodings(model, amplitude=0),
  ):
    _assert_same_outputs(copy(data), model(data))
  assert not [w for w in recwarn if 'lambda' in str(w.message)]


class WithFunction(keras_layers.Layer):

  def __init__(self, function, **kwargs):
    super().__init__(**kwargs)
    self.function = function

  def get_config(self):
    function = keras.saving.serialize_keras_object(self.function)
    return {**super().get_config(), 'function': function}

  @classmethod
  def from_config(cls, config):
    config['function'] = keras.saving.deserialize_keras_object(
        config['function']
    )
    return cls(**config)

  def call(self, x):
    return self.function(x)


@pytest.mark.parametrize(
    'copy', [tff_bn.convert_batch_norm, tff_bn.add_position_encodings]
)
def test_layers_that_cannot_be_remade_are_named(copy):
  model = convertible_models.stack(
      keras_layers.Dense(3),
      keras_layers.BatchNormalization(),
      WithFunction(lambda x: x, name='own'),
      keras_layers.Dense(2),
  )
  with pytest.raises(
      ValueError,
      match="layer 'own' .*cannot be copied .*without Python lambdas",
  ) as caught:
    copy(model)
  assert 'safe_mode' not in str(caught.value)


def test_encodings_keep_converted_layers(tmp_path):
  model = convertible_models.stack(
      keras_layers.Dense(4),
      keras_layers.ReLU(),
      convertible_models.AutoConfig(),
      convertible_models.AutoConfig(),
  )
  converted = tff_bn.convert_batch_norm(convertible_models.randomize(model))
  encoded = tff_bn.add_position_encodings(converted, amplitude=0)
  assert _kinds(encoded) == {'federated'}
  with keras.saving.CustomObjectScope(convertible_models.HOLDER_CLASSES):
    encoded.save(tmp_path / 'model.keras')
    loaded = keras.models.load_model(tmp_path / 'model.keras')
  x = convertible_models.random_data(8, 4)
  expected = converted(x, training=True)
  for other in (encoded, loaded):
    np.testing.assert_allclose(other(x, training=True), expected, 1e-5, 1e-5)


def test_encodings_refuse_layers_that_were_replaced_by_hand():
  block = convertible_models.AutoConfig(name='block')
  block.norm = layers.FederatedBatchNormalization()
  model = convertible_models.stack(
      keras_layers.Dense(4), keras_layers.ReLU(), block
  )
  with pytest.raises(
      ValueError, match="'block' .*other batch normalization layers.*__init__"
  ):
    tff_bn.add_position_encodings(model)


def test_policies_inside_custom_layers_are_kept():
  keras.config.set_dtype_policy('mixed_bfloat16')
  try:
    model = convertible_models.stack(convertible_models.InContainers())
  finally:
    keras.config.set_dtype_policy('float32')
  converted = tff_bn.convert_batch_norm(model)
  pairs = zip(
      layers.all_layers(converted), layers.all_layers(model), strict=True
  )
  assert {a.compute_dtype for a, b in pairs if a.weights} == {'bfloat16'}


class Subclassed(keras.Model):

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.block = convertible_models.InContainers(name='block')
    self.dense = keras_layers.Dense(2)

  def call(self, inputs, training=None):
    return self.dense(self.block(inputs['x'], training=training)) + inputs['y']


_TWO_INPUTS = {
    'x': convertible_models.random_data(3, 4),
    'y': convertible_models.random_data(3, 2),
}


def test_unbuilt_subclassed_model():
  converted = tff_bn.convert_batch_norm(Subclassed(name='unbuilt'))
  assert _kinds(converted) == {'federated'}
  assert not converted.built
  assert converted(_TWO_INPUTS).shape == (3, 2)


class NotBuilt(Subclassed):

  def build_from_config(self, config):
    del config


class MadeInBuild(keras_layers.Layer):

  def build(self, input_shape):
    self.norm = keras_layers.BatchNormalization(name='hidden_norm')
    self.norm.build(input_shape)

  def call(self, x):
    return self.norm(x)


class UsedBehindTheScenes(keras_layers.Layer):
  """Calls its layer through an object that Keras does not track."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.norm = keras_layers.BatchNormalization(name='hidden_norm')
    self.holder = types.SimpleNamespace(norm=self.norm)

  def call(self, x):
    return self.holder.norm(x)


class InSet(keras_layers.Layer):

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.norms = {keras_layers.BatchNormalization(name='hidden_norm')}

  def call(self, x):
    for norm in self.norms:
      x = norm(x)
    return x


class ModelMadeInBuild(keras.Model):

  def build(self, input_shape):
    self.layer = MadeInBuild(name='has_norm')
    self.layer.build(input_shape)

  def call(self, x):
    return self.layer(x)


class OwnCall(keras_layers.BatchNormalization):

  def call(self, inputs, training=None, mask=None):
    return super().call(inputs, training=False, mask=mask)


class OwnConfig(keras_layers.BatchNormalization):

  def __init__(self, strength=1.0, **kwargs):
    super().__init__(**kwargs)
    self.strength = strength

  def get_config(self):
    return {**super().get_config(), 'strength': self.strength}


class Tied(keras_layers.Layer):
  """Shares the weights of another layer in the model."""

  def __init__(self, other=None, **kwargs):
    super().__init__(**kwargs)
    self.other = other or keras_layers.Dense(3)

  def get_config(self):
    return {'name': self.name}

  def call(self, x):
    return self.other(x)


class Random(keras_layers.Layer):
  """Creates other layers each time."""

  count = 0

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    Random.count += 1
    self.norms = [
        keras_layers.BatchNormalization() for _ in range(2 + (Random.count > 3))
    ]

  def call(self, x):
    return self.norms[0](self.norms[1](x))


def _tied():
  dense = keras_layers.Dense(3)
  norm = keras_layers.BatchNormalization()
  return convertible_models.stack(dense, norm, Tied(dense), shape=(3,))


def _called(model, *inputs):
  model(*inputs)
  return model


# A function that builds a model, and why it cannot be converted.
_REFUSED = {
    'none': (lambda: None, r'model must be a keras\.Model'),
    'layer': (keras_layers.BatchNormalization, r'model must be a keras\.Model'),
    'without': (
        lambda: keras.Sequential([keras_layers.Dense(1)], name='nothing'),
        "'nothing' has no batch normalization",
    ),
    'not_connected': (
        lambda: _called(
            keras.Sequential(
                [keras_layers.Add(), keras_layers.BatchNormalization()],
                name='deferred',
            ),
            [
                convertible_models.random_data(2, 3),
                convertible_models.random_data(2, 3),
            ],
        ),
        "'deferred' has been called.* keras.Input",
    ),
    **{
        kind.__name__: (
            lambda kind=kind: convertible_models.stack(kind(name='has_norm')),
            r"'has_norm' .* creates .*'hidden_norm' in a.* attribute in the"
            f' `__init__` of {kind.__name__}',
        )
        for kind in (MadeInBuild, UsedBehindTheScenes, InSet)
    },
    'made_in_build_of_a_wrapped_layer': (
        lambda: convertible_models.stack(
            keras_layers.TimeDistributed(MadeInBuild(name='has_norm')),
            shape=(4, 3),
        ),
        "'has_norm' .* creates .*'hidden_norm'",
    ),
    'made_in_build_of_a_model': (
        lambda: _called(
            ModelMadeInBuild(name='mine'), convertible_models.random_data(2, 4)
        ),
        "model 'mine' .*'hidden_norm'",
    ),
    'not_built': (
        lambda: _called(NotBuilt(name='mine'), _TWO_INPUTS),
        "'mine' has 35 weights, but its copy 6, .* not build",
    ),
    'no_configuration': (
        lambda: convertible_models.stack(
            convertible_models.Inner(
                keras_layers.BatchNormalization(name='norm'), name='inner'
            )
        ),
        "layer 'inner' .*'norm', cannot be copied.*get_config",
    ),
    'own_call': (
        lambda: convertible_models.stack(OwnCall(name='n')),
        "layer 'n' .*whose method call may change",
    ),
    'own_argument': (
        lambda: convertible_models.stack(OwnConfig(name='n')),
        r"layer 'n' .*additional argument strength=1\.0",
    ),
    'renorm': (
        lambda: convertible_models.stack(
            keras_layers.BatchNormalization(renorm=True, name='n')
        ),
        "layer 'n' .*renorm=True",
    ),
    'tied': (_tied, 'has 6 weights, but its copy 8'),
    'random': (
        lambda: convertible_models.stack(Random(name='random')),
        "'random' .*Random",
    ),
}


@pytest.mark.parametrize('case', _REFUSED)
def test_models_that_cannot_be_converted(case):
  build, message = _REFUSED[case]
  with pytest.raises((TypeError, ValueError), match=message):
    tff_bn.convert_batch_norm(build())


@pytest.mark.parametrize(
    ('to', 'end'), [('federatd', r'. Did you mean federated\?'), (3, r'\.')]
)
def test_unknown_target_is_an_error(to, end):
  with pytest.raises(
      ValueError,
      match="to=.*; use one of 'federated', 'batch', 'synchronized', 'hybrid',"
      f" 'batch_renorm', 'frozen', 'layer', 'group'{end}$",
  ):
    tff_bn.convert_batch_norm(_sequential(), to)
