"""Models of keras.applications."""

import keras
import numpy as np
import pytest

from tff_bn import layers
from tff_bn.catalog import models as catalog


@pytest.mark.parametrize(
    ('name', 'num_values', 'num_norms'),
    [
        # Of 2,257,984 values in the backbone of Keras's documentation.
        ('mobilenet_v2', 2_257_984 + 1281 * 3, 52),
        pytest.param(
            'resnet50', 23_587_712 + 2049 * 3, 53, marks=pytest.mark.slow
        ),
    ],
)
def test_backbone_and_new_head(name, num_values, num_norms):
  model = catalog.MODELS[name].load()((32, 32, 3), 3)
  assert model.name == name
  assert model.count_params() == num_values
  assert model.output_shape == (None, 3)
  assert [layer.name for layer in model.layers][1:] == [
      'backbone',
      'mean',
      'logits',
  ]
  assert model.layers[-1].activation is keras.activations.linear
  norms = layers.batch_norm_layers(model)
  assert len(norms) == num_norms
  assert {type(norm) for norm in norms} == {keras.layers.BatchNormalization}
  assert {norm.momentum for norm in norms} == {0.9}
  # A saved model opens without this package.
  for layer in layers.all_layers(model):
    assert type(layer).__module__.startswith('keras.')


def test_any_channels_without_a_warning(recwarn):
  model = catalog.MODELS['mobilenet_v2'].load()((33, 40, 5), 2)
  assert model(np.zeros((1, 33, 40, 5), np.float32)).shape == (1, 2)
  assert not [w for w in recwarn if 'channels' in str(w.message)]


@pytest.mark.parametrize('name', ['mobilenet_v2', 'resnet50'])
def test_other_normalizations(name):
  with pytest.raises(
      ValueError,
      match=f'normalization=layer is impossible with model={name}, .*=batch',
  ):
    catalog.MODELS[name].load()((32, 32, 3), 3, 'layer')
