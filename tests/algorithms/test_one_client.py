"""Tests that every algorithm equals plain Keras training with one client."""

import keras
import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_STATEFUL = ['fed_bn', 'silo_bn', 'local_affine', 'single']


@pytest.mark.parametrize(
    ('name', 'problem'),
    [
        ('fed_avg', 'toy_images'),
        pytest.param('centralized', 'toy', marks=pytest.mark.slow),
        ('fed_bn', 'toy_images'),
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
  state = process.initialize()
  client = None
  if name in _STATEFUL:
    client = process.initialize_client(state)

  keras_model.compile(keras.optimizers.SGD(0.05, 0.9), problem.loss())
  for _ in range(2):
    if name != 'centralized':  # A federated client's momentum starts afresh.
      keras_model.compile(keras.optimizers.SGD(0.05, 0.9), problem.loss())
    history = keras_model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    if client is None:
      output = process.next(state, [dataset])
    else:
      output = process.next(state, [client], [dataset])
      (client,) = output.client_states
    state = output.state
    np.testing.assert_allclose(
        output.metrics['client_work']['train']['loss'],
        np.mean(history.history['loss']),
        rtol=1e-5,
    )

  if client is None:
    weights = process.get_model_weights(state)
  else:
    weights = process.get_client_model_weights(state, client)
  for found, expected in zip(
      model.from_model_weights(weights), keras_model.get_weights()
  ):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
