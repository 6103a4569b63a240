"""Tests of BN-SCAFFOLD."""

import functools

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf

from tff_bn import BatchNormModel

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_process = functools.partial(client_rounds.toy_process, 'build_bn_scaffold')
_SIZES = (20, 7, 33)  # Unequal, with short last batches.
_TRAINABLE = (0, 1, 2, 3, 6, 7)
_EPSILON = 2**-10
_RATE = 0.1


def _gradients(weights, x, y, offsets):
  """Returns the gradients with shifted statistics, and these statistics.

  `offsets` are added to the batch's mean and deviation, through which gradients
  flow.
  """
  w1, b1, gamma, beta, _, _, w2, b2 = weights
  n = len(x)
  z = x @ w1 + b1
  own_deviation = np.sqrt(z.var(0) + _EPSILON)
  mean = z.mean(0) + offsets[0]
  deviation = np.maximum(own_deviation + offsets[1], np.sqrt(_EPSILON))
  is_free = own_deviation + offsets[1] > np.sqrt(_EPSILON)
  z_hat = (z - mean) / deviation
  a = z_hat * gamma + beta
  h = np.maximum(a, 0)
  logits = h @ w2 + b2
  p = np.exp(logits - logits.max(1, keepdims=True))
  p /= p.sum(1, keepdims=True)
  d = p.copy()
  d[np.arange(n), y] -= 1
  d /= n
  da = (d @ w2.T) * (a > 0)
  dz_hat = da * gamma
  dz = dz_hat / deviation
  of_mean = -dz.sum(0)
  of_deviation = -(dz * z_hat).sum(0) * is_free
  dz += of_mean / n
  dz += of_deviation * (z - z.mean(0)) / (n * own_deviation)
  gradients = [
      x.T @ dz,
      dz.sum(0),
      (da * z_hat).sum(0),
      da.sum(0),
      None,
      None,
      h.T @ d,
      d.sum(0),
  ]
  return gradients, z, mean, deviation**2 - _EPSILON


class _Truth:
  """BN-SCAFFOLD in NumPy; all clients have the same weight."""

  def __init__(self, model, num_clients, is_pooled=True):
    self.weights = model.from_model_weights(model.initial_weights)
    self.is_pooled = is_pooled
    zeros = [np.zeros_like(w) for w in self.weights]
    self.variates = [zeros for _ in range(num_clients)]
    self.server_variates = zeros
    self.seen = {}  # The values' mean and variance in a client's last round.

  def _server_statistics(self):
    means, variances = np.array(list(self.seen.values())).swapaxes(0, 1)
    if not self.is_pooled:
      return means.mean(0), np.sqrt(variances + _EPSILON).mean(0)
    pooled = variances.mean(0) + means.var(0)
    return means.mean(0), np.sqrt(pooled + _EPSILON)

  def round(self, batches, sampled):
    """Runs a round of these clients; `batches` are those of all."""
    known = dict(self.seen)
    if known:
      server = self._server_statistics()
    models, changes = [], []
    for k in sampled:
      offsets = (0.0, 0.0)
      if k in known:
        mean, variance = known[k]
        offsets = (server[0] - mean, server[1] - np.sqrt(variance + _EPSILON))
      weights = [w.copy() for w in self.weights]
      values = []
      for x, y in batches[k]:
        gradients, z, mean, variance = _gradients(weights, x, y, offsets)
        values.append(z)
        for i in _TRAINABLE:
          corrected = (
              gradients[i] - self.variates[k][i] + self.server_variates[i]
          )
          weights[i] = weights[i] - _RATE * corrected
        for i, new in zip(reference.STATISTICS, (mean, variance), strict=True):
          weights[i] = 0.75 * weights[i] + 0.25 * new
      union = np.concatenate(values)
      self.seen[k] = (union.mean(0), union.var(0))
      models.append(weights)
      sum_of_rates = len(batches[k]) * _RATE
      new = [
          own - c + (before - after) / sum_of_rates
          for own, c, before, after in zip(
              self.variates[k],
              self.server_variates,
              self.weights,
              weights,
              strict=True,
          )
      ]
      changes.append([a - b for a, b in zip(new, self.variates[k])])
      self.variates[k] = new
    self.weights = [np.mean(parts, 0) for parts in zip(*models)]
    share = len(sampled) / len(self.variates)
    self.server_variates = [
        c + share * np.mean(parts, 0)
        for c, *parts in zip(self.server_variates, *changes)
    ]


