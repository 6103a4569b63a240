"""Tests of SCAFFOLD."""

import functools

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import numpy_steps
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import aggregators
from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_OPTIMIZERS = tff.learning.optimizers
_SGD = _OPTIMIZERS.build_sgdm
_SIZES = (20, 7, 33)  # Unequal, with short last batches.
_TRAINABLE = (0, 1, 2, 3, 6, 7)
_scaffold = functools.partial(client_rounds.toy_process, 'build_scaffold')
_assert_same = client_rounds.assert_same
_assert_close = client_rounds.assert_close


def _control_variates(model, state, positions=_TRAINABLE):
  """Returns the control variates in a client's or the correction's state."""
  return [
      state[f'control_variate_{model.variables[i].name}'] for i in positions
  ]


def _server_state(state):
  return state.client_work['correction']


def _variates(client_or_server_state):
  """Returns all control variates by name."""
  return {
      name: value
      for name, value in client_or_server_state.items()
      if name.startswith('control_variate_')
  }


def _server_variates(state):
  return _variates(_server_state(state))


class _Truth:
  """SCAFFOLD with option II, in NumPy."""

  def __init__(self, problem, model, sizes, shared=_TRAINABLE, local=()):
    weights = model.from_model_weights(model.initial_weights)
    self.sizes = sizes
    self.batches = client_rounds.batches(problem, sizes)
    self.models = [list(weights) for _ in sizes]
    self.shared = shared  # The trainable weights.
    self.local = local
    self.server_variates = [np.zeros_like(weights[i]) for i in shared]
    self.client_variates = [self.server_variates for _ in sizes]

  def round(
      self,
      sampled,
      *,
      uniform=True,
      all_clients=None,
      server_rate=1.0,
      rates=None,
      **kwargs,
  ):
    """Runs one round of these clients; `rates` are the rates of all clients."""
    counts, models, changes = [], [], []
    for k in sampled:
      before = self.models[k]
      own, server = self.client_variates[k], self.server_variates
      correction = [0.0] * len(before)
      for i, c_own, c in zip(self.shared, own, server):
        correction[i] = c - c_own
      batches = self.batches[k]
      used = rates[k] if rates else [0.1] * len(batches)
      after, num_examples, _ = reference.train(
          before, batches, used, extra=lambda _, c=correction: c, **kwargs
      )
      new = [
          c_own - c + (before[i] - after[i]) / sum(used)
          for i, c_own, c in zip(self.shared, own, server)
      ]
      changes.append([a - b for a, b in zip(new, own)])
      self.client_variates[k] = new
      models.append(after)
      counts.append(1 if uniform else num_examples)
    mean = reference.average_models(models, counts)
    change = reference.average_models(changes, counts)
    share = len(sampled) / (all_clients or len(sampled))
    self.server_variates = [
        c + share * d for c, d in zip(self.server_variates, change)
    ]
    old = self.models[sampled[0]]
    for i in self.shared:
      mean[i] = old[i] + server_rate * (mean[i] - old[i])
    for k, after in zip(sampled, models):
      self.models[k] = after
    for weights in self.models:
      for i in set(range(len(mean))) - set(self.local):
        weights[i] = mean[i]

  def check(self, model, training):
    found = training.client_weights(model)
    for weights, expected in zip(found, self.models, strict=True):
      _assert_close(weights, expected)
    for client, expected in zip(
        training.clients, self.client_variates, strict=True
    ):
      _assert_close(_control_variates(model, client, self.shared), expected)
    _assert_close(
        _control_variates(model, _server_state(training.state), self.shared),
        self.server_variates,
    )


def _check_rounds(toy, model, process, truth, rounds):
  """Runs rounds, each (clients, arguments of `_Truth.round`)."""
  training = client_rounds.Training(process, len(truth.sizes))
  data = client_rounds.datasets(toy, truth.sizes)
  for sampled, kwargs in rounds:
    truth.round(sampled, **kwargs)
    training.next_round(data, sampled)
    truth.check(model, training)
  return training


