"""Tests of clipping the mean of the clients' updates at the server."""

import client_rounds
import numpy as np
import numpy_reference as reference
import numpy_steps
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)
_COUNTS = (8, 7, 8)  # Of the first batches.
_CLIP_NORM = 0.023
_assert_close = client_rounds.assert_close


def _initial(model):
  return model.from_model_weights(model.initial_weights)


def _clipped(old, mean, clip_norm=_CLIP_NORM):
  """Returns the changes of the trainable variables, and their factor."""
  changes = {
      i: mean[i] - old[i]
      for i in range(len(old))
      if i not in reference.STATISTICS
  }
  norm = np.sqrt(sum((c**2).sum() for c in changes.values()))
  factor = min(1.0, clip_norm / norm)
  return {i: factor * c for i, c in changes.items()}, factor


def _mean_of_a_step(toy, weights, rate):
  results = [
      numpy_steps.train(weights, batches[:1], rate)
      for batches in client_rounds.batches(toy, _SIZES)
  ]
  return reference.average_models(results, _COUNTS)


def test_rounds_equal_numpy(toy):
  """The optimizer sees the clipped mean; the statistics are not clipped."""
  model, process = client_rounds.toy_process(
      'build_fed_avg',
      local_steps=1,
      server_clip_norm=_CLIP_NORM,
      server_optimizer=_SGD(0.5, 0.9),
  )
  training = client_rounds.Training(process, len(_SIZES))
  expected = _initial(model)
  velocity = [0.0] * len(expected)
  factors = []
  for _ in range(12):
    mean = _mean_of_a_step(toy, expected, 0.1)
    changes, factor = _clipped(expected, mean)
    factors.append(factor)
    for i, change in changes.items():
      velocity[i] = 0.9 * velocity[i] + change
      mean[i] = expected[i] + 0.5 * velocity[i]
    expected = mean
    training.next_round(client_rounds.datasets(toy, _SIZES))
  assert min(factors) < 0.9 and max(factors) == 1
  _assert_close(training.weights(model), expected)


def test_fbn_is_the_same_for_every_split(toy):
  """Unlike with clipping at the clients, whose gradients differ."""
  x, y = toy.arrays(24, 0)

  def train(sizes, **options):
    parts = np.cumsum(sizes)[:-1]
    data = [
        tf.data.Dataset.from_tensor_slices(part).batch(24)
        for part in zip(np.split(x, parts), np.split(y, parts), strict=True)
    ]
    model, process = client_rounds.toy_process(
        'build_fbn', rate=0.3, local_steps=1, backward='running', **options
    )
    return client_rounds.run(process, data, 6).weights(model)

  options = dict(server_clip_norm=_CLIP_NORM)
  whole = train([24], **options)
  for sizes in ([12, 12], [17, 1, 6]):
    _assert_close(train(sizes, **options), whole)
  unclipped = train([24])
  assert any(
      np.abs(a - b).max() > 1e-2 for a, b in zip(whole, unclipped, strict=True)
  )


def test_a_short_update_keeps_its_bits(toy):
  data = client_rounds.datasets(toy, _SIZES)
  found = []
  for options in ({}, dict(server_clip_norm=1e3)):
    model, process = client_rounds.toy_process('build_fed_avg', **options)
    found.append(client_rounds.run(process, data, 2).weights(model))
  for a, b in zip(*found, strict=True):
    np.testing.assert_array_equal(a, b)


def test_local_variables_are_not_counted(toy):
  """FedBN clips what it aggregates."""
  model, process = client_rounds.toy_process(
      'build_fed_bn', local_steps=1, server_clip_norm=_CLIP_NORM
  )
  training = client_rounds.run(process, client_rounds.datasets(toy, _SIZES), 1)
  old = _initial(model)
  mean = _mean_of_a_step(toy, old, 0.1)
  for i in reference.AFFINE:
    mean[i] = old[i]
  changes, factor = _clipped(old, mean)
  assert factor < 1
  found = training.weights(model)
  for i, change in changes.items():
    np.testing.assert_allclose(found[i], old[i] + change, 1e-10, 1e-12)


def test_an_update_whose_norm_overflows_is_rejected(toy_images):
  """Clipping to 0 would hide it."""
  model = toy_images.model()
  process = algorithms.build_fed_avg(
      model,
      _SGD(1e25),
      local_steps=1,
      server_clip_norm=1.0,
  )
  output = process.next(process.initialize(), [toy_images.dataset(8, 0)])
  assert output.metrics['finalizer']['rejected_rounds'] == 1
  for found, old in zip(
      model.from_model_weights(process.get_model_weights(output.state)),
      _initial(model),
      strict=True,
  ):
    np.testing.assert_array_equal(found, old)
