"""Tests of HBN, hybrid batch normalization."""

import functools

import client_rounds
import hybrid_models
import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import toy_problem

import tff_bn
from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn import analysis
from tff_bn import partition
from tff_bn.layers import HybridBatchNormalization
from tff_bn.layers import batch_norm_layers

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_THETA, _MEAN, _VARIANCE = (
    hybrid_models.THETA,
    hybrid_models.MEAN,
    hybrid_models.VARIANCE,
)
_SIZES = (20, 7, 1)


def _build(model, **options):
  return algorithms.build_hbn(model, _SGD(0.1), **options)


def _process(**options):
  """Returns a model and a process, which tests share."""
  return client_rounds.toy_process('build_hbn', **options)


def _truth(model, num_clients=3, rate=0.002):
  weights = model.from_model_weights(model.initial_weights)
  return hybrid_models.Truth(weights, num_clients, rate)


def _assert_equals(training, model, truth, rtol=1e-10):
  client_rounds.assert_close(training.weights(model), truth.weights, rtol)
  for k, weights in enumerate(training.client_weights(model)):
    client_rounds.assert_close(weights, truth.client(k), rtol)


def test_rounds_equal_numpy(toy):
  """Several steps, unequal clients, one of them with one example."""
  model, process = _process(statistics_rate=0.5)
  training = client_rounds.Training(process, len(_SIZES))
  truth = _truth(model, rate=0.5)
  for round_num in range(6):
    seeds = [3 * round_num + k for k in range(len(_SIZES))]
    training.next_round(client_rounds.datasets(toy, _SIZES, seeds))
    truth.round(client_rounds.batches(toy, _SIZES, seeds))
    _assert_equals(training, model, truth)
  assert all(np.all(theta != 0) for theta in truth.thetas[:2])


def test_partial_participation_equals_numpy(toy):
  """With the paper's rate, which is the default."""
  model, process = _process()
  training = client_rounds.Training(process, 3)
  truth = _truth(model)
  data = client_rounds.datasets(toy, _SIZES)
  batches = client_rounds.batches(toy, _SIZES)
  for sampled in ([0, 1], [2], [1, 2], [0, 1, 2]):
    before = list(training.clients)
    training.next_round(data, sampled)
    truth.round([batches[k] for k in sampled], sampled)
    _assert_equals(training, model, truth)
    for k in set(range(3)) - set(sampled):
      client_rounds.assert_same(training.clients[k], before[k])


@pytest.mark.parametrize(
    ('steps', 'epochs'), [(2, 1), pytest.param(None, 2, marks=pytest.mark.slow)]
)
def test_the_pass_covers_the_batches_of_the_round(toy, steps, epochs):
  model, process = _process(local_steps=steps, local_epochs=epochs)
  training = client_rounds.Training(process, len(_SIZES))
  truth = _truth(model)
  batches = [
      (client * epochs)[:steps] for client in client_rounds.batches(toy, _SIZES)
  ]
  for _ in range(2):
    training.next_round(client_rounds.datasets(toy, _SIZES))
    truth.round(batches)
  _assert_equals(training, model, truth)


def test_clients_without_data_and_dropped_ones_do_not_count(toy):
  model, process = _process()
  training = client_rounds.Training(process, 5)
  truth = _truth(model, 5)
  data = client_rounds.datasets(toy, _SIZES)
  batches = client_rounds.batches(toy, _SIZES)
  for _ in range(2):
    metrics = training.next_round(
        data + client_rounds.datasets_without_update(toy)
    )
    truth.round(batches)
    assert metrics['client_work']['num_dropped_clients'] == 1
    assert metrics['client_work']['num_participants'] == 3
  _assert_equals(training, model, truth)


def test_a_round_without_any_values_changes_nothing(toy):
  model, process = _process()
  empty, poisoned = client_rounds.datasets_without_update(toy)
  for data in ([empty, empty], [poisoned]):
    training = client_rounds.Training(process, len(data))
    before = training.weights(model), training.clients
    evaluated = process.evaluation_state(training.state, training.clients, data)
    client_rounds.assert_same(
        model.from_model_weights(process.get_model_weights(evaluated)),
        before[0],
    )
    training.next_round(data)
    client_rounds.assert_same(
        (training.weights(model), training.clients), before
    )


