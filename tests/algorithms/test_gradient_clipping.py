"""Tests of gradient clipping in local training."""

import functools

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import numpy_steps
import pytest
import tensorflow_federated as tff

from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)
# Longer than some gradients of these problems, shorter than others.
_CLIP_NORM = 0.7
_assert_close = client_rounds.assert_close


def _initial(model):
  return model.from_model_weights(model.initial_weights)


def _mean(results, counts=_SIZES):
  return reference.average_models(results, counts)


def test_the_norm_lies_between_the_gradients_norms(toy):
  model = client_rounds.toy_model()
  norms = []
  for x, y in sum(client_rounds.batches(toy, _SIZES), []):
    grads = reference.gradients(_initial(model), x, y)[1]
    norms.append(np.sqrt(sum((g**2).sum() for g in grads if g is not None)))
  assert min(norms) < _CLIP_NORM < max(norms)
  # Clipping each variable separately would give another result.
  assert max(norms) > 1.5 * _CLIP_NORM


def test_rounds_equal_numpy(toy):
  """With momentum and weight decay, which is not clipped."""
  model, process = client_rounds.toy_process(
      'build_fed_avg',
      momentum=0.5,
      local_epochs=2,
      client_weight_decay=0.3,
      client_gradient_clip_norm=_CLIP_NORM,
  )
  training = client_rounds.run(process, client_rounds.datasets(toy, _SIZES), 3)
  expected = _initial(model)
  for _ in range(3):
    expected = _mean(
        [
            numpy_steps.train(
                expected,
                batches * 2,
                0.1,
                momentum=0.5,
                weight_decay=0.3,
                clip_norm=_CLIP_NORM,
            )
            for batches in client_rounds.batches(toy, _SIZES)
        ]
    )
  _assert_close(training.weights(model), expected)


def test_the_norm_includes_local_variables(toy):
  """A client of FedBN clips shared and local variables together."""
  model, process = client_rounds.toy_process(
      'build_fed_bn', client_gradient_clip_norm=_CLIP_NORM
  )
  training = client_rounds.run(process, client_rounds.datasets(toy, _SIZES), 1)
  results = [
      numpy_steps.train(_initial(model), batches, 0.1, clip_norm=_CLIP_NORM)
      for batches in client_rounds.batches(toy, _SIZES)
  ]
  weights = training.client_weights(model)
  for found, result in zip(weights, results, strict=True):
    expected = _mean(results)
    for i in reference.AFFINE + reference.STATISTICS:
      expected[i] = result[i]
    _assert_close(found, expected)


def _synchronized_gradients(weights, batches, shares):
  """Returns the clients' gradients in FedTAN's first step, and the statistics.

  A client's gradient is the gradient of its loss, except that the gradients
  with respect to the global mean and variance come from the mean loss.
  """
  w1, b1, gamma, beta, _, _, w2, b2 = weights
  zs = [x @ w1 + b1 for x, _ in batches]
  mean = sum(s * z.mean(0) for s, z in zip(shares, zs))
  variance = sum(s * ((z - mean) ** 2).mean(0) for s, z in zip(shares, zs))
  inv = 1 / np.sqrt(variance + 2**-10)
  backward = []
  for (_, y), z in zip(batches, zs):
    z_hat = (z - mean) * inv
    a = z_hat * gamma + beta
    h = np.maximum(a, 0)
    p = np.exp(h @ w2 + b2)
    p /= p.sum(1, keepdims=True)
    d = p.copy()
    d[np.arange(len(y)), y] -= 1
    d /= len(y)
    backward.append((z_hat, h, d, (d @ w2.T) * (a > 0)))
  shift = sum(s * da.sum(0) for s, (_, _, _, da) in zip(shares, backward))
  scale = sum(
      s * (da * z_hat).sum(0) for s, (z_hat, _, _, da) in zip(shares, backward)
  )
  gradients = []
  for (x, y), (z_hat, h, d, da) in zip(batches, backward):
    dz = inv * gamma * (da - (shift + z_hat * scale) / len(y))
    gradients.append(
        [
            *(x.T @ dz, dz.sum(0)),
            *((da * z_hat).sum(0), da.sum(0), None, None),
            *(h.T @ d, d.sum(0)),
        ]
    )
  return gradients, mean, variance


