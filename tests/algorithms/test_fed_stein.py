"""Tests of FedStein."""

import client_rounds
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf

from tff_bn import algorithms

_SIZES = (20, 7, 33)
_RATE = 0.1


def _james_stein(v):
  c = len(v)
  return (1 - (c - 2) * ((v - v.mean()) ** 2).mean() / (v**2).sum()) * v


def test_rounds_equal_numpy(toy, in_process_runtime):
  """Each client trains its own scale and shift; estimates are shrunk again."""
  del in_process_runtime
  model, process = client_rounds.toy_process('build_fed_stein', rate=_RATE)
  initial = model.from_model_weights(model.initial_weights)
  models = [list(initial) for _ in _SIZES]
  training = client_rounds.Training(process, len(_SIZES))
  data = client_rounds.datasets(toy, _SIZES)
  batches = client_rounds.batches(toy, _SIZES)
  for _ in range(3):
    trained, counts = [], []
    for weights, client in zip(models, batches, strict=True):
      after, num_examples, _ = reference.train(weights, client, _RATE)
      trained.append(after)
      counts.append(num_examples)
    mean = reference.average_models(trained, counts)
    for position in reference.STATISTICS:
      mean[position] = _james_stein(mean[position])
    models = [
        [
            own if i in reference.AFFINE else shared
            for i, (own, shared) in enumerate(zip(after, mean, strict=True))
        ]
        for after in trained
    ]
    training.next_round(data)
    for found, expected in zip(
        training.client_weights(model), models, strict=True
    ):
      client_rounds.assert_close(found, expected)


@pytest.mark.parametrize(
    ('values', 'expected'),
    [
        # Mean 0: the factor is 2/c.
        ([3.0, -3.0, 3.0, -3.0], [1.5, -1.5, 1.5, -1.5]),
        # Without differences between channels, nothing is shrunk.
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0]),
        # Variance 1.25, square norm 30: the factor is 1 - 2 · 1.25 / 30.
        ([1.0, 2.0, 3.0, 4.0], 11 / 12 * np.arange(1.0, 5.0)),
        # Too few channels.
        ([1.0, -1.0], [1.0, -1.0]),
        ([5.0], [5.0]),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    ],
)
@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
def test_james_stein(values, expected, dtype):
  found = algorithms.james_stein(tf.constant(values, dtype))
  assert found.dtype == dtype
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_large_values_do_not_overflow():
  values = tf.constant([3e30, -3e30, 3e30, -3e30])
  np.testing.assert_allclose(algorithms.james_stein(values), values / 2)
