"""Tests of FedDyn."""

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

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_OPTIMIZERS = tff.learning.optimizers
_SIZES = (20, 7, 33)  # Unequal, with short last batches.
_TRAINABLE = (0, 1, 2, 3, 6, 7)
_STRENGTH = 0.7
_fed_dyn = functools.partial(
    client_rounds.toy_process, 'build_fed_dyn', feddyn_strength=_STRENGTH
)
_assert_same = client_rounds.assert_same
_assert_close = client_rounds.assert_close


def _gradients(model, state, positions=_TRAINABLE):
  """Returns the entries of a client's or of the correction's state."""
  return [
      state[f'feddyn_gradient_{model.variables[i].name}'] for i in positions
  ]


def _server_state(state):
  return state.client_work['correction']


class _Truth:
  """FedDyn in NumPy, with h as the mean of the states of all clients."""

  def __init__(self, problem, model, sizes=_SIZES, local=(), num_clients=None):
    weights = model.from_model_weights(model.initial_weights)
    self.batches = client_rounds.batches(problem, sizes)
    self.models = [list(weights) for _ in sizes]
    self.local = local
    self.shared = [i for i in _TRAINABLE if i not in local]
    self.num_clients = num_clients or len(sizes)
    self.client_gradients = [[0.0] * len(self.shared) for _ in sizes]

  @property
  def server_gradients(self):
    return [
        sum(values) / self.num_clients for values in zip(*self.client_gradients)
    ]

  def round(self, sampled, *, server_rate=1.0, **kwargs):
    """Runs a round of these clients."""
    models = {}
    for k in sampled:
      before, own = self.models[k], self.client_gradients[k]

      def extra(weights, before=before, own=own):
        added = [0.0] * len(weights)
        for i, g in zip(self.shared, own):
          added[i] = _STRENGTH * (weights[i] - before[i]) - g
        return added

      after, _, _ = reference.train(
          before, self.batches[k], 0.1, extra=extra, **kwargs
      )
      self.client_gradients[k] = [
          g - _STRENGTH * (after[i] - before[i])
          for i, g in zip(self.shared, own)
      ]
      models[k] = after
    old = self.models[sampled[0]]
    new = reference.average_models(list(models.values()), [1] * len(models))
    for i, h in zip(self.shared, self.server_gradients):
      target = new[i] - h / _STRENGTH
      new[i] = old[i] + server_rate * (target - old[i])
    for k, weights in enumerate(self.models):
      own = models.get(k, weights)
      self.models[k] = [
          own[i] if i in self.local else value for i, value in enumerate(new)
      ]

  def check(self, model, training):
    for weights, expected in zip(
        training.client_weights(model), self.models, strict=True
    ):
      _assert_close(weights, expected)
    for client, expected in zip(
        training.clients, self.client_gradients, strict=True
    ):
      _assert_close(
          _gradients(model, client, self.shared),
          # A client that never took part has zeros.
          [g + np.zeros([]) for g in expected],
      )
    _assert_close(
        _gradients(model, _server_state(training.state), self.shared),
        self.server_gradients,
    )


def _check_rounds(toy, model, process, truth, rounds):
  """Runs rounds, each (clients, arguments of `_Truth.round`)."""
  training = client_rounds.Training(process, len(truth.models))
  data = client_rounds.datasets(toy, _SIZES)
  for sampled, kwargs in rounds:
    truth.round(sampled, **kwargs)
    training.next_round(data, sampled)
    truth.check(model, training)


@pytest.mark.parametrize('momentum', [None, 0.6])
def test_rounds_equal_numpy(toy, momentum):
  model, process = _fed_dyn(
      momentum=momentum,
      server_optimizer=_OPTIMIZERS.build_sgdm(0.5),
      client_weight_decay=0.01,
  )
  kwargs = dict(server_rate=0.5, momentum=momentum or 0.0, weight_decay=0.01)
  truth = _Truth(toy, model)
  _check_rounds(toy, model, process, truth, [(range(3), kwargs)] * 4)


@pytest.mark.parametrize('num_clients', [3, 5])
def test_partial_participation(toy, num_clients):
  model, process = _fed_dyn(num_clients=num_clients)
  truth = _Truth(toy, model, num_clients=num_clients)
  rounds = [(sampled, {}) for sampled in [(0, 1, 2), (0, 2), (1,), (0, 1)]]
  _check_rounds(toy, model, process, truth, rounds)


@pytest.mark.parametrize(
    ('build_process', 'local'),
    [
        (algorithms.build_fed_bn, (2, 3, 4, 5)),
        (algorithms.build_silo_bn, reference.STATISTICS),
    ],
)
def test_local_variables_have_no_terms(toy, build_process, local):
  model, process = _fed_dyn(build_process=build_process)
  truth = _Truth(toy, model, local=local)
  _check_rounds(toy, model, process, truth, [(range(3), {})] * 3)


