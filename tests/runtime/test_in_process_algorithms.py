"""Tests that algorithms compute the same in process as in TFF's runtime."""

import builders
import comparison
import keras
import numpy as np
import pytest
import tensorflow_federated as tff
import tff_models

from tff_bn import algorithms
from tff_bn.processes.stateful_process import StatefulLearningProcess

_SIZES = (20, 7, 13)
_SGD = tff.learning.optimizers.build_sgdm
_RTOL = {'float32': 1e-5, 'float64': 1e-12}


def _train(context, process, datasets, num_rounds):
  """Returns all outputs; the last two are the weights before and after."""
  is_stateful = isinstance(process, StatefulLearningProcess)

  def weights():
    if is_stateful:
      return process.get_client_model_weights(state, client_states[-1])
    return process.get_model_weights(state)

  with tff.framework.get_context_stack().install(context):
    state = process.initialize()
    outputs = [state]
    if is_stateful:
      client_states = [
          process.personalize(process.initialize_client(state), number)
          for number in range(len(datasets))
      ]
      outputs.append(client_states)
    before = weights()
    for _ in range(num_rounds):
      if is_stateful:
        output = process.next(state, client_states, datasets)
        client_states = output.client_states
      else:
        output = process.next(state, datasets)
      state = output.state
      outputs.append(output)
    outputs += [process.get_model_weights(state), before, weights()]
  return outputs


def _assert_trained(outputs):
  """Without training, all runtimes would agree trivially."""
  before, after = (comparison.leaves(o.trainable) for o in outputs[-2:])
  assert all(np.all(np.isfinite(value)) for value in after)
  assert any(np.any(a != b) for a, b in zip(before, after))


def _datasets(problem, name=''):
  sizes = _SIZES[:1] if name == 'build_centralized' else _SIZES
  return [problem.dataset(size, seed) for seed, size in enumerate(sizes)]


# With FedTAN below, their rounds are the most different computations.
_QUICK = ('build_fed_bn', 'build_fbn', 'build_scaffold')
_ON_IMAGES = (
    *('build_fed_avg', 'build_fbn', 'build_hbn'),
    'build_moon',
)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow)
        for n in builders.WITH_DIFFERENT_ROUNDS
    ],
)
def test_algorithm_of_this_package(
    name, toy, toy_images, in_process_context, native_context
):
  problem = toy_images if name in _ON_IMAGES else toy
  # SCAFFOLD refuses momentum.
  momentum = None if 'scaffold' in name else 0.5
  process = builders.build(name, problem.model_for(name), _SGD(0.1, momentum))
  _compare(
      process,
      _datasets(problem, name),
      _RTOL[problem.dtype],
      (in_process_context, native_context),
      # Some have a second phase.
      num_rounds=2 if name in (*_QUICK, *builders.REQUIRED) else 1,
  )


def _compare(process, data, rtol, contexts, num_rounds=2):
  found, expected = (
      _train(context, process, data, num_rounds) for context in contexts
  )
  _assert_trained(found)
  comparison.assert_equal(found, expected, rtol, same_leaf_types=True)


@pytest.mark.slow
def test_fedtan_with_frozen_layers(toy, in_process_context, native_context):
  def keras_model():
    layers = [
        keras.layers.Dense(6, dtype=toy.dtype, trainable=False),
        keras.layers.BatchNormalization(dtype=toy.dtype, trainable=False),
        keras.layers.Dense(5, dtype=toy.dtype),
        keras.layers.BatchNormalization(dtype=toy.dtype),
        keras.layers.Dense(3, dtype=toy.dtype),
    ]
    return keras.Sequential([keras.Input((4,), dtype=toy.dtype), *layers])

  model = toy.model(keras_model)
  assert len(model.constants) == 6
  process = algorithms.build_fedtan(model, _SGD(0.1), local_steps=2)
  _compare(
      process,
      _datasets(toy),
      _RTOL[toy.dtype],
      (in_process_context, native_context),
  )


def _fixed_clipping():
  return tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
      noise_multiplier=0.0, clients_per_round=3, clip=0.05
  )


