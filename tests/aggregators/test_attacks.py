"""Tests for attacks, against NumPy and the papers' numbers."""

import collections
import math
import statistics

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import attacked_rule
from tff_bn.aggregators import attacks
from tff_bn.aggregators import robust_rule

_DTYPES = (np.float32, np.float64)


def _honest(num_honest=7, size=11, dtype=np.float64, seed=0):
  rng = np.random.default_rng([seed, num_honest, size])
  return (3 + rng.normal(size=(num_honest, size)) ** 3).astype(dtype)


def _values(attack, honest, num_attackers=3, round_num=0, is_mean=None):
  """Traced as in a TFF computation: the number of clients is not known."""

  @tf.function(
      input_signature=[
          tf.TensorSpec([None, honest.shape[1]], honest.dtype),
          tf.TensorSpec([], tf.int32),
      ]
  )
  def values(honest, round_num):
    return attack.values(honest, num_attackers, round_num, is_mean)

  result = values(honest, round_num)
  assert result.dtype == honest.dtype
  assert result.shape == (num_attackers, honest.shape[1])
  return result.numpy()


def _numpy_mimicked(honest):
  """The client that the singular value decomposition finds."""
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
}


@pytest.mark.parametrize('dtype', _DTYPES)
@pytest.mark.parametrize(
    ('num_honest', 'num_attackers'), [(7, 3), (3, 1), (6, 4), (5, 5), (80, 19)]
)
@pytest.mark.parametrize('name', _ATTACKS)
def test_attack_is_numpys(name, num_honest, num_attackers, dtype):
  attack, expected = _ATTACKS[name]
  honest = _honest(num_honest, dtype=dtype)
  values = _values(attack, honest, num_attackers)
  np.testing.assert_allclose(
      values,
      [expected(honest.astype(np.float64), num_attackers)] * num_attackers,
      rtol=1e-5 if dtype == np.float32 else 1e-12,
  )


@pytest.mark.parametrize('dtype', _DTYPES)
@pytest.mark.parametrize('name', [*_ATTACKS, 'gaussian'])
def test_order_of_the_honest_clients_does_not_matter(name, dtype):
  attack = (
      attacks.GaussianNoise(2.0, seed=1)
      if name == 'gaussian'
      else _ATTACKS[name][0]
  )
  honest = _honest(6, dtype=dtype)
  permuted = np.random.default_rng(0).permutation(honest)
  np.testing.assert_allclose(
      _values(attack, honest), _values(attack, permuted), rtol=1e-5
  )


@pytest.mark.parametrize(
    ('attack', 'expected'),
    [
        (attacks.SignFlipping(), [-2, -4]),
        (attacks.FallOfEmpires(1.5), [-1, -2]),
        (attacks.InnerProductManipulation(0.5), [-1, -2]),
        (attacks.ALittleIsEnough(0.5), [2.5, 5]),
    ],
)
def test_examples_of_the_docstrings(attack, expected):
  honest = np.array([[1, 2], [3, 6]], np.float64)
  np.testing.assert_allclose(_values(attack, honest, 1), [expected])


def test_sign_flipping_keeps_variances():
  honest = _honest(4, 5)
  mean = honest.mean(axis=0)
  is_mean = np.array([True, False, False, True, False])
  values = _values(attacks.SignFlipping(), honest, 2, is_mean=is_mean)
  expected = mean * [-1, 1, 1, -1, 1]
  np.testing.assert_allclose(values, [expected, expected])


@pytest.mark.parametrize(
    'attack',
    [
        attacks.FallOfEmpires(3.0),
        attacks.InnerProductManipulation(3.0),
        attacks.ALittleIsEnough(),
        attacks.Mimic(),
        attacks.GaussianNoise(1.0, seed=0),
    ],
)
def test_other_attacks_treat_means_and_variances_alike(attack):
  honest = _honest(5, 3)
  np.testing.assert_array_equal(
      _values(attack, honest),
      _values(attack, honest, is_mean=np.array([True, False, True])),
  )