def test_evaluation_has_the_statistics_of_all_values(toy):
  # The pass covers all batches, unlike the training.
  model, process = _process(local_steps=2, local_epochs=1)
  training = client_rounds.Training(process, len(_SIZES))
  data = client_rounds.datasets(toy, _SIZES)
  for _ in range(3):
    training.next_round(data)
  before = training.weights(model)
  evaluated = process.evaluation_state(training.state, training.clients, data)
  found = model.from_model_weights(process.get_model_weights(evaluated))
  values = np.concatenate([toy.arrays(n, k)[0] for k, n in enumerate(_SIZES)])
  values = values @ before[0] + before[1]
  expected = list(before)
  expected[_MEAN] = values.mean(0)
  expected[_VARIANCE] = values.var(0, ddof=1)
  client_rounds.assert_close(found, expected)
  # Nothing else differs, and training can go on with either state.
  for name in ('client_work', 'aggregator', 'finalizer'):
    client_rounds.assert_same(
        getattr(evaluated, name), getattr(training.state, name)
    )
  for client in training.clients:
    own = model.from_model_weights(
        process.get_client_model_weights(evaluated, client)
    )
    client_rounds.assert_same(own[_THETA], list(client.values())[0])
    own[_THETA] = found[_THETA]
    client_rounds.assert_same(own, found)


@pytest.mark.parametrize('computation', ['next', 'evaluation_state'])
def test_the_shares_are_in_no_value_of_the_server(computation):
  _, process = _process()
  signature = getattr(process, computation).type_signature
  client_type = process.initialize_client.type_signature.result
  assert str(client_type) == f'<mixing_{_THETA}=float64[5]>'
  assert signature.parameter[1].member == client_type
  names = list(client_rounds.names_at_server(signature))
  assert 'round_num' in names
  assert not any('mixing' in n for n in names)


def test_no_share_is_sent():
  """The tensors of a round: a model without shares in both directions."""
  _, process = _process()
  messages = analysis.messages(process.next)
  assert {m.exchange for m in messages} == {1}
  sent = [
      m.shape
      for m in messages
      if m.direction.value == 'up' and not m.metrics_only and m.shape
  ]
  # Kernels, biases, scale and shift; mean and variance.
  assert sorted(sent) == sorted(
      [(4, 5), (5,), (5,), (5,), (5, 3), (3,), (5,), (5,)]
  )
  _, fed_avg = client_rounds.toy_process('build_fed_avg')
  assert analysis.ProcessTraffic(process).until(
      1, 3
  ) == analysis.ProcessTraffic(fed_avg).until(1, 3)


def test_partitions_of_the_share():
  local = [
      p.name
      for p in (
          *(partition.FEDAVG, partition.FEDBN, partition.SILOBN),
          *(partition.LOCAL_AFFINE, partition.HBN, partition.SINGLE),
      )
      if p.is_local(partition.Role.MIXING)
  ]
  assert local == ['fedbn', 'local_affine', 'hbn', 'single']


@pytest.mark.slow
def test_robust_rule_for_the_statistics(toy):
  """The rule replaces both means, and the counts are added up."""
  model, process = _process(
      statistics_aggregator=aggregators.CoordinateMedian(), statistics_rate=1.0
  )
  assert {m.exchange for m in analysis.messages(process.next)} == {1}
  training = client_rounds.Training(process, 3)
  w1, b1 = training.weights(model)[:2]
  sizes = (20, 7, 9)
  inputs = [toy.arrays(n, k)[0] @ w1 + b1 for k, n in enumerate(sizes)]
  training.next_round(client_rounds.datasets(toy, sizes))
  means = np.array([z.mean(0) for z in inputs])
  mean = np.median(means, axis=0)
  variance = np.median([z.var(0) for z in inputs], axis=0)
  variance += np.median((means - mean) ** 2, axis=0)
  n = sum(sizes)
  found = training.weights(model)
  client_rounds.assert_close(
      [found[_MEAN], found[_VARIANCE]], [mean, variance * n / (n - 1)]
  )


def test_other_weights_and_server_optimizers_move_no_statistics(toy):
  data = client_rounds.datasets(toy, _SIZES)
  model, plain = _process()
  _, process = _process(
      server_optimizer=_SGD(0.5, 0.9), client_weighting='uniform'
  )
  expected, found = (
      client_rounds.run(p, data, 1).weights(model) for p in (plain, process)
  )
  assert np.any(found[0] != expected[0])
  client_rounds.assert_same(
      found[_MEAN : _VARIANCE + 1], expected[_MEAN : _VARIANCE + 1]
  )


