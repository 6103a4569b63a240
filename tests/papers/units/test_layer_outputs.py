"""Tests of finding hidden layers, and of the outputs of layers."""

import keras
import numpy as np
import pytest
import random_models
import tensorflow as tf

from tff_bn.papers import units
from tff_bn.papers.units import layer_outputs

_LAYERS = keras.layers


def _functional(*layers, shape=(4,)):
  x = inputs = keras.Input(shape)
  for layer in layers:
    x = layer(x)
  return keras.Model(inputs, x)


@pytest.mark.parametrize('name', list(random_models.SHAPES))
def test_each_layer_with_a_kernel_but_the_last_is_hidden(name):
  model = random_models.build(name)
  kernels = [layer for layer in model.layers if hasattr(layer, 'kernel')]
  found = units.hidden_layers(model)
  assert len(found) == len(kernels) - 1
  for layer_name in found:
    assert isinstance(model.get_layer(layer_name), _LAYERS.ReLU)


def test_fused_and_separate_activations():
  model = _functional(
      _LAYERS.Dense(3, activation='relu', name='fused'),
      _LAYERS.Dense(3, name='without'),
      _LAYERS.PReLU(name='prelu'),
      _LAYERS.Dense(3, activation='linear', name='linear'),
      _LAYERS.Activation('tanh', name='tanh'),
      _LAYERS.Dense(3, name='dense'),
      _LAYERS.Activation('linear', name='nothing'),
      _LAYERS.LeakyReLU(name='leaky'),
      _LAYERS.Dropout(0.5, name='dropout'),
      _LAYERS.Dense(3, name='dense_2'),
      _LAYERS.ELU(name='elu'),
      _LAYERS.Dense(2, activation='softmax', name='last'),
  )
  assert units.hidden_layers(model) == [
      *('fused', 'prelu', 'tanh', 'leaky', 'elu')
  ]


def test_layers_after_the_last_weights_are_not_hidden():
  model = _functional(
      _LAYERS.Dense(3, name='hidden'),
      _LAYERS.ReLU(name='relu'),
      _LAYERS.Dense(2, name='logits'),
      _LAYERS.Activation('softmax', name='softmax'),
      _LAYERS.ReLU(name='late'),
  )
  assert units.hidden_layers(model) == ['relu']


def test_models_without_activations():
  model = _functional(
      _LAYERS.Conv2D(3, 1, name='conv'),
      _LAYERS.BatchNormalization(name='norm'),
      _LAYERS.Flatten(name='flatten'),
      _LAYERS.Dense(3, name='dense'),
      _LAYERS.Dense(2, name='logits'),
      _LAYERS.ReLU(name='relu'),
      shape=(2, 2, 1),
  )
  assert units.hidden_layers(model) == ['conv', 'dense']


def test_layers_are_in_the_order_of_calls():
  # Keras lists layers by depth, so layers of the shorter branch come late.
  inputs = keras.Input((4,))
  second = _LAYERS.ReLU(name='second')
  x = _LAYERS.Dense(4, activation='relu', name='first')(inputs)
  y = second(_LAYERS.Dense(4, name='dense')(x))
  y = second(_LAYERS.Dense(4, name='dense_2')(y))
  y = _LAYERS.Add()([x, _LAYERS.Activation('tanh', name='third')(y)])
  model = keras.Model(inputs, _LAYERS.Dense(2)(y))
  assert units.hidden_layers(model) == ['first', 'second', 'third']


def test_nested_models():
  inner = keras.Sequential(
      [
          keras.Input((4,)),
          _LAYERS.Dense(4, name='dense_1'),
          _LAYERS.ReLU(name='relu_1'),
          _functional(
              _LAYERS.Dense(4, activation='tanh', name='deep'),
              _LAYERS.Dense(4, name='after'),
          ),
      ]
  )
  model = _functional(
      inner, _LAYERS.ReLU(name='relu_2'), _LAYERS.Dense(2, name='logits')
  )
  assert units.hidden_layers(model) == ['relu_1', 'deep', 'relu_2']
  # The last layer with weights may be in a nested model.
  model = _functional(_LAYERS.Dense(4, activation='relu', name='first'), inner)
  assert units.hidden_layers(model) == ['first', 'relu_1', 'deep']


def test_functions_are_not_layers():
  inputs = keras.Input((4,))
  x = keras.ops.relu(_LAYERS.Dense(4, name='first')(inputs))
  x = x + _LAYERS.Dense(4, name='second')(x)
  model = keras.Model(inputs, _LAYERS.Dense(2, name='logits')(x) * 2)
  assert units.hidden_layers(model) == ['first', 'second']


def test_models_that_are_not_functional():
  model = random_models.Subclassed()
  model(tf.zeros((1, 4)))
  unconnected = keras.Sequential([_LAYERS.Dense(3), _LAYERS.Dense(2)])
  for wrong in (model, unconnected):
    with pytest.raises(ValueError, match='not a functional model') as error:
      units.hidden_layers(wrong)
    assert repr(wrong.name) in str(error.value)


@pytest.mark.parametrize(
    'layers',
    [
        [_LAYERS.Dense(2)],
        [_LAYERS.Dense(2), _LAYERS.ReLU()],
        [_LAYERS.BatchNormalization(), _LAYERS.Dense(2)],
        [_LAYERS.Flatten()],
    ],
)
def test_models_without_hidden_layers(layers):
  with pytest.raises(ValueError, match='has no hidden layer'):
    units.hidden_layers(_functional(*layers))


def test_outputs_of_layers_in_a_nested_model():
  inner = _functional(
      _LAYERS.Dense(3, name='hidden'), _LAYERS.ReLU(name='relu')
  )
  model = _functional(inner, _LAYERS.Dense(2, name='logits'))
  x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
  (relu, hidden), logits = layer_outputs.call(model, ['relu', 'hidden'], x)
  np.testing.assert_array_equal(relu, inner(x))
  np.testing.assert_array_equal(relu, np.maximum(hidden, 0))
  np.testing.assert_array_equal(logits, model(x))


def test_batches_cover_the_examples_in_order():
  x = np.arange(300)
  parts = [x[part] for part in layer_outputs.batches(tf.constant(x))]
  assert len(parts) > 1
  np.testing.assert_array_equal(np.concatenate(parts), x)
  with pytest.raises(ValueError, match='x has no examples'):
    list(layer_outputs.batches(x[:0]))


def test_layers_without_outputs_are_an_error():
  model = _functional(_LAYERS.Dense(2, name='logits'))
  with pytest.raises(ValueError, match="^layer_name='nowhere' .* 0 layers"):
    layer_outputs.call(model, ['nowhere'], np.zeros((1, 4)))
  name = model.layers[0].name
  with pytest.raises(ValueError, match=f"^layer_name: .* layer '{name}'"):
    layer_outputs.call(model, [name], np.zeros((1, 4)))


@pytest.mark.parametrize('axis', [0, 2, -2, -3])
def test_an_axis_without_units_is_an_error(axis):
  with pytest.raises(
      ValueError, match=rf"axis={axis} .*'norm'.*\(5, 6\).* examples"
  ):
    layer_outputs.units_first(np.zeros((5, 6)), axis, 'norm')