# Worked out by hand; 12 of 50 is what the paper's experiments have.
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
def test_alie_without_a_default_says_so(num_honest, num_attackers):
  attack = attacks.ALittleIsEnough()
  honest = _honest(num_honest)
  with pytest.raises(tf.errors.InvalidArgumentError, match='deviations'):
    _values(attack, honest, num_attackers)
  with pytest.raises(tf.errors.InvalidArgumentError, match='deviations'):
    attack.values(tf.constant(honest), num_attackers, 0)
  with_deviations = attacks.ALittleIsEnough(1.0)
  assert np.isfinite(_values(with_deviations, honest, num_attackers)).all()


@pytest.mark.parametrize('dtype', _DTYPES)
@pytest.mark.parametrize('name', _ATTACKS)
def test_clients_that_are_alike(name, dtype):
  honest = np.tile(_honest(1, dtype=dtype), (5, 1))
  attack, expected = _ATTACKS[name]
  np.testing.assert_allclose(
      _values(attack, honest), [expected(honest, 3)] * 3, rtol=1e-5
  )


@pytest.mark.parametrize('name', sorted(set(_ATTACKS) - {'alie'}))
def test_one_honest_client(name):
  attack, expected = _ATTACKS[name]
  honest = _honest(1)
  np.testing.assert_allclose(_values(attack, honest), [expected(honest, 3)] * 3)


def test_mimic_finds_the_furthest_client():
  # The docstring's example.
  honest = np.array([[0, 0], [1, 0], [5, 1]], np.float32)
  np.testing.assert_array_equal(
      _values(attacks.Mimic(), honest, 2), [[5, 1], [5, 1]]
  )
  # A far client that is not where the clients differ most: 40 clients along
  # the first axis, one along the second.
  line = np.stack([np.linspace(-1, 1.1, 40), np.zeros(40)], axis=1)
  honest = np.concatenate([[[0.0, 2.0]], line])
  np.testing.assert_allclose(_values(attacks.Mimic(), honest, 1), [[1.1, 0.0]])


@pytest.mark.parametrize('dtype', _DTYPES)
def test_mimic_decides_between_two_sides(dtype):
  for seed in range(20):
    honest = _honest(2, 5, dtype, seed)
    first = _values(attacks.Mimic(), honest, 1)
    np.testing.assert_array_equal(
        first, _values(attacks.Mimic(), honest[::-1].copy(), 1)
    )
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
def test_noise_has_its_distribution(dtype):
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


def test_noise_depends_on_seed_and_round_alone():
  honest = _honest(4, 50)

  def noise(seed=2**32 - 1, round_num=1, values=honest):
    attack = attacks.GaussianNoise(1.0, seed)
    return _values(attack, values, 1, round_num)

  np.testing.assert_array_equal(noise(), noise(values=_honest(9, 50)))
  others = [noise(seed=1), noise(round_num=2), noise(seed=1, round_num=2)]
  for other in others:
    assert abs(np.corrcoef(noise(), other)[0, 1]) < 0.8
    assert (noise() != other).all()


@pytest.mark.parametrize(
    ('create', 'message'),
    [
        (
            lambda: attacks.FallOfEmpires(math.nan),
            'factor=nan of FallOfEmpires must be a finite number',
        ),
        (lambda: attacks.FallOfEmpires('2'), "factor='2' of FallOfEmpires"),
        (
            lambda: attacks.InnerProductManipulation(0.0),
            'epsilon=0.0 of InnerProductManipulation',
        ),
        (lambda: attacks.InnerProductManipulation(math.inf), 'epsilon=inf of'),
        (
            lambda: attacks.ALittleIsEnough(math.inf),
            'deviations=inf of ALittleIsEnough',
        ),
        (lambda: attacks.GaussianNoise(-1.0, 0), 'stddev=-1.0 of Gaussian'),
        (lambda: attacks.GaussianNoise(1.0, -1), 'seed=-1 of GaussianNoise'),
    ],
)
def test_wrong_arguments(create, message):
  with pytest.raises(ValueError, match=message):
    create()


