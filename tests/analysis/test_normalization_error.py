"""The error of federated normalization against theory and the paper."""

import math
import subprocess
import sys
import time

import numpy as np
import pytest

from tff_bn.analysis import normalization_error
from tff_bn.analysis.normalization_error import Settings

# The variance of each coordinate of the union: 1 for each class, plus half the
# squared radius 10 of the circle of centres.
_TOTAL_VARIANCE = 51.0
_GAMMAS = (0.0, 0.01, 0.1, 0.3, 0.5, 1.0)
_SETTINGS = Settings()


@pytest.fixture(scope='module')
def results():
  return {
      gamma: normalization_error.run(_SETTINGS, gamma) for gamma in (*_GAMMAS,)
  }


def _mean_square_distance(a, b):
  return (np.linalg.norm(a - b, axis=-1) ** 2).mean()


def _all_points(settings, gamma, round_num):
  points, _ = normalization_error.draw_points(settings, gamma, round_num)
  return points.reshape(-1, 2)


def test_fbn_statistics_equal_centralized_batch_normalization():
  settings = Settings(num_clients=7, points_per_client=9, beta=0.3, rounds=50)
  running = dict.fromkeys(
      ('fbn', 'fixbn'), normalization_error.INITIAL_STATISTICS
  )
  mean, variance = np.zeros(2), np.ones(2)
  for round_num in range(50):
    this_round = normalization_error.run_round(
        settings, 0.2, round_num, running
    )
    running = this_round.running
    points = _all_points(settings, 0.2, round_num)
    np.testing.assert_allclose(
        this_round.normalized['fbn'].reshape(-1, 2),
        (points - mean) / np.sqrt(variance + 1e-5),
        atol=1e-12,
    )
    mean = 0.7 * mean + 0.3 * points.mean(axis=0)
    variance = 0.7 * variance + 0.3 * points.var(axis=0, ddof=1)
    np.testing.assert_allclose(running['fbn'].mean, mean, atol=1e-12)
    np.testing.assert_allclose(running['fbn'].variance, variance, rtol=1e-12)


def test_fixbn_statistics_are_means_over_clients():
  settings = Settings(num_clients=5, points_per_client=8, beta=0.2, rounds=7)
  assert settings.fixbn_rounds == 4
  running = dict.fromkeys(
      ('fbn', 'fixbn'), normalization_error.INITIAL_STATISTICS
  )
  mean, variance = np.zeros(2), np.ones(2)
  for round_num in range(7):
    this_round = normalization_error.run_round(settings, 0, round_num, running)
    running = this_round.running
    clients = this_round.points
    if round_num < 4:
      np.testing.assert_array_equal(
          this_round.normalized['fixbn'], this_round.normalized['naive']
      )
      mean = np.mean([0.8 * mean + 0.2 * x.mean(axis=0) for x in clients], 0)
      variance = np.mean(
          [0.8 * variance + 0.2 * x.var(axis=0, ddof=1) for x in clients], 0
      )
    else:
      np.testing.assert_allclose(
          this_round.normalized['fixbn'],
          (clients - mean) / np.sqrt(variance + 1e-5),
          atol=1e-12,
      )
    np.testing.assert_allclose(running['fixbn'].mean, mean, atol=1e-12)
    np.testing.assert_allclose(running['fixbn'].variance, variance, rtol=1e-12)


def test_centralized_and_naive_normalization():
  result = normalization_error.run(_SETTINGS, 0.3)
  last = result.last_round
  union = last.centralized.reshape(-1, 2)
  np.testing.assert_allclose(union.mean(axis=0), 0, atol=1e-12)
  np.testing.assert_allclose(union.var(axis=0), 1, rtol=1e-5)
  for points, batch in zip(last.points, last.normalized['naive']):
    np.testing.assert_allclose(
        batch,
        (points - points.mean(axis=0)) / np.sqrt(points.var(axis=0) + 1e-5),
    )