def test_the_truth_for_fedtan_is_the_gradient_of_the_mean_loss(toy):
  """The mean over the clients is the gradient on the union of the batches."""
  weights = _initial(client_rounds.toy_model())
  batches = [batches[0] for batches in client_rounds.batches(toy, _SIZES)]
  counts = np.array([len(y) for _, y in batches])
  gradients, mean, variance = _synchronized_gradients(
      weights, batches, counts / counts.sum()
  )
  union = [np.concatenate(parts) for parts in zip(*batches)]
  _, expected, *statistics = reference.gradients(weights, *union)
  np.testing.assert_allclose([mean, variance], statistics)
  for truth, values in zip(expected, zip(*gradients)):
    if truth is not None:
      found = reference.average(values, counts)
      np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ('local_steps', 'clip_norm'),
    [pytest.param(1, 0.2, marks=pytest.mark.slow), (3, _CLIP_NORM)],
)
def test_fedtan_clips_each_clients_gradient_in_the_first_step_too(
    toy, local_steps, clip_norm
):
  model, process = client_rounds.toy_process(
      'build_fedtan',
      local_steps=local_steps,
      client_weight_decay=0.3,
      client_gradient_clip_norm=clip_norm,
  )
  training = client_rounds.run(process, client_rounds.datasets(toy, _SIZES), 2)
  expected = _initial(model)
  for _ in range(2):
    batches = [
        batches[:local_steps] for batches in client_rounds.batches(toy, _SIZES)
    ]
    first = [b[0] for b in batches]
    sizes = np.array([len(y) for _, y in first])
    gradients, mean, variance = _synchronized_gradients(
        expected, first, sizes / sizes.sum()
    )
    results = []
    for grads, client_batches in zip(gradients, batches):
      after = [
          w if g is None else w - 0.1 * (g + 0.3 * w)
          for w, g in zip(expected, numpy_steps.clip(grads, clip_norm))
      ]
      for i, seen in zip(reference.STATISTICS, (mean, variance)):
        after[i] = 0.75 * expected[i] + 0.25 * seen
      after = numpy_steps.train(
          after, client_batches[1:], 0.1, weight_decay=0.3, clip_norm=clip_norm
      )
      results.append(after)
    expected = _mean(results, [sum(len(y) for _, y in b) for b in batches])
  _assert_close(training.weights(model), expected)


@pytest.mark.parametrize('name', ['fed_avg', 'fedtan', 'dsgd'])
@pytest.mark.slow
def test_short_gradients_stay_the_same_to_the_bit(toy, name):
  train = functools.partial(client_rounds.weights_after_two_rounds, toy, name)
  expected = train()
  # TensorFlow's function computes 49 · (1 / 49), which is not 1.
  assert 49 * (1 / 49) != 1
  for value, truth in zip(train(client_gradient_clip_norm=49), expected):
    np.testing.assert_array_equal(value, truth)
  changed = train(client_gradient_clip_norm=0.2)
  assert any(np.any(a != b) for a, b in zip(changed, expected))


def test_a_gradient_of_0_is_allowed(toy):
  """Its norm is 0, so nothing may be divided by it."""

  class NoLoss(keras.losses.Loss):

    def call(self, y_true, y_pred):
      return 0.0 * y_pred[:, 0]

  toy.loss = NoLoss
  model = toy.model()
  process = algorithms.build_fed_avg(
      model, _SGD(0.1), client_gradient_clip_norm=1.0
  )
  training = client_rounds.Training(process, len(_SIZES))
  metrics = training.next_round(client_rounds.datasets(toy, _SIZES))
  assert metrics['client_work']['num_dropped_clients'] == 0
  for i, (value, truth) in enumerate(
      zip(training.weights(model), _initial(model))
  ):
    if i not in reference.STATISTICS:
      np.testing.assert_array_equal(value, truth)