class _CountingMean(robust_rule.Rule):
  """The mean; its state is the number of rows that it has seen."""

  def initial_state(self, size, dtype):
    return collections.OrderedDict(num_rows=tf.zeros([], tf.int32))

  def aggregate(self, values, num_dropped, state):
    num_rows = tf.shape(values)[0]
    mean = tf.math.divide_no_nan(
        tf.reduce_sum(values, axis=0), tf.cast(num_rows, values.dtype)
    )
    return mean, collections.OrderedDict(num_rows=state['num_rows'] + num_rows)


def _attacked(num_attackers=2, attack=None, **arguments):
  return attacked_rule.Attacked(
      _CountingMean(0),
      attack or attacks.FallOfEmpires(3.0),
      num_attackers,
      **arguments,
  )


def _process(rule, size=3, dtype=np.float32):
  return rule.create(tff.TensorType(dtype, [size]))


@pytest.mark.parametrize('dtype', _DTYPES)
def test_attackers_are_the_first_clients(in_process_runtime, dtype):
  clients = _honest(6, 3, dtype)
  process = _process(_attacked(), dtype=dtype)

  state = process.initialize()
  for round_num in range(3):
    assert state['round_num'] == round_num
    assert state['rule']['num_rows'] == 6 * round_num
    output = process.next(state, list(clients))
    state = output.state
    sent = [-2 * clients[2:].mean(axis=0)] * 2
    np.testing.assert_allclose(
        output.result, np.mean([*sent, *clients[2:]], axis=0), rtol=1e-5
    )
  assert list(state) == ['round_num', 'rule']
  assert output.measurements == {'num_dropped': 0}


def test_structures_are_attacked_as_one_vector(in_process_runtime):
  rng = np.random.default_rng(0)
  clients = [
      collections.OrderedDict(
          w=rng.normal(size=(2, 2)).astype(np.float32),
          b=[rng.normal(size=1).astype(np.float32)],
      )
      for _ in range(5)
  ]
  vectors = [np.r_[c['w'].ravel(), c['b'][0]] for c in clients]
  attacked = _attacked(1, attacks.Mimic())
  process = attacked.create(
      collections.OrderedDict(
          w=tff.TensorType(np.float32, [2, 2]),
          b=[tff.TensorType(np.float32, [1])],
      )
  )
  result = process.next(process.initialize(), clients).result
  honest = np.array(vectors[1:], np.float64)
  expected = (honest.sum(axis=0) + _numpy_mimicked(honest)) / 5
  np.testing.assert_allclose(result['w'].ravel(), expected[:4], rtol=1e-5)
  np.testing.assert_allclose(result['b'][0], expected[4:], rtol=1e-5)


def test_noise_is_new_in_each_round(in_process_runtime):
  process = _process(_attacked(1, attacks.GaussianNoise(1.0, seed=5)))
  state, results = process.initialize(), []
  for _ in range(2):
    output = process.next(state, list(np.zeros([2, 3], np.float32)))
    state = output.state
    results.append(output.result)
  again = process.next(process.initialize(), list(np.zeros([2, 3], np.float32)))
  np.testing.assert_array_equal(again.result, results[0])
  assert (results[0] != results[1]).all()


def test_who_is_dropped_is_no_attacker(in_process_runtime):
  clients = _honest(5, 3, np.float32)
  clients[1] = np.nan
  process = _process(_attacked())
  output = process.next(process.initialize(), list(clients))
  # Of the clients 0, 2, 3 and 4, the first two are attackers.
  np.testing.assert_allclose(
      output.result, -0.5 * clients[3:].mean(axis=0), rtol=1e-5
  )
  assert output.measurements == {'num_dropped': 1}


def test_corrupt_keeps_the_honest_rows():
  values = _honest(7)
  is_mean = np.arange(11) % 2 == 0
  attacked = _attacked(3, attacks.SignFlipping())
  corrupted = attacked.corrupt(values, tf.constant(0), is_mean).numpy()
  np.testing.assert_array_equal(corrupted[3:], values[3:])
  mean = values[3:].mean(axis=0)
  np.testing.assert_allclose(
      corrupted[:3], [np.where(is_mean, -mean, mean)] * 3
  )


def test_corrupt_passes_on_the_round():
  attack = attacks.GaussianNoise(1.0, seed=1)
  values = _honest(3)
  corrupted = _attacked(1, attack).corrupt(values, tf.constant(4))
  np.testing.assert_array_equal(corrupted[:1], _values(attack, values, 1, 4))


