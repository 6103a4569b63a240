"""Tests of FedBS."""

import functools

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn.keras_model import partition
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes.stateful_process import StatefulLearningProcess

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)  # Unequal, with short last batches.
_STRENGTH = 0.7
_NEVER, _AT_ONCE = 1e-6, 100.0  # Two values of ε.
_fed_bs = functools.partial(
    client_rounds.toy_process, 'build_fed_bs', proximal_strength=_STRENGTH
)
_assert_same = client_rounds.assert_same
# The clients' weights and their sum are float32.
_assert_close = functools.partial(
    client_rounds.assert_close, rtol=1e-6, atol=1e-8
)


class _Truth:
  """FedBS in NumPy."""

  def __init__(self, model, epsilon, local=()):
    weights = model.from_model_weights(model.initial_weights)
    self.models = [list(weights) for _ in _SIZES]
    self.shared = [i for i in range(len(weights)) if i not in local]
    self.epsilon = epsilon
    self.switched = False
    self.std = None
    self.loss = None

  def round(self, data, server_step=None, **kwargs):
    """Runs one round with these batches of all clients."""
    results = []
    for before, batches in zip(self.models, data):
      extra = None
      if self.switched:
        extra = reference.proximal(before, _STRENGTH, self.shared)
      results.append(
          reference.train(before, batches, 0.1, extra=extra, **kwargs)
      )
    models, counts, loss_sums = zip(*results)
    losses = np.array(loss_sums) / counts
    shares = np.array(counts) if self.switched else losses
    mean = reference.average_models(models, shares)
    if server_step is not None:
      server_step(self.models[0], mean)
    self.models = [list(after) for after in models]
    for weights in self.models:
      for i in self.shared:
        weights[i] = mean[i]
    self.std = np.std(losses)
    self.loss = sum(loss_sums) / sum(counts)
    self.switched = self.switched or self.std < self.epsilon


def _check_rounds(toy, model, process, truth, rounds):
  """Runs rounds, each (seeds of the data, arguments of `_Truth.round`)."""
  training = client_rounds.Training(process, len(_SIZES))
  for seeds, kwargs in rounds:
    truth.round(client_rounds.batches(toy, _SIZES, seeds), **kwargs)
    data = client_rounds.datasets(toy, _SIZES, seeds)
    metrics = training.next_round(data)['client_work']
    correction = metrics['correction']
    np.testing.assert_allclose(correction['loss_std'], truth.std, rtol=1e-5)
    assert correction['switched_to_fedprox'] == int(truth.switched)
    np.testing.assert_allclose(metrics['train']['loss'], truth.loss, rtol=1e-9)
  if not training.clients:
    _assert_close(training.weights(model), truth.models[0])
  for found, expected in zip(training.client_weights(model), truth.models):
    _assert_close(found, expected)


_DIFFERENT, _ALIKE = (0, 1, 2), (4, 10, 16)


def test_weights_are_the_losses(toy):
  model, process = _fed_bs(
      epsilon=_NEVER, client_weighting='uniform', client_weight_decay=0.01
  )
  assert isinstance(process, tff.learning.templates.LearningProcess)
  kwargs = {'weight_decay': 0.01}
  _check_rounds(
      toy,
      model,
      process,
      _Truth(model, _NEVER),
      [(_DIFFERENT, kwargs), (_ALIKE, kwargs), (_DIFFERENT, kwargs)],
  )


def _stds(toy, rounds):
  """Returns the standard deviations before the switch to FedProx."""
  truth = _Truth(client_rounds.toy_model(), 0.0)
  stds = []
  for seeds in rounds:
    truth.round(client_rounds.batches(toy, _SIZES, seeds))
    stds.append(truth.std)
  return stds


def test_it_becomes_fed_prox_once_and_for_good(toy):
  rounds = [_DIFFERENT, _DIFFERENT, _ALIKE, _DIFFERENT, _DIFFERENT]
  stds = _stds(toy, rounds)
  # Just above the deviation of the round that must trigger the switch, but
  # below the deviation with Bessel's correction.
  epsilon = 1.1 * stds[2]
  assert np.sqrt(1.5) * stds[2] > epsilon
  assert 2 * epsilon < min(stds[:2] + stds[3:])
  model, process = _fed_bs(epsilon=epsilon)
  truth = _Truth(model, epsilon)
  _check_rounds(toy, model, process, truth, [(seeds, {}) for seeds in rounds])
  assert truth.switched
  assert truth.std > epsilon


