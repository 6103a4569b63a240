"""Tests that every algorithm equals plain Keras training with one client."""

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn import algorithms

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
