"""Tests of processes that change their algorithm at given rounds."""

import asyncio
import collections
import dataclasses

import client_rounds
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import training_fakes

from tff_bn import algorithms
from tff_bn import training
from tff_bn.processes.phased_process import Phase
from tff_bn.processes.phased_process import PhasedComputation
from tff_bn.processes.phased_process import build_phased_process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.processes.stateful_process import StatefulProcessOutput
from tff_bn.processes.stateful_process import with_next

_TWO_ROUNDS = 2
_assert_same = client_rounds.assert_same


@pytest.fixture(scope='module')
def model():
  return training_fakes.build_model()


def _build(model, local_steps, **options):
  return algorithms.build_fed_avg(
      model,
      tff.learning.optimizers.build_sgdm(0.1),
      local_steps=local_steps,
      **options,
  )


@pytest.fixture(scope='module')
def processes(model):
  """Returns processes with one and with three local steps."""
  return _build(model, 1), _build(model, 3)


@pytest.fixture(scope='module')
def phased(processes):
  first, second = processes
  return build_phased_process([(_TWO_ROUNDS, first), (None, second)])


@pytest.fixture(
    params=[
        'in_process_runtime',
        pytest.param('native_runtime', marks=pytest.mark.slow),
    ]
)
def any_runtime(request):
  return request.getfixturevalue(request.param)


def _data():
  """Returns two clients with three batches of eight examples."""
  return [
      training_fakes.FakeData().client_dataset(
          [client_id], seed=0, round_num=1, batch_size=8, local_steps=3
      )
      for client_id in training_fakes.CLIENT_IDS[:2]
  ]


def _expected_states(processes, data):
  """Runs two separate processes one after the other."""
  first, second = processes
  states = [first.initialize()]
  for process in (first, first, second, second):
    states.append(process.next(states[-1], data).state)
  return states


def test_the_state_selects_the_phase(any_runtime, processes, phased):
  data = _data()
  states = _expected_states(processes, data)
  _assert_same(phased.initialize(), states[0])
  for number in (3, 0, 2, 1):
    output = phased.next(states[number], data)
    _assert_same(output.state, states[number + 1])
    num_examples = output.metrics['client_work']['train']['num_examples']
    assert num_examples == (16 if number < _TWO_ROUNDS else 48)
  # By name, which TFF's computations accept, too.
  name, _ = tff.structure.to_elements(phased.next.type_signature.parameter)[1]
  output = phased.next(state=states[2], **{name: data})
  _assert_same(output.state, states[3])


@pytest.fixture(name='event_loop')
def _event_loop():
  """Sets an event loop for TFF's loop; other tests may have removed it."""
  loop = asyncio.new_event_loop()
  asyncio.set_event_loop(loop)
  yield
  asyncio.set_event_loop(None)
  loop.close()


@pytest.mark.usefixtures('event_loop')
def test_tffs_training_loop(in_process_runtime, processes, phased):
  data = _data()

  state = tff.simulation.run_training_process(
      phased, training_selection_fn=lambda _: data, total_rounds=4
  )

  _assert_same(state, _expected_states(processes, data)[4])


_CONFIG = training.TrainingConfig(
    rounds=5,
    batch_size=8,
    local_steps=3,
    evaluate_every=1,
    checkpoint_every=1,
)


def test_training_is_resumed_in_its_phase(
    in_process_runtime, model, phased, tmp_path
):
  def train(name, rounds):
    config = dataclasses.replace(_CONFIG, rounds=rounds)
    return training.train(
        phased, model, training_fakes.FakeData(), config, tmp_path / name
    )

  expected = train('uninterrupted', 5)
  for stop_after in (2, 3):  # The last round of a phase, and a later one.
    train('stopped', stop_after)
  result = train('stopped', 5)

  assert result.resumed_from == 3
  assert result.rows == expected.rows
  _assert_same(result.state, expected.state)
  assert [row['exchanges'] for row in result.rows] == [0, 1, 2, 3, 4, 5]


