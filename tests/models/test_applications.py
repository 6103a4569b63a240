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


@pytest.mark.parametrize(
    ('normalization', 'kind', 'config'),
    [
        ('group8', keras.layers.GroupNormalization, {'groups': 8}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ('layer', keras.layers.LayerNormalization, {}),
                (
                    'batch_renorm',
                    layers.BatchRenormalization,
                    {'momentum': 0.9},
                ),
            )
        ),
    ],
)
def test_other_normalizations(normalization, kind, config):
  model = catalog.MODELS['mobilenet_v2'].load()((32, 32, 3), 3, normalization)
  norms = [x for x in layers.all_layers(model) if isinstance(x, kind)]
  assert len(norms) == 52
  expected = {'epsilon': 1e-3, **config}
  for norm in norms:
    assert {key: norm.get_config()[key] for key in expected} == expected
  # Scale and shift, but no running statistics.
  if normalization != 'batch_renorm':
    assert not layers.batch_norm_layers(model)
    num_channels = sum(norm.gamma.shape[0] for norm in norms)
    assert model.count_params() == 2_257_984 + 1281 * 3 - 2 * num_channels
    # Each example is normalized by itself.
    x = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
    np.testing.assert_allclose(
        model(x, training=True)[:1], model(x[:1], training=True), atol=1e-4
    )


@pytest.mark.parametrize('name', ['mobilenet_v2', 'resnet50'])
@pytest.mark.parametrize(
    'normalization', ['weight_standardization', 'static_batch', 'none']
)
def test_impossible_normalizations(name, normalization):
  with pytest.raises(
      ValueError,
      match=f'normalization={normalization} is impossible with model={name}, .*'
      r'use normalization=batch, layer, batch_renorm or group<N>\.',
  ):
    catalog.MODELS[name].load()((32, 32, 3), 3, normalization)


def test_groups_that_do_not_divide_the_channels():
  with pytest.raises(
      ValueError,
      match='normalization=group16 is impossible with model=mobilenet_v2: 16'
      ' does not divide the channels of every layer; the largest number of'
      ' groups is 8.',
  ):
    catalog.MODELS['mobilenet_v2'].load()((32, 32, 3), 3, 'group16')
