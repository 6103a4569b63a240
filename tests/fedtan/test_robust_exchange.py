"""A rule in the exchanges of FedTAN, against NumPy and the rules' promises."""

import collections
import functools

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn.catalog import rules
from tff_bn.fedtan import robust_exchange
from tff_bn.layers.batch_moments import Moments

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SIZE = 4
_NUM_HONEST, _NUM_ATTACKERS = 7, 3
_VECTOR = tff.TensorType(np.float64, [_SIZE])
_TYPE = tff.to_type(
    collections.OrderedDict(
        POOLED_MOMENTS=[Moments(tff.TensorType(np.float64), _VECTOR, _VECTOR)],
        MEAN=[collections.OrderedDict(scale=_VECTOR, shift=_VECTOR)],
    )
)


@functools.cache
def _process(rule):
  return robust_exchange.RobustExchangeFactory(rule).create(
      _TYPE, tff.TensorType(np.int32)
  )


def _client(rng, count=32.0):
  return collections.OrderedDict(
      POOLED_MOMENTS=[
          Moments(
              np.float64(count),
              rng.normal(2, 1, _SIZE),
              rng.uniform(0.5, 2, _SIZE),
          )
      ],
      MEAN=[
          collections.OrderedDict(
              scale=rng.normal(size=_SIZE), shift=rng.normal(1, size=_SIZE)
          )
      ],
  )


def _column(clients, name):
  if name in Moments._fields:
    return np.array([getattr(c['POOLED_MOMENTS'][0], name) for c in clients])
  return np.array([c['MEAN'][0][name] for c in clients])


def _answers(rule, clients, weights=None):
  process = _process(rule)
  weights = [1] * len(clients) if weights is None else weights
  result = process.next(process.initialize(), clients, weights).result
  assert list(result) == ['POOLED_MOMENTS', 'MEAN']
  return {**result['POOLED_MOMENTS'][0]._asdict(), **result['MEAN'][0]}


def test_the_median_of_those_who_take_part():
  rng = np.random.default_rng(0)
  clients = [_client(rng, count) for count in (30, 32, 34, 36, 1e9)]
  absent = _client(rng, 0)
  answers = _answers(
      aggregators.CoordinateMedian(2),
      [absent, *clients],
      [0, *[1] * len(clients)],
  )
  for name in ('scale', 'shift', 'mean'):
    np.testing.assert_allclose(
        answers[name], np.median(_column(clients, name), axis=0)
    )
  deviations = _column(clients, 'mean') - answers['mean']
  np.testing.assert_allclose(
      answers['variance'],
      np.median(_column(clients, 'variance'), axis=0)
      + np.median(deviations**2, axis=0),
  )
  # The greatest count is clipped.
  assert answers['count'] == 30 + 32 + 34 + 36 + 10 * 34


def test_states_of_rules_last():
  rng = np.random.default_rng(1)
  process = _process(aggregators.CenteredClipping(radius=0.5, num_byzantine=1))
  clients = [_client(rng) for _ in range(4)]
  first = process.next(process.initialize(), clients, [1] * 4)
  second = process.next(first.state, clients, [1] * 4)
  # It comes nearer to the mean.
  far, near = (
      np.linalg.norm(
          output.result['MEAN'][0]['shift'] - _column(clients, 'shift').mean(0)
      )
      for output in (first, second)
  )
  assert near < 0.9 * far


def _kappas(num_honest, num_attackers):
  """The constants of Allouah et al., Fixing by Mixing, AISTATS 2023."""
  ratio = num_attackers / (num_honest - num_attackers)
  return {
      aggregators.TrimmedMean: 6 * ratio * (1 + ratio),
      aggregators.CoordinateMedian: 4 * (1 + ratio) ** 2,
  }


def _arbitrary(rng, kind):
  """A message of an attacker, of a size from tiny to huge."""
  size = 10.0 ** rng.uniform(-3, 100)
  client = _client(rng, count=size)
  for name in ('mean', 'variance') if kind == 'moments' else ():
    vector = getattr(client['POOLED_MOMENTS'][0], name)
    vector *= rng.choice([-size, size], _SIZE)
  for vector in client['MEAN'][0].values():
    vector *= rng.choice([-size, size], _SIZE)
  return client


def _assert_near(answers, honest, kappa):
  """Asserts that errors are at most √κ times the honest clients' deviation."""

  def bound(values):
    return np.sqrt(kappa * values.var(axis=0))

  tolerance = 1e-9
  for name in ('mean', 'scale', 'shift'):
    values = _column(honest, name)
    error = np.abs(answers[name] - values.mean(axis=0))
    assert (error <= bound(values) + tolerance).all()
  means, variances = _column(honest, 'mean'), _column(honest, 'variance')
  squares = (means - answers['mean']) ** 2
  # The squares are deviations from an answer which is itself κ-near.
  error = np.abs(answers['variance'] - variances.mean(0) - means.var(0))
  largest = bound(variances) + bound(squares) + kappa * means.var(axis=0)
  assert (error <= largest + tolerance).all()


@pytest.mark.parametrize(
    'rule_class',
    [
        aggregators.CoordinateMedian,
        pytest.param(aggregators.TrimmedMean, marks=pytest.mark.slow),
    ],
)
def test_answers_are_near_to_honest_ones_whatever_attackers_send(rule_class):
  kappa = _kappas(_NUM_HONEST, _NUM_ATTACKERS)[rule_class]
  rule = rule_class(num_byzantine=_NUM_ATTACKERS)
  for seed in range(40):
    rng = np.random.default_rng(seed)
    honest = [_client(rng) for _ in range(_NUM_HONEST)]
    kind = ('moments', 'gradients')[seed % 2]
    attackers = [_arbitrary(rng, kind) for _ in range(_NUM_ATTACKERS)]
    if seed % 4 < 2:
      attackers = [attackers[0]] * _NUM_ATTACKERS
    answers = _answers(rule, [*attackers, *honest])
    _assert_near(answers, honest, kappa)
    assert answers['count'] <= (_NUM_HONEST + 10 * _NUM_ATTACKERS) * 32
  # The mean promises nothing.
  answers = _answers(aggregators.Mean(), [*attackers, *honest])
  with pytest.raises(AssertionError):
    _assert_near(answers, honest, kappa)


# The attacks of the catalog that falsify what clients send.
_ATTACKS = [
    name for name, attack in rules.ATTACKS.items() if not attack.poisons_data
]


@pytest.mark.parametrize(
    'name',
    [
        n if n == 'alie' else pytest.param(n, marks=pytest.mark.slow)
        for n in _ATTACKS
    ],
)
def test_answers_are_near_to_honest_ones_under_our_attacks(name):
  entry = rules.ATTACKS[name]
  arguments = {}
  if entry.strength is not None:
    arguments[entry.strength.name] = entry.strength.default
  if entry.needs_seed:
    arguments['seed'] = 5
  attack = entry.load()(**arguments)
  rng = np.random.default_rng(3)
  clients = [_client(rng) for _ in range(_NUM_ATTACKERS + _NUM_HONEST)]
  honest = clients[_NUM_ATTACKERS:]
  rule = aggregators.TrimmedMean(num_byzantine=_NUM_ATTACKERS)
  kappa = _kappas(_NUM_HONEST, _NUM_ATTACKERS)[type(rule)]
  attacked = aggregators.Attacked(rule, attack, _NUM_ATTACKERS)
  _assert_near(_answers(attacked, clients), honest, kappa)
