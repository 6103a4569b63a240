"""Tests of training when clients differ before their first round."""

import collections
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow_federated as tff
import training_example
import training_fakes

from tff_bn import training
from tff_bn.keras_model.partition import Role
from tff_bn.training import client_state_store
from tff_bn.training import evaluation

_CONFIG = training_example.CONFIG
_FAKE_CONFIG = training_fakes.CONFIG


class _PersonalProcess(training_fakes.FakeStatefulProcess):
  """Adds the clients' numbers to their initial moving means."""

  has_personal_state = True

  def __init__(self, model):
    super().__init__(model)
    self.personalized = []

  def personalize(self, client_state, client_number):
    assert client_state['rounds'] == 0
    self.personalized.append(client_number)
    moments = client_state['moments']
    return collections.OrderedDict(
        client_state,
        moments=collections.OrderedDict(
            moments, mean=moments['mean'] + np.float32(client_number)
        ),
    )


class _RecordingProcess(_PersonalProcess):
  """Records the initial states of new clients."""

  def __init__(self, model):
    super().__init__(model)
    self.new_clients = []

  def next(self, state, client_states, datasets):
    self.new_clients.append(
        [c['moments']['mean'][0] for c in client_states if not c['rounds']]
    )
    return super().next(state, client_states, datasets)


def test_new_clients_are_personalized_by_their_position(fake_model, tmp_path):
  process = _RecordingProcess(fake_model)
  data = training_fakes.FakeData()
  training_fakes.train(
      fake_model, tmp_path, _FAKE_CONFIG, data=data, process=process
  )

  seen, expected = set(), []
  for round_num in range(1, 8):
    numbers = [
        training_fakes.CLIENT_IDS.index(call['client_ids'][0])
        for call in data.calls
        if call['round_num'] == round_num
    ]
    expected.append([n for n in numbers if n not in seen])
    seen.update(numbers)
  assert len(seen) == 4
  assert expected[0] != [0, 1]
  assert process.new_clients == expected


def test_round_0_is_evaluated_with_the_clients_own_models(fake_model, tmp_path):
  config = dataclasses.replace(
      _FAKE_CONFIG, rounds=1, max_evaluation_clients=2, seed=4
  )
  process = _PersonalProcess(fake_model)
  result = training_fakes.train(fake_model, tmp_path, config, process=process)

  row, chosen = result.rows[0], process.personalized[:2]
  assert chosen == [0, 2]  # Determined by the seed.
  data = training_fakes.FakeData()
  evaluator = evaluation.Evaluator(fake_model)
  tests, own_tests = [], []
  for number in chosen:
    client_id = training_fakes.CLIENT_IDS[number]
    weights = fake_model.initial_weights
    weights.non_trainable[0] = weights.non_trainable[0] + np.float32(number)
    tests.append(evaluator.evaluate(weights, data.test_dataset(3)))
    own_data = data.client_test_dataset(client_id, 3)
    own_tests.append(evaluator.evaluate(weights, own_data))
  assert len({result['loss'] for result in tests}) == 2
  for prefix, results in (('test_', tests), ('client_test_', own_tests)):
    results = [result for result in results if result['num_examples']]
    for name in ('loss', 'accuracy'):
      np.testing.assert_allclose(
          row[prefix + name], np.mean([r[name] for r in results]), rtol=1e-6
      )


# The tests below use FedAvg, whose clients store only their phases.


@pytest.fixture(scope='module')
def data():
  return training_example.build_data()


@pytest.fixture(scope='module')
def model(data):
  return training_example.build_model(data, 0.5)


@pytest.fixture(scope='module')
def train(model, data, native_context):
  """Trains in a folder."""
  process = training_example.build_process('fed_avg', model)
  assert process.has_personal_state

  def run(run_dir, config=_CONFIG):
    with tff.framework.get_context_stack().install(native_context):
      return training.train(process, model, data, config, run_dir)

  return run


@pytest.fixture(scope='module')
def uninterrupted(train, tmp_path_factory):
  run_dir = tmp_path_factory.mktemp('uninterrupted')
  return train(run_dir), run_dir


def _phases(run_dir):
  with client_state_store.ClientStateStore(
      run_dir / 'client_states.sqlite'
  ) as store:
    states = {c: store.get(c) for c in store.client_ids()}
  assert all(len(state) == 1 for state in states.values())
  return {c: next(iter(state.values())) for c, state in states.items()}


def _drawn(data):
  """Returns the phases that belong to the builder's seed 0."""
  return {
      client_id: np.random.default_rng([0, number, 0x70686173]).random(
          dtype=np.float32
      )
      for number, client_id in enumerate(data.client_ids)
  }


@pytest.mark.slow
def test_clients_keep_their_phases(uninterrupted, data):
  # The phases do not depend on the round in which a client is first sampled.
  _, run_dir = uninterrupted
  assert _phases(run_dir) == _drawn(data)


def test_models(uninterrupted, model, data):
  """The clients' models differ only in the phase."""
  result, run_dir = uninterrupted
  (position,) = [
      i for i, v in enumerate(model.variables) if v.role is Role.PERSONAL_PHASE
  ]
  merged = keras.models.load_model(
      run_dir / 'model' / 'model.keras'
  ).get_weights()
  drawn = _drawn(data)
  assert len(drawn) == 4
  for client_id, phase in drawn.items():
    own = training_fakes.load_client(run_dir, client_id)
    (encoding,) = [
        layer for layer in own.layers if hasattr(layer, 'personal_phase')
    ]
    assert encoding.personal_phase.numpy() == phase
    for i, (a, b) in enumerate(zip(own.get_weights(), merged, strict=True)):
      if i != position:
        np.testing.assert_array_equal(a, b)
  assert merged[position] == 0
  found = model.from_model_weights(result.model_weights)
  for a, b in zip(found, merged, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_killed_program(train, uninterrupted, tmp_path):
  training_example.train_and_kill(tmp_path, 'fed_avg', '0.5')

  result = train(tmp_path)

  assert result.resumed_from in (2, 4, 6)
  assert training_fakes.snapshot(tmp_path) == training_fakes.snapshot(
      uninterrupted[1]
  )
