"""Tests of FedAvg with averaged statistics."""

import client_rounds
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn.clients.local_training_config import LocalTrainingConfig

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)  # Unequal, with short last batches.


def _reference_round(weights, data, pooled, uniform, **kwargs):
  results = [
      reference.train(weights, reference.split(x, y), 0.1, **kwargs)
      for x, y in data
  ]
  counts = [1 if uniform else n for _, n, _ in results]
  new = [
      reference.average([w[i] for w, _, _ in results], counts)
      for i in range(len(weights))
  ]
  if pooled:
    new[reference.MEAN], new[reference.VARIANCE] = reference.pool(
        [w[reference.MEAN] for w, _, _ in results],
        [w[reference.VARIANCE] for w, _, _ in results],
        counts,
    )
  loss = sum(s for _, _, s in results) / sum(n for _, n, _ in results)
  return new, loss


@pytest.mark.parametrize(('pooled', 'uniform'), [(False, False), (True, True)])
def test_rounds_equal_numpy_in_float64(toy, pooled, uniform):
  model = toy.model()
  data = [toy.arrays(size, seed) for seed, size in enumerate(_SIZES)]
  process = algorithms.build_fed_avg(
      model,
      _SGD(0.1, momentum=0.5),
      client_weight_decay=0.01,
      client_weighting='uniform' if uniform else 'num_examples',
      statistics_aggregator=aggregators.PooledMomentsFactory()
      if pooled
      else None,
  )
  training = client_rounds.Training(process, len(_SIZES))
  expected = training.weights(model)

  for _ in range(4):
    expected, loss = _reference_round(
        expected, data, pooled, uniform, momentum=0.5, weight_decay=0.01
    )
    metrics = training.next_round(client_rounds.datasets(toy, _SIZES))
    train_metrics = metrics['client_work']['train']
    np.testing.assert_allclose(train_metrics['loss'], loss, rtol=1e-10)
    assert train_metrics['num_examples'] == sum(_SIZES)
  client_rounds.assert_close(training.weights(model), expected)


def test_image_statistics_are_biased(toy_images):
  """Keras's are biased, too; TensorFlow's fused operation adds K/(K-1)."""
  model = toy_images.model()
  process = algorithms.build_fed_avg(model, _SGD(0.0))
  sizes = (16, 5)
  training = client_rounds.Training(process, len(sizes))
  kernel, bias = training.weights(model)[:2]
  mean, variance = np.zeros(5), np.ones(5)
  for _ in range(3):
    means, variances = [], []
    for seed, size in enumerate(sizes):
      x, _ = toy_images.arrays(size, seed)
      local_mean, local_variance = mean, variance
      for batch, _ in reference.split(x, x):
        z = tf.nn.conv2d(batch, kernel, 1, 'VALID').numpy() + bias
        z = z.astype(np.float64).reshape(-1, 5)
        local_mean = 0.75 * local_mean + 0.25 * z.mean(0)
        local_variance = 0.75 * local_variance + 0.25 * z.var(0)
      means.append(local_mean)
      variances.append(local_variance)
    mean = reference.average(means, sizes)
    variance = reference.average(variances, sizes)
    training.next_round(client_rounds.datasets(toy_images, sizes))
  found = training.weights(model)
  np.testing.assert_allclose(found[4], mean, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(found[5], variance, rtol=1e-5)


def test_it_is_a_learning_process(toy):
  model, process = client_rounds.toy_process('build_fed_avg')
  assert isinstance(process, tff.learning.templates.LearningProcess)
  state = process.initialize()
  weights = model.from_keras(toy.keras_model())
  moved = process.set_model_weights(state, weights)
  for a, b in zip(
      process.get_model_weights(moved).trainable, weights.trainable
  ):
    np.testing.assert_array_equal(a, b)
  hparams = process.get_hparams(state)
  assert hparams['client_work']['learning_rate'] == 0.1
  hparams['client_work']['learning_rate'] = 0.0
  frozen = process.set_hparams(state, hparams)
  after = process.next(frozen, [toy.dataset(8, 0)]).state
  for a, b in zip(
      process.get_model_weights(after).trainable,
      process.get_model_weights(state).trainable,
  ):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ('kwargs', 'num_batches'),
    [
        ({}, 3),
        ({'local_steps': 2}, 2),
        ({'local_epochs': 2}, 6),
        ({'local_steps': 50}, 3),
    ],
)
def test_steps_and_epochs(toy, kwargs, num_batches):
  """Rounds with either are compared with NumPy in other files."""
  config = LocalTrainingConfig(_SGD(0.1), **kwargs)
  batches = list(config.batches(toy.dataset(20, 3)))
  expected = (reference.split(*toy.arrays(20, 3)) * 2)[:num_batches]
  for batch, truth in zip(batches, expected, strict=True):
    client_rounds.assert_same(list(batch), list(truth))


def _server_optimizers():
  build = tff.learning.optimizers

  def adam(w, g, s, t):
    s['m'] = 0.9 * s.get('m', 0) + 0.1 * g
    s['v'] = 0.999 * s.get('v', 0) + 0.001 * g**2
    rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - rate * s['m'] / (np.sqrt(s['v']) + 1e-3)

  def yogi(w, g, s, t):
    s['m'] = 0.9 * s.get('m', 0) + 0.1 * g
    v = s.get('v', np.full_like(g, 1e-6))
    s['v'] = v + 0.001 * np.sign(g**2 - v) * g**2
    rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - rate * s['m'] / (np.sqrt(s['v']) + 1e-3)

  return [
      pytest.param(
          build.build_adam(0.01, epsilon=1e-3), adam, 1e-10, id='adam'
      ),
      pytest.param(
          build.build_yogi(
              0.01, epsilon=1e-3, initial_preconditioner_value=1e-6
          ),
          yogi,
          1e-6,  # TFF's Yogi has float32 hyperparameters.
          id='yogi',
          marks=pytest.mark.slow,
      ),
  ]


@pytest.mark.parametrize(
    ('server_optimizer', 'rule', 'tolerance'), _server_optimizers()
)
def test_server_optimizer_moves_weights_and_never_statistics(
    toy, server_optimizer, rule, tolerance
):
  model = toy.model()
  process = algorithms.build_fed_avg(
      model, _SGD(0.1), server_optimizer=server_optimizer
  )
  training = client_rounds.Training(process, len(_SIZES))
  data = [toy.arrays(size, seed) for seed, size in enumerate(_SIZES)]
  weights = training.weights(model)
  optimizer_states = [{} for _ in weights]
  for t in range(1, 4):
    average, _ = _reference_round(weights, data, pooled=False, uniform=False)
    weights = [
        new
        if i in reference.STATISTICS
        else rule(old, old - new, optimizer_states[i], t)
        for i, (old, new) in enumerate(zip(weights, average))
    ]
    training.next_round(client_rounds.datasets(toy, _SIZES))
  client_rounds.assert_close(
      training.weights(model), weights, tolerance, tolerance
  )
