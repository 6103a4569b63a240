"""Optimized attacks against NumPy."""

import numpy as np
import pytest
import rule_calls
import tensorflow as tf

from tff_bn import aggregators

_ATTACKS = {
    'alie': aggregators.OptimizedALittleIsEnough,
    'ipm': aggregators.OptimizedInnerProductManipulation,
}
_F = 3


def _honest(num_honest=7, dtype=np.float64, seed=0):
  rng = np.random.default_rng([seed, num_honest])
  return (1 + rng.normal(size=(num_honest, 5))).astype(dtype)


def _sent(name, honest, strength):
  if name == 'ipm':
    return -strength * honest.mean(axis=0)
  return honest.mean(axis=0) + strength * honest.std(axis=0, ddof=1)


def _numpy_strength(name, honest, aggregate, num_evaluations=20, step=10.0):
  """Searches as ByzFL does."""

  def damage(strength):
    rows = np.concatenate([[_sent(name, honest, strength)] * _F, honest])
    return np.linalg.norm(aggregate(rows) - honest.mean(axis=0))

  best, highest, is_growing = 0.0, damage(0.0), True
  for _ in range(num_evaluations - 1):
    value = damage(best + step)
    if value > highest:
      best, highest = best + step, value
    else:
      is_growing = False
    step *= 2 if is_growing else 0.8
  return best


def _attacked(rule, attack, num_attackers=_F):
  return aggregators.Attacked(rule, attack, num_attackers)


@pytest.mark.parametrize(
    ('name', 'defense'),
    [
        pytest.param('alie', 'nnm+mean', marks=pytest.mark.slow),
        ('alie', 'nnm+krum'),
        ('ipm', 'nnm+mean'),
    ],
)
def test_equals_numpy(name, defense):
  rule = rule_calls.build(defense, _F)
  attacked = _attacked(rule, _ATTACKS[name]())
  aggregate = rule_calls.traced(rule, 'float64', 5)
  corrupt = tf.function(
      lambda x: attacked.corrupt(x, tf.constant(0)),
      input_signature=[tf.TensorSpec([None, 5], tf.float64)],
  )
  for num_honest in (7, 10):
    honest = _honest(num_honest)
    strength = _numpy_strength(name, honest, aggregate)
    sent = corrupt(np.concatenate([np.zeros((_F, 5)), honest]))
    np.testing.assert_allclose(
        sent[:_F], [_sent(name, honest, strength)] * _F, rtol=1e-9
    )
    np.testing.assert_array_equal(sent[_F:], honest)


def test_equals_byzfl():
  """What ByzFL 0.0.11 sends."""
  honest = np.array([[1.0, -2], [3, 4], [4, -1], [10, 5], [2, 2]])
  median = aggregators.NearestNeighborMixing(aggregators.CoordinateMedian(2), 2)
  for name, rule, num_attackers, expected in (
      ('alie', aggregators.TrimmedMean(1), 1, [39.35533905932738, 32.09590136]),
      ('ipm', aggregators.TrimmedMean(1), 1, [-40, -16]),
      ('ipm', median, 2, [-5.368709120000003, -2.147483648000001]),
  ):
    x = np.concatenate([np.zeros((num_attackers, 2)), honest])
    attacked = _attacked(rule, _ATTACKS[name](), num_attackers)
    sent = attacked.corrupt(x, tf.constant(0))
    np.testing.assert_allclose(sent[0], expected, rtol=1e-9)


@pytest.mark.parametrize('name', _ATTACKS)
def test_number_of_evaluations(name):
  honest = _honest()
  x = np.concatenate([np.zeros((_F, 5)), honest])
  rule = aggregators.Mean()
  # The mean is always harmed more by twice the strength.
  for num_evaluations, strength in ((1, 0), (2, 3), (3, 9), (5, 45)):
    attack = _ATTACKS[name](num_evaluations, first_step=3.0)
    sent = _attacked(rule, attack).corrupt(x, tf.constant(0))
    np.testing.assert_allclose(
        sent[:_F], [_sent(name, honest, strength)] * _F, atol=1e-12
    )


def test_knows_the_state_of_the_rule():
  """Without the true center, the attack would be another one."""
  rule = aggregators.CenteredClipping(1.0, num_byzantine=1)
  attacked = _attacked(rule, _ATTACKS['ipm'](), 1)
  state = attacked.initial_state(1, tf.float64)
  x = np.array([[0.0], [3], [5]])
  sent = []
  for center in (0.0, 1e3):
    state['rule'] = tf.constant([center], tf.float64)
    sent.append(
        float(
            attacked.corrupt(x, tf.constant(0), rule_state=state['rule'])[0, 0]
        )
    )
  # From a far center, all values pull in the same direction.
  assert sent[0] < 0
  assert sent[1] == 0


@pytest.mark.parametrize('name', _ATTACKS)
def test_one_honest_client_and_large_values(name):
  for dtype, scale in ((np.float32, 1e37), (np.float64, 1.0)):
    for num_honest in (1, 2, 7):
      honest = (scale * _honest(num_honest)).astype(dtype)
      x = np.concatenate([np.zeros((1, 5), dtype), honest])
      attacked = _attacked(aggregators.CoordinateMedian(), _ATTACKS[name](), 1)
      sent = attacked.corrupt(x, tf.constant(0)).numpy()
      assert sent.dtype == dtype
      assert np.all(np.isfinite(sent))


def test_falsified_counts_pass_the_defense_on():
  honest = _honest()
  x = np.concatenate([np.zeros((_F, 5)), honest])
  rule = aggregators.TrimmedMean(_F)
  attack = _ATTACKS['alie']()
  expected = _attacked(rule, attack).corrupt(x, tf.constant(0))
  attack = aggregators.FalsifiedCounts(attack, 5)
  found = _attacked(rule, attack).corrupt(x, tf.constant(0))
  np.testing.assert_array_equal(found, expected)


def test_a_defense_is_needed():
  with pytest.raises(ValueError, match='needs the defense'):
    _ATTACKS['ipm']().values(tf.constant(_honest()), 1, 0)
