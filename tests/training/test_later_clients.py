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


def _train(model, data, epochs=3, batch_size=8):
  with runtime.in_process_runtime():
    return later_clients.train_batch_norm(
        model,
        model.initial_weights,
        data,
        'paris',
        lambda frozen: algorithms.build_single(
            frozen, tff.learning.optimizers.build_sgdm(_RATE)
        ),
        epochs=epochs,
        batch_size=batch_size,
        seed=7,
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


def test_client_with_one_example(model):
  adapted = _train(model, _data([0, 1, 0]), epochs=2)
  for value in model.from_model_weights(adapted):
    assert np.isfinite(np.asarray(value)).all()


def test_models_without_trainable_batch_norm():
  without = small_models.classifier(
      lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]),
      (3,),
  )
  with pytest.raises(ValueError, match='no batch normalization with trainable'):
    later_clients.batch_norm_only(without, without.initial_weights)


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