def test_rounds_equal_numpy(toy):
  """Also a server learning rate, weight decay, and changing rates.

  Only the batch's gradient is clipped, not the correction.
  """
  clip_norm = 0.05
  model, process = _scaffold(
      rate=123.0,  # The schedule's rate counts.
      server_optimizer=_SGD(0.5),
      client_weighting='num_examples',
      client_weight_decay=0.01,
      client_gradient_clip_norm=clip_norm,
      client_warmup_steps=4,
      client_learning_rate_schedule=lambda r: tf.where(r < 2, 0.25, 0.125),
  )

  def clipped(*args, **kwargs):
    loss, grads, *statistics = reference.gradients(*args, **kwargs)
    return loss, numpy_steps.clip(grads, clip_norm), *statistics

  truth = _Truth(toy, model, _SIZES)
  rounds = []
  for rate in (0.25, 0.25, 0.125, 0.125):
    # The clients have different numbers of steps: 3, 1 and 5.
    rates = [
        [rate * min(1, (step + 1) / 4) for step in range(len(own))]
        for own in truth.batches
    ]
    kwargs = {
        'uniform': False,
        'server_rate': 0.5,
        'rates': rates,
        'weight_decay': 0.01,
        'gradients_fn': clipped,
    }
    rounds.append((range(3), kwargs))
  _check_rounds(toy, model, process, truth, rounds)


def test_partial_participation(toy):
  """The server moves by |S|/N of the mean change; all have equal weights."""
  model, process = _scaffold(num_clients=5)
  _check_rounds(
      toy,
      model,
      process,
      _Truth(toy, model, _SIZES),
      [(sampled, {'all_clients': 5}) for sampled in [(0, 1, 2), (0, 2), (1,)]],
  )


@pytest.mark.parametrize('num_clients', [None, 5])
def test_clients_without_an_update_keep_their_control_variates(
    toy, num_clients
):
  model, process = _scaffold(
      **({} if num_clients is None else dict(num_clients=num_clients))
  )
  truth = _Truth(toy, model, (16,) * 4)
  training = client_rounds.Training(process, 4)
  data = client_rounds.datasets(toy, truth.sizes)
  training.next_round(data)
  truth.round(range(4), all_clients=num_clients)
  clients = training.clients

  metrics = training.next_round(
      data[:2] + client_rounds.datasets_without_update(toy)
  )

  # Two of four clients have changed.
  truth.round(range(2), all_clients=num_clients or 4)
  truth.check(model, training)
  for k in (2, 3):
    _assert_same(training.clients[k], clients[k])
  assert metrics['client_work']['num_dropped_clients'] == 1


def test_without_any_update_nothing_changes(toy):
  _, process = _scaffold()
  training = client_rounds.Training(process, 2)
  training.next_round(client_rounds.datasets(toy, (16, 16)))
  state, clients = training.state, training.clients
  training.next_round(client_rounds.datasets_without_update(toy))
  _assert_same(training.clients, clients)
  _assert_same(_server_variates(training.state), _server_variates(state))
  _assert_same(training.state.global_model_weights, state.global_model_weights)


@pytest.mark.slow
def test_learning_rate_0_keeps_the_control_variates(toy):
  model = toy.model()
  process = algorithms.build_scaffold(
      model,
      _SGD(123.0),
      client_learning_rate_schedule=lambda r: tf.where(r < 1, 0.1, 0.0),
  )
  training = client_rounds.Training(process, 2)
  data = client_rounds.datasets(toy, (16, 16))
  training.next_round(data)
  state, clients = training.state, training.clients
  training.next_round(data)
  _assert_same(
      [_variates(client) for client in training.clients],
      [_variates(client) for client in clients],
  )
  _assert_same(_server_variates(training.state), _server_variates(state))