@pytest.mark.slow
def test_states_go_through_the_phases_of_fixbn(toy):
  model, process = _fed_dyn(
      build_process=algorithms.build_fixbn, fixbn_rounds=1, num_clients=3
  )
  rounds = [
      (range(3), {}),
      (range(3), dict(fixed=True)),
      ((0, 2), dict(fixed=True)),
  ]
  _check_rounds(toy, model, process, _Truth(toy, model), rounds)


def test_sums_equal_the_mean(toy):
  model, process = _fed_dyn(sum_aggregator=tff.aggregators.SumFactory())
  truth = _Truth(toy, model)
  _check_rounds(toy, model, process, truth, [(range(3), {})] * 2)


@pytest.mark.parametrize('num_clients', [None, 4])
def test_clients_without_an_update_keep_their_states(toy, num_clients):
  """Without `num_clients`, a client without data does not count for m."""
  model, process = _fed_dyn(
      **({} if num_clients is None else dict(num_clients=num_clients))
  )
  training = client_rounds.Training(process, 4)
  truth = _Truth(toy, model, (16,) * 4, num_clients=num_clients)
  data = client_rounds.datasets(toy, (16,) * 4)
  training.next_round(data)
  truth.round(range(4))
  truth.check(model, training)
  before = training.state
  clients = training.clients
  training.next_round(data[:2] + client_rounds.datasets_without_update(toy))
  for k in (2, 3):
    _assert_same(training.clients[k], clients[k])
  moved = [
      sum(new - old for old, new in changes)
      for changes in zip(
          *(
              zip(
                  _gradients(model, clients[k]),
                  _gradients(model, training.clients[k]),
                  strict=True,
              )
              for k in range(2)
          )
      )
  ]
  _assert_close(
      _gradients(model, _server_state(training.state)),
      [
          h + change / (num_clients or 3)
          for h, change in zip(
              _gradients(model, _server_state(before)), moved, strict=True
          )
      ],
  )


def test_without_any_update_nothing_changes(toy):
  _, process = _fed_dyn()
  training = client_rounds.Training(process, 2)
  training.next_round(client_rounds.datasets(toy, (16, 16)))
  state, clients = training.state, training.clients
  training.next_round(client_rounds.datasets_without_update(toy))
  _assert_same(training.clients, clients)
  _assert_same(_server_state(training.state), _server_state(state))
  _assert_same(training.state.global_model_weights, state.global_model_weights)


def test_clients_do_not_get_the_servers_state():
  _, process = _fed_dyn()
  state_type = process.initialize.type_signature.result.member
  correction = state_type.client_work['correction']
  assert len(correction) == len(_TRAINABLE)


def test_fixed_point_is_the_optimum_of_all_clients():
  """Quadratics with several local steps: FedAvg stops elsewhere.

  The clients have losses a (w - optimum)² / 2 with other a, so the optimum of
  their mean loss is the mean of the optima with the weights a.
  """
  curvatures, optima = np.array([1.0, 4.0]), np.array([0.0, 1.0])
  rate, num_steps = 0.1, 8

  def keras_model_fn():
    return keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False)]
    )

  model = BatchNormModel(
      keras_model_fn,
      (tf.TensorSpec((None, 1)), tf.TensorSpec((None, 1))),
      loss_fn=keras.losses.MeanSquaredError,
  )
  scales = np.sqrt(curvatures / 2)  # (scale w - scale optimum)²
  data = [
      tf.data.Dataset.from_tensors(
          (np.float32([[s]]), np.float32([[s * optimum]]))
      ).repeat(num_steps)
      for s, optimum in zip(scales, optima)
  ]
  fixed_points = []
  for build, options in (
      (algorithms.build_fed_avg, {}),
      (algorithms.build_fed_dyn, dict(feddyn_strength=1.0)),
  ):
    process = build(model, _OPTIMIZERS.build_sgdm(rate), **options)
    training = client_rounds.run(process, data, 60)
    fixed_points.append(training.weights(model)[0].item())
  moved = 1 - (1 - rate * curvatures) ** num_steps
  expected = [
      (moved * optima).sum() / moved.sum(),
      (curvatures * optima).sum() / curvatures.sum(),
  ]
  np.testing.assert_allclose(fixed_points, expected, rtol=1e-3)
  assert expected[1] - expected[0] > 0.1


def test_refused(toy):
  model = toy.model()
  sgd = _OPTIMIZERS.build_sgdm(0.1)
  with pytest.raises(TypeError, match='weighted mean, which FedDyn needs'):
    algorithms.build_fed_dyn(
        model,
        sgd,
        model_aggregator=aggregators.CoordinateMedian(num_byzantine=0),
    )
  with pytest.raises(ValueError, match='DpSums is impossible with FedDyn'):
    algorithms.build_fed_dyn(
        model,
        sgd,
        sum_aggregator=aggregators.DpSums(0.0, num_clients=3, clip_norm=1.0),
    )
  process = _fed_dyn(num_clients=1)[1]
  training = client_rounds.Training(process, 2)
  with pytest.raises(
      Exception, match='FedDyn got num_clients=1, but there are'
  ):
    training.next_round(client_rounds.datasets(toy, (16, 16)))
