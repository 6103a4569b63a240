"""Rules with attackers among the clients."""

import collections
import functools

import numpy as np
import pytest
import rule_calls
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import attacked_rule
from tff_bn.aggregators import attacks
from tff_bn.aggregators import coordinate_rules
from tff_bn.aggregators import krum
from tff_bn.aggregators import robust_rule

_DTYPES = (np.float32, np.float64)


def _honest(num_honest=7, size=11, dtype=np.float64, seed=0):
  rng = np.random.default_rng([seed, num_honest, size])
  return (3 + rng.normal(size=(num_honest, size)) ** 3).astype(dtype)


class _CountingMean(robust_rule.Rule):
  """The mean; its state counts the rows of all rounds."""

  def initial_state(self, size, dtype):
    return collections.OrderedDict(num_rows=tf.zeros([], tf.int32))

  def aggregate(self, values, num_dropped, state):
    num_rows = tf.shape(values)[0]
    mean = tf.math.divide_no_nan(
        tf.reduce_sum(values, axis=0), tf.cast(num_rows, values.dtype)
    )
    return mean, collections.OrderedDict(num_rows=state['num_rows'] + num_rows)


@functools.cache
def _attacked(num_attackers=2, attack=None, **arguments):
  return attacked_rule.Attacked(
      _CountingMean(0),
      attack or attacks.FallOfEmpires(3.0),
      num_attackers,
      **arguments,
  )


@functools.cache
def _process(rule, dtype=np.float32):
  return rule.create(tff.TensorType(dtype, [3]))


def test_attackers_are_the_first_clients(in_process_runtime):
  clients = _honest(6, 3, np.float32)
  process = _process(_attacked())

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


def test_noise_differs_between_rounds(in_process_runtime):
  process = _process(_attacked(1, attacks.GaussianNoise(1.0, seed=5)))
  state, results = process.initialize(), []
  for _ in range(2):
    output = process.next(state, list(np.zeros([2, 3], np.float32)))
    state = output.state
    results.append(output.result)
  again = process.next(process.initialize(), list(np.zeros([2, 3], np.float32)))
  np.testing.assert_array_equal(again.result, results[0])
  assert (results[0] != results[1]).all()


def test_dropped_clients_are_no_attackers(in_process_runtime):
  clients = _honest(5, 3, np.float32)
  clients[1] = np.nan
  process = _process(_attacked())
  output = process.next(process.initialize(), list(clients))
  # Clients 0 and 2 are the attackers.
  np.testing.assert_allclose(
      output.result, -0.5 * clients[3:].mean(axis=0), rtol=1e-5
  )
  assert output.measurements == {'num_dropped': 1}


@pytest.mark.parametrize('dtype', _DTYPES)
@pytest.mark.parametrize(
    'attack',
    [
        attacks.InnerProductManipulation(1e9),
        attacks.ALittleIsEnough(-1e9),
        attacks.SignFlipping(),
    ],
)
def test_attacks_are_clipped_to_finite_values(attack, dtype):
  largest = np.finfo(dtype).max
  values = np.array([[1, 1], [1, 1], [1, -1]], dtype) * largest
  sent = _attacked(1, attack).corrupt(values, tf.constant(0)).numpy()
  assert np.isfinite(sent).all()
  assert abs(sent[0]).max() > largest / 10


def test_without_clients_there_are_no_attackers(in_process_runtime):
  for attack in (attacks.Mimic(), attacks.ALittleIsEnough()):
    corrupted = _attacked(2, attack).corrupt(tf.zeros([0, 4]), tf.constant(0))
    assert corrupted.shape == (0, 4)
  process = _process(_attacked())
  output = process.next(
      process.initialize(), [np.full(3, np.nan, np.float32)] * 4
  )
  np.testing.assert_array_equal(output.result, [0, 0, 0])
  assert output.measurements == {'num_dropped': 4}


@pytest.mark.parametrize('num_clients', [1, 2])
def test_no_honest_client_is_an_error(in_process_runtime, num_clients):
  process = _process(_attacked())
  values = _honest(num_clients, 3, np.float32)
  with pytest.raises(Exception, match='num_attackers=2 there must be'):
    process.next(process.initialize(), list(values))
  message = f'num_attackers=2 leaves none of {num_clients} clients honest'
  with pytest.raises(ValueError, match=message):
    _attacked(num_clients=num_clients)
  with pytest.raises(ValueError, match=message):
    attacked_rule.Attacked(
        _CountingMean(0, num_clients=num_clients), attacks.SignFlipping(), 2
    )
  with pytest.raises(ValueError, match=message):
    _attacked().check_num_clients(num_clients)


def test_attacked_has_the_requirements_of_its_rule():
  rule = _CountingMean(2, num_clients=7)
  attacked = attacked_rule.Attacked(rule, attacks.SignFlipping(), 3)
  assert attacked.num_byzantine == 2
  assert attacked.num_clients == 7
  assert attacked.min_clients(2) == 5
  attacked.check_num_clients(5)
  with pytest.raises(ValueError, match='num_byzantine=2 is too large'):
    attacked.check_num_clients(4)


@pytest.mark.parametrize('dtype', _DTYPES)
@pytest.mark.parametrize(
    'attack',
    [attacks.Infinity(), attacks.FalsifiedCounts(attacks.Infinity(), 1.0)],
)
def test_infinity_is_dropped(attack, dtype):
  """Even by the mean. The rule then has fewer attackers to tolerate."""
  values = _honest(7, 3, dtype)
  for rule, expected in (
      (coordinate_rules.Mean(), values[2:].mean(axis=0)),
      (coordinate_rules.TrimmedMean(2), values[2:].mean(axis=0)),
      (
          coordinate_rules.TrimmedMean(3),
          np.sort(values[2:], axis=0)[1:-1].mean(axis=0),
      ),
  ):
    attacked = attacked_rule.Attacked(rule, attack, 2)
    sent = attacked.corrupt(values, tf.constant(0)).numpy()
    assert np.all(np.isposinf(sent[:2]))
    np.testing.assert_array_equal(sent[2:], values[2:])
    result, _ = rule_calls.aggregate(attacked, values)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_infinity_leaves_too_few_clients():
  attacked = attacked_rule.Attacked(krum.Krum(1), attacks.Infinity(), 3)
  # Two honest clients are left; Krum needs 3 without attackers.
  with pytest.raises(
      tf.errors.InvalidArgumentError, match='it needs at least . of these'
  ):
    rule_calls.aggregate(attacked, _honest(5, 3, np.float32))


def test_round_without_honest_clients_after_all_diverged():
  """The values stay as they are if all honest clients were dropped."""
  values = np.arange(8.0).reshape(2, 4)
  result, state = rule_calls.aggregate(_attacked(), values, num_dropped=3)
  np.testing.assert_allclose(result, values.mean(0))
  assert state['round_num'] == 1
