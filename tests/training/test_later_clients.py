"""Models for clients that join later, against NumPy and plain Keras."""

import keras
import numpy as np
import pytest
import small_models
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import data as tff_bn_data
from tff_bn import runtime
from tff_bn.data import dataset as dataset_lib
from tff_bn.keras_model.partition import Role
from tff_bn.training import evaluation
from tff_bn.training import later_clients

_RATE = 0.1
_BATCH_NORM = (
    *(Role.SCALE, Role.SHIFT),
    *(Role.MOVING_MEAN, Role.MOVING_VARIANCE),
)


def _keras_model():
  return keras.Sequential(
      [
          keras.Input((6, 6, 1)),
          keras.layers.Conv2D(4, 3),
          keras.layers.BatchNormalization(momentum=0.8),
          keras.layers.ReLU(),
          keras.layers.Flatten(),
          keras.layers.BatchNormalization(momentum=0.8),
          keras.layers.Dense(3),
      ]
  )


@pytest.fixture(scope='module')
def model():
  return small_models.classifier(
      _keras_model,
      (6, 6, 1),
      metrics_fn=lambda: [keras.metrics.SparseCategoricalAccuracy('accuracy')],
  )


def _data(counts):
  """A client with this many training samples of each class."""
  rng = np.random.default_rng(5)
  labels = np.repeat(np.arange(3), counts)
  x = rng.normal(labels[:, None, None, None], 1, (len(labels), 6, 6, 1))
  x = x.astype(np.float32)
  dataset = dataset_lib.Dataset('later', x, labels, x[:0], labels[:0], 3)
  indices = {'paris': np.arange(len(labels))}
  return tff_bn_data.FederatedData(dataset, indices, {'paris': []})


_SETTINGS = dict(batch_size=8, seed=7)


def _start(model, data, client='paris'):
  return later_clients.own_statistics(
      model, model.initial_weights, data, client, **_SETTINGS
  )


def _training(model):
  return later_clients.BatchNormTraining(
      model,
      model.initial_weights,
      lambda frozen: algorithms.build_single(
          frozen, tff.learning.optimizers.build_sgdm(_RATE)
      ),
  )


def _train(model, data, epochs=3):
  with runtime.in_process_runtime():
    return _training(model).train(
        _start(model, data), data, 'paris', epochs=epochs, **_SETTINGS
    )


def _batches(data, epoch):
  return data.client_dataset(
      ['paris'], seed=7, round_num=epoch, batch_size=8, local_epochs=1
  )


def test_training_is_that_of_keras_with_frozen_layers(model):
  data = _data([7, 9, 5])
  adapted = _train(model, data)
  start = evaluation.reestimate_batch_norm_statistics(
      model, model.initial_weights, _batches(data, 0)
  )
  expected = model.to_keras(start)
  for layer in expected.layers:
    if not isinstance(layer, keras.layers.BatchNormalization):
      layer.trainable = False
  expected.compile(
      keras.optimizers.SGD(_RATE),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )
  for epoch in (1, 2, 3):
    expected.fit(_batches(data, epoch), shuffle=False, verbose=0)
  initial = model.from_model_weights(model.initial_weights)
  for info, old, new, value in zip(
      model.variables,
      initial,
      model.from_model_weights(adapted),
      expected.get_weights(),
      strict=True,
  ):
    np.testing.assert_allclose(new, value, rtol=2e-4, atol=1e-5)
    if info.role in _BATCH_NORM:
      assert (np.asarray(new) != np.asarray(old)).all(), info.name
    else:
      assert np.asarray(new).tobytes() == np.asarray(old).tobytes()


def test_one_training_serves_all_clients(model):
  """The second client's model does not depend on the first one's."""
  data = _data([7, 9, 5])
  names = ['paris', 'oslo']
  indices = dict(zip(names, (np.arange(12), np.arange(8, 21))))
  data = tff_bn_data.FederatedData(
      data.dataset, indices, {name: [] for name in names}
  )
  with runtime.in_process_runtime():
    training = _training(model)
    shared = [
        training.train(
            _start(model, data, name), data, name, epochs=2, **_SETTINGS
        )
        for name in names
    ]
    alone = _training(model).train(
        _start(model, data, 'oslo'), data, 'oslo', epochs=2, **_SETTINGS
    )
  paris, oslo, expected = map(model.from_model_weights, [*shared, alone])
  np.testing.assert_equal(list(oslo), list(expected))
  # Both trained from their own statistics.
  assert (np.asarray(paris[2]) != np.asarray(oslo[2])).all()