@pytest.mark.parametrize(
    'name',
    [
        'build_fed_bs',
        pytest.param('build_moon', marks=pytest.mark.slow),
        pytest.param('build_scaffold', marks=pytest.mark.slow),
        pytest.param('build_fed_nova', marks=pytest.mark.slow),
        pytest.param('build_fed_dyn', marks=pytest.mark.slow),
    ],
)
def test_corrections_of_drift(toy, name):
  """The statistics do not depend on the correction."""
  data = client_rounds.datasets(toy, _SIZES)
  _, plain = _process()
  model, process = client_rounds.toy_process(
      name, build_process=algorithms.build_hbn
  )
  assert process.evaluation_state is not None
  expected = client_rounds.run(plain, data, 1).weights(model)
  training = client_rounds.run(process, data, 1)
  client_rounds.assert_close(
      training.weights(model)[_MEAN : _VARIANCE + 1],
      expected[_MEAN : _VARIANCE + 1],
  )
  training.next_round(data)
  assert all(np.isfinite(w).all() for w in training.weights(model))
  assert np.all(training.clients[0][f'mixing_{_THETA}'] != 0)


def test_plain_layers_are_an_error():
  message = (
      "layer 'norm' of the model .* is a BatchNormalization. .*"
      "convert_batch_norm.*to='hybrid'"
  )
  with pytest.raises(ValueError, match=message):
    _build(client_rounds.toy_model())


def test_a_model_without_batch_normalization_is_an_error(toy):
  def dense():
    inputs = keras.Input((4,), dtype='float64')
    return keras.Model(inputs, keras.layers.Dense(3, dtype='float64')(inputs))

  with pytest.raises(ValueError, match='HBN .* has no trainable layer'):
    _build(toy.model(dense))


def test_wrong_statistics_aggregator():
  with pytest.raises(TypeError, match='of HBN must be a .*Rule'):
    _build(
        client_rounds.toy_model('build_hbn'),
        statistics_aggregator=aggregators.PooledMomentsFactory(),
    )


@pytest.mark.parametrize(
    'name',
    [
        *('centralized', 'fed_avg', 'fed_bn', 'silo_bn', 'local_affine'),
        *('fbn', 'fixbn', 'dsgd', 'fedtan'),
    ],
)
def test_other_algorithms_refuse_hybrid_layers(name):
  message = 'HybridBatchNormalization'
  if name != 'fedtan':
    message = f'Only HBN .* {message}'
  with pytest.raises(ValueError, match=message):
    client_rounds.build(f'build_{name}', client_rounds.toy_model('build_hbn'))


def test_frozen_layers_stay(toy):
  """A frozen layer is in inference mode; its statistics never change."""

  def frozen():
    keras_model = tff_bn.convert_batch_norm(
        hybrid_models.two_layers(), 'hybrid'
    )
    first, _ = [
        x for x in keras_model.layers if isinstance(x, HybridBatchNormalization)
    ]
    first.trainable = False
    return keras_model

  model = toy.model(frozen)
  before = model.from_model_weights(model.initial_weights)
  after = client_rounds.run(
      _build(model, statistics_rate=0.5), client_rounds.datasets(toy, _SIZES), 2
  ).weights(model)
  for info, a, b in zip(model.variables, before, after, strict=True):
    assert np.array_equal(a, b) == (
        info.frozen or info.role is partition.Role.MIXING
    ), info


def _eager_inputs(keras_model, batches):
  """Returns the inputs of each layer, computed by eager Keras."""
  seen = {}
  for layer in batch_norm_layers(keras_model):
    seen[layer.name] = []
  inner = keras.Model(
      keras_model.input,
      {
          layer.name: layer.input
          for layer in keras_model.layers
          if layer.name in seen
      },
  )
  for x, _ in batches:
    for name, values in inner(x, training=True).items():
      channels = values.shape[-1]
      seen[name].append(values.numpy().reshape(-1, channels).astype(np.float64))
  return {name: np.concatenate(values) for name, values in seen.items()}


