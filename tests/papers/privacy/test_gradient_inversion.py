"""Tests for the reconstruction of pictures."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn.papers.privacy import client_message
from tff_bn.papers.privacy import client_simulation
from tff_bn.papers.privacy import gradient_inversion
from tff_bn.papers.privacy import message_noise

_BATCH = client_simulation.Normalization.BATCH
_RUNNING = client_simulation.Normalization.RUNNING


def _prior():
  rng = np.random.default_rng(0)
  return gradient_inversion.Prior(
      rng.uniform(size=(40, 2, 2, 1)).astype(np.float32), np.arange(40) % 3
  )


def _model():
  layers = keras.layers
  keras.utils.set_random_seed(0)
  return keras.Sequential(
      [
          keras.Input((2, 2, 1)),
          layers.Conv2D(4, 2, padding='same'),
          layers.BatchNormalization(),
          layers.Flatten(),
          layers.Dense(3),
      ]
  )


def _message(simulation, x, y, shared, rate=0.01):
  simulated = simulation.run(x, y, shared)
  return client_message.ClientMessage(
      [g.numpy() for g in simulated.gradients],
      [rate * np.asarray(s) for s in simulated.statistics],
      None,
  )


def test_a_dense_layer_reveals_a_single_picture():
  """Of one example x, the gradient of the kernel is x times the bias's."""
  model = keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Flatten()])
  model.add(keras.layers.Dense(3))
  simulation = client_simulation.ClientSimulation(model)
  inversion = gradient_inversion.Inversion(simulation, _prior(), 600)
  x = np.array([0.9, 0.1, 0.3, 0.6], np.float32).reshape(1, 2, 2, 1)
  labels = np.array([1], np.int32)
  message = _message(simulation, x, labels, [])
  kernel, bias = message.update
  closed_form = (kernel[:, 0] / bias[0]).reshape(x.shape)
  np.testing.assert_allclose(closed_form, x, atol=1e-5)
  evidence = inversion.evidence(message)
  found = inversion.run(evidence, _RUNNING, labels, 1, np.random.default_rng(0))
  np.testing.assert_allclose(found, closed_form, atol=0.05)


def test_a_batch_with_known_statistics():
  simulation = client_simulation.ClientSimulation(_model())
  inversion = gradient_inversion.Inversion(simulation, _prior(), 400)
  rng = np.random.default_rng(3)
  x = rng.uniform(size=(2, 2, 2, 1)).astype(np.float32)
  y = np.array([2, 0], np.int32)
  message = _message(simulation, x, y, simulation.fixed_statistics(None))
  evidence = inversion.evidence(message)
  assert evidence.statistics_weight == evidence.update.weight == 1
  assert evidence.exchanged.weight == 0
  found = inversion.run(evidence, _RUNNING, y, 1, rng)
  start = gradient_inversion.psnr(_prior().means[y], x)
  assert np.all(gradient_inversion.psnr(found, x) > start + 8)
  assert found.min() >= 0 and found.max() <= 1
  # The true pictures fit better than any other ones.
  for weight, other in ((0, x), (1, np.float32(0.5) * x)):
    simulated = simulation.run(other, y, evidence.shared)
    distance = gradient_inversion._distance(simulated, evidence)
    assert (float(distance) > 1e-4) == bool(weight)


def test_steps_become_smaller():
  """The first step of Adam moves each pixel by the rate, here a half of 0.1."""
  simulation = client_simulation.ClientSimulation(_model())
  inversion = gradient_inversion.Inversion(simulation, _prior(), 2)
  x = np.full((1, 2, 2, 1), 0.5, np.float32)
  y = np.array([1], np.int32)
  message = _message(simulation, x, y, simulation.fixed_statistics(None))
  found = inversion.run(
      inversion.evidence(message), _RUNNING, y, 1, np.random.default_rng(0)
  )
  noise = np.random.default_rng(0).standard_normal(x.shape)
  start = _prior().means[y] + 0.1 * noise
  # In the last step the rate is 0.
  np.testing.assert_allclose(np.abs(found - start), 0.05, atol=1e-4)


def test_pictures_hidden_by_noise_are_the_mean_pictures():
  simulation = client_simulation.ClientSimulation(_model())
  inversion = gradient_inversion.Inversion(simulation, _prior(), 200)
  rng = np.random.default_rng(3)
  x = rng.uniform(size=(2, 2, 2, 1)).astype(np.float32)
  y = np.array([2, 0], np.int32)
  noise = message_noise.Noise(1000.0, 1.0, 1.0)
  message = message_noise.protect(_message(simulation, x, y, None), noise, rng)
  evidence = inversion.evidence(message, noise)
  assert evidence.update.weight == evidence.statistics_weight == 0
  found = inversion.run(evidence, _BATCH, y, 1, rng)
  np.testing.assert_array_equal(found, _prior().means[y])


def test_evidence_of_exchanges():
  simulation = client_simulation.ClientSimulation(_model())
  inversion = gradient_inversion.Inversion(simulation, _prior(), 1)
  shared = simulation.fixed_statistics(None)[0]
  exchanges = client_message.Exchanges(
      [np.full((2, 4), 3.0)], [(np.full(4, 5.0), np.full(4, 7.0))], [shared]
  )
  update = [np.zeros(v.shape) for v in simulation.model.trainable_variables]
  evidence = inversion.evidence(
      client_message.ClientMessage(update, [np.ones((2, 4))], exchanges)
  )
  assert evidence.exchanged.weight == evidence.statistics_weight == 1
  np.testing.assert_array_equal(evidence.statistics[0], 3)
  # The trainable variables: kernel, bias, scale, shift, kernel, bias.
  assert [float(k) for k in evidence.exchanged.known] == [0, 0, 1, 1, 0, 0]
  assert [float(k) for k in evidence.update.known] == [1] * 6
  np.testing.assert_array_equal(evidence.exchanged.values[2], 5)
  np.testing.assert_array_equal(evidence.exchanged.values[3], 7)
  assert evidence.shared == [shared]