def test_first_round_of_fbn_does_not_normalize():
  # Its statistics are 0 and 1; 1e-5 is added to the variance.
  settings = Settings(rounds=1)
  points = _all_points(settings, 0.5, 0)
  centralized = (points - points.mean(axis=0)) / points.std(axis=0)
  result = normalization_error.run(settings, 0.5)
  expected = np.linalg.norm(points - centralized, axis=1).mean()
  assert result.mean_error('fbn') == pytest.approx(expected, rel=1e-4)
  assert result.final_error('fbn') == result.mean_error('fbn')
  # With one round, FixBN is naive.
  np.testing.assert_array_equal(result.errors['fixbn'], result.errors['naive'])


def test_closed_forms_of_many_points():
  """With many points, batch statistics are close to the distributions' moments.

  A point is μ + z, with |μ| = 10 and z from N(0, I). Centralized normalization
  divides it by √51, naive normalization returns z, and FixBN the point.
  """
  settings = Settings(points_per_client=20_000, beta=1.0, rounds=2)
  last = normalization_error.run(settings, 0).last_round
  scale = 1 / math.sqrt(_TOTAL_VARIANCE)
  naive = 2 * (1 - scale) ** 2 + 100 * scale**2
  fixbn = 102 * (1 - scale) ** 2
  for name, expected in (('naive', naive), ('fixbn', fixbn), ('fbn', 0)):
    actual = _mean_square_distance(last.normalized[name], last.centralized)
    # The statistics have errors of 1 % at most.
    assert actual == pytest.approx(expected, rel=0.01, abs=1e-3), name


def test_figure_2c(results):
  """FBN's error does not depend on heterogeneity; the others' grow with it."""
  fbn = [results[gamma].mean_error('fbn') for gamma in _GAMMAS]
  np.testing.assert_allclose(fbn, fbn[0], rtol=1e-9)
  for name in ('naive', 'fixbn'):
    errors = [results[gamma].mean_error(name) for gamma in _GAMMAS]
    assert errors == sorted(errors, reverse=True)
    final_errors = [results[gamma].final_error(name) for gamma in _GAMMAS]
    assert final_errors == sorted(final_errors, reverse=True)
    assert errors[0] > 5 * errors[-1]
    assert errors[0] > 5 * fbn[0]
  # After the first rounds, FBN is close to centralized normalization.
  assert results[0.0].errors['fbn'][50:].mean() < 0.03
  assert results[0.0].errors['fbn'][0] > 5


def test_identical_distributions(results):
  iid, extreme = results[1.0], results[0.0]
  # Statistics of 30 points instead of 300.
  assert iid.mean_error('naive') < 0.25 < 1.5 < extreme.mean_error('naive')
  # FixBN is right if the clients have the same distribution.
  assert iid.errors['fixbn'][50:].mean() < 0.03
  assert extreme.errors['fixbn'][50:].mean() > 8


def test_separability_at_extreme_heterogeneity(results):
  """Figures 1 and 2: only naive normalization mixes the classes."""
  last = results[0.0].last_round

  def share_at_own_centre(points):
    centres = points.mean(axis=1)
    distances = np.linalg.norm(points[:, :, np.newaxis] - centres, axis=-1)
    return (distances.argmin(axis=-1) == last.classes).mean()

  assert share_at_own_centre(last.centralized) > 0.98
  assert share_at_own_centre(last.normalized['fbn']) > 0.98
  assert share_at_own_centre(last.normalized['fixbn']) > 0.98
  assert share_at_own_centre(last.normalized['naive']) < 0.3


@pytest.mark.parametrize('gamma', _GAMMAS)
def test_points_have_the_heterogeneity(gamma):
  points, classes = normalization_error.draw_points(_SETTINGS, gamma, 3)
  assert points.shape == (10, 30, 2)
  np.testing.assert_array_equal(np.bincount(classes.ravel()), [30] * 10)
  angles = 2 * np.pi * classes / 10
  noise = points - 10 * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
  assert abs(noise.mean()) < 0.2
  assert noise.std() == pytest.approx(1, abs=0.15)


