"""Tests that models of many kinds train as with Keras, in every algorithm."""

import functools

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import user_models

from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_RATE = 0.05
_SGD = tff.learning.optimizers.build_sgdm
_ALGORITHMS = ('fed_avg', 'fed_bn', 'fedtan', 'fbn')
# Keras's names of metrics that `fit` gives to the outputs.
_SEPARATOR = '_'


@pytest.fixture(name='policy')
def fixture_policy(request):
  """Lets Keras build models in a dtype policy."""
  before = keras.config.floatx(), keras.config.dtype_policy()
  if request.param == 'float64':
    keras.config.set_floatx('float64')
  keras.config.set_dtype_policy(request.param)
  yield request.param
  keras.config.set_floatx(before[0])
  keras.config.set_dtype_policy(before[1])


def _cases(*quick):
  """All models; those that are not named are slow."""
  assert set(quick) <= set(user_models.MODELS)
  return [
      name if name in quick else pytest.param(name, marks=pytest.mark.slow)
      for name in user_models.MODELS
  ]


@pytest.mark.parametrize('name', _cases('unet_dice', 'text', 'two_outputs'))
def test_one_client_trains_as_fit(name):
  case = user_models.MODELS[name]
  model = case.model()
  dataset = case.dataset(1, 10)  # The last batch is smaller.
  process = algorithms.build_fed_avg(model, _SGD(_RATE, 0.9), local_epochs=2)
  training = client_rounds.Training(process, 1)
  metrics = training.next_round([dataset])['client_work']['train']

  keras_model = model.to_keras()
  case.compiled(keras_model, keras.optimizers.SGD(_RATE, 0.9))
  history = keras_model.fit(dataset, epochs=2, shuffle=False, verbose=0).history
  client_rounds.assert_close(
      training.weights(model), keras_model.get_weights(), 1e-6, 1e-6
  )
  np.testing.assert_allclose(
      metrics['loss'], np.mean(history['loss']), rtol=1e-5
  )
  assert {'loss', 'num_examples'} < set(metrics)


def _step_of_union(model, case, weights, batches):
  """One step of SGD of Keras on all batches together, in NumPy."""
  keras_model = model.to_keras(weights)
  case.compiled(keras_model, keras.optimizers.SGD(_RATE))
  x, y = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
  keras_model.train_on_batch(x, y)
  return keras_model.get_weights()


@pytest.mark.parametrize('policy', ['float64'], indirect=True)
@pytest.mark.parametrize('name', _cases('unet_dice', 'two_outputs', 'series'))
def test_fedtan_makes_the_step_of_the_union(name, policy):
  del policy
  case = user_models.MODELS[name]
  model = case.model()
  batches = [case.arrays(client, size) for client, size in enumerate((5, 3))]
  # With masks, the numbers of values differ from the numbers of examples.
  process = algorithms.build_fedtan(
      model, _SGD(_RATE), local_steps=1, moments='fused'
  )
  state = process.initialize()
  weights = process.get_model_weights(state)
  data = [
      tf.data.Dataset.from_tensors(batch) for batch in batches
  ]
  expected = _step_of_union(model, case, weights, batches)
  found = process.get_model_weights(process.next(state, data).state)
  client_rounds.assert_close(
      model.from_model_weights(found), expected, 1e-8, 1e-10
  )