def test_other_frozen_weights(model):
  other = list(model.from_model_weights(model.initial_weights))
  other[0] = other[0] + 1
  data = _data([7, 9, 5])
  with runtime.in_process_runtime():
    training = _training(model)
  weights = model.to_model_weights(other)
  with pytest.raises(ValueError, match='Outside of batch normalization'):
    training.train(weights, data, 'paris', epochs=1, **_SETTINGS)


def test_client_with_one_example():
  """Its pictures have a variance, its vectors have none."""

  def keras_model():
    layers = _keras_model().layers
    return keras.Sequential([*layers[:4], keras.layers.Dense(3)])

  convolution = small_models.classifier(keras_model, (6, 6, 1))
  adapted = _train(convolution, _data([0, 1, 0]), epochs=2)
  for value in convolution.from_model_weights(adapted):
    assert np.isfinite(np.asarray(value)).all()


def test_client_whose_samples_have_no_variance(model):
  with pytest.raises(ValueError, match="do not vary in .*'paris' .*: 1"):
    _start(model, _data([0, 1, 0]))


@pytest.mark.parametrize(
    'layer',
    [
        keras.layers.ReLU(),
        keras.layers.BatchNormalization(trainable=False),
        keras.layers.BatchNormalization(center=False, scale=False),
    ],
)
def test_models_without_trainable_batch_norm(layer):
  def keras_model():
    copy = type(layer).from_config(layer.get_config())
    return keras.Sequential([keras.Input((3,)), copy, keras.layers.Dense(2)])

  without = small_models.classifier(keras_model, (3,))
  with pytest.raises(ValueError, match='no batch normalization with trainable'):
    later_clients.check_trainable(without)
  with pytest.raises(ValueError, match='no batch normalization with trainable'):
    later_clients.batch_norm_only(without, without.initial_weights)


def test_models_with_trainable_batch_norm(model):
  later_clients.check_trainable(model)


def test_statistics_of_balanced_classes_have_a_closed_form(model):
  """Each class counts alike: the mean of means, the law of total variance."""
  data = _data([2, 8, 4])
  balanced = tff_bn_data.with_balanced_classes(data, seed=0)
  found = evaluation.reestimate_batch_norm_statistics(
      model, model.initial_weights, _batches(balanced, 0)
  )
  keras_model = model.to_keras(model.initial_weights)
  x, y = data.dataset.x_train, data.dataset.y_train
  features = keras.ops.convert_to_numpy(keras_model.layers[0](x))
  by_class = [
      features[y == label].reshape(-1, 4).astype(np.float64)
      for label in range(3)
  ]
  means = np.stack([values.mean(axis=0) for values in by_class])
  variances = np.stack([values.var(axis=0) for values in by_class])
  values = dict(
      zip(
          [(info.role, info.batch_norm) for info in model.variables],
          model.from_model_weights(found),
      )
  )
  np.testing.assert_allclose(
      values[Role.MOVING_MEAN, 0], means.mean(axis=0), rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(
      values[Role.MOVING_VARIANCE, 0],
      variances.mean(axis=0) + means.var(axis=0),
      rtol=1e-5,
  )


def test_balanced_classes_give_the_first_layer_the_mean_over_classes(model):
  """Balanced Batch Normalization: each class counts alike (pFedBBN)."""
  data = _data([12, 3, 6])
  balanced = tff_bn_data.with_balanced_classes(data, seed=0)
  adapted = model.to_keras(_start(model, balanced))
  convolution, norm, *_ = adapted.layers
  values = convolution(data.dataset.x_train).numpy().astype(np.float64)
  of_classes = [
      values[data.dataset.y_train == label].reshape(-1, 4) for label in range(3)
  ]
  means = np.array([x.mean(0) for x in of_classes])
  variances = np.array([x.var(0) for x in of_classes])
  mean = means.mean(0)
  # The variance within the classes, and between them.
  variance = (variances + (means - mean) ** 2).mean(0)
  np.testing.assert_allclose(norm.moving_mean, mean, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(norm.moving_variance, variance, rtol=1e-5)
  plain = model.to_keras(_start(model, data)).layers[1]
  assert not np.allclose(plain.moving_mean, mean, rtol=1e-2)
