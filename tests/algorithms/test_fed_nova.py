"""Tests of FedNova."""

import functools

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn.processes.stateful_process import StatefulLearningProcess

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_OPTIMIZERS = tff.learning.optimizers
_SIZES = (20, 7, 33)  # 3, 1 and 5 steps.
_TRAINABLE = (0, 1, 2, 3, 6, 7)
_fed_nova = functools.partial(client_rounds.toy_process, 'build_fed_nova')
_assert_close = client_rounds.assert_close


def _norm(num_steps, momentum):
  """Returns ‖a‖₁ in the closed form of the paper."""
  if not momentum:
    return num_steps
  geometric = momentum * (1 - momentum**num_steps) / (1 - momentum)
  return (num_steps - geometric) / (1 - momentum)


def _norm_of_rates(rates, momentum):
  """Returns ‖a‖₁ by the factor of each gradient in the sum of the steps."""
  return sum(
      rate * momentum ** (later - step)
      for step in range(len(rates))
      for later, rate in enumerate(rates)
      if later >= step
  )


class _Truth:
  """FedNova in NumPy."""

  def __init__(self, problem, model, sizes=_SIZES, local=()):
    weights = model.from_model_weights(model.initial_weights)
    self.batches = client_rounds.batches(problem, sizes)
    self.models = [list(weights) for _ in sizes]
    self.local = local

  def round(
      self,
      *,
      uniform=False,
      server_rate=1.0,
      rates=None,
      norms=None,
      momentum=0.0,
      **kwargs,
  ):
    """Runs a round; `rates` are the clients' rates, `norms` their ‖a‖₁."""
    before = self.models[0]
    models, counts = [], []
    for k, batches in enumerate(self.batches):
      after, num_examples, _ = reference.train(
          self.models[k],
          batches,
          rates[k] if rates else 0.1,
          momentum=momentum,
          **kwargs,
      )
      models.append(after)
      counts.append(1 if uniform else num_examples)
    norms = norms or [_norm(len(b), momentum) for b in self.batches]
    shares = np.array(counts) / sum(counts)
    mean_norm = (shares * norms).sum()
    # Statistics are averaged by the shares.
    new = reference.average_models(models, shares)
    for i in _TRAINABLE:
      if i not in self.local:
        direction = sum(
            share * (before[i] - after[i]) / norm
            for share, after, norm in zip(shares, models, norms)
        )
        new[i] = before[i] - server_rate * mean_norm * direction
    for k, after in enumerate(models):
      self.models[k] = [
          after[i] if i in self.local else value for i, value in enumerate(new)
      ]


def _check_rounds(toy, model, process, truth, rounds):
  training = client_rounds.Training(process, len(truth.models))
  data = client_rounds.datasets(toy, _SIZES)
  for kwargs in rounds:
    truth.round(**kwargs)
    training.next_round(data)
    if training.clients:
      found = training.client_weights(model)
      for weights, expected in zip(found, truth.models, strict=True):
        _assert_close(weights, expected)
    else:
      _assert_close(training.weights(model), truth.models[0])
  return training


@pytest.mark.parametrize(
    ('weighting', 'momentum'),
    [
        *(('num_examples', 0.6), ('uniform', None)),
        pytest.param('num_examples', None, marks=pytest.mark.slow),
        pytest.param('uniform', 0.6, marks=pytest.mark.slow),
    ],
)
def test_rounds_equal_numpy(toy, momentum, weighting):
  model, process = _fed_nova(
      momentum=momentum,
      client_weighting=weighting,
      server_optimizer=_OPTIMIZERS.build_sgdm(0.5),
      client_weight_decay=0.01,
  )
  assert isinstance(process, tff.learning.templates.LearningProcess)
  kwargs = dict(
      uniform=weighting == 'uniform',
      server_rate=0.5,
      momentum=momentum or 0.0,
      weight_decay=0.01,
  )
  _check_rounds(toy, model, process, _Truth(toy, model), [kwargs] * 3)


@pytest.mark.parametrize(
    'momentum', [pytest.param(0.0, marks=pytest.mark.slow), 0.6]
)
def test_changing_learning_rates(toy, momentum):
  """The rates are a part of a: a warm-up in the round, and a schedule."""
  model, process = _fed_nova(
      rate=123.0,  # The schedule's rate counts.
      momentum=momentum,
      client_warmup_steps=4,
      client_learning_rate_schedule=lambda r: tf.where(r < 1, 0.25, 0.125),
  )
  truth = _Truth(toy, model)
  rounds = []
  for rate in (0.25, 0.125):
    rates = [
        [rate * min(1, (step + 1) / 4) for step in range(len(batches))]
        for batches in truth.batches
    ]
    norms = [_norm_of_rates(own, momentum) for own in rates]
    rounds.append(dict(rates=rates, norms=norms, momentum=momentum))
  _check_rounds(toy, model, process, truth, rounds)


def test_the_two_forms_of_the_norm_are_equal():
  for num_steps in (1, 2, 7):
    for momentum in (0.0, 0.3, 0.9):
      np.testing.assert_allclose(
          _norm_of_rates([0.1] * num_steps, momentum),
          0.1 * _norm(num_steps, momentum),
      )


