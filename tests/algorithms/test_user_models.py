"""Tests that models of many kinds train as with Keras, in every algorithm."""

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


@pytest.mark.parametrize('name', _cases('two_outputs'))
def test_one_client_trains_as_fit(name):
  case = user_models.MODELS[name]
  model = case.model()
  # The last batch is smaller, but not so small that rounding errors grow.
  dataset = case.dataset(1, 20, batch_size=8)
  process = algorithms.build_fed_avg(model, _SGD(_RATE, 0.9))
  training = client_rounds.Training(process, 1)
  metrics = training.next_round([dataset])['client_work']['train']

  keras_model = model.to_keras()
  case.compiled(keras_model, keras.optimizers.SGD(_RATE, 0.9))
  history = keras_model.fit(dataset, shuffle=False, verbose=0).history
  client_rounds.assert_close(
      training.weights(model), keras_model.get_weights(), 1e-6, 1e-6
  )
  losses = {
      name: weight * metrics[f'{name}_loss']
      for name, weight in (case.loss_weights or {}).items()
  }
  if losses:
    np.testing.assert_allclose(sum(losses.values()), metrics['loss'], rtol=1e-5)
  # Keras's losses of the outputs give each batch the same weight.
  names = {'loss', *model.metric_shapes} - {f'{name}_loss' for name in losses}
  assert names <= history.keys() & metrics.keys()
  for name in names:
    np.testing.assert_allclose(
        metrics[name], history[name][0], rtol=1e-5, atol=1e-6, err_msg=name
    )


def _step_of_union(model, case, weights, batches):
  """One step of SGD of Keras on all batches together, in NumPy."""
  keras_model = model.to_keras(weights)
  case.compiled(keras_model, keras.optimizers.SGD(_RATE))
  x, y = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
  keras_model.train_on_batch(x, y)
  return keras_model.get_weights()


@pytest.mark.parametrize('policy', ['float64'], indirect=True)
@pytest.mark.parametrize('name', _cases('two_outputs'))
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
  data = [tf.data.Dataset.from_tensors(batch) for batch in batches]
  expected = _step_of_union(model, case, weights, batches)
  found = process.get_model_weights(process.next(state, data).state)
  client_rounds.assert_close(
      model.from_model_weights(found), expected, 1e-8, 1e-10
  )


# Each model in one precision and with one algorithm, in turn. The tests above
# have fed_avg and fedtan in float32, and FedTAN refuses float16.
_TURNS = (
    ('mixed_bfloat16', 'fed_avg'),
    ('mixed_float16', 'fed_bn'),
    ('mixed_bfloat16', 'fedtan'),
    ('float32', 'fbn'),
    ('mixed_float16', 'fed_avg'),
    ('mixed_bfloat16', 'fed_bn'),
    ('mixed_float16', 'fbn'),
    ('float32', 'fed_bn'),
)
_COMBINATIONS = [
    (name, *_TURNS[number % len(_TURNS)])
    for number, name in enumerate(user_models.MODELS)
]
# The others are slow.
_QUICK = _COMBINATIONS[:1]


@pytest.mark.parametrize(
    ('name', 'policy', 'algorithm'),
    [
        each if each in _QUICK else pytest.param(*each, marks=pytest.mark.slow)
        for each in _COMBINATIONS
    ],
    indirect=['policy'],
)
def test_clients_without_data_change_nothing(name, policy, algorithm):
  case = user_models.MODELS[name]
  model = case.model()
  assert {layer.dtype_policy.name for layer in model.keras_model.layers} >= {
      policy
  }
  process = getattr(algorithms, f'build_{algorithm}')(model, _SGD(_RATE))
  datasets = [case.dataset(client, 6) for client in range(2)]
  empty = case.dataset(2, 4).take(0)
  results = []
  for data in (datasets, [datasets[0], empty, datasets[1]]):
    training = client_rounds.Training(process, len(data))
    before = training.weights(model)
    train = training.next_round(data)['client_work']['train']
    results.append((train, training.weights(model)))
    if training.clients:
      after = training.client_weights(model)
      results[-1] += (after[0], after[-1])
  client_rounds.assert_same(results[1], results[0])
  assert train['num_examples'] == 12
  assert all(np.all(np.isfinite(values)) for values in train.values())
  for variable, old, new in zip(model.variables, before, results[0][1]):
    assert np.all(np.isfinite(new)), variable
    assert new.dtype == old.dtype
    if variable.trainable and variable.batch_norm is None:
      # A bias before batch normalization has no gradient.
      assert np.any(new != old) or len(variable.shape) == 1, variable
