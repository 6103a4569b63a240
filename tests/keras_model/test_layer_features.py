"""Tests of recording the output of a layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model.layer_features import LayerFeatures
from tff_bn.layers import discovery

_LAYERS = keras.layers
_X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def _features(model, name=None, x=_X, **kwargs):
  features = LayerFeatures(model, name)
  with features.watched():
    model(x, **kwargs)
  return features.value.numpy()


def _functional():
  inputs = keras.Input((4,))
  x = _LAYERS.Dense(5, name='hidden')(inputs)
  x = _LAYERS.ReLU(name='relu')(x)
  return keras.Model(inputs, _LAYERS.Dense(3, name='logits')(x))


def _hidden(model, layer=None):
  """The output of ReLU, by hand."""
  layer = layer or model.get_layer('hidden')
  kernel, bias = (value.numpy() for value in layer.weights)
  return np.maximum(_X @ kernel + bias, 0)


def _assert_close(found, expected):
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_by_name():
  model = _functional()
  kernel, bias = (value.numpy() for value in model.get_layer('hidden').weights)
  _assert_close(_features(model, 'hidden'), _X @ kernel + bias)
  _assert_close(_features(model, 'relu'), _hidden(model))
  _assert_close(_features(model, 'logits'), model(_X))


def _with_end(*layers):
  def build():
    model = _functional()
    outputs = model.output
    for layer in layers:
      outputs = layer(outputs)
    return keras.Model(model.input, outputs)

  return build


def _with_input():
  return keras.Sequential([keras.Input((4,)), *_functional().layers[1:]])


def _called():
  model = keras.Sequential(
      [_LAYERS.Dense(5, name='hidden'), _LAYERS.ReLU(), _LAYERS.Dense(3)]
  )
  model(_X)
  return model


def _nested_head():
  inputs = keras.Input((4,))
  x = _LAYERS.Dense(5, name='hidden')(inputs)
  head = keras.Sequential([_LAYERS.ReLU(), _LAYERS.Dense(3), _LAYERS.Softmax()])
  return keras.Model(inputs, _LAYERS.Softmax()(head(x)))


def _head_that_is_a_dense_layer():
  inputs = keras.Input((4,))
  x = _LAYERS.Dense(5, name='hidden', activation='relu')(inputs)
  head_inputs = keras.Input((5,))
  head = keras.Model(head_inputs, _LAYERS.Dense(3)(head_inputs))
  return keras.Model(inputs, head(x))


def _model_without_weights_at_the_end():
  model = _functional()
  end = keras.Sequential([_LAYERS.Softmax(), _LAYERS.Dropout(0.5)])
  return keras.Model(model.input, end(model.output))


@pytest.mark.parametrize(
    'build',
    [
        _functional,
        _with_input,
        _called,
        _nested_head,
        _head_that_is_a_dense_layer,
        _model_without_weights_at_the_end,
        _with_end(_LAYERS.Softmax()),
        _with_end(_LAYERS.Reshape((1, 3)), _LAYERS.Flatten()),
        _with_end(lambda x: keras.ops.cast(x, 'float64')),
        _with_end(_LAYERS.Lambda(tf.nn.softmax)),
    ],
    ids=lambda build: build.__name__.strip('_'),
)
def test_the_default_is_the_input_of_the_last_layer_with_weights(build):
  model = build()
  _assert_close(_features(model), _hidden(model))


def test_a_merge_after_the_last_layer_with_weights():
  """The output combines tensors with and without weights."""
  inputs = keras.Input((4,))
  x = _LAYERS.Dense(4, name='hidden')(inputs)
  model = keras.Model(inputs, _LAYERS.Add()([x, inputs]), name='merged')
  with pytest.raises(
      ValueError, match="'merged' has no single .* 2 tensors.*feature_layer"
  ):
    LayerFeatures(model)
  assert _features(model, 'hidden').shape == (6, 4)
  several = keras.Model(inputs, [_LAYERS.Dense(2)(x), _LAYERS.Dense(3)(x)])
  with pytest.raises(ValueError, match='combines 2 tensors.*feature_layer'):
    LayerFeatures(several)


def test_without_a_hidden_layer():
  for layers in (
      [_LAYERS.Dense(3, name='only')],
      [_LAYERS.Flatten(), _LAYERS.Dense(3, name='only'), _LAYERS.Softmax()],
  ):
    model = keras.Sequential([keras.Input((4,)), *layers], name='flat')
    with pytest.raises(ValueError, match="'flat' has no hidden .* 'only' has"):
      LayerFeatures(model)


def test_an_unknown_or_ambiguous_name():
  model = _functional()
  with pytest.raises(ValueError, match="'nowhere' is the name of 0") as error:
    LayerFeatures(model, 'nowhere')
  for layer in model.layers:
    assert layer.name in str(error.value)

  inputs = keras.Input((4,))
  inner = [keras.Sequential([_LAYERS.Dense(4, name='same')]) for _ in range(2)]
  twice = keras.Model(inputs, inner[1](inner[0](inputs)))
  with pytest.raises(ValueError, match="'same' is the name of 2 layers"):
    LayerFeatures(twice, 'same')


def test_nested_models_and_wrappers_are_searched():
  inputs = keras.Input((4,))
  inner = keras.Sequential(
      [keras.Sequential([_LAYERS.Dense(5, name='hidden')]), _LAYERS.ReLU()]
  )
  x = _LAYERS.Reshape((1, 5))(inner(inputs))
  x = _LAYERS.TimeDistributed(_LAYERS.Dense(2, name='wrapped'))(x)
  model = keras.Model(inputs, _LAYERS.Dense(3)(_LAYERS.Flatten()(x)))
  (hidden,) = (x for x in discovery.all_layers(model) if x.name == 'hidden')
  before = _features(model, 'hidden')
  _assert_close(np.maximum(before, 0), _hidden(model, hidden))
  assert before.min() < 0
  assert _features(model, 'wrapped').shape[-1] == 2
  # A nested model is a layer, too.
  _assert_close(_features(model, inner.name), _hidden(model, hidden))


def test_the_last_of_two_calls_counts():
  inputs = keras.Input((4,))
  shared = _LAYERS.Dense(4, name='shared')
  model = keras.Model(inputs, _LAYERS.Dense(2)(shared(shared(inputs))))
  _assert_close(_features(model, 'shared'), shared(shared(_X)))


class _Subclassed(keras.Model):
  """A model with a layer that has control flow over tensors."""

  def __init__(self):
    super().__init__(name='subclassed')
    self.hidden = _Switching(name='switching')
    self.logits = _LAYERS.Dense(3)

  def call(self, inputs):
    return self.logits(self.hidden(inputs))


class _Switching(_LAYERS.Layer):
  """A layer with a condition and a loop."""

  def call(self, inputs, scale=2.0):
    result = keras.ops.cond(
        keras.ops.sum(inputs) < 0,
        lambda: -scale * inputs,
        lambda: scale * inputs,
    )
    return keras.ops.fori_loop(0, 3, lambda _, value: value + 1.0, result)


def test_a_subclassed_model_with_a_name_and_control_flow():
  model = _Subclassed()
  model(_X)
  features = LayerFeatures(model, 'switching')

  @tf.function
  def compute(x):
    with features.watched():
      model(x)
    return features.value

  for x in (np.abs(_X), -np.abs(_X)):
    _assert_close(compute(x), 2 * np.abs(x) + 3)
  _assert_close(_features(model, 'switching', np.abs(_X)), 2 * np.abs(_X) + 3)


def test_a_subclassed_model_without_a_name():
  model = _Subclassed()
  model(_X)
  with pytest.raises(ValueError, match="'subclassed' is neither.*feature_lay"):
    LayerFeatures(model)


def test_arguments_of_the_layer_are_passed_on():
  inputs = keras.Input((4,))
  x = _LAYERS.Dropout(0.5, name='drop')(inputs)
  x = _Switching(name='switching')(x, scale=7.0)
  model = keras.Model(inputs, _LAYERS.Dense(3)(x))
  x = np.abs(_X)
  _assert_close(_features(model, 'switching', x), 7 * x + 3)
  assert not np.any(_features(model, 'drop', x, training=False) == 0)
  assert np.any(_features(model, 'drop', x, training=True) == 0)


def test_a_replaced_call_is_used_and_stays():
  """As in local training, which replaces calls of batch normalization."""
  inputs = keras.Input((4,))
  x = _LAYERS.BatchNormalization(name='norm')(inputs)
  model = keras.Model(inputs, _LAYERS.Dense(3)(x))
  layer = model.get_layer('norm')
  features = LayerFeatures(model, 'norm')
  with batch_norm_calls.replaced(model, lambda layer, x, mask: 5 * x):
    replaced = vars(layer)['call']
    with features.watched():
      model(_X, training=True)
    assert vars(layer)['call'] is replaced
    _assert_close(features.value, 5 * _X)
  assert 'call' not in vars(layer)


def test_a_model_that_does_not_call_the_layer():
  model = _functional()
  features = LayerFeatures(model, 'relu')
  before = len(discovery.all_layers(model))
  with features.watched():
    model(_X)
  first = features.value
  model(_X + 1)
  assert features.value is first
  # The model does not track the function in its layer.
  assert len(discovery.all_layers(model)) == before
  # The value of an earlier call does not count.
  message = "feature_layer: .*'relu'.*NoneType"
  with pytest.raises(ValueError, match=message), features.watched():
    pass


def test_a_layer_with_several_outputs():
  inputs = keras.Input((4, 1))
  x, state = _LAYERS.GRU(2, return_state=True, name='gru')(inputs)
  outputs = _LAYERS.Dense(3)(_LAYERS.Concatenate()([x, state]))
  model = keras.Model(inputs, outputs)
  features = LayerFeatures(model, 'gru')
  message = "must give one tensor as the features of the layer 'gru'"
  with pytest.raises(ValueError, match=message), features.watched():
    model(_X[..., np.newaxis])
  # The default is a single tensor.
  assert _features(model, x=_X[..., np.newaxis]).shape == (6, 4)
