"""The convolutional network for series."""

import client_rounds
import keras
import numpy as np
import pytest
import small_models
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import layers
from tff_bn import models


@pytest.mark.parametrize(
    ('steps', 'features', 'num_outputs'), [(50, 6, 3), (1, 1, 2), (7, 2, 5)]
)
def test_any_series(steps, features, num_outputs):
  model = models.build_model_fn('conv1d', (steps, features), num_outputs)()
  assert model.output_shape == (None, num_outputs)
  norms = layers.batch_norm_layers(model)
  assert [norm.gamma.shape[0] for norm in norms] == [32, 64, 64]
  num_values = 5 * (features * 32 + 32 * 64 + 64 * 64) + 4 * (32 + 64 + 64)
  num_values += (64 + 1) * num_outputs
  assert model.count_params() == num_values
  assert num_values == 160 * features + 65 * num_outputs + 31360
  lengths = [
      layer.output.shape[1]
      for layer in model.layers
      if isinstance(layer, keras.layers.ReLU)
  ]
  assert lengths == [steps, -(-steps // 2), -(-steps // 4)]


def test_logits_are_of_the_mean_over_time():
  model = models.build_model_fn('conv1d', (8, 2), 3)()
  last = model.get_layer('logits')
  x = np.random.default_rng(0).normal(size=(2, 8, 2)).astype(np.float32)
  features = keras.Model(model.input, model.get_layer('relu_3').output)(x)
  np.testing.assert_allclose(
      model(x), np.mean(features, axis=1) @ last.kernel + last.bias, atol=1e-6
  )


def test_other_normalizations():
  for normalization, kind in (
      ('group2', keras.layers.GroupNormalization),
      ('layer', keras.layers.LayerNormalization),
      ('weight_standardization', layers.WeightStandardizedConv1D),
      ('none', None),
  ):
    model = models.build_model_fn('conv1d', (8, 2), 3, normalization)()
    found = [x for x in model.layers if kind and isinstance(x, kind)]
    assert len(found) == (3 if kind else 0)
    has_bias = normalization in ('weight_standardization', 'none')
    assert model.get_layer('conv_1').use_bias == has_bias


@pytest.mark.parametrize('shape', [(8, 8, 1), (8,)])
def test_other_samples(shape):
  with pytest.raises(
      ValueError,
      match=rf'model=conv1d needs series as \[steps, features\], but .* shape'
      rf' \({shape[0]},.*; use model=',
  ):
    models.build_model_fn('conv1d', shape, 2)


@pytest.mark.slow
@pytest.mark.usefixtures('in_process_runtime')
@pytest.mark.parametrize(
    ('name', 'shape'),
    [
        ('conv1d', (9, 3)),
        pytest.param('tabular', (6,), marks=pytest.mark.slow),
    ],
)
def test_fedtan_is_a_step_on_the_union(name, shape):
  keras.utils.set_random_seed(0)
  model = small_models.classifier(models.build_model_fn(name, shape, 3), shape)
  rng = np.random.default_rng(0)
  x = [
      (rng.normal(k, 1 + k, size=(8, *shape))).astype(np.float32)
      for k in range(2)
  ]
  y = [rng.integers(0, 3, 8).astype(np.int32) for _ in range(2)]
  data = [
      tf.data.Dataset.from_tensor_slices(pair).batch(8) for pair in zip(x, y)
  ]
  process = algorithms.build_fedtan(
      model, tff.learning.optimizers.build_sgdm(0.1)
  )
  training = client_rounds.Training(process, 2)
  training.next_round(data)
  expected = model.to_keras()
  expected.compile(keras.optimizers.SGD(0.1), model.loss_fn())
  expected.train_on_batch(np.concatenate(x), np.concatenate(y))
  found = model.to_keras(process.get_model_weights(training.state))
  for a, b in zip(found.weights, expected.weights, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
