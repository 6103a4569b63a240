"""Attacks against NumPy and the papers' numbers."""

import functools
import math
import statistics

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.aggregators import attacks

_DTYPES = (np.float32, np.float64)


def _honest(num_honest=7, size=11, dtype=np.float64, seed=0):
  rng = np.random.default_rng([seed, num_honest, size])
  return (3 + rng.normal(size=(num_honest, size)) ** 3).astype(dtype)


@functools.cache
def _traced(attack, dtype, num_columns, num_attackers, is_mean):
  """Traces the attack with an unknown number of clients, as TFF does."""

  @tf.function(
      input_signature=[
          tf.TensorSpec([None, num_columns], dtype),
          tf.TensorSpec([], tf.int32),
      ]
  )
  def values(honest, round_num):
    return attack.values(
        honest, num_attackers, round_num, is_mean and np.array(is_mean)
    )

  return values


def _values(attack, honest, num_attackers=3, round_num=0, is_mean=None):
  values = _traced(
      attack, honest.dtype, honest.shape[1], num_attackers, is_mean
  )
  result = values(honest, round_num)
  assert result.dtype == honest.dtype
  assert result.shape == (num_attackers, honest.shape[1])
  return result.numpy()


def _numpy_mimicked(honest):
  """Finds the client by a singular value decomposition."""
  u, _, _ = np.linalg.svd(honest - honest.mean(axis=0), full_matrices=False)
  return honest[np.argmax(abs(u[:, 0]))]


def _numpy_alie(honest, num_attackers):
  n, f = len(honest) + num_attackers, num_attackers
  s = math.floor(n / 2 + 1) - f
  z = statistics.NormalDist().inv_cdf((n - f - s) / (n - f))
  return honest.mean(axis=0) + z * honest.std(axis=0)


_ATTACKS = {
    'sf': (attacks.SignFlipping(), lambda x, f: -x.mean(axis=0)),
    'foe': (attacks.FallOfEmpires(3.5), lambda x, f: -2.5 * x.mean(axis=0)),
    'ipm': (
        attacks.InnerProductManipulation(0.3),
        lambda x, f: -0.3 * x.mean(axis=0),
    ),
    'alie': (attacks.ALittleIsEnough(), _numpy_alie),
    'alie with deviations': (
        attacks.ALittleIsEnough(-1.5),
        lambda x, f: x.mean(axis=0) - 1.5 * x.std(axis=0),
    ),
    'mimic': (attacks.Mimic(), lambda x, f: _numpy_mimicked(x)),
    'inf': (attacks.Infinity(), lambda x, f: np.full(x.shape[1], np.inf)),
}


@pytest.mark.parametrize('dtype', _DTYPES)
@pytest.mark.parametrize(
    ('num_honest', 'num_attackers'),
    [(7, 3), (5, 5), (80, 19), (1, 3)],
)
@pytest.mark.parametrize('name', _ATTACKS)
def test_attacks_equal_numpy(name, num_honest, num_attackers, dtype):
  if name == 'alie' and num_honest == 1:
    return  # It has no default there.
  attack, expected = _ATTACKS[name]
  different = _honest(num_honest, dtype=dtype)
  for honest in (different, np.tile(different[:1], (num_honest, 1))):
    np.testing.assert_allclose(
        _values(attack, honest, num_attackers),
        [expected(honest.astype(np.float64), num_attackers)] * num_attackers,
        rtol=1e-5 if dtype == np.float32 else 1e-12,
    )


def test_sign_flipping_keeps_variances():
  honest = _honest(4, 5)
  mean = honest.mean(axis=0)
  is_mean = (True, False, False, True, False)
  values = _values(attacks.SignFlipping(), honest, 2, is_mean=is_mean)
  expected = mean * [-1, 1, 1, -1, 1]
  np.testing.assert_allclose(values, [expected, expected])


@pytest.mark.parametrize('name', sorted(set(_ATTACKS) - {'sf'}))
def test_other_attacks_ignore_is_mean(name):
  honest, (attack, _) = _honest(5, 3), _ATTACKS[name]
  np.testing.assert_array_equal(
      _values(attack, honest),
      _values(attack, honest, is_mean=(True, False, True)),
  )