@functools.cache
def _two_layers(dtype='float64', shape=(4,), jit_compile=False):
  """Returns a model with two layers and a process."""
  model = toy_problem.Toy(dtype, shape).model_for(
      'build_hbn', lambda: hybrid_models.two_layers(dtype, shape)
  )
  # Keras's optimizer has a float32 rate.
  return model, algorithms.build_hbn(
      model, _SGD(0.125), statistics_rate=0.25, jit_compile=jit_compile
  )


@pytest.mark.parametrize(
    ('dtype', 'shape', 'tolerance', 'jit_compile'),
    [
        pytest.param('float64', (4,), 1e-10, False, marks=pytest.mark.slow),
        pytest.param('float64', (4,), 1e-10, True, marks=pytest.mark.slow),
        ('float32', (5, 5, 2), 1e-4, False),
    ],
)
def test_two_layers_equal_eager_keras(dtype, shape, tolerance, jit_compile):
  """Each layer's inputs come from hybrid normalization with own shares."""
  toy = toy_problem.Toy(dtype, shape)
  model, process = _two_layers(dtype, shape, jit_compile)
  sizes = (20, 7, 9)
  data = client_rounds.datasets(toy, sizes)
  training = client_rounds.Training(process, 3)
  for _ in range(2):
    models = [
        model.to_keras(process.get_client_model_weights(training.state, client))
        for client in training.clients
    ]
    server = training.weights(model)
    values = [
        _eager_inputs(m, reference.split(*toy.arrays(n, k)))
        for k, (m, n) in enumerate(zip(models, sizes))
    ]
    results = []
    for k, (m, n) in enumerate(zip(models, sizes)):
      optimizer = keras.optimizers.SGD(0.125)
      for x, y in reference.split(*toy.arrays(n, k)):
        with tf.GradientTape() as tape:
          loss = toy.loss()(y, m(x, training=True))
        variables = m.trainable_variables
        optimizer.apply(
            tape.gradient(loss, [v.value for v in variables]), variables
        )
      results.append(m.get_weights())
    expected = reference.average_models(results, sizes)
    for position, info in enumerate(model.variables):
      if info.role is partition.Role.MIXING:
        expected[position] = server[position]
      elif info.is_statistic:
        union = np.concatenate([v[info.layer] for v in values])
        is_mean = info.role is partition.Role.MOVING_MEAN
        new = union.mean(0) if is_mean else union.var(0, ddof=1)
        expected[position] = 0.75 * server[position] + 0.25 * new
    training.next_round(data)
    client_rounds.assert_close(
        training.weights(model), expected, tolerance, tolerance
    )
    for m, found in zip(models, training.client_weights(model)):
      for info, own, value in zip(model.variables, m.get_weights(), found):
        if info.role is partition.Role.MIXING:
          np.testing.assert_allclose(value, own, tolerance, tolerance)


def _normalized_by_batch(model, weights, batches):
  """Returns the inputs of both layers, normalized by their batches alone."""
  w1, b1, gamma, zeta, *_, w2, b2 = (
      weights[i] for i in (0, 1, 2, 3, 4, 5, 6, 7, 8)
  )
  first, second = [], []
  for x, _ in batches:
    z = x @ w1 + b1
    first.append(z)
    z_hat = (z - z.mean(0)) / np.sqrt(z.var(0) + 2**-10)
    second.append(np.maximum(gamma * z_hat + zeta, 0) @ w2 + b2)
  return np.concatenate(first), np.concatenate(second)


def test_evaluation_pass_normalizes_by_the_batches(toy):
  model, process = _two_layers()
  training = client_rounds.Training(process, len(_SIZES))
  data = client_rounds.datasets(toy, _SIZES)
  for _ in range(2):
    training.next_round(data)
  evaluated = process.evaluation_state(training.state, training.clients, data)
  found = model.from_model_weights(process.get_model_weights(evaluated))
  union = zip(
      *(
          _normalized_by_batch(model, found, batches)
          for batches in client_rounds.batches(toy, _SIZES)
      )
  )
  statistics = [
      value
      for parts in union
      for value in (
          np.concatenate(parts).mean(0),
          np.concatenate(parts).var(0, ddof=1),
      )
  ]
  positions = [i for i, v in enumerate(model.variables) if v.is_statistic]
  client_rounds.assert_close([found[i] for i in positions], statistics)