def test_metrics_describe_each_phases_messages(
    in_process_runtime, model, tmp_path
):
  class ZeroFactory(tff.aggregators.UnweightedAggregationFactory):
    """An aggregator to which clients send nothing."""

    def create(self, value_type):
      @tff.tensorflow.computation
      def zeros():
        return [tf.zeros(t.shape, t.dtype.type) for t in value_type]

      @tff.federated_computation
      def initialize():
        return tff.federated_value((), tff.SERVER)

      @tff.federated_computation(
          initialize.type_signature.result,
          tff.FederatedType(value_type, tff.CLIENTS),
      )
      def next_fn(state, value):
        del value
        return tff.templates.MeasuredProcessOutput(
            state, tff.federated_eval(zeros, tff.SERVER), state
        )

      return tff.templates.AggregationProcess(initialize, next_fn)

  class SumFactory(ZeroFactory):
    """An aggregator to which clients send everything."""

    def create(self, value_type):
      return tff.aggregators.SumFactory().create(value_type)

  processes = [
      _build(model, 1, model_aggregator=f(), client_weighting='uniform')
      for f in (ZeroFactory, SumFactory)
  ]
  phased = build_phased_process([(2, processes[0]), (None, processes[1])])

  result = training.train(
      phased, model, training_fakes.FakeData(), _CONFIG, tmp_path
  )

  trainable = 4 * (3 * 4 + 4 + 2 * 4 + 4 * 2 + 2)
  statistics = 4 * 2 * 4
  # The server sends everything once, and four clients send.
  first = trainable + 5 * statistics
  second = first + 4 * trainable
  assert [row['megabytes'] * 2**20 for row in result.rows] == pytest.approx(
      np.cumsum([0, first, first, second, second, second])
  )


def test_it_is_a_learning_process(in_process_runtime, processes, phased):
  first, _ = processes
  assert isinstance(phased, tff.learning.templates.LearningProcess)
  assert phased.next.type_signature == first.next.type_signature
  assert isinstance(phased.next, PhasedComputation)
  assert [
      (phase.num_rounds, phase.computation) for phase in phased.next.phases
  ] == [(2, first.next), (None, processes[1].next)]
  assert hash(phased.next) == hash(phased.next)
  state = phased.initialize()
  weights = phased.get_model_weights(state)
  _assert_same(weights, first.get_model_weights(state))
  ones = tf.nest.map_structure(np.ones_like, weights)
  state = phased.set_model_weights(state, ones)
  _assert_same(phased.get_model_weights(state), ones)
  hparams = phased.get_hparams(state)
  _assert_same(hparams, first.get_hparams(state))
  assert tf.nest.flatten(hparams)
  twice = tf.nest.map_structure(lambda value: value + value, hparams)
  _assert_same(phased.get_hparams(phased.set_hparams(state, twice)), twice)


def test_phases_follow_each_other(processes):
  first, second = (process.next for process in processes)
  phases = [(1, first), (3, second), (None, first)]
  computation = PhasedComputation([Phase(*phase) for phase in phases])

  assert [
      computation.phases.index(computation.phase_after(r)) for r in range(7)
  ] == [0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ('lengths', 'expected'),
    [
        ((1, 3), [0, 1, 1, 1, 0, 1, 1, 1, 0]),
        ((2, 1, 1), [0, 0, 1, 2, 0, 0, 1, 2, 0]),
        ((2,), [0] * 9),
        ((1, None), [0] + [1] * 8),
    ],
)
def test_phases_repeat_if_the_last_one_ends(processes, lengths, expected):
  phases = [
      Phase(n, process.next) for n, process in zip(lengths, processes * 2)
  ]
  computation = PhasedComputation(phases)

  for number, phase in enumerate(expected):
    assert computation.phase_after(number) is computation.phases[phase]
    assert computation.rounds_of_phases(number) == [
        expected[:number].count(i) for i in range(len(lengths))
    ]