# Computed by hand. The paper's experiments have 12 attackers of 50.
@pytest.mark.parametrize(
    ('num_honest', 'num_attackers', 'deviations'),
    [
        (7, 3, 0.18001),  # Φ⁻¹(4/7)
        (38, 12, 0.33604),  # s = 14: Φ⁻¹(24/38)
        (26, 24, 1.42608),  # s = 2: Φ⁻¹(24/26)
        (4, 4, 0.67449),  # s = 1: Φ⁻¹(3/4)
        (3, 1, -0.43073),  # s = 2: Φ⁻¹(1/3)
    ],
)
def test_default_deviations(num_honest, num_attackers, deviations):
  honest = _honest(num_honest, 1)
  honest = (honest - honest.mean()) / honest.std()
  values = _values(attacks.ALittleIsEnough(), honest, num_attackers)
  np.testing.assert_allclose(values, deviations, atol=1e-5)


@pytest.mark.parametrize(
    ('num_honest', 'num_attackers'), [(1, 1), (2, 3), (7, 8), (1, 2)]
)
def test_alie_raises_without_a_default(num_honest, num_attackers):
  attack = attacks.ALittleIsEnough()
  honest = _honest(num_honest)
  with pytest.raises(tf.errors.InvalidArgumentError, match='deviations'):
    _values(attack, honest, num_attackers)
  with pytest.raises(tf.errors.InvalidArgumentError, match='deviations'):
    attack.values(tf.constant(honest), num_attackers, 0)
  with_deviations = attacks.ALittleIsEnough(1.0)
  assert np.isfinite(_values(with_deviations, honest, num_attackers)).all()


def test_mimic_finds_the_furthest_client():
  # The example in the docstring.
  honest = np.array([[0, 0], [1, 0], [5, 1]], np.float32)
  np.testing.assert_array_equal(
      _values(attacks.Mimic(), honest, 2), [[5, 1], [5, 1]]
  )
  # One client is far along the second axis, but the clients differ most along
  # the first.
  line = np.stack([np.linspace(-1, 1.1, 40), np.zeros(40)], axis=1)
  honest = np.concatenate([[[0.0, 2.0]], line])
  np.testing.assert_allclose(_values(attacks.Mimic(), honest, 1), [[1.1, 0.0]])


@pytest.mark.parametrize('dtype', _DTYPES)
def test_mimic_breaks_ties_between_two_sides(dtype):
  mimic = attacks.Mimic()
  for seed in range(20):
    honest = _honest(2, 5, dtype, seed)
    first = _values(mimic, honest, 1)
    np.testing.assert_array_equal(first, _values(mimic, honest[::-1].copy(), 1))
    difference = honest[0] - honest[1]
    greater = difference[np.argmax(abs(difference))] > 0
    np.testing.assert_array_equal(first, [honest[0 if greater else 1]])


def test_mimic_of_large_values():
  honest = _honest(7, dtype=np.float32) * np.float32(1e30)
  np.testing.assert_allclose(
      _values(attacks.Mimic(), honest, 1),
      [_numpy_mimicked(honest.astype(np.float64))],
  )


@pytest.mark.parametrize('dtype', _DTYPES)
def test_noise_is_normal(dtype):
  attack = attacks.GaussianNoise(2.5, seed=3)
  first, second = _values(
      attack, np.full((3, 40_000), 7, dtype), num_attackers=2
  )
  for values in (first, second):
    # Five standard errors.
    assert abs(values.mean()) < 5 * 2.5 / 200
    assert values.std() == pytest.approx(2.5, rel=5 / math.sqrt(2 * 40_000))
    assert (abs(values) < 2.5).mean() == pytest.approx(0.6827, abs=0.012)
  assert abs(np.corrcoef(first, second)[0, 1]) < 5 / 200


def test_noise_depends_only_on_seed_and_round():
  honest = _honest(4, 50)

  def noise(seed=2**32 - 1, round_num=1, values=honest):
    attack = attacks.GaussianNoise(1.0, seed)
    return _values(attack, values, 1, round_num)

  np.testing.assert_array_equal(noise(), noise(values=_honest(9, 50)))
  others = [noise(seed=1), noise(round_num=2), noise(seed=1, round_num=2)]
  for other in others:
    assert abs(np.corrcoef(noise(), other)[0, 1]) < 0.8
    assert (noise() != other).all()
