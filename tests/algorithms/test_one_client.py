"""Tests that every algorithm equals plain Keras training with one client."""

import client_rounds
import fedtan_models
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms

layers = keras.layers

pytestmark = pytest.mark.usefixtures('in_process_runtime')


@pytest.mark.parametrize(
    ('name', 'problem'),
    [
        ('fed_avg', 'toy_images'),
        pytest.param('centralized', 'toy', marks=pytest.mark.slow),
        pytest.param('fed_bn', 'toy_images', marks=pytest.mark.slow),
        pytest.param('silo_bn', 'toy', marks=pytest.mark.slow),
        pytest.param('local_affine', 'toy', marks=pytest.mark.slow),
        pytest.param('single', 'toy', marks=pytest.mark.slow),
    ],
)
def test_equals_keras_fit(name, problem, request):
  problem = request.getfixturevalue(problem)
  problem.dtype = 'float32'
  model = problem.model()
  keras_model = model.to_keras()
  dataset = problem.dataset(40, seed=5)
  process = getattr(algorithms, f'build_{name}')(
      model, tff.learning.optimizers.build_sgdm(0.05, 0.9), local_epochs=2
  )
  training = client_rounds.Training(process, 1)

  keras_model.compile(keras.optimizers.SGD(0.05, 0.9), problem.loss())
  for _ in range(2):
    if name != 'centralized':  # A federated client's momentum starts afresh.
      keras_model.compile(keras.optimizers.SGD(0.05, 0.9), problem.loss())
    history = keras_model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    metrics = training.next_round([dataset])
    np.testing.assert_allclose(
        metrics['client_work']['train']['loss'],
        np.mean(history.history['loss']),
        rtol=1e-5,
    )

  weights = training.weights(model)
  if training.clients:
    (weights,) = training.client_weights(model)
  client_rounds.assert_close(weights, keras_model.get_weights(), 1e-5, 1e-5)


def _siamese():
  """One network with batch normalization, called on two inputs."""
  twin = keras.Sequential(
      [
          layers.Dense(5),
          layers.BatchNormalization(momentum=0.7),
          layers.ReLU(),
      ]
  )
  left, right = keras.Input((4,)), keras.Input((4,))
  x = layers.Concatenate()([twin(left), twin(right)])
  return keras.Model([left, right], layers.Dense(3)(x))


def _each_step():
  norm = layers.BatchNormalization(momentum=0.7)
  inputs = keras.Input((5, 3))
  x = layers.TimeDistributed(layers.Dense(4))(inputs)
  x = layers.TimeDistributed(norm)(x)
  return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


_PAIR = (fedtan_models.Values((4,)), fedtan_models.Values((4,)))
_SERIES = fedtan_models.Values((5, 3))


@pytest.mark.parametrize(
    'case',
    [
        pytest.param(fedtan_models.Case(_siamese, _PAIR), id='siamese'),
        pytest.param(
            fedtan_models.CASES['masking'], id='masks', marks=pytest.mark.slow
        ),
        pytest.param(
            fedtan_models.Case(_each_step, _SERIES),
            id='time_distributed',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_repeated_and_masked_batch_norm_equals_keras_fit(case):
  model = case.model()
  keras_model = model.to_keras()
  dataset = tf.data.Dataset.from_tensor_slices(case.batch(1, 20)).batch(8)
  process = algorithms.build_fed_avg(
      model, tff.learning.optimizers.build_sgdm(0.05, 0.9), local_epochs=2
  )
  training = client_rounds.Training(process, 1)
  training.next_round([dataset])
  keras_model.compile(keras.optimizers.SGD(0.05, 0.9), case.loss_fn())
  keras_model.fit(dataset, epochs=2, shuffle=False, verbose=0)
  client_rounds.assert_close(
      training.weights(model), keras_model.get_weights(), 1e-6, 1e-6
  )