def test_not_inside_another_computation(phased):
  parameter = phased.next.type_signature.parameter
  with pytest.raises(TypeError, match=r'round_num.* inside another'):

    @tff.federated_computation(*parameter)
    def _(state, data):
      return phased.next(state, data)


@pytest.mark.parametrize('arguments', [[], [3], [None, []]])
def test_other_values_than_states(phased, arguments):
  with pytest.raises(TypeError, match='round_num'):
    phased.next(*arguments)


@pytest.mark.parametrize(
    'numbers', [[], [None, None], [None, 2], [2, 0], [0, None], [-1, None]]
)
def test_numbers_of_rounds(processes, numbers):
  phases = [(number, processes[0]) for number in numbers]
  with pytest.raises(ValueError, match='phases'):
    build_phased_process(phases)


def test_processes_of_different_types(model, processes):
  first, _ = processes

  def refuse(other, what):
    with pytest.raises(TypeError, match=f'The {what} of phase 3 must'):
      build_phased_process([(1, first), (1, first), (None, other)])

  with_server_momentum = algorithms.build_fed_avg(
      model,
      tff.learning.optimizers.build_sgdm(0.1),
      server_optimizer=tff.learning.optimizers.build_sgdm(1.0, 0.9),
  )
  refuse(with_server_momentum, 'state')
  refuse(_with_next(first, other_metrics=True), 'metrics')
  refuse(_with_next(first, other_data=True), 'client data')


def _with_next(process, other_metrics=False, other_data=False):
  """Builds processes with the same state but other data or metrics."""
  state_type, data_type = process.next.type_signature.parameter
  if other_data:
    data_type = tff.FederatedType(tff.SequenceType(np.int32), tff.CLIENTS)
  metrics_type = process.next.type_signature.result.metrics.member
  if other_metrics:
    metrics_type = tff.to_type(collections.OrderedDict(a=np.int32))

  @tff.tensorflow.computation
  def metrics():
    return tff.types.type_to_py_container(
        tff.structure.map_structure(
            lambda t: tf.zeros(t.shape, t.dtype.type), metrics_type
        ),
        metrics_type,
    )

  @tff.federated_computation(state_type, data_type)
  def next_fn(state, data):
    del data
    return tff.learning.templates.LearningProcessOutput(
        state, tff.federated_eval(metrics, tff.SERVER)
    )

  return tff.learning.templates.LearningProcess(
      process.initialize,
      next_fn,
      process.get_model_weights,
      process.set_model_weights,
  )


def test_state_without_a_number_of_rounds():
  model = tff.learning.models.FunctionalModel(
      initial_weights=((np.zeros([3, 2], np.float32),), ()),
      predict_on_batch_fn=tf.function(
          lambda weights, x, training: x @ weights[0][0]
      ),
      loss_fn=tf.function(
          lambda output, label, weight: tf.reduce_mean((output - label) ** 2)
      ),
      input_spec=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])),
  )
  process = tff.learning.algorithms.build_weighted_fed_avg(
      model, tff.learning.optimizers.build_sgdm(0.1)
  )
  with pytest.raises(TypeError, match='number of finished rounds'):
    build_phased_process([(1, process), (None, process)])


_SGD = tff.learning.optimizers.build_sgdm


# TFF must have built a Keras model before this model is built.
@pytest.fixture(scope='module')
def new_model():
  return training_fakes.build_model()


@pytest.fixture(scope='module')
def fixbn(new_model):
  return algorithms.build_fixbn(
      new_model,
      _SGD(0.1),
      fixbn_rounds=_TWO_ROUNDS,
      # With its rounds of two clients, it sends its control variates.
      drift_correction=algorithms.Scaffold(4),
      local_steps=2,
  )