@pytest.mark.parametrize('dtype', _DTYPES)
@pytest.mark.parametrize(
    'attack',
    [
        attacks.InnerProductManipulation(1e9),
        attacks.ALittleIsEnough(-1e9),
        attacks.SignFlipping(),
    ],
)
def test_what_attackers_send_is_finite(attack, dtype):
  largest = np.finfo(dtype).max
  values = np.array([[1, 1], [1, 1], [1, -1]], dtype) * largest
  sent = _attacked(1, attack).corrupt(values, tf.constant(0)).numpy()
  assert np.isfinite(sent).all()
  assert abs(sent[0]).max() > largest / 10


def test_without_clients_there_are_no_attackers(in_process_runtime):
  for attack in (attacks.Mimic(), attacks.ALittleIsEnough()):
    corrupted = _attacked(2, attack).corrupt(tf.zeros([0, 4]), tf.constant(0))
    assert corrupted.shape == (0, 4)
  process = _process(_attacked(2, attacks.Mimic()))
  output = process.next(
      process.initialize(), [np.full(3, np.nan, np.float32)] * 4
  )
  np.testing.assert_array_equal(output.result, [0, 0, 0])
  assert output.measurements == {'num_dropped': 4}


@pytest.mark.parametrize('num_clients', [1, 2])
def test_no_honest_client_is_an_error_in_the_round(
    in_process_runtime, num_clients
):
  values = _honest(num_clients, 3, np.float32)
  with pytest.raises(tf.errors.InvalidArgumentError, match='num_attackers=2'):
    _attacked().corrupt(values, tf.constant(0))
  process = _process(_attacked())
  with pytest.raises(Exception, match='num_attackers=2 there must be'):
    process.next(process.initialize(), list(values))


def test_no_default_of_alie_is_an_error_in_the_round(in_process_runtime):
  process = _process(_attacked(2, attacks.ALittleIsEnough()))
  with pytest.raises(Exception, match='at most half are attackers'):
    process.next(process.initialize(), list(_honest(3, 3, np.float32)))


@pytest.mark.parametrize('num_clients', [1, 2])
def test_no_honest_client_is_an_error_at_once_if_known(num_clients):
  message = f'num_attackers=2 leaves none of {num_clients} clients honest'
  with pytest.raises(ValueError, match=message):
    _attacked(num_clients=num_clients)
  with pytest.raises(ValueError, match=message):
    attacked_rule.Attacked(
        _CountingMean(0, num_clients=num_clients), attacks.SignFlipping(), 2
    )
  with pytest.raises(ValueError, match=message):
    _attacked().check_num_clients(num_clients)


def test_the_rules_demands_are_the_attacked_rules():
  rule = _CountingMean(2, num_clients=7)
  attacked = attacked_rule.Attacked(rule, attacks.SignFlipping(), 3)
  assert attacked.num_byzantine == 2
  assert attacked.num_clients == 7
  assert attacked.min_clients(2) == 5
  attacked.check_num_clients(5)
  with pytest.raises(ValueError, match='num_byzantine=2 is too large'):
    attacked.check_num_clients(4)


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ((None, attacks.Mimic(), 1), TypeError, 'Attacked needs a rule'),
        ((_CountingMean(0), 'sf', 1), TypeError, "attack, .* given 'sf'"),
        (
            (_CountingMean(0), attacks.Mimic(), 0),
            ValueError,
            'num_attackers=0 of Attacked',
        ),
    ],
)
def test_wrong_arguments_of_attacked(arguments, error, message):
  with pytest.raises(error, match=message):
    attacked_rule.Attacked(*arguments)


def test_attackers_that_are_left_alone():
  """A round goes on after all honest clients diverged and were left out."""
  values = np.arange(8.0).reshape(2, 4)
  result, state = _attacked(2).aggregate(
      tf.constant(values),
      tf.constant(3),
      _attacked(2).initial_state(4, tf.float64),
  )
  np.testing.assert_allclose(result, values.mean(0))
  assert state['round_num'] == 1
