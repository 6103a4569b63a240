"""Layers that are frozen by their names."""

import keras
import numpy as np
import pytest
import small_models
import tensorflow_federated as tff

import tff_bn
from tff_bn import algorithms
from tff_bn import analysis
from tff_bn.keras_model import freezing

_LAYERS = keras.layers


def _model():
  backbone = keras.Sequential(
      [
          keras.Input((5, 2)),
          _LAYERS.Dense(3, name='dense_1'),
          _LAYERS.BatchNormalization(name='norm'),
          _LAYERS.ReLU(name='relu'),
          _LAYERS.TimeDistributed(
              _LAYERS.Dense(4, name='inner'), name='wrapper'
          ),
          _LAYERS.BatchNormalization(name='norm_2'),
      ],
      name='backbone',
  )
  inputs = keras.Input((5, 2), name='input')
  x = backbone(inputs)
  x = _LAYERS.Flatten(name='flatten')(x)
  x = _LAYERS.Dense(6, name='dense_1')(x)
  x = _LAYERS.BatchNormalization(name='norm')(x)
  return keras.Model(inputs, _LAYERS.Dense(2, name='logits')(x), name='mine')


def _trainable(model):
  return {
      path
      for path, layer in freezing.layer_paths(model)
      if layer.trainable_weights
  }


_ALL = {
    *('backbone', 'backbone/dense_1', 'backbone/norm', 'backbone/norm_2'),
    *('backbone/wrapper', 'backbone/wrapper/inner'),
    *('dense_1', 'norm', 'logits'),
}


def test_paths():
  paths = [path for path, _ in freezing.layer_paths(_model())]
  assert [path for path in paths if path in _ALL] == [
      *('backbone', 'backbone/dense_1', 'backbone/norm', 'backbone/wrapper'),
      *('backbone/wrapper/inner', 'backbone/norm_2'),
      *('dense_1', 'norm', 'logits'),
  ]
  assert 'backbone/relu' in paths and len(set(paths)) == len(paths)


def test_a_layer_in_two_places_is_listed_once():
  inner = _LAYERS.Dense(2, name='inner')
  wrapper = _LAYERS.TimeDistributed(inner, name='wrapper')
  model = keras.Sequential([keras.Input((5, 2)), inner, wrapper])
  paths = [path for path, x in freezing.layer_paths(model) if x.weights]
  assert paths == ['inner', 'wrapper']


_BACKBONE = {path for path in _ALL if path.startswith('backbone')}


@pytest.mark.parametrize(
    ('regex', 'listed', 'frozen'),
    [
        ('backbone', {'backbone'}, _BACKBONE),
        ('backbone.*', {'backbone'}, _BACKBONE),
        # The name of a layer, at any depth.
        ('norm', {'backbone/norm', 'norm'}, {'backbone/norm', 'norm'}),
        ('backbone/norm', {'backbone/norm'}, {'backbone/norm'}),
        (
            'inner|relu',
            {'backbone/wrapper/inner'},
            {'backbone/wrapper', 'backbone/wrapper/inner'},
        ),
        (
            'dense_1|logits',
            {'backbone/dense_1', 'dense_1', 'logits'},
            {'backbone/dense_1', 'dense_1', 'logits'},
        ),
    ],
)
def test_whole_names_and_paths(regex, listed, frozen):
  model = _model()
  assert set(tff_bn.freeze_layers(model, regex)) == listed
  assert _trainable(model) == _ALL - frozen


def test_freezing_twice():
  model = _model()
  tff_bn.freeze_layers(model, 'backbone')
  assert tff_bn.freeze_layers(model, 'backbone/norm') == ['backbone/norm']
  tff_bn.freeze_layers(model, 'dense_1')
  assert _trainable(model) == {'norm', 'logits'}


@pytest.mark.parametrize(
    ('regex', 'message'),
    [
        (
            'dense',
            "layers='dense' matches the name or path of no layer with weights;"
            " the model 'mine' has backbone, backbone/dense_1, .*, logits.$",
        ),
        ('relu|flatten', 'of no layer with weights'),
        ('.*', "leaves no trainable weight in the model 'mine': it matches"),
        ('[', r'is no regular expression: unterminated character set'),
    ],
)
def test_errors_change_nothing(regex, message):
  model = _model()
  with pytest.raises(ValueError, match=message):
    tff_bn.freeze_layers(model, regex)
  assert _trainable(model) == _ALL


def test_what_is_frozen_already_does_not_count_as_trainable():
  model = _model()
  tff_bn.freeze_layers(model, 'backbone')
  with pytest.raises(ValueError, match='leaves no trainable weight'):
    tff_bn.freeze_layers(model, 'dense_1|norm|logits')
  assert _trainable(model) == {'dense_1', 'norm', 'logits'}


def test_wrong_types():
  with pytest.raises(TypeError, match='model must be a keras.Model'):
    tff_bn.freeze_layers(_LAYERS.Dense(1), 'dense')
  with pytest.raises(TypeError, match='layers must be a regular expression'):
    tff_bn.freeze_layers(_model(), None)


def test_frozen_batch_norm_uses_its_statistics():
  model = _model()
  tff_bn.freeze_layers(model, 'backbone')
  backbone = model.get_layer('backbone')
  x = np.random.default_rng(0).normal(3, size=(8, 5, 2)).astype(np.float32)
  before = backbone.get_weights()
  np.testing.assert_array_equal(
      backbone(x, training=True), backbone(x, training=False)
  )
  for a, b in zip(before, backbone.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)


def test_frozen_layers_cost_no_traffic(in_process_runtime):
  def keras_model_fn():
    model = _model()
    tff_bn.freeze_layers(model, 'backbone')
    return model

  model = small_models.classifier(keras_model_fn, (5, 2))
  process = algorithms.build_fed_avg(
      model, tff.learning.optimizers.build_sgdm(0.1)
  )
  # Kernels and biases, scale and shift, and the statistics of the norm.
  num_values = (20 * 6 + 6) + (6 * 2 + 2) + 2 * 6 + 2 * 6
  traffic = analysis.computation_traffic(process.next)
  assert traffic == analysis.Traffic(1, 4 * num_values, 4 * num_values)
  assert analysis.ProcessTraffic(process).until(3, 5) == dict(
      exchanges=3, megabytes=pytest.approx(3 * 6 * 4 * num_values / 2**20)
  )
