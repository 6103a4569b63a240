"""Tests of FedAP."""

import client_rounds
import numpy as np
import numpy_reference as reference
import pytest
import small_models
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import models
from tff_bn.algorithms import fed_ap

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SIZES = (20, 7, 33, 16)
_LOCAL = (*reference.AFFINE, *reference.STATISTICS)
_SHARED = [j for j in range(8) if j not in _LOCAL]


def _numpy_shares(statistics, own_share):
  """Computes the shares pair by pair.

  `statistics` has, for each client, the mean and the deviation of each layer.
  """
  n = len(statistics)
  if n == 1:
    return np.ones([1, 1])
  shares = np.zeros([n, n])
  for i in range(n):
    for j in range(n):
      if i != j:
        distance = sum(
            np.sqrt(np.sum((m - m_j) ** 2) + np.sum((d - d_j) ** 2))
            for (m, d), (m_j, d_j) in zip(statistics[i], statistics[j])
        )
        shares[i, j] = 1 / max(distance, 1e-14)
    shares[i] *= (1 - own_share) / shares[i].sum()
    shares[i, i] = own_share
  return shares


def _found_shares(statistics, own_share):
  layers = np.repeat(
      np.arange(len(statistics[0])), [2 * len(m) for m, _ in statistics[0]]
  )
  rows = [np.concatenate([v for pair in s for v in pair]) for s in statistics]
  return fed_ap.similar_shares(np.stack(rows), layers, own_share).numpy()


@pytest.mark.parametrize('num_clients', [1, 2, 7])
def test_shares_equal_numpy(num_clients):
  rng = np.random.default_rng(num_clients)
  statistics = [
      [(rng.normal(size=size), rng.gamma(1.0, size=size)) for size in (3, 1, 8)]
      for _ in range(num_clients)
  ]
  for own_share in (0.0, 0.3, 1.0):
    shares = _found_shares(statistics, own_share)
    np.testing.assert_allclose(
        shares, _numpy_shares(statistics, own_share), rtol=1e-12
    )
    np.testing.assert_allclose(shares.sum(axis=1), 1.0, rtol=1e-12)


def test_clients_with_equal_statistics_share_with_each_other():
  twin, other = [(np.ones(2), np.ones(2))], [(np.zeros(2), np.ones(2))]
  shares = _found_shares([twin, other, twin], 0.5)
  np.testing.assert_allclose(
      shares, [[0.5, 0, 0.5], [0.25, 0.5, 0.25], [0.5, 0, 0.5]], atol=1e-12
  )


def _numpy_fed_ap(initial, batches, rounds, num_fedbn_rounds, own_share):
  """Runs rounds in NumPy; returns the server's and the clients' models."""
  server = list(initial)
  models = [list(initial) for _ in batches]
  compared = {}
  for number, sampled in enumerate(rounds):
    for i in sampled:
      models[i], _, _ = reference.train(
          models[i], batches[i], 0.1, momentum=0.5
      )
      if number < num_fedbn_rounds or i not in compared:
        mean, variance = (models[i][j] for j in reference.STATISTICS)
        compared[i] = [(mean, np.sqrt(variance))]
    shares = np.full([len(sampled)] * 2, 1 / len(sampled))
    if number >= num_fedbn_rounds:
      shares = _numpy_shares([compared[i] for i in sampled], own_share)
    for j in _SHARED:
      trained = np.stack([models[i][j] for i in sampled])
      server[j] = trained.mean(axis=0)
      for i, row in zip(sampled, shares):
        models[i][j] = np.tensordot(row, trained, 1)
  return server, models


# Client 1 misses a round, and client 3 comes after the rounds of FedBN.
_ROUNDS = [(0, 1, 2), (0, 2), (0, 1, 2, 3), (3, 1, 2), (0, 3)]


@pytest.mark.parametrize(
    'num_fedbn_rounds',
    [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 9))],
)
def test_rounds_equal_numpy(toy, num_fedbn_rounds):
  model, process = client_rounds.toy_process(
      'build_fed_ap',
      momentum=0.5,
      fedap_own_share=0.3,
      fedap_fedbn_rounds=num_fedbn_rounds,
  )
  data = client_rounds.datasets(toy, _SIZES)
  training = client_rounds.Training(process, len(_SIZES))
  # A new client starts with the server's model of its first round.
  late = training.clients.pop()
  for number, sampled in enumerate(_ROUNDS):
    if number == 2:
      training.clients.append(late)
    training.next_round(data, sampled)
  server, clients = _numpy_fed_ap(
      model.from_model_weights(model.initial_weights),
      client_rounds.batches(toy, _SIZES),
      _ROUNDS,
      num_fedbn_rounds,
      0.3,
  )
  client_rounds.assert_close(training.weights(model), server)
  for found, truth in zip(training.client_weights(model), clients, strict=True):
    client_rounds.assert_close(found, truth)


def test_first_rounds_equal_fedbn(toy):
  data = client_rounds.datasets(toy, _SIZES)
  model, process = client_rounds.toy_process('build_fed_ap')
  found = client_rounds.run(process, data, 3).client_weights(model)
  _, fedbn = client_rounds.toy_process(
      'build_fed_bn', client_weighting='uniform'
  )
  expected = client_rounds.run(fedbn, data, 3).client_weights(model)
  for weights, truth in zip(found, expected, strict=True):
    client_rounds.assert_close(weights, truth)