_LEARNING = tff.learning.algorithms
_ITERATOR = tff.learning.LoopImplementation.DATASET_ITERATOR
_TFF_ALGORITHMS = {
    'weighted_fed_avg': lambda: _LEARNING.build_weighted_fed_avg(
        tff_models.VariableModel, _SGD(0.1)
    ),
    'fed_adam': lambda: _LEARNING.build_weighted_fed_avg(
        tff_models.VariableModel,
        _SGD(0.1),
        tff.learning.optimizers.build_adam(0.01),
        loop_implementation=_ITERATOR,
    ),
    'weighted_fed_prox': lambda: _LEARNING.build_weighted_fed_prox(
        tff_models.VariableModel,
        proximal_strength=0.5,
        client_optimizer_fn=_SGD(0.1),
    ),
    'fed_sgd': lambda: _LEARNING.build_fed_sgd(
        tff_models.VariableModel, _SGD(0.1)
    ),
    'robust_aggregator': lambda: _LEARNING.build_weighted_fed_avg(
        tff_models.VariableModel,
        _SGD(0.1),
        model_aggregator=tff.learning.robust_aggregator(),
    ),
    'differential_privacy': lambda: _LEARNING.build_unweighted_fed_avg(
        tff_models.VariableModel,
        _SGD(0.1),
        model_aggregator=_fixed_clipping(),
    ),
}


@pytest.fixture
def tff_problem(toy):
  toy.dtype = 'float32'
  return toy


@pytest.mark.parametrize(
    'name',
    [
        n
        if n == 'robust_aggregator'
        else pytest.param(n, marks=pytest.mark.slow)
        for n in _TFF_ALGORITHMS
    ],
)
def test_algorithm_of_tff(
    name, tff_problem, in_process_context, native_context
):
  _compare(
      _TFF_ALGORITHMS[name](),
      _datasets(tff_problem),
      1e-5,
      (in_process_context, native_context),
      num_rounds=1,
  )


def test_evaluation_of_tff(tff_problem, in_process_context, native_context):
  process = _LEARNING.build_fed_eval(tff_models.VariableModel)
  data = _datasets(tff_problem)
  x, y = (
      np.concatenate(arrays)
      for arrays in zip(
          *(tff_problem.arrays(n, seed) for seed, n in enumerate(_SIZES))
      )
  )
  weights = tff_models.build_weights(seed=2)

  outputs = []
  for context in (in_process_context, native_context):
    with tff.framework.get_context_stack().install(context):
      state = process.set_model_weights(
          process.initialize(),
          tff.learning.models.ModelWeights(weights, []),
      )
      outputs.append(process.next(state, data))
  comparison.assert_equal(*outputs, 1e-5, same_leaf_types=True)
  metrics = outputs[0].metrics['client_work']['eval']['current_round_metrics']
  logits = tff_models.compute_logits(weights, x)
  np.testing.assert_allclose(
      metrics['accuracy'], np.mean(np.argmax(logits, 1) == y), rtol=1e-6
  )
  np.testing.assert_allclose(
      metrics['loss'], tff_models.compute_loss(logits, y), rtol=1e-5
  )
  assert metrics['num_examples'] == sum(_SIZES)


@pytest.mark.slow
def test_compression(tff_problem, in_process_context):
  """Random rounding changes the weights only a little."""

  def weights(**kwargs):
    process = _LEARNING.build_weighted_fed_avg(
        tff_models.VariableModel, _SGD(0.1), **kwargs
    )
    outputs = _train(in_process_context, process, _datasets(tff_problem), 1)
    _assert_trained(outputs)
    return outputs[-1].trainable

  expected = weights(model_aggregator=tff.learning.robust_aggregator())
  compressed = weights(model_aggregator=tff.learning.compression_aggregator())
  for found, truth in zip(compressed, expected):
    np.testing.assert_allclose(found, truth, atol=0.02)


def test_noise_of_differential_privacy(in_process_context):
  factory = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
      noise_multiplier=2.0, clients_per_round=4, clip=3.0
  )
  size = 20_000
  process = factory.create(tff.TensorType(np.float32, [size]))
  state = comparison.invoke(in_process_context, process.initialize)
  values = [np.zeros([size], np.float32)] * 4
  results = [
      comparison.invoke(in_process_context, process.next, state, values).result
      for _ in range(2)
  ]
  for noise in results:
    # Noise of 2 × 3 in the sum, divided by the number of clients.
    np.testing.assert_allclose(np.std(noise), 1.5, rtol=0.05)
    np.testing.assert_allclose(np.mean(noise), 0, atol=0.06)
  assert np.any(results[0] != results[1])
