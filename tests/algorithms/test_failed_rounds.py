"""Tests of rounds in which some or all clients are dropped.

A round without clients must leave the states unchanged to the bit.
"""

import collections
import copy
import functools

import client_rounds
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.clients import drift_correction

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_OPTIMIZERS = tff.learning.optimizers
_SGD = _OPTIMIZERS.build_sgdm
_OPTIONS = {
    'fed_avg': dict(
        client_weighting='uniform', server_optimizer=_SGD(0.5, 0.9)
    ),
    'fed_bs': dict(epsilon=1e-9),
    'fixbn': dict(fixbn_rounds=3),
    # A dropped client still counts for N.
    'scaffold': dict(num_clients=4),
    'bn_scaffold': dict(num_clients=4),
    'fed_dyn': dict(num_clients=4),
}
_NAMES = [
    *('fed_bn', 'scaffold', 'fed_avg'),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            *('fbn', 'fedtan', 'fixbn', 'fed_bs', 'greg', 'bn_scaffold'),
            *('fed_nova', 'fed_dyn'),
        )
    ),
]


def _poisoned(toy, seed=0):
  x, y = toy.arrays(8, seed)
  x[3, 0] = np.nan
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


def _empty(toy):
  return toy.dataset(8, 0).take(0)


def _good(toy):
  return [toy.dataset(16, 1), toy.dataset(9, 2), toy.dataset(20, 3)]


class _Run(client_rounds.Training):
  """A training that knows its model."""

  def __init__(self, model, process, num_clients=3):
    super().__init__(process, num_clients)
    self.model = model

  def next(self, data):
    """Runs a round; returns metrics of its clients and of the server's step."""
    metrics = self.next_round(data)
    return {**metrics['client_work'], **metrics['finalizer']}

  @property
  def values(self):
    return self.weights(self.model)

  @property
  def lasting(self):
    """Returns everything that a round without clients must not change."""
    work = collections.OrderedDict(self.state.client_work)
    del work['round_num']
    return [
        self.state.global_model_weights,
        self.state.finalizer['optimizer'],
        work,
        self.clients,
    ]


@functools.cache
def _with_server_optimizer(name):
  """Returns a model and a process with a server optimizer that has a state."""
  options = dict(
      client_weighting='num_examples',
      server_optimizer=_OPTIMIZERS.build_adam(0.01),
  )
  return client_rounds.toy_process(
      f'build_{name}',
      momentum=None if 'scaffold' in name else 0.5,
      **{**options, **_OPTIONS.get(name, {})},
  )


def _assert_same(found, expected):
  tf.nest.assert_same_structure(found, expected)
  for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
    assert np.asarray(a).dtype == np.asarray(b).dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _changed(found, expected):
  return any(
      np.any(a != b)
      for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected))
  )


@pytest.mark.parametrize('name', _NAMES)
def test_a_dropped_client_leaves_the_mean_of_the_others(toy, name):
  arguments = _with_server_optimizer(name)
  found, expected = _Run(*arguments, 4), _Run(*arguments)
  before = found.values
  for number in range(1, 4):
    good = _good(toy)
    metrics = found.next([good[0], _poisoned(toy), *good[1:]])
    assert metrics['num_clients'] == 4
    assert metrics['num_dropped_clients'] == 1
    assert metrics['failed_rounds'] == 0
    others = expected.next(good)
    assert others['num_dropped_clients'] == 0
    for key, value in others['train'].items():
      np.testing.assert_array_equal(metrics['train'][key], value)
    _assert_same(found.values, expected.values)
    _assert_same(found.state.finalizer, expected.state.finalizer)
    assert found.state.client_work['round_num'] == number
  assert _changed(found.values, before)
  if found.clients:
    dropped = found.clients.pop(1)
    _assert_same(found.clients, expected.clients)
    _assert_same(dropped, found.process.initialize_client(found.state))


