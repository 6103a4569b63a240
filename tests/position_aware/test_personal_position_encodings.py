"""Tests of existing models with personal position encodings."""

import keras
import numpy as np
import pytest

import tff_bn
from tff_bn import models
from tff_bn.layers import PositionEncoding
from tff_bn.layers import discovery

_layers = keras.layers
# Input shapes, and the sizes of hidden layers.
_UNITS = {
    'mlp4': ((8, 8, 1), [1024] * 3),
    'resnet20': ((8, 8, 3), [16] * 7 + [32] * 6 + [64] * 6),
    'vgg9': ((8, 8, 3), [32, 64, 128, 128, 256, 256, 512, 512]),
}


def _encodings(model):
  return [
      layer
      for layer in discovery.all_layers(model)
      if isinstance(layer, PositionEncoding)
  ]


def _model(name):
  keras.utils.set_random_seed(3)
  return models.build_model_fn(name, _UNITS[name][0], 10)()


@pytest.mark.parametrize('name', list(_UNITS))
def test_each_hidden_layer_has_a_phase(name):
  shape, units = _UNITS[name]
  model = _model(name)
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
  x = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
  expected = shared(x)
  np.testing.assert_array_equal(own(x), expected)
  for phase in phases:
    before = phase.numpy()
    phase.assign(0.3)
    assert np.abs(own(x) - expected).max() > 1e-6
    phase.assign(before)


def test_copies_keep_the_phases(tmp_path):
  model = tff_bn.add_position_encodings(_model('resnet20'), personal_share=0.5)
  for number, encoding in enumerate(_encodings(model)):
    encoding.personal_phase.assign(number / 19)
  x = np.random.default_rng(0).normal(size=(3, 8, 8, 3)).astype(np.float32)
  federated = tff_bn.convert_batch_norm(model)
  np.testing.assert_array_equal(
      federated(x, training=False), model(x, training=False)
  )
  model.save(tmp_path / 'model.keras')
  loaded = keras.models.load_model(tmp_path / 'model.keras')
  np.testing.assert_array_equal(loaded(x), model(x))
  for copy in (federated, loaded):
    found = {
        e.name: e.personal_phase.numpy()
        for e in _encodings(copy)
        if e.personal_phase is not None
    }
    assert found == {
        e.name: e.personal_phase.numpy() for e in _encodings(model)
    }


def test_an_invalid_share_is_an_error():
  model = _model('mlp4')
  with pytest.raises(ValueError, match='personal_share=2 must be'):
    tff_bn.add_position_encodings(model, personal_share=2)


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
