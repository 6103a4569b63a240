"""Tests of SCAFFOLD's rounds without control variates."""

import client_rounds
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn import analysis
from tff_bn.processes.options import ProcessConfig
from tff_bn.processes.short_rounds import ShortRounds

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
# Two batches each, of unequal sizes.
_SIZES = (16, 9, 12, 10)


_MEAN = tff.aggregators.MeanFactory()


def _process(**options):
  """Returns a model and a process, which tests share."""
  return client_rounds.toy_process('build_scaffold', **options)


class _Pair:
  """The same rounds with and without sending, whose results must be equal."""

  def __init__(self, **options):
    self.model, short = _process(**options)
    # Another aggregator than the default gets control variates.
    _, sending = _process(model_aggregator=_MEAN, **options)
    self.short, self.sending = (
        client_rounds.Training(process, 4) for process in (short, sending)
    )

  def next_round(self, data, sampled=None):
    """Runs a round; returns the numbers of full and of repeated rounds."""
    metrics = self.short.next_round(data, sampled)
    expected = self.sending.next_round(data, sampled)
    assert (
        metrics['client_work']['num_dropped_clients']
        == expected['client_work']['num_dropped_clients']
    )
    self.check()
    return tuple(metrics['client_work']['correction'].values())

  def check(self):
    short, sending = self.short, self.sending
    for found, expected in [
        *zip(short.clients, sending.clients, strict=True),
        *(
            [t.state.client_work['correction'] for t in (short, sending)],
            [dict(enumerate(t.weights(self.model))) for t in (short, sending)],
        ),
    ]:
      for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-10, atol=1e-12, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(
            num_clients=4,
            client_weighting='uniform',
            client_weight_decay=0.01,
            client_warmup_steps=2,
            client_gradient_clip_norm=0.5,
            client_learning_rate_schedule=lambda n: 0.1
            / tf.cast(n + 1, tf.float64),
            server_optimizer=_SGD(1.0),
        ),
        pytest.param(
            dict(build_process=algorithms.build_fbn), marks=pytest.mark.slow
        ),
        pytest.param(
            dict(build_process=algorithms.build_fed_bn, num_clients=4),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(build_process=algorithms.build_fixbn, fixbn_rounds=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=['fed_avg', 'all_options', 'fbn', 'fed_bn', 'fixbn'],
)
def test_results_are_scaffolds(toy, options):
  pair = _Pair(**options)
  for number in range(5):
    data = client_rounds.datasets(
        toy, _SIZES, [10 * number + k for k in range(4)]
    )
    assert pair.next_round(data) == (0, 0)


@pytest.mark.parametrize(
    'name',
    ['build_fed_avg', pytest.param('build_fed_bn', marks=pytest.mark.slow)],
)
def test_a_short_round_has_the_traffic_of_fed_avg(name):
  options = dict(num_clients=4)
  if name == 'build_fed_bn':
    options['build_process'] = algorithms.build_fed_bn
  model, process = _process(**options)
  _, plain = client_rounds.toy_process(name)
  assert isinstance(process.next, ShortRounds)
  assert process.next.num_clients == 4
  base = analysis.computation_traffic(plain.next)
  assert analysis.computation_traffic(process.next.short) == base
  full = analysis.computation_traffic(process.next.full)
  num_bytes = sum(
      8 * v.numpy().size
      for v in model.keras_model.trainable_weights
      if name == 'build_fed_avg' or 'norm' not in v.path
  )
  assert full.exchanges == base.exchanges == 1
  assert full.upload_bytes == base.upload_bytes + num_bytes
  assert full.download_bytes == base.download_bytes + num_bytes

  traffic = analysis.ProcessTraffic(process)
  one, sent = base.megabytes(4), full.megabytes(4)
  for metrics, expected in [
      (None, 6 * one),
      (dict(full_rounds=0, repeated_rounds=0), 6 * one),
      (dict(full_rounds=2, repeated_rounds=0), 4 * one + 2 * sent),
      (dict(full_rounds=3, repeated_rounds=2), 5 * one + 3 * sent),
  ]:
    costs = traffic.until(6, 4, metrics)
    assert costs['megabytes'] == pytest.approx(expected)
    repeated = metrics['repeated_rounds'] if metrics else 0
    assert costs['exchanges'] == 6 + repeated
  # With three of four clients, no round is short.
  costs = traffic.until(6, 3)
  assert costs['megabytes'] == pytest.approx(6 * full.megabytes(3))


@pytest.mark.slow
def test_traffic_of_phases_with_short_rounds():
  _, process = _process(build_process=algorithms.build_fixbn, fixbn_rounds=2)
  traffics = [
      [
          analysis.computation_traffic(computation).megabytes(4)
          for computation in (phase.computation.short, phase.computation.full)
      ]
      for phase in process.next.phases
  ]
  # Else it would matter in which phase a round is full.
  assert traffics[0] == traffics[1]
  short, full = traffics[0]
  traffic = analysis.ProcessTraffic(process)
  for num_full, repeated in ((0, 0), (1, 0), (4, 3)):
    metrics = dict(full_rounds=num_full, repeated_rounds=repeated)
    costs = traffic.until(5, 4, metrics)
    assert costs['exchanges'] == 5 + repeated
    assert costs['megabytes'] == pytest.approx(
        (5 - num_full + repeated) * short + num_full * full
    )


_ALL = (0, 1, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize('num_clients', [None, 4])
def test_rounds_that_cannot_be_short(toy, num_clients):
  """Each line: what is special, then the numbers of full, repeated rounds."""
  options = {} if num_clients is None else dict(num_clients=num_clients)
  pair = _Pair(**options)
  known = num_clients is not None
  empty, dropped = client_rounds.datasets_without_update(toy)
  normal = client_rounds.datasets(toy, _SIZES)
  three_steps = [toy.dataset(20, 7), *normal[1:]]

  def run(data, sampled=_ALL):
    return pair.next_round(data, sampled)

  assert run(normal) == (0, 0)
  # The round with a dropped client is short, but not the next one.
  assert run([dropped, *normal[1:]]) == (0, 0)
  assert run(normal) == (1, 0)
  # Without `num_clients`, a round must show that the clients are the same.
  assert run(normal) == ((1, 0) if known else (2, 0))
  full = 1 if known else 2
  assert run(normal) == (full, 0)
  assert run([empty, *normal[1:]]) == (full, 0)
  assert run([empty, *normal[1:]]) == (full + 1, 0)
  assert run(normal) == (full + 2, 0)
  full += 2 if known else 3
  if not known:
    assert run(normal) == (full, 0)
  assert run(normal) == (full, 0)
  # That a client makes more steps turns out in the round.
  assert run(three_steps) == (full + 1, 1)
  assert run(three_steps) == (full + 2, 1)
  assert run(normal) == (full + 3, 1)
  assert run(normal) == (full + 3, 1)


def test_partial_participation_with_num_clients(toy):
  pair = _Pair(num_clients=4)
  data = client_rounds.datasets(toy, _SIZES)
  for number, sampled in enumerate([(0, 1, 2), (1, 3), (1, 3)], start=1):
    assert pair.next_round(data, sampled) == (number, 0)
  assert pair.next_round(data) == (4, 0)
  for _ in range(2):
    assert pair.next_round(data) == (4, 0)


def test_a_client_that_missed_a_round_gets_control_variates(toy):
  """Without `num_clients`, no one knows beforehand that it comes."""
  pair = _Pair()
  data = client_rounds.datasets(toy, _SIZES)
  assert pair.next_round(data, (0, 1)) == (0, 0)
  assert pair.next_round(data, (0, 1)) == (0, 0)
  # A subset can do without.
  assert pair.next_round(data, (1,)) == (0, 0)
  assert pair.next_round(data, (0, 1)) == (1, 1)
  assert pair.next_round(data, (2, 3)) == (2, 1)
  assert pair.next_round(data, (2, 3)) == (3, 1)
  assert pair.next_round(data, (2, 3)) == (3, 1)


def test_a_new_client_after_some_rounds(toy):
  """A client whose state was lost, or that nobody has seen before."""
  pair = _Pair(num_clients=4)
  data = client_rounds.datasets(toy, _SIZES)
  for _ in range(2):
    assert pair.next_round(data) == (0, 0)
  for training in (pair.short, pair.sending):
    training.clients[2] = training.process.initialize_client(training.state)
  assert pair.next_round(data) == (1, 1)
  assert pair.next_round(data) == (1, 1)


def test_an_outdated_client_that_is_dropped_is_noticed(toy):
  """With a wrong c it could be dropped in the short round only."""
  pair = _Pair()
  _, dropped = client_rounds.datasets_without_update(toy)
  data = client_rounds.datasets(toy, _SIZES)
  assert pair.next_round(data, (0, 1)) == (0, 0)
  assert pair.next_round([data[0], data[1], dropped], (0, 1, 2)) == (1, 1)


class _Spoiling(tff.aggregators.UnweightedAggregationFactory):
  """Statistics that are not finite in the second round."""

  def create(self, value_type):
    inner = aggregators.NaiveMomentsFactory().create(value_type)

    @tff.tensorflow.computation(value_type, np.int32)
    def spoil(value, round_num):
      return tf.nest.map_structure(
          lambda v: tf.where(tf.equal(round_num, 1), np.inf * v, v), value
      )

    @tff.tensorflow.computation(np.int32)
    def add_one(round_num):
      return round_num + 1

    @tff.federated_computation
    def initialize():
      return tff.federated_value(0, tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      result = inner.next(inner.initialize(), value).result
      return tff.templates.MeasuredProcessOutput(
          tff.federated_map(add_one, state),
          tff.federated_map(spoil, (result, state)),
          tff.federated_value((), tff.SERVER),
      )

    return tff.templates.AggregationProcess(initialize, next_fn)


@pytest.mark.slow
def test_after_a_model_that_the_server_rejected(toy):
  """The server has a new c, but the old model."""
  pair = _Pair(num_clients=4, statistics_aggregator=_Spoiling())
  data = client_rounds.datasets(toy, _SIZES)
  assert pair.next_round(data) == (0, 0)
  before = pair.short.weights(pair.model)
  assert pair.next_round(data) == (0, 0)
  client_rounds.assert_same(pair.short.weights(pair.model), before)
  assert pair.next_round(data) == (1, 0)
  assert pair.next_round(data) == (1, 0)


def test_after_a_change_of_the_servers_model(toy):
  pair = _Pair(num_clients=4)
  data = client_rounds.datasets(toy, _SIZES)
  for _ in range(2):
    assert pair.next_round(data) == (0, 0)
  for training in (pair.short, pair.sending):
    state = training.state
    weights = pair.model.to_model_weights(
        [1.5 * np.asarray(w) for w in training.weights(pair.model)]
    )
    training.state = tff.learning.templates.LearningAlgorithmState(
        weights,
        state.distributor,
        state.client_work,
        state.aggregator,
        state.finalizer,
    )
  assert pair.next_round(data) == (1, 1)
  assert pair.next_round(data) == (1, 1)


@pytest.mark.slow
def test_a_round_with_learning_rate_0(toy):
  pair = _Pair(
      num_clients=4,
      client_learning_rate_schedule=lambda n: tf.where(
          tf.equal(n, 1), 0.0, 0.1
      ),
  )
  data = client_rounds.datasets(toy, _SIZES)
  for expected in [(0, 0), (0, 0), (1, 0), (1, 0)]:
    assert pair.next_round(data) == expected


@pytest.mark.parametrize(
    ('options', 'averages'),
    [
        ({}, True),
        (dict(server_optimizer=_SGD(1.0)), True),
        (dict(model_aggregator=aggregators.WeightedMeanFactory()), True),
        (dict(statistics_aggregator=aggregators.PooledMomentsFactory()), True),
        (dict(server_optimizer=_SGD(0.5)), False),
        (dict(server_optimizer=_SGD(1.0, 0.9)), False),
        (
            dict(server_optimizer=tff.learning.optimizers.build_adam(1.0)),
            False,
        ),
        (
            dict(
                server_optimizer=tff.learning.optimizers.schedule_learning_rate(
                    _SGD(1.0), lambda n: tf.ones([], tf.float64)
                )
            ),
            False,
        ),
        (dict(server_clip_norm=1e9), False),
        (
            dict(
                model_aggregator=aggregators.CoordinateMedian(),
                client_weighting='uniform',
            ),
            False,
        ),
        (dict(model_aggregator=_MEAN), False),
    ],
)
def test_only_servers_that_average_do_without_control_variates(
    options, averages
):
  config = ProcessConfig(
      _SGD(0.1), drift_correction=algorithms.Scaffold(), **options
  )
  assert (config.round_variants() is not None) == averages


def test_what_is_kept_where_control_variates_are_always_sent():
  model, process = _process(model_aggregator=_MEAN)
  assert isinstance(process.next, tff.framework.ConcreteComputation)
  names = {f'control_variate_{v.name}' for v in model.variables if v.trainable}
  state = process.initialize()
  assert set(process.initialize_client(state)) == names
  assert set(state.client_work['correction']) == names


@pytest.mark.slow
@pytest.mark.parametrize('rate', [1e-4, 0.1])
def test_float32_images(toy_images, rate):
  """The derived c has the error of the model's rounding."""
  model = toy_images.model()
  data = client_rounds.datasets(toy_images, (12, 12))
  weights = []
  for aggregator in (None, tff.aggregators.MeanFactory()):
    process = algorithms.build_scaffold(
        model, _SGD(rate), model_aggregator=aggregator
    )
    weights.append(client_rounds.run(process, data, 6).weights(model))
  for value, expected in zip(*weights, strict=True):
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-6)