class _Quadratics:
  """Linear regression: clients with different Hessians and optima."""

  sizes = (6, 9, 15)
  rate = 0.05
  num_steps = 10

  def __init__(self):
    rng = np.random.default_rng(1)
    self.data = []
    for k, size in enumerate(self.sizes):
      x = rng.normal(size=(size, 3)) * [1, 0.5 + 0.5 * k, 2 - 0.5 * k]
      y = x @ rng.normal(size=(3, 1)) + rng.normal(size=(size, 1)) + 2 * k
      self.data.append((x, y))

  def model(self):
    def keras_model_fn():
      inputs = keras.Input((3,), dtype='float64')
      outputs = keras.layers.Dense(1, use_bias=False, dtype='float64')(inputs)
      return keras.Model(inputs, outputs)

    return BatchNormModel(
        keras_model_fn,
        (
            tf.TensorSpec((None, 3), tf.float64),
            tf.TensorSpec((None, 1), tf.float64),
        ),
        loss_fn=lambda: keras.losses.MeanSquaredError(dtype='float64'),
    )

  def datasets(self):
    return [
        tf.data.Dataset.from_tensors(arrays).repeat(self.num_steps)
        for arrays in self.data
    ]

  def client_weights(self, uniform):
    return np.ones(3) / 3 if uniform else np.array(self.sizes) / 30

  def hessians(self):
    return [2 * x.T @ x / len(x) for x, _ in self.data]

  def optimum(self, uniform):
    """Returns the minimizer of the weighted mean of the clients' losses."""
    shares = self.client_weights(uniform)
    hessian = sum(a * h for a, h in zip(shares, self.hessians()))
    right = sum(
        a * 2 * x.T @ y / len(x) for a, (x, y) in zip(shares, self.data)
    )
    return np.linalg.solve(hessian, right)

  def fed_avg_fixed_point(self, uniform):
    """Returns the point at which the mean change of K local steps is 0."""
    left, right = 0, 0
    for share, hessian, (x, y) in zip(
        self.client_weights(uniform), self.hessians(), self.data
    ):
      own_optimum = np.linalg.lstsq(x, y, rcond=None)[0]
      moved = np.eye(3) - np.linalg.matrix_power(
          np.eye(3) - self.rate * hessian, self.num_steps
      )
      left = left + share * moved
      right = right + share * moved @ own_optimum
    return np.linalg.solve(left, right)


