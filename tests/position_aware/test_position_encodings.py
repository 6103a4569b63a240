"""Tests of position encodings in existing models."""

import keras
import numpy as np
import pytest
import random_models
import tensorflow as tf

import tff_bn
from tff_bn import models
from tff_bn.keras_model import keras_graph
from tff_bn.layers import PositionEncoding
from tff_bn.layers import all_layers

_layers = keras.layers
# The number of layers with units, except the last.
_NUM_ENCODINGS = {
    'small_cnn': 3,
    'mlp3': 1,
    'mlp4': 3,
    'digits_cnn': 5,
    'fbn_cnn': 5,
    'resnet20': 19,
    'vgg9': 8,
}


def _encodings(model):
  return [
      layer
      for layer in all_layers(model)
      if isinstance(layer, PositionEncoding)
  ]


def _outputs_and_gradients(model, x, training):
  with tf.GradientTape() as tape:
    outputs = model(x, training=training)
    loss = tf.reduce_mean(tf.square(outputs))
  return [outputs, *tape.gradient(loss, model.trainable_weights)]


@pytest.mark.parametrize(
    ('name', 'normalization'),
    [
        ('mlp3', 'batch'),
        ('fbn_cnn', 'batch'),
        ('mlp3', 'none'),
        ('small_cnn', 'group2'),
        ('small_cnn', 'weight_standardization'),
        ('mlp3', 'static_batch'),
        ('small_cnn', 'kernel'),
        *(
            pytest.param(name, normalization, marks=pytest.mark.slow)
            for name, normalization in (
                *(('vgg9', 'batch'), ('resnet20', 'batch')),
                ('resnet20', 'fixup'),
            )
        ),
    ],
)
def test_encodings_without_effect_keep_all_bits(name, normalization):
  # Dropout is random in training.
  training = name != 'fbn_cnn' and normalization != 'kernel'
  model = random_models.build(name, normalization)
  x = random_models.inputs(model, 4)
  for settings in (dict(amplitude=0), dict(mode='multiply', period=0)):
    off = tff_bn.add_position_encodings(model, **settings)
    assert len(_encodings(off)) == _NUM_ENCODINGS[name]
    assert [w.path for w in off.weights] == [w.path for w in model.weights]
    found = _outputs_and_gradients(off, x, training)
    weights = model.get_weights()
    expected = _outputs_and_gradients(model, x, training)
    # Training changes running statistics.
    model.set_weights(weights)
    for a, b in zip(found, expected, strict=True):
      assert a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize(
    'name',
    [
        *('small_cnn', 'mlp3', 'fbn_cnn', 'resnet20'),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ('mlp4', 'digits_cnn', 'vgg9')
        ),
    ],
)
def test_encodings_come_after_normalizations_and_before_activations(name):
  model = random_models.build(name)
  on = tff_bn.add_position_encodings(model, 'multiply', 0.3, 2.0, 1.0)
  encodings = _encodings(on)
  assert len(encodings) == _NUM_ENCODINGS[name]
  for layer in encodings:
    settings = dict(mode='multiply', amplitude=0.3, period=2.0, offset=1.0)
    assert layer.get_config().items() >= settings.items()
    before = keras_graph.producer(layer.input).layer
    followers = [
        call.layer
        for call in keras_graph.calls(on)
        if call.inputs and call.inputs[0] is layer.output
    ]
    assert followers
    # In fbn_cnn batch normalization comes after the activation.
    expected = (
        (_layers.Conv2D, _layers.Dense)
        if name == 'fbn_cnn'
        else _layers.BatchNormalization
    )
    assert isinstance(before, expected)
    # A second convolution of a residual block is encoded before the addition.
    kind = (_layers.ReLU, _layers.Add) if name == 'resnet20' else _layers.ReLU
    assert all(isinstance(follower, kind) for follower in followers)
  x = random_models.inputs(model, 4)
  assert np.abs(on(x) - model(x)).max() > 1e-4