def test_clients_have_their_own_class_and_others():
  def own_shares(gamma):
    return [
        (
            normalization_error.draw_points(_SETTINGS, gamma, n)[1]
            == np.arange(10)[:, np.newaxis]
        ).mean()
        for n in range(50)
    ]

  assert own_shares(0) == [1] * 50
  for gamma in _GAMMAS[1:]:
    # A tenth of the random points are of the client's class by chance. The
    # chunks may contain points of the neighbours' classes, because the classes
    # in the pool have different sizes.
    expected = 1 - gamma + gamma / 10
    assert expected - 0.1 < np.mean(own_shares(gamma)) < expected + 0.01


def test_only_the_distribution_over_clients_depends_on_gamma():
  for round_num in (0, 1):
    unions = [
        np.sort(_all_points(_SETTINGS, gamma, round_num), axis=0)
        for gamma in (0, 0.5, 1)
    ]
    np.testing.assert_array_equal(unions[0], unions[1])
    np.testing.assert_array_equal(unions[0], unions[2])


def test_points_depend_on_round_and_seed():
  first = _all_points(_SETTINGS, 0.5, 0)
  np.testing.assert_array_equal(first, _all_points(_SETTINGS, 0.5, 0))
  assert not np.isin(first, _all_points(_SETTINGS, 0.5, 1)).any()
  assert not np.isin(first, _all_points(Settings(seed=1), 0.5, 0)).any()
  # The distribution over the clients also differs.
  first, *others = [
      normalization_error.draw_points(settings, 1, round_num)[1].tolist()
      for settings, round_num in (
          (_SETTINGS, 0),
          (_SETTINGS, 1),
          (Settings(seed=1), 0),
      )
  ]
  assert first not in others


def test_all_levels_in_order(results):
  levels = normalization_error.run_levels(_SETTINGS, [0.5, 0])
  assert [level.gamma for level in levels] == [0.5, 0]
  for level in levels:
    for name, errors in results[level.gamma].errors.items():
      np.testing.assert_array_equal(level.errors[name], errors)
      assert errors.shape == (100,)
      assert level.mean_error(name) == errors.mean()
      assert level.final_error(name) == errors[99] != errors[0]


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('num_clients', 0),
        ('points_per_client', 1),
        ('rounds', 0),
        ('seed', -1),
        ('beta', 0.0),
        ('beta', 1.5),
        ('beta', math.nan),
    ],
)
def test_wrong_settings(name, value):
  with pytest.raises(ValueError, match=f'{name}={value} '):
    Settings(**{name: value})


def test_long_work_shows_progress(monkeypatch, capsys):
  now = [0.0]
  monkeypatch.setattr(
      time, 'monotonic', lambda: now.append(now[-1] + 3) or now[-1]
  )
  normalization_error.run_levels(Settings(rounds=4), [0.5, 1.0])
  assert capsys.readouterr().err.splitlines() == [
      'γ = 0.5: round 2 of 4',
      'level 1 of 2',
      'γ = 1: round 2 of 4',
  ]


def test_wrong_gamma():
  with pytest.raises(ValueError, match='gamma=1.5 '):
    normalization_error.run(_SETTINGS, 1.5)


def test_needs_no_tensorflow():
  script = """
import sys
from tff_bn.analysis import normalization_error
normalization_error.run(normalization_error.Settings(rounds=2), 0.5)
assert 'tensorflow' not in sys.modules
import tff_bn
assert tff_bn.analysis.normalization_error is normalization_error
assert 'Traffic' in dir(tff_bn.analysis)
"""
  completed = subprocess.run(
      [sys.executable, '-c', script], capture_output=True, text=True
  )
  assert completed.returncode == 0, completed.stderr