@pytest.mark.slow
@pytest.mark.parametrize(
    'uniform', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_scaffold_finds_the_optimum_that_fed_avg_misses(uniform):
  problem = _Quadratics()
  model = problem.model()
  weighting = 'uniform' if uniform else 'num_examples'
  data = problem.datasets()
  process = algorithms.build_scaffold(
      model, _SGD(problem.rate), client_weighting=weighting
  )
  training = client_rounds.Training(process, 3)
  for _ in range(120):
    training.next_round(data)
  (found,) = process.get_model_weights(training.state).trainable
  optimum = problem.optimum(uniform)
  np.testing.assert_allclose(found, optimum, rtol=1e-8)
  # Each client's control variate is its gradient at the optimum.
  for client, (x, y) in zip(training.clients, problem.data, strict=True):
    (variate,) = _control_variates(model, client, [0])
    gradient = 2 * x.T @ (x @ optimum - y) / len(x)
    np.testing.assert_allclose(variate, gradient, rtol=1e-6, atol=1e-8)
  (variate,) = _control_variates(model, _server_state(training.state), [0])
  np.testing.assert_allclose(variate, np.zeros((3, 1)), atol=1e-8)

  fed_avg = algorithms.build_fed_avg(
      model, _SGD(problem.rate), client_weighting=weighting
  )
  state = fed_avg.initialize()
  for _ in range(60):
    state = fed_avg.next(state, data).state
  (found,) = fed_avg.get_model_weights(state).trainable
  fixed_point = problem.fed_avg_fixed_point(uniform)
  np.testing.assert_allclose(found, fixed_point, rtol=1e-8)
  assert np.abs(fixed_point - optimum).max() > 0.05
  if not uniform:
    x, y = (np.concatenate(parts) for parts in zip(*problem.data))
    np.testing.assert_allclose(
        optimum, np.linalg.lstsq(x, y, rcond=None)[0], rtol=1e-10
    )


def test_what_is_local_has_no_control_variate(toy):
  model, process = _scaffold(build_process=algorithms.build_fed_bn)
  assert process.has_client_models
  local = reference.AFFINE + reference.STATISTICS
  shared = [i for i in _TRAINABLE if i not in local]
  training = _check_rounds(
      toy,
      model,
      process,
      _Truth(toy, model, _SIZES, shared, local),
      [((0, 1, 2), {}), ((0, 2), {}), ((1, 0), {})],
  )
  names = [model.variables[i].name for i in range(8)]
  assert set(training.clients[0]) == {
      *(names[i] for i in local),
      *(f'control_variate_{names[i]}' for i in shared),
      *(f'received_{names[i]}' for i in shared),
      'last_rate_sum',
      'last_round',
  }
  assert set(_server_variates(training.state)) == {
      f'control_variate_{names[i]}' for i in shared
  }


@pytest.mark.slow
def test_a_robust_rule_aggregates_control_variates_too(toy):
  model = toy.model()
  process = algorithms.build_scaffold(
      model,
      _SGD(0.1),
      client_weighting='uniform',
      model_aggregator=aggregators.CoordinateMedian(),
  )
  training = client_rounds.Training(process, 5)
  data = client_rounds.datasets(toy, (16,) * 3)
  data += client_rounds.datasets_without_update(toy)
  for _ in range(2):
    before, old_clients = training.state, training.clients
    training.next_round(data)
  # The median ignores clients without an update.
  changes = [
      np.subtract(_control_variates(model, new)[0], old)
      for new, old in zip(
          training.clients[:3],
          [_control_variates(model, client)[0] for client in old_clients],
      )
  ]
  (old, *_), (new, *_) = (
      _control_variates(model, _server_state(state))
      for state in (before, training.state)
  )
  median = np.median(changes, axis=0)
  np.testing.assert_allclose(new, old + 3 / 5 * median, rtol=1e-12)
  assert np.abs(median - np.mean(changes, axis=0)).max() > 1e-3


def test_a_dropped_client_sends_nothing(toy):
  """It equals a client without data, also for an unweighted aggregator."""
  _, process = _scaffold(
      model_aggregator=tff.aggregators.UnweightedMeanFactory()
  )
  training = client_rounds.Training(process, 2)
  data = client_rounds.datasets(toy, (16, 16))
  training.next_round(data)
  empty, dropped = (
      process.next(training.state, training.clients, [data[0], other])
      for other in client_rounds.datasets_without_update(toy)
  )
  _assert_same(_server_state(dropped.state), _server_state(empty.state))
  _assert_same(
      dropped.state.global_model_weights, empty.state.global_model_weights
  )


@pytest.mark.parametrize(
    'optimizer',
    [
        _SGD(0.1, momentum=0.9),
        _OPTIMIZERS.build_adam(0.1),
        _OPTIMIZERS.build_adagrad(0.1),
        _OPTIMIZERS.build_yogi(0.1),
        _OPTIMIZERS.schedule_learning_rate(_SGD(0.1), lambda r: 0.1),
    ],
    ids=['momentum', 'adam', 'adagrad', 'yogi', 'schedule'],
)
def test_other_optimizers_are_refused(optimizer):
  with pytest.raises(ValueError, match='SCAFFOLD .* must be plain SGD'):
    algorithms.build_scaffold(client_rounds.toy_model(), optimizer)


def test_too_many_clients_in_a_round_are_refused(toy):
  _, process = _scaffold(num_clients=5)
  state = process.initialize()
  new = process.initialize_client(state)
  data = [toy.dataset(8, seed) for seed in range(6)]
  process.next(state, [new] * 5, data[:5])
  with pytest.raises(Exception, match='SCAFFOLD got num_clients=5, but'):
    process.next(state, [new] * 6, data)


@pytest.mark.slow
def test_float32_images(toy_images):
  """Control variates have the dtype of the variables; XLA can compile it."""
  model = toy_images.model()
  results = []
  for jit_compile in (False, True):
    process = algorithms.build_scaffold(
        model, _SGD(0.1), jit_compile=jit_compile
    )
    training = client_rounds.Training(process, 2)
    for _ in range(2):
      training.next_round(client_rounds.datasets(toy_images, (12, 12)))
    results.append((training.clients, _server_state(training.state)))
  plain, compiled = results
  for value in _variates(plain[0][0]).values():
    assert value.dtype == np.float32
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
      compiled,
      plain,
  )