def test_outputs_of_a_model():
  """Against NumPy, with batch normalization in inference mode."""
  model = random_models.build('mlp3')
  on = tff_bn.add_position_encodings(model, 'multiply', 0.5, 1.0)
  x = random_models.inputs(model, 4)
  kernel, gamma, beta, mean, variance, last, bias = [
      model.get_layer(layer).get_weights()[i]
      for layer, i in (
          *(('hidden', 0), ('norm', 0), ('norm', 1), ('norm', 2), ('norm', 3)),
          *(('logits', 0), ('logits', 1)),
      )
  ]
  h = x.reshape(4, -1) @ kernel
  h = (h - mean) / np.sqrt(variance + 1e-5) * gamma + beta
  h = h * (1 + 0.5 * np.sin(2 * np.pi * np.arange(30) / 30))
  np.testing.assert_allclose(
      on(x), np.maximum(h, 0) @ last + bias, rtol=1e-4, atol=1e-4
  )


def test_fused_activations_nested_models_and_other_outputs():
  backbone = keras.Sequential(
      [
          keras.Input((4,)),
          _layers.Dense(5, activation='tanh', name='a'),
          _layers.Dense(6, name='b'),
      ],
      name='backbone',
  )
  inputs = keras.Input((4,), name='in')
  x = _layers.ReLU()(backbone(inputs))
  x = x * 2.0
  outputs = _layers.Dense(3, activation='softmax', name='out')(x)
  model = keras.Model(inputs, [outputs, x], name='outer')
  model.get_layer('backbone').get_layer('a').trainable = False
  random_models.randomize(model)

  on = tff_bn.add_position_encodings(model, 'add', 0.5)

  inner = on.get_layer('backbone')
  assert [layer.name for layer in inner.layers[1:]] == [
      'a',
      'a_position',
      'a_activation',
      'b',
      'b_position',
  ]
  assert not inner.get_layer('a').trainable
  assert on.get_layer('out').activation is keras.activations.softmax
  assert on.name == 'outer'
  x = random_models.inputs(model, 4)
  (k1, b1), (k2, b2) = (
      backbone.get_layer(name).get_weights() for name in ('a', 'b')
  )

  def encoding(num_units):
    return 0.5 * np.sin(2 * np.pi * np.arange(num_units) / num_units)

  h = np.tanh(x @ k1 + b1 + encoding(5))
  h = np.maximum(h @ k2 + b2 + encoding(6), 0) * 2
  np.testing.assert_allclose(on(x)[1], h, rtol=1e-5, atol=1e-5)


def test_a_layer_that_is_called_twice_has_one_encoding():
  shared = _layers.Dense(4, name='shared')
  inputs = keras.Input((4,))
  x = _layers.ReLU()(shared(inputs))
  x = _layers.ReLU()(shared(x))
  model = keras.Model(inputs, _layers.Dense(2)(x))
  on = tff_bn.add_position_encodings(model)
  (encoding,) = _encodings(on)
  called = [call.layer for call in keras_graph.calls(on)]
  assert sum(layer is encoding for layer in called) == 2
  assert len(on.trainable_weights) == len(model.trainable_weights)


def test_channels_first():
  model = keras.Sequential(
      [
          keras.Input((3, 6, 5)),
          _layers.Permute((1, 2, 3)),
          _layers.Conv2D(4, 1, data_format='channels_first', name='conv'),
          _layers.Flatten(),
          _layers.Dense(2),
      ]
  )
  (encoding,) = _encodings(tff_bn.add_position_encodings(model))
  assert encoding.axis == 1


def test_the_given_model_does_not_change():
  model = random_models.build('small_cnn')
  before = model.get_weights()
  on = tff_bn.add_position_encodings(model, 'multiply')
  on.set_weights([w + 1 for w in on.get_weights()])
  for a, b in zip(model.get_weights(), before, strict=True):
    np.testing.assert_array_equal(a, b)
  assert not _encodings(model)


def test_dtype_policies():
  model = models.build_model_fn(
      'small_cnn', (8, 8, 1), 10, precision='mixed_bfloat16'
  )()
  on = tff_bn.add_position_encodings(model)
  for encoding in _encodings(on):
    assert encoding.compute_dtype == 'bfloat16'
  assert on(random_models.inputs(model, 4)).dtype == tf.float32