@pytest.mark.parametrize(
    ('build_process', 'local'),
    [
        (algorithms.build_fed_bn, (2, 3, 4, 5)),
        (algorithms.build_silo_bn, reference.STATISTICS),
    ],
)
def test_local_variables_are_not_normalized(toy, build_process, local):
  model, process = _fed_nova(build_process=build_process)
  assert isinstance(process, StatefulLearningProcess)
  truth = _Truth(toy, model, local=local)
  _check_rounds(toy, model, process, truth, [{}] * 2)


@pytest.mark.slow
def test_with_fixed_statistics(toy):
  model, process = _fed_nova(
      build_process=algorithms.build_fixbn, fixbn_rounds=1
  )
  rounds = [{}, dict(fixed=True), dict(fixed=True)]
  _check_rounds(toy, model, process, _Truth(toy, model), rounds)


@pytest.mark.parametrize(
    'momentum', [0.6, pytest.param(None, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    'name',
    [
        'fed_avg',
        *(pytest.param(n, marks=pytest.mark.slow) for n in ('fed_bn', 'fbn')),
    ],
)
def test_with_equal_numbers_of_steps_it_is_the_algorithm(toy, name, momentum):
  """So two steps of clients with 9 and 16 examples."""
  options = dict(
      local_steps=2, server_optimizer=_OPTIMIZERS.build_sgdm(1.0, 0.9)
  )
  model, process = _fed_nova(
      momentum=momentum,
      build_process=getattr(algorithms, f'build_{name}'),
      **options,
  )
  _, plain = client_rounds.toy_process(
      f'build_{name}', momentum=momentum, **options
  )
  data = client_rounds.datasets(toy, (9, 16, 16))
  found = client_rounds.run(process, data, 3)
  expected = client_rounds.run(plain, data, 3)
  _assert_close(found.weights(model), expected.weights(model))


@pytest.mark.slow
def test_it_removes_the_bias_towards_clients_with_many_steps():
  """Two losses (w - optimum)², against closed forms of the fixed points."""
  rate, steps, optima = 0.02, np.array([1, 9]), np.array([0.0, 1.0])

  def keras_model_fn():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

  model = BatchNormModel(
      keras_model_fn,
      (tf.TensorSpec((None, 1)), tf.TensorSpec((None, 1))),
      loss_fn=keras.losses.MeanSquaredError,
  )
  # Zeros train only the bias.
  data = [
      tf.data.Dataset.from_tensor_slices(
          (np.zeros((n, 1), np.float32), np.full((n, 1), y, np.float32))
      ).batch(1)
      for n, y in zip(steps, optima)
  ]
  fixed_points = []
  for build in (algorithms.build_fed_avg, algorithms.build_fed_nova):
    process = build(
        model, _OPTIMIZERS.build_sgdm(rate), client_weighting='uniform'
    )
    training = client_rounds.run(process, data, 100)
    fixed_points.append(training.weights(model)[1].item())
  moved = 1 - (1 - 2 * rate) ** steps  # As shares of w - optimum.
  expected = [(m * optima).sum() / m.sum() for m in (moved, moved / steps)]
  np.testing.assert_allclose(fixed_points, expected, rtol=1e-3)
  assert expected[0] > 0.88
  assert expected[1] < 0.48


def test_learning_rate_0_changes_only_statistics(toy):
  model, process = _fed_nova(rate=0.0)
  training = client_rounds.Training(process, len(_SIZES))
  before = training.weights(model)
  metrics = training.next_round(client_rounds.datasets(toy, _SIZES))
  assert metrics['client_work']['num_dropped_clients'] == 0
  after = training.weights(model)
  for i in _TRAINABLE:
    np.testing.assert_array_equal(after[i], before[i])
  assert np.any(after[reference.MEAN] != before[reference.MEAN])


def test_sums_equal_the_mean(toy):
  options = dict(sum_aggregator=tff.aggregators.SumFactory())
  model, process = _fed_nova(**options)
  _check_rounds(toy, model, process, _Truth(toy, model), [{}] * 2)


def test_refused(toy):
  model = toy.model()
  with pytest.raises(ValueError, match='FedNova needs the factor .* be SGD'):
    algorithms.build_fed_nova(model, _OPTIMIZERS.build_adam(0.1))
  sgd = _OPTIMIZERS.build_sgdm(0.1)
  for aggregator in (
      aggregators.CoordinateMedian(num_byzantine=0),
      tff.learning.robust_aggregator(),
  ):
    with pytest.raises(TypeError, match='weighted mean, which FedNova needs'):
      algorithms.build_fed_nova(model, sgd, model_aggregator=aggregator)
  with pytest.raises(ValueError, match='also send normalizer'):
    algorithms.build_fed_nova(
        model,
        sgd,
        client_weighting='uniform',
        sum_aggregator=aggregators.DpSums(0.0, num_clients=3, clip_norm=1.0),
    )