@pytest.mark.parametrize(
    ('epsilon', 'switched'), [(0.99, False), (1.0, False), (1.01, True)]
)
def test_epsilon_is_a_strict_bound(epsilon, switched):
  model = client_rounds.toy_model()
  correction = algorithms.FedBs(epsilon, 0.1).bind(
      model, SharedWeights(model, partition.FEDAVG), None
  )
  # The losses' deviation is 1.
  sums = [correction.sums(tf.constant(loss, tf.float64)) for loss in (1.0, 3.0)]
  total = tf.nest.map_structure(lambda *parts: tf.add_n(parts), *sums)
  for before in (False, True):
    after = correction.next_server_state(
        dict(switched=tf.constant(before)), total, {}, None
    )
    assert after['switched'].numpy() == (before or switched)


def test_after_the_switch_it_is_fed_prox_to_the_bit(toy):
  _, process = _fed_bs(epsilon=_AT_ONCE, client_weighting='uniform')
  data = client_rounds.datasets(toy, _SIZES)
  data.append(toy.dataset(8, 0).take(0))
  state = process.next(process.initialize(), data).state
  _, fed_prox = client_rounds.toy_process(
      'build_fed_prox', proximal_strength=_STRENGTH, client_weighting='uniform'
  )
  prox_state = fed_prox.set_model_weights(
      fed_prox.initialize(), process.get_model_weights(state)
  )
  for _ in range(2):
    output = process.next(state, data)
    expected = fed_prox.next(prox_state, data)
    state, prox_state = output.state, expected.state
    _assert_same(
        process.get_model_weights(state),
        fed_prox.get_model_weights(prox_state),
    )
    _assert_same(
        output.metrics['client_work']['train'],
        expected.metrics['client_work']['train'],
    )


