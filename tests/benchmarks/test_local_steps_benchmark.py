"""Tests of benchmarks/local_steps.py."""

import benchmark_files
import jax
from jax import numpy as jnp
import numpy as np
import pytest

benchmark = benchmark_files.import_benchmark('local_steps')

_OWN, _ALL, _NONE = benchmark.OWN, benchmark.ALL, benchmark.NONE


def _batches(seed=0):
  """Returns the values of three clients with two channels."""
  rng = np.random.default_rng(seed)
  shift = np.arange(3.0)[:, None, None]
  return jnp.asarray(rng.normal(size=(3, 8, 2)) + shift, jnp.float32)


def _statistics(values, of_statistics):
  return benchmark.shared_statistics(
      values.mean(1), values.var(1), of_statistics
  )


@pytest.mark.parametrize('kind', [_OWN, _ALL, _NONE])
def test_statistics_are_those_of_the_union(kind):
  values = _batches()
  union = values.reshape(-1, 2)
  mean, variance = _statistics(values, kind)
  for client in range(3):
    np.testing.assert_allclose(mean[client], union.mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance[client], union.var(0), rtol=1e-5)


def _gradient(kind):
  """Returns the gradient of a function of the statistics of each client.

  A client's loss is its number times the sum of means and variances.
  """
  numbers = jnp.arange(1.0, 4.0)[:, None]

  def loss(values):
    mean, variance = _statistics(values, kind)
    return (numbers * (mean + variance)).sum()

  return jax.grad(loss)(_batches())


def test_gradients_of_statistics():
  """Each client's own; the mean of all; none."""
  values = np.asarray(_batches())
  # The derivative of mean and variance of the union with respect to a value,
  # if there were no other client.
  of_value = (1 + 2 * (values - values.mean((0, 1)))) / 8
  numbers = np.arange(1.0, 4.0)[:, None, None]
  np.testing.assert_allclose(_gradient(_OWN), numbers * of_value, rtol=1e-4)
  np.testing.assert_allclose(_gradient(_ALL), 2 * of_value, rtol=1e-4)
  np.testing.assert_array_equal(_gradient(_NONE), np.zeros_like(values))


@pytest.mark.slow
def test_all_together_is_training_on_the_union():
  rng = np.random.default_rng(1)
  one = benchmark.initial_weights(rng)
  x = rng.random((2, 4, 8, 8, 1), np.float32)
  y = np.array([[0, 0, 0, 0], [1, 2, 1, 2]])
  step, _ = benchmark._compiled()

  def after(case, x, y):
    weights = {
        name: jnp.broadcast_to(value, (len(x), *value.shape))
        for name, value in one.items()
    }
    return step(weights, x, y, case)

  centralized = after(
      benchmark.Case(), x.reshape(1, 8, 8, 8, 1), y.reshape(1, 8)
  )
  together = after(benchmark.CASES['all (centralized training)'], x, y)
  fedavg = after(benchmark.CASES['FedAvg'], x, y)
  for name, expected in centralized.items():
    for found in together[name]:
      np.testing.assert_allclose(found, expected[0], rtol=1e-3, atol=1e-5)
  assert not np.allclose(fedavg['kernel_0'].mean(0), centralized['kernel_0'][0])


def test_report():
  text, are_floors_met = benchmark.report(
      benchmark.Measurements(
          ['A machine'], 60, 5, {'FedAvg': [50.0, 52.0, 51.0]}
      )
  )
  assert are_floors_met
  ((_, row),) = benchmark_files.tables(text)
  assert row == ['FedAvg', 'own', 'own', 'own', 'own', '51.0 (50.0–52.0)']
  assert 'mean (range) of 3 seeds' in text


@pytest.mark.slow
def test_run(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(
      benchmark, 'CASES', {'FedTAN': benchmark.Case(first_only=True)}
  )
  flags = ('--rounds=1', '--steps=2', '--seeds=2')
  code, text = benchmark_files.run(
      benchmark, monkeypatch, capsys, tmp_path, *flags
  )
  assert code == 0
  ((_, row),) = benchmark_files.tables(text)
  assert row[0] == 'FedTAN'
  mean = float(row[-1].partition(' ')[0])
  assert 0 <= mean <= 40
