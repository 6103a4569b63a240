"""Models for clients that took no part in training, against NumPy."""

import keras
import numpy as np
import pytest
import small_models
import tensorflow as tf

from tff_bn.keras_model.partition import Role
from tff_bn.training import evaluation
from tff_bn.training import unseen_clients

_SAMPLES = 40


@pytest.fixture(scope='module')
def model():
  def keras_model_fn():
    return keras.Sequential(
        [
            keras.layers.Input([3]),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(5, activation='relu'),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )

  return small_models.classifier(
      keras_model_fn,
      (3,),
      metrics_fn=lambda: [keras.metrics.SparseCategoricalAccuracy('accuracy')],
  )


def _random_weights(model, seed):
  rng = np.random.default_rng(seed)
  return model.to_model_weights(
      [
          rng.uniform(0.5, 3, v.shape).astype(v.dtype.as_numpy_dtype)
          for v in model.variables
      ]
  )


@pytest.fixture(scope='module')
def data():
  x = np.random.default_rng(9).normal(5, 2, (_SAMPLES, 3)).astype(np.float32)
  return x, tf.data.Dataset.from_tensor_slices(
      (x, np.zeros(_SAMPLES, np.int32))
  ).batch(_SAMPLES)


def _by_role(model, weights, role):
  values = model.from_model_weights(weights)
  return [
      np.asarray(value, np.float64)
      for info, value in zip(model.variables, values)
      if info.role is role
  ]


def _assert_equal(model, a, b, **tolerances):
  for x, y in zip(
      model.from_model_weights(a), model.from_model_weights(b), strict=True
  ):
    np.testing.assert_allclose(x, y, **(tolerances or dict(rtol=0)))


@pytest.mark.parametrize('share', [0.0, 0.3, 1.0])
def test_mixture_has_the_weighted_moments(model, share):
  a, b = (_random_weights(model, seed) for seed in range(2))
  mixed = unseen_clients.mix_batch_norm_statistics(model, a, b, share)
  means, variances = (
      [_by_role(model, weights, role) for weights in (a, b, mixed)]
      for role in (Role.MOVING_MEAN, Role.MOVING_VARIANCE)
  )
  assert len(means[0]) == 2
  for m1, m2, m, v1, v2, v in zip(*means, *variances, strict=True):
    np.testing.assert_allclose(m, (1 - share) * m1 + share * m2, rtol=1e-6)
    second_moment = (1 - share) * (v1 + m1**2) + share * (v2 + m2**2)
    np.testing.assert_allclose(v, second_moment - m**2, rtol=1e-5)
  for role in Role:
    if role not in (Role.MOVING_MEAN, Role.MOVING_VARIANCE):
      for x, y in zip(*(_by_role(model, w, role) for w in (a, mixed))):
        np.testing.assert_array_equal(x, y)
  assert all(
      np.asarray(x).dtype == np.float32 for x in model.from_model_weights(mixed)
  )


@pytest.mark.parametrize('share', [-0.1, 1.1])
def test_share_is_checked(model, share):
  with pytest.raises(ValueError, match=f'own_share={share} must be between'):
    unseen_clients.mix_batch_norm_statistics(
        model, model.initial_weights, model.initial_weights, share
    )


def test_first_layer_mixes_prior_and_data(model, data):
  weights = _random_weights(model, 0)
  models = unseen_clients.unseen_client_weights(
      model, weights, data[1], _SAMPLES, prior=10
  )
  assert list(models) == ['averaged', 'reestimated', 'mixed']
  x = data[0].astype(np.float64)
  # As if the prior were ten samples.
  prior_mean = _by_role(model, weights, Role.MOVING_MEAN)[0]
  prior_variance = _by_role(model, weights, Role.MOVING_VARIANCE)[0]
  mean = (10 * prior_mean + x.sum(axis=0)) / 50
  square = (
      10 * (prior_variance + prior_mean**2) + np.square(x).sum(axis=0)
  ) / 50
  mixed = models['mixed']
  np.testing.assert_allclose(
      _by_role(model, mixed, Role.MOVING_MEAN)[0], mean, rtol=1e-6
  )
  np.testing.assert_allclose(
      _by_role(model, mixed, Role.MOVING_VARIANCE)[0],
      square - mean**2,
      rtol=1e-5,
  )
  _assert_equal(model, models['averaged'], weights)


def test_limits(model, data):
  weights = _random_weights(model, 0)
  reestimated = evaluation.reestimate_batch_norm_statistics(
      model, weights, data[1]
  )

  def build(num_samples, prior):
    return unseen_clients.unseen_client_weights(
        model, weights, data[1], num_samples, prior
    )

  many_samples = build(10**12, 16)
  _assert_equal(model, many_samples['reestimated'], reestimated)
  _assert_equal(model, many_samples['mixed'], reestimated, rtol=1e-6)
  _assert_equal(model, build(_SAMPLES, 1e12)['mixed'], weights, rtol=1e-6)