def test_invalid_models_and_arguments():
  with pytest.raises(TypeError, match='must be a keras.Model, but is a D'):
    tff_bn.add_position_encodings(_layers.Dense(3))
  with pytest.raises(ValueError, match="'mine' is not a functional model"):
    tff_bn.add_position_encodings(random_models.Subclassed())
  with pytest.raises(ValueError, match='is not a functional model'):
    tff_bn.add_position_encodings(keras.Sequential([_layers.Dense(2)]))
  only_outputs = keras.Sequential([keras.Input((3,)), _layers.Dense(2)])
  with pytest.raises(ValueError, match='has no hidden layer'):
    tff_bn.add_position_encodings(only_outputs)
  with pytest.raises(ValueError, match="mode='off' must be one of"):
    tff_bn.add_position_encodings(only_outputs, 'off')
  with pytest.raises(ValueError, match='amplitude=-1 must be'):
    tff_bn.add_position_encodings(only_outputs, amplitude=-1)
  with pytest.raises(ValueError, match='personal_share=2 must be'):
    tff_bn.add_position_encodings(only_outputs, personal_share=2)


# The sizes of the hidden layers.
_UNITS = {'small_cnn': [16, 32, 32], 'resnet20': [16] * 7 + [32] * 6 + [64] * 6}


@pytest.mark.parametrize(
    'name', ['small_cnn', pytest.param('resnet20', marks=pytest.mark.slow)]
)
def test_each_hidden_layer_has_a_phase(name):
  units = _UNITS[name]
  model = random_models.build(name)
  shared = tff_bn.add_position_encodings(model, 'multiply', 0.5)
  assert len(shared.weights) == len(model.weights)
  own = tff_bn.add_position_encodings(
      model, 'multiply', 0.5, personal_share=0.25
  )
  encodings = _encodings(own)
  assert all(encoding.personal_share == 0.25 for encoding in encodings)
  found = [
      (e.input.shape[-1], e.num_personal(e.input.shape[-1])) for e in encodings
  ]
  assert sorted(found) == sorted((j, j // 4) for j in units)
  phases = [e.personal_phase for e in encodings]
  assert len({id(phase) for phase in phases}) == len(units)
  assert len(own.weights) == len(model.weights) + len(units)
  assert [w.name for w in own.trainable_weights] == [
      w.name for w in model.trainable_weights
  ]
  x = random_models.inputs(model, 3)
  expected = shared(x)
  np.testing.assert_array_equal(own(x), expected)
  for phase in phases[::6]:
    before = phase.numpy()
    phase.assign(0.3)
    assert np.abs(own(x) - expected).max() > 1e-6
    phase.assign(before)


def _phases(model):
  return {e.name: e.personal_phase.numpy() for e in _encodings(model)}


def test_copies_keep_the_phases(tmp_path):
  model = tff_bn.add_position_encodings(
      random_models.build('small_cnn'), 'multiply', 0.3, personal_share=0.5
  )
  for number, encoding in enumerate(_encodings(model)):
    encoding.personal_phase.assign(number / 3)
  x = random_models.inputs(model, 3)
  federated = tff_bn.convert_batch_norm(model)
  np.testing.assert_array_equal(
      federated(x, training=False), model(x, training=False)
  )
  model.save(tmp_path / 'model.keras')
  loaded = keras.models.load_model(tmp_path / 'model.keras')
  np.testing.assert_array_equal(loaded(x), model(x))
  for copy in (federated, loaded):
    assert _phases(copy) == _phases(model)


def test_encodings_of_models_with_many_layers_are_found_in_linear_time():
  """Each layer is compared once, by Keras when it is called."""
  comparisons = []

  class Layer(_layers.Dense):

    def __eq__(self, other):
      comparisons.append(other)
      return self is other

    def __hash__(self):
      return id(self)

  layers = [Layer(4) for _ in range(12)]
  model = keras.Sequential(
      [keras.Input((4,)), *layers, _layers.BatchNormalization(), Layer(2)]
  )
  comparisons.clear()
  encoded = tff_bn.add_position_encodings(model)
  assert len(_encodings(encoded)) == 12
  assert len(comparisons) <= len(model.layers)
