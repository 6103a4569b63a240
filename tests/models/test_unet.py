"""The U-Net."""

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn import layers
from tff_bn import models
from tff_bn.models.unet import build_unet


@pytest.mark.parametrize(
    ('size', 'channels', 'num_outputs'),
    [((32, 32), 1, 3), ((5, 7), 4, 1), ((4, 4), 3, 2), ((9, 6), 2, 2)],
)
def test_any_image_gives_a_map_of_its_size(size, channels, num_outputs):
  shape = (*size, channels)
  model = models.build_model_fn(
      'unet', shape, num_outputs, task='segmentation'
  )()
  assert model.output_shape == (None, *size, num_outputs)
  x = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
  assert model(x).shape == (2, *size, num_outputs)
  norms = layers.batch_norm_layers(model)
  assert sorted(norm.gamma.shape[0] for norm in norms) == sorted(
      [16, 16, 32, 32, 64, 64, 32, 32, 16, 16]
  )
  kernels = [(channels, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64)]
  kernels += [(64 + 32, 32), (32, 32), (32 + 16, 16), (16, 16)]
  num_values = sum(9 * a * b for a, b in kernels)
  num_values += sum(4 * norm.gamma.shape[0] for norm in norms)
  num_values += (16 + 1) * num_outputs
  assert model.count_params() == num_values
  assert num_values == 144 * channels + 17 * num_outputs + 118784
  assert not any(
      layer.use_bias
      for layer in model.layers
      if isinstance(layer, keras.layers.Conv2D)
  )


def test_resolutions():
  model = build_unet((9, 6, 1), 2)
  sizes = {
      layer.name: layer.output.shape[1:3]
      for layer in model.layers
      if isinstance(layer, keras.layers.ReLU)
  }
  for level, size in ((1, (9, 6)), (2, (5, 3)), (3, (3, 2))):
    assert sizes[f'down_{level}_relu_2'] == size
  for level, size in ((1, (9, 6)), (2, (5, 3))):
    assert sizes[f'up_{level}_relu_2'] == size


def test_normalization_is_between_convolution_and_relu():
  model = build_unet((4, 4, 1), 2)
  norms = layers.batch_norm_layers(model)
  for norm in norms:
    conv, relu = (
        model.get_layer(norm.name.replace('norm', kind))
        for kind in ('conv', 'relu')
    )
    assert norm.input is conv.output and relu.input is norm.output
  assert len(norms) == 10


def test_skip_connections_align_pixels():
  """What is concatenated comes from the same place of the image."""
  model = build_unet((9, 7, 1), 1, normalization='none')
  for level in (1, 2):
    a, b = model.get_layer(f'up_{level}_concat').input
    assert a is model.get_layer(f'down_{level}_relu_2').output
    # Each pixel of the coarser map is repeated in its own four pixels.
    coarse = model.get_layer(
        'down_3_relu_2' if level == 2 else 'up_2_relu_2'
    ).output
    x = np.random.default_rng(0).normal(size=(1, 9, 7, 1)).astype('f')
    fine, low = keras.Model(model.input, [b, coarse])(x)
    repeated = np.repeat(np.repeat(low, 2, axis=1), 2, axis=2)
    np.testing.assert_array_equal(
        fine, repeated[:, : fine.shape[1], : fine.shape[2]]
    )


@pytest.mark.parametrize('normalization', ['group4', 'layer', 'feature'])
def test_other_normalizations(normalization):
  model = build_unet((4, 4, 1), 2, normalization)
  assert not layers.batch_norm_layers(model)
  assert model.output_shape == (None, 4, 4, 2)


def test_wrong_tasks():
  with pytest.raises(
      ValueError,
      match='model=unet has a map: .* pixel, but task=regression needs one'
      ' vector .* use model=small_cnn',
  ):
    models.build_model_fn('unet', (8, 8, 1), 2, task='regression')
  with pytest.raises(
      ValueError,
      match='model=resnet20 has one vector .* each sample, but'
      ' task=segmentation needs a map: .* use model=unet.$',
  ):
    models.build_model_fn('resnet20', (8, 8, 1), 2, task='segmentation')
  # No model has maps of vectors.
  with pytest.raises(ValueError, match='needs a map: .* each pixel.$'):
    models.build_model_fn('tabular', (8,), 2, task='segmentation')
  with pytest.raises(
      ValueError, match=r'\(8, 3, 1\); resize by `image_size`.$'
  ):
    models.build_model_fn('unet', (8, 3, 1), 2, task='segmentation')
  with pytest.raises(
      ValueError, match="task='segmentaton' must be .*mean segmentation"
  ):
    models.build_model_fn('unet', (8, 8, 1), 2, task='segmentaton')


@pytest.mark.slow
@pytest.mark.usefixtures('in_process_runtime')
def test_federated_rounds_learn_a_mask():
  """A client's FedAvg is Keras's training; two clients learn a threshold."""
  spec = (
      tf.TensorSpec((None, 6, 5, 1), tf.float32),
      tf.TensorSpec((None, 6, 5), tf.int32),
  )
  keras.utils.set_random_seed(0)
  model = BatchNormModel(
      models.build_model_fn('unet', (6, 5, 1), 2, task='segmentation'),
      spec,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
  )
  rng = np.random.default_rng(0)
  x = rng.normal(size=(8, 6, 5, 1)).astype(np.float32)
  y = (x[..., 0] > 0).astype(np.int32)
  data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
  process = algorithms.build_fed_avg(
      model, tff.learning.optimizers.build_sgdm(0.1)
  )
  training = client_rounds.Training(process, 1)
  losses = []
  expected = model.to_keras()
  expected.compile(keras.optimizers.SGD(0.1), model.loss_fn())
  for _ in range(3):
    training.next_round([data])
    losses.append(expected.train_on_batch(x, y))
  assert losses[2] < losses[0]
  found = model.to_keras(process.get_model_weights(training.state))
  for a, b in zip(found.weights, expected.weights, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