@pytest.mark.parametrize('name', _NAMES)
def test_without_any_good_client_nothing_changes(toy, name):
  run = _Run(*_with_server_optimizer(name))
  assert run.next(_good(toy))['failed_rounds'] == 0
  assert run.next(_good(toy))['failed_rounds'] == 0
  # An optimizer with momentum would continue.
  accumulators = [
      leaf for leaf in tf.nest.flatten(run.state.finalizer) if np.ndim(leaf)
  ]
  assert accumulators
  assert any(np.any(leaf != 0) for leaf in accumulators)
  before = run.lasting
  without_failures = copy.copy(run)

  poisoned = [_poisoned(toy, seed) for seed in range(3)]
  empty = [_empty(toy)] * 3
  one_of_each = [_poisoned(toy), _empty(toy), _empty(toy)]
  for data, num_dropped, failed_rounds in (
      (poisoned, 3, 1),
      (poisoned, 3, 2),
      (one_of_each, 1, 3),
      # Nobody was dropped.
      (empty, 0, 0),
      (poisoned, 3, 1),
  ):
    round_num = run.state.client_work['round_num']
    metrics = run.next(data)
    assert metrics['num_clients'] == 3
    assert metrics['num_dropped_clients'] == num_dropped
    assert metrics['failed_rounds'] == failed_rounds
    assert run.state.finalizer['failed_rounds'] == failed_rounds
    assert metrics['rejected_rounds'] == 0
    assert run.state.client_work['round_num'] == round_num + 1
    assert metrics['train']['num_examples'] == 0
    _assert_same(run.lasting, before)

  # Training continues as if these rounds had not happened, except in FixBN,
  # whose phase depends on the number of the round.
  assert run.next(_good(toy))['failed_rounds'] == 0
  assert _changed(run.values, without_failures.values)
  if name != 'fixbn':
    without_failures.next(_good(toy))
    _assert_same(run.values, without_failures.values)
    _assert_same(run.state.finalizer, without_failures.state.finalizer)


def test_centralized_keeps_its_model_and_its_momentum(toy):
  run = _Run(*client_rounds.toy_process('build_centralized', momentum=0.9), 1)
  run.next([toy.dataset(20, 1)])
  without_failures, before = copy.copy(run), run.state
  for data, num_dropped, failed_rounds in (
      (_poisoned(toy), 1, 1),
      (_poisoned(toy), 1, 2),
      (_empty(toy), 0, 0),
      (_poisoned(toy), 1, 1),
  ):
    metrics = run.next([data])
    assert metrics['num_dropped_clients'] == num_dropped
    assert metrics['failed_rounds'] == failed_rounds
    _assert_same(run.state.global_model_weights, before.global_model_weights)
    _assert_same(
        run.state.client_work['optimizer'], before.client_work['optimizer']
    )
  assert run.state.client_work['round_num'] == 5
  assert run.next([toy.dataset(20, 1)])['failed_rounds'] == 0
  without_failures.next([toy.dataset(20, 1)])
  _assert_same(run.values, without_failures.values)


def test_a_client_that_diverges_in_its_second_step_is_dropped(toy):
  """Its first step was good, but is not sent either."""
  run = _Run(*client_rounds.toy_process('build_fedtan', local_steps=2))
  before = run.values
  bad = toy.dataset(8, 0).concatenate(_poisoned(toy, 4))
  metrics = run.next([bad, _poisoned(toy)])
  assert metrics['num_dropped_clients'] == 2
  assert metrics['failed_rounds'] == 1
  _assert_same(run.values, before)


class _Careless(drift_correction.DriftCorrection):
  """The layer keeps the mean over its steps, which is NaN without steps."""

  def bind(self, model, weights, client_optimizer):
    del model, weights, client_optimizer

    class Bound(drift_correction.BoundCorrection):

      def initial_client_state(self, values):
        return collections.OrderedDict(mean_change=tf.zeros_like(values[0]))

      def finish(self, started, before, after, collected, client_state):
        del started, collected, client_state
        change = after[0] - before[0]
        mean = change / tf.math.count_nonzero(change, dtype=change.dtype)
        return collections.OrderedDict(mean_change=mean), {}

    return Bound()


def test_a_discarded_state_does_not_drop_a_client_without_data(toy):
  run = _Run(
      *client_rounds.toy_process('build_fed_avg', drift_correction=_Careless()),
      num_clients=5,
  )
  metrics = run.next([*_good(toy), _empty(toy), _poisoned(toy)])
  assert metrics['num_dropped_clients'] == 1
  *good, empty, poisoned = run.clients
  assert all(np.any(state['mean_change'] != 0) for state in good)
  for state in (empty, poisoned):
    np.testing.assert_array_equal(state['mean_change'], 0)