class TestClientStates:
  """FixBN with SCAFFOLD: clients keep control variates in both phases."""

  def _rounds(self, processes, data):
    """Returns the states of the server and of the clients after each round."""
    state = processes[0].initialize()
    clients = [processes[0].initialize_client(state) for _ in data]
    states = [(state, clients)]
    for process in processes:
      output = process.next(state, clients, data)
      state, clients = output.state, output.client_states
      states.append((state, clients))
    return states

  @pytest.mark.slow
  def test_states_go_through_the_phases(self, any_runtime, fixbn):
    first, second = (
        with_next(fixbn, phase.computation) for phase in fixbn.next.phases
    )
    data = _data()

    found = self._rounds([fixbn] * 4, data)

    expected = self._rounds([first, first, second, second], data)
    _assert_same(found, expected)
    for before, after in zip(found, found[1:]):
      for a, b in zip(before[1], after[1], strict=True):
        for name in a:
          # The clients also keep what they got, which changes a round later.
          if name.startswith('control_variate_'):
            assert np.any(a[name] != b[name]), name
    # Only the first phase changes the statistics.
    statistics = [
        fixbn.get_model_weights(state).non_trainable for state, _ in found
    ]
    _assert_same(statistics[3:], statistics[2:4])
    assert np.any(statistics[2][0] != statistics[1][0])

  def test_it_is_a_stateful_process(self, in_process_runtime, fixbn):
    assert isinstance(fixbn, StatefulLearningProcess)
    assert isinstance(fixbn.next, PhasedComputation)
    assert fixbn.has_client_models is False
    state = fixbn.initialize()
    client = fixbn.initialize_client(state)
    _assert_same(
        fixbn.get_client_model_weights(state, client),
        fixbn.get_model_weights(state),
    )

  def test_clients_with_models_keep_them(self, in_process_runtime, new_model):
    short, long = (
        algorithms.build_fed_bn(new_model, _SGD(0.1), local_steps=n)
        for n in (1, 3)
    )
    phased = build_phased_process([(1, short), (None, long)])
    assert phased.has_client_models is True
    found = self._rounds([phased] * 3, _data())
    _assert_same(found, self._rounds([short, long, long], _data()))
    state, (client, other) = found[-1]
    weights = phased.get_client_model_weights(state, client)
    _assert_same(weights, long.get_client_model_weights(state, client))
    other_weights = phased.get_client_model_weights(state, other)
    assert np.any(weights.non_trainable[0] != other_weights.non_trainable[0])


def _with_client_states(process, client_type):
  """A process that differs only in its client states."""
  state_type, data_type = process.next.type_signature.parameter
  client_type = tff.to_type(client_type)

  @tff.tensorflow.computation(state_type.member)
  def initialize_client(state):
    del state
    return tf.zeros(client_type.shape, client_type.dtype.type)

  @tff.federated_computation(
      state_type, tff.FederatedType(client_type, tff.CLIENTS), data_type
  )
  def next_fn(state, client_states, data):
    output = process.next(state, data)
    return StatefulProcessOutput(output.state, client_states, output.metrics)

  return StatefulLearningProcess(
      process.initialize,
      initialize_client,
      next_fn,
      process.get_model_weights,
      lambda state, client_state: process.get_model_weights(state),
  )


def test_processes_with_different_client_states(processes):
  stateless, _ = processes
  integer, vector = (
      _with_client_states(stateless, t) for t in (np.int32, (np.float32, [3]))
  )
  build_phased_process([(1, vector), (None, vector)])
  for first, second in (
      (integer, vector),
      (integer, stateless),
      (stateless, integer),
  ):
    with pytest.raises(TypeError, match='The client state of phase 2 must'):
      build_phased_process([(1, first), (None, second)])
  model = training_fakes.build_model()
  with pytest.raises(TypeError, match='The state of phase 2 must'):
    build_phased_process(
        [
            (1, algorithms.build_fed_bn(model, _SGD(0.1))),
            (None, algorithms.build_silo_bn(model, _SGD(0.1))),
        ]
    )