def test_equal_losses_give_the_uniform_mean(toy):
  """Without a head all losses are log 3, but the gradients differ."""

  def keras_model_fn():
    layers, dtype = keras.layers, 'float64'
    return keras.Sequential(
        [
            keras.Input((4,), dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.Dense(3, kernel_initializer='zeros', dtype=dtype),
        ]
    )

  model = toy.model(keras_model_fn)
  data = [toy.dataset(size, size, batch_size=16) for size in (4, 8, 16)]
  process = algorithms.build_fed_bs(model, _SGD(0.1), epsilon=1e-3)
  output = process.next(process.initialize(), data)
  found = model.from_model_weights(process.get_model_weights(output.state))
  fed_avg = algorithms.build_fed_avg(
      model, _SGD(0.1), client_weighting='uniform'
  )
  _assert_close(found, client_rounds.run(fed_avg, data, 1).weights(model))
  correction = output.metrics['client_work']['correction']
  np.testing.assert_allclose(correction['loss_std'], 0, atol=1e-7)
  assert correction['switched_to_fedprox'] == 1


def _bad_datasets(toy):
  x, y = toy.arrays(16, 5)
  huge = np.full_like(x, 1e300) * [1, -1, 1, -1]
  return [
      *client_rounds.datasets_without_update(toy),
      tf.data.Dataset.from_tensor_slices((huge, y)).batch(8),
  ]


@pytest.mark.parametrize('switched', [False, True])
def test_clients_without_a_finite_loss_do_not_count(toy, switched):
  """They count neither in the mean nor in the standard deviation."""
  model, process = _fed_bs(epsilon=_AT_ONCE if switched else _NEVER)
  data = client_rounds.datasets(toy, _SIZES)
  state = process.initialize()
  if switched:
    state = process.next(state, data).state
  expected = process.next(state, data)
  output = process.next(state, data + _bad_datasets(toy))
  found = model.from_model_weights(process.get_model_weights(output.state))
  _assert_close(
      found,
      model.from_model_weights(process.get_model_weights(expected.state)),
  )
  metrics, others = (o.metrics['client_work'] for o in (output, expected))
  assert metrics['correction']['loss_std'] == others['correction']['loss_std']
  assert metrics['train'] == others['train']
  assert metrics['num_clients'] == 6
  assert metrics['num_dropped_clients'] == 2


def test_without_any_loss_nothing_changes(toy):
  """It does not trigger the switch either."""
  _, process = _fed_bs(epsilon=_AT_ONCE)
  state = process.initialize()
  output = process.next(state, _bad_datasets(toy))
  _assert_same(output.state.global_model_weights, state.global_model_weights)
  correction = output.metrics['client_work']['correction']
  assert np.isnan(correction['loss_std'])
  assert correction['switched_to_fedprox'] == 0
  assert not output.state.client_work['correction']['switched']


def test_one_client_has_no_deviation(toy):
  _, process = _fed_bs(epsilon=_NEVER)
  output = process.next(process.initialize(), [toy.dataset(16, 0)])
  correction = output.metrics['client_work']['correction']
  np.testing.assert_allclose(correction['loss_std'], 0, atol=1e-6)
  assert correction['switched_to_fedprox'] == 1


def test_local_variables_stay(toy):
  # It switches in the first round, so both phases occur.
  model, process = _fed_bs(
      epsilon=_AT_ONCE, build_process=algorithms.build_fed_bn
  )
  assert isinstance(process, StatefulLearningProcess)
  _check_rounds(
      toy,
      model,
      process,
      _Truth(model, _AT_ONCE, reference.AFFINE + reference.STATISTICS),
      [(_DIFFERENT, {})] * 3,
  )


def test_fbns_statistics_describe_all_values(toy):
  """They do not depend on the losses."""
  model, process = _fed_bs(epsilon=_AT_ONCE, build_process=algorithms.build_fbn)
  truth = _Truth(model, _AT_ONCE)
  seen, before = [], []

  def set_statistics(old, mean):
    before[:] = old
    mean[reference.MEAN], mean[reference.VARIANCE] = reference.fbn_statistics(
        old, seen
    )
    seen.clear()

  kwargs = {'fixed': True, 'seen': seen, 'server_step': set_statistics}
  _check_rounds(toy, model, process, truth, [(_DIFFERENT, kwargs)] * 3)


@pytest.mark.slow
def test_fixbns_second_phase_keeps_the_state(toy):
  model, process = _fed_bs(
      epsilon=_AT_ONCE, build_process=algorithms.build_fixbn, fixbn_rounds=2
  )
  _check_rounds(
      toy,
      model,
      process,
      _Truth(model, _AT_ONCE),
      [(_DIFFERENT, {'fixed': number >= 2}) for number in range(4)],
  )


def test_a_weighted_model_aggregator(toy):
  """It receives the losses as weights."""
  model, process = _fed_bs(
      epsilon=_NEVER,
      model_aggregator=tff.aggregators.clipping_factory(
          0.01, tff.aggregators.MeanFactory()
      ),
  )
  data = client_rounds.datasets(toy, _SIZES)
  state = process.next(process.initialize(), data).state
  weights = model.from_model_weights(model.initial_weights)
  updates, losses = [], []
  for batches in client_rounds.batches(toy, _SIZES):
    after, count, loss_sum = reference.train(weights, batches, 0.1)
    update = [
        a - b
        for i, (a, b) in enumerate(zip(after, weights))
        if i not in reference.STATISTICS
    ]
    norm = np.sqrt(sum((u**2).sum() for u in update))
    assert norm > 0.01
    updates.append([0.01 / norm * u for u in update])
    losses.append(loss_sum / count)
  mean = reference.average_models(updates, losses)
  found = model.from_model_weights(process.get_model_weights(state))
  positions = [i for i in range(8) if i not in reference.STATISTICS]
  _assert_close([found[i] - weights[i] for i in positions], mean, rtol=1e-5)


@pytest.mark.parametrize(
    'factory',
    [aggregators.CoordinateMedian(), tff.aggregators.UnweightedMeanFactory()],
    ids=['median', 'mean'],
)
def test_an_aggregator_without_weights_is_refused(factory):
  with pytest.raises(
      TypeError, match='^model_aggregator must take weights, wh'
  ):
    _fed_bs(model_aggregator=factory, client_weighting='uniform')