def test_a_client_with_the_whole_share_trains_alone(toy):
  options = dict(fedap_own_share=1.0, fedap_fedbn_rounds=1)
  model, process = client_rounds.toy_process('build_fed_ap', **options)
  data = client_rounds.datasets(toy, _SIZES)
  training = client_rounds.run(process, data, 1)
  expected, _, _ = reference.train(
      training.client_weights(model)[1],
      client_rounds.batches(toy, _SIZES)[1],
      0.1,
  )
  training.next_round(data)
  client_rounds.assert_close(training.client_weights(model)[1], expected)


def test_new_clients_start_with_the_servers_model(toy):
  model, process = client_rounds.toy_process('build_fed_ap')
  training = client_rounds.run(process, client_rounds.datasets(toy, _SIZES), 1)
  new = process.initialize_client(training.state)
  found = model.from_model_weights(
      process.get_client_model_weights(training.state, new)
  )
  server = training.weights(model)
  client_rounds.assert_close(
      [found[j] for j in _SHARED], [server[j] for j in _SHARED]
  )


def test_clients_without_update_keep_their_models(toy):
  model, process = client_rounds.toy_process('build_fed_ap')
  training = client_rounds.run(process, client_rounds.datasets(toy, (20, 7)), 1)
  before, server = training.client_weights(model), training.weights(model)
  metrics = training.next_round(client_rounds.datasets_without_update(toy))
  for found, truth in zip(training.client_weights(model), before, strict=True):
    client_rounds.assert_same(found, truth)
  client_rounds.assert_same(training.weights(model), server)
  assert metrics['client_work']['num_dropped_clients'] == 1
  assert metrics['client_work']['num_participants'] == 0
  assert metrics['finalizer']['failed_rounds'] == 1


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['nan', 'empty'])
def test_rounds_of_a_convolutional_model(kind):
  shape = (8, 8, 1)
  model = small_models.classifier(
      models.build_model_fn('small_cnn', shape, 4), shape
  )
  process = client_rounds.build(
      'build_fed_ap', model, fedap_fedbn_rounds=1, local_steps=None
  )
  data = []
  for number, size in enumerate((8, 7, 1, 6)):  # One has a single example.
    rng = np.random.default_rng(number)
    x = rng.normal(number, size=(size, *shape)).astype(np.float32)
    if kind == 'nan' and number == 1:
      x[5, 3, 2] = np.nan
    y = rng.integers(4, size=size).astype(np.int32)
    data.append(tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
  if kind == 'empty':
    data[1] = data[1].take(0)
  found = client_rounds.run(process, data, 3)
  expected = client_rounds.Training(process, 4)
  for _ in range(3):
    expected.next_round(data, (0, 2, 3))
  assert not np.array_equal(
      found.clients[0]['personal_kernel_0'],
      found.clients[3]['personal_kernel_0'],
  )
  for value, truth in zip(
      tf.nest.flatten([found.weights(model), found.clients]),
      tf.nest.flatten([expected.weights(model), expected.clients]),
      strict=True,
  ):
    np.testing.assert_allclose(value, truth, rtol=1e-5, atol=1e-6)


def test_the_type_shows_that_batch_norm_stays_with_the_client():
  model, process = client_rounds.toy_process('build_fed_ap')
  signature = process.next.type_signature
  local = {model.variables[j].name for j in _LOCAL}
  personal = {f'personal_{model.variables[j].name}' for j in _SHARED}
  names = {
      n for n, _ in tff.structure.iter_elements(signature.parameter[1].member)
  }
  assert local | personal < names
  assert not local & set(client_rounds.names_at_server(signature))
  assert process.has_client_models and process.has_personal_state


@pytest.mark.parametrize('numbers', [(0, 0), (None, 1)])
def test_clients_without_their_own_number(toy, numbers):
  _, process = client_rounds.toy_process('build_fed_ap')
  state = process.initialize()
  new = process.initialize_client(state)
  clients = [
      new if number is None else process.personalize(new, number)
      for number in numbers
  ]
  with pytest.raises(Exception, match='a number of its own for each client'):
    process.next(state, clients, client_rounds.datasets(toy, (20, 7)))


@pytest.mark.parametrize('number', [-1, 2**24])
def test_wrong_numbers(number):
  _, process = client_rounds.toy_process('build_fed_ap')
  with pytest.raises(ValueError, match='client_number must be from 0 to'):
    process.personalize(process.initialize_client(process.initialize()), number)


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(fedap_own_share=1.5), 'fedap_own_share=1.5 must be'),
        (dict(fedap_fedbn_rounds=0), 'fedap_fedbn_rounds=0 must be'),
        (dict(server_clip_norm=1.0), 'server_clip_norm has no effect in fedap'),
        (
            dict(server_optimizer=tff.learning.optimizers.build_sgdm(1.0)),
            'server_optimizer has no effect in fedap',
        ),
        (
            dict(drift_correction=algorithms.FedProx(0.1)),
            'drift_correction has no effect in fedap',
        ),
        (
            dict(model_aggregator=tff.aggregators.MeanFactory()),
            'model_aggregator has no effect in fedap',
        ),
    ],
)
def test_wrong_options(options, message):
  with pytest.raises(ValueError, match=message):
    client_rounds.build('build_fed_ap', client_rounds.toy_model(), **options)