def test_weights_of_noisy_evidence():
  simulation = client_simulation.ClientSimulation(_model())
  inversion = gradient_inversion.Inversion(simulation, _prior(), 1)
  update = [np.full(v.shape, 3.0) for v in simulation.model.trainable_variables]
  statistics = [np.full((2, 4), 300.0)]
  evidence = inversion.evidence(
      client_message.ClientMessage(update, statistics, None),
      message_noise.Noise(2.0, 0.5, 4.0),
  )
  # 79 values and 8 values; the variances are 1 / 0.9 and 64 / 0.1.
  share = 1 - (79 + 3 * np.sqrt(158)) / (9 * 79 * 0.9)
  np.testing.assert_allclose(evidence.update.weight, share, rtol=1e-6)
  share = 1 - 640 * (8 + 3 * np.sqrt(16)) / (90000 * 8)
  np.testing.assert_allclose(evidence.statistics_weight, share, rtol=1e-6)
  np.testing.assert_allclose(evidence.statistics[0], 30000, rtol=1e-6)


def test_distance():
  simulated = client_simulation.Simulated(
      [tf.constant([1.0, 0.0])], [tf.constant([[1.0, 2.0], [0.0, 3.0]])]
  )
  same, orthogonal = (
      gradient_inversion._Gradients([np.float32(v)], [np.float32(1)], weight)
      for v, weight in (([5, 0], 1.0), ([0, 5], 2.0))
  )

  def distance(variances, **others):
    return gradient_inversion._distance(
        simulated,
        gradient_inversion.Evidence(
            **{
                'update': same,
                'exchanged': same,
                'statistics': [np.float32([[0, 2], variances])],
                'statistics_weight': np.float32(0.5),
                'shared': [],
                **others,
            }
        ),
    )

  # The variances are 1/2 and 2: (1/½ + ¼/¼ + 0 + 4/4) / 2 = 2.
  np.testing.assert_allclose(distance([-0.5, 1]), 0.1 * 0.5 * 2, rtol=1e-5)
  # A variance is at least 1/1000: (1000 + 4·10⁶ + 1) / 2.
  np.testing.assert_allclose(
      distance([-2, 1]), 0.1 * 0.5 * (1000 + 4e6 + 1) / 2, rtol=1e-5
  )
  for name in ('update', 'exchanged'):
    np.testing.assert_allclose(
        distance([-0.5, 1], **{name: orthogonal}), 0.1 + 2, rtol=1e-5
    )


def test_share_of_the_signal():
  share = gradient_inversion._signal_share
  assert share([np.full(4, 2.0), None], 0.0) == 1
  # The squared norm is 200, and that of the noise is at most 50 + 3·√100.
  assert share([np.full(50, 2.0), None], 1.0) == pytest.approx(0.6)
  assert share([np.full(50, 2.0)], 3.0) == 0
  assert share([], 1.0) == 0


def test_cosine():
  seen = gradient_inversion._Gradients(
      [np.float32([3, 4]), np.float32([9])], [np.float32(1), np.float32(0)], 1
  )
  gradients = [tf.constant([4.0, 3.0]), tf.constant([-5.0])]
  np.testing.assert_allclose(
      gradient_inversion._cosine(gradients, seen), 24 / 25, rtol=1e-6
  )


def test_prior():
  rng = np.random.default_rng(0)
  pictures = rng.uniform(size=(30, 2, 2, 1))
  labels = np.arange(30) % 3
  prior = gradient_inversion.Prior(pictures, labels)
  deviations = []
  for label in range(3):
    mean = pictures[labels == label].mean(0)
    np.testing.assert_allclose(prior.means[label], mean)
    deviations += [(p - mean).ravel() for p in pictures[labels == label]]
  covariance = np.mean([np.outer(d, d) for d in deviations], 0)
  np.testing.assert_allclose(
      prior.precision,
      np.linalg.inv(covariance + 0.003 * np.eye(4)),
      rtol=1e-4,
  )


def test_psnr_of_the_best_assignment():
  rng = np.random.default_rng(0)
  true = rng.uniform(size=(3, 2, 2, 1))
  shuffled = true[[2, 0, 1]] + np.array([0.1, 0.2, 0.01]).reshape(3, 1, 1, 1)
  errors = [0.2, 0.01, 0.1]
  np.testing.assert_allclose(
      gradient_inversion.psnr(shuffled, true),
      [10 * np.log10(1 / error**2) for error in errors],
  )
  np.testing.assert_array_equal(
      gradient_inversion.in_true_order(shuffled, true), shuffled[[1, 2, 0]]
  )


@pytest.mark.parametrize(('error', 'expected'), [(1.0, 0.0), (0.0, 100.0)])
def test_psnr_of_one_picture(error, expected):
  picture = np.zeros((1, 2, 2, 1))
  np.testing.assert_allclose(
      gradient_inversion.psnr(picture + error, picture), [expected], atol=1e-9
  )
