"""Tests of the pass that computes the moments of layers' inputs."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import toy_problem

from tff_bn.clients.moments_collector import StatisticsPass
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model.partition import Role


@functools.cache
def _model(policy=None):
  toy = toy_problem.Toy('float32', (5, 5, 2))

  def keras_model_fn():
    previous = keras.config.dtype_policy()
    if policy is not None:
      keras.config.set_dtype_policy(policy)
    try:
      return keras.Sequential(
          [
              keras.Input(toy.shape),
              keras.layers.Conv2D(4, 3, padding='same'),
              keras.layers.BatchNormalization(name='first'),
              keras.layers.Dropout(0.5),
              keras.layers.Conv2D(3, 3),
              keras.layers.BatchNormalization(name='second'),
              keras.layers.GlobalAveragePooling2D(),
              keras.layers.Dense(3, dtype='float32'),
          ]
      )
    finally:
      keras.config.set_dtype_policy(previous)

  return toy.model_for('build_hbn', keras_model_fn)


@functools.cache
def _pass(policy=None, **kwargs):
  model = _model(policy)
  moving_means = [
      keras_variable
      for info, keras_variable in zip(
          model.variables, model.keras_model.weights
      )
      if info.role is Role.MOVING_MEAN
  ]
  statistics_pass = StatisticsPass(model, moving_means, **kwargs)
  assert statistics_pass.is_random
  return statistics_pass


def _run(dataset, seed=(1, 2), policy=None, **kwargs):
  """Returns the moments of both layers as arrays."""
  model, statistics_pass = _model(policy), _pass(policy, **kwargs)
  values = [
      tf.constant(v) for v in model.from_model_weights(model.initial_weights)
  ]

  @tf.function
  def run():
    return statistics_pass.run(values, dataset, tf.constant(seed, tf.int64))

  before = model.keras_model.get_weights()
  found = run()
  for a, b in zip(model.keras_model.get_weights(), before):
    np.testing.assert_array_equal(a, b)
  return tf.nest.map_structure(lambda x: x.numpy(), found)


def _assert_close(found, expected, tolerance=1e-5):
  for layer, wanted in zip(found, expected, strict=True):
    for a, b in zip(layer, wanted, strict=True):
      np.testing.assert_allclose(a, b, tolerance, tolerance)


@pytest.mark.parametrize('jit_compile', [False, True])
def test_moments_of_all_batches(toy_images, jit_compile):
  dataset = toy_images.dataset(20, 1)
  empty = dataset.take(1).map(lambda x, y: (x[:0], y[:0]))
  options = dict(jit_compile=True) if jit_compile else {}
  first, second = _run(dataset.concatenate(empty), **options)
  x = toy_images.arrays(20, 1)[0]
  inputs = _model().keras_model.layers[0](x).numpy().astype(np.float64)
  _assert_close(
      [first],
      [(20 * 25, inputs.mean((0, 1, 2)), inputs.var((0, 1, 2)))],
  )
  assert second.count == 20 * 9


def test_seed_and_normalization_matter_for_deeper_layers(toy_images):
  dataset = toy_images.dataset(20, 1)
  runs = [
      _run(dataset),
      _run(dataset),
      _run(dataset, seed=(1, 3)),
      _run(dataset, normalize=fused_batch_norm.by_batch),
  ]
  for run in runs[1:]:
    _assert_close(run[:1], runs[0][:1], 0)
  np.testing.assert_array_equal(runs[1][1].mean, runs[0][1].mean)
  for run in runs[2:]:
    assert np.all(run[1].mean != runs[0][1].mean)


def test_without_data(toy_images):
  for layer in _run(toy_images.dataset(20, 1).take(0)):
    for value in layer:
      np.testing.assert_array_equal(value, np.zeros_like(value))


def test_values_that_are_not_finite_are_seen(toy_images):
  x, y = toy_images.arrays(20, 1)
  x[11] = np.nan
  dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
  for layer in _run(dataset):
    assert np.isnan(layer.mean).all()


def test_batches_where_float16_overflows_are_skipped(toy_images):
  policy = 'mixed_float16'
  x, y = toy_images.arrays(24, 1)
  x[9] = 1e5
  dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
  found = _run(dataset, policy=policy)
  assert [layer.count for layer in found] == [16 * 25, 16 * 9]
  inputs = (
      _model(policy)
      .keras_model.layers[0](np.concatenate([x[:8], x[16:]]))
      .numpy()
      .astype(np.float64)
  )
  np.testing.assert_allclose(
      found[0].variance, inputs.var((0, 1, 2)), rtol=1e-3
  )
  assert np.isfinite(found[1].variance).all()