def _check(model, training, truth):
  client_rounds.assert_close(
      training.weights(model), truth.weights, rtol=1e-9, atol=1e-10
  )


@pytest.mark.parametrize(
    'kind', [pytest.param('pooled', marks=pytest.mark.slow), 'mean']
)
def test_rounds_equal_numpy(toy, kind):
  """Also a client that takes part for the first time in a later round."""
  model, process = _process(
      rate=_RATE, num_clients=len(_SIZES), variate_deviation=kind
  )
  truth = _Truth(model, len(_SIZES), kind == 'pooled')
  training = client_rounds.Training(process, len(_SIZES))
  data = client_rounds.datasets(toy, _SIZES)
  for sampled in ([0, 1], [0, 1, 2], [1, 2], [0, 2]):
    truth.round(client_rounds.batches(toy, _SIZES), sampled)
    training.next_round(data, sampled)
    _check(model, training, truth)


def test_one_client_is_plain_training(toy):
  """Nothing differs between one client and all, so nothing is corrected."""
  model, process = _process(rate=_RATE, num_clients=1)
  _, fedavg = client_rounds.toy_process('build_fed_avg', rate=_RATE)
  data = client_rounds.datasets(toy, [24])
  client_rounds.assert_close(
      client_rounds.run(process, data, 3).weights(model),
      client_rounds.run(fedavg, data, 3).weights(model),
      rtol=1e-9,
  )


def test_a_deviation_is_never_less_than_the_smallest(toy):
  """The values of a client spread ten thousand times less than before."""
  model, process = _process(rate=_RATE, num_clients=2)
  truth = _Truth(model, 2)
  training = client_rounds.Training(process, 2)
  for scale in (100.0, 0.01):
    arrays = [toy.arrays(8, seed) for seed in range(2)]
    arrays[0] = (scale * arrays[0][0], arrays[0][1])
    truth.round([[client] for client in arrays], [0, 1])
    training.next_round(
        [
            tf.data.Dataset.from_tensor_slices(client).batch(8)
            for client in arrays
        ]
    )
    _check(model, training, truth)


def test_clients_without_an_update_keep_their_statistics(toy):
  _, process = _process(rate=_RATE, num_clients=3)
  data = client_rounds.datasets(toy, [16, 16, 16])
  training = client_rounds.run(process, data, 1)
  before = training.clients[1:]
  training.next_round([data[0], *client_rounds.datasets_without_update(toy)])
  client_rounds.assert_same(training.clients[1:], before)


def test_a_model_without_batch_normalization_is_refused(toy):
  model = BatchNormModel(
      lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]),
      toy.model().input_spec,
      toy.model().loss_fn,
  )
  with pytest.raises(ValueError, match='BN-SCAFFOLD .* batch normalization'):
    client_rounds.build('build_bn_scaffold', model)


def test_other_optimizers_are_refused():
  with pytest.raises(ValueError, match='BN-SCAFFOLD.*plain SGD'):
    _process(momentum=0.9)


def test_too_many_clients_in_a_round_are_refused(toy):
  _, process = _process(num_clients=2)
  state = process.initialize()
  new = process.initialize_client(state)
  data = [toy.dataset(8, seed) for seed in range(3)]
  with pytest.raises(Exception, match='BN-SCAFFOLD got num_clients=2, but'):
    process.next(state, [new] * 3, data)
