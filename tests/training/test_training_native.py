"""Tests the training loop with real algorithms in TFF's native runtime."""

import dataclasses

import numpy as np
import psutil
import pytest
import training_example
import training_fakes

from tff_bn import runtime
from tff_bn import training
from tff_bn.training import client_state_store
from tff_bn.training import saved_models

_CONFIG = training_example.CONFIG


@pytest.fixture(scope='module')
def data():
  return training_example.build_data()


@pytest.fixture(scope='module')
def model(data):
  return training_example.build_model(data)


@pytest.fixture(scope='module', params=['fed_bn', 'scaffold'])
def algorithm(request):
  return request.param


@pytest.fixture(scope='module')
def train(model, data, algorithm):
  """Trains in a folder."""
  process = training_example.build_process(algorithm, model)
  with runtime.native_runtime():
    yield lambda run_dir, config=_CONFIG: training.train(
        process, model, data, config, run_dir
    )


@pytest.fixture(scope='module')
def uninterrupted(train, tmp_path_factory):
  run_dir = tmp_path_factory.mktemp('uninterrupted')
  return train(run_dir), run_dir


def test_it_learns(uninterrupted):
  result, _ = uninterrupted

  assert [row['round'] for row in result.rows] == [0, 3, 6, 8]
  assert result.rows[-1]['train_loss'] < result.rows[1]['train_loss']
  assert result.rows[-1]['test_accuracy'] > 0.2
  assert result.rows[-1]['num_clients'] == 2
  assert result.rows[-1]['num_dropped_clients'] == 0


@pytest.mark.parametrize('algorithm', ['scaffold'], indirect=True)
def test_resumed_run_equals_an_uninterrupted_one(
    algorithm, train, uninterrupted, tmp_path
):
  train(tmp_path, dataclasses.replace(_CONFIG, rounds=5))

  result = train(tmp_path)

  assert result.resumed_from == 5
  assert training_fakes.snapshot(tmp_path) == training_fakes.snapshot(
      uninterrupted[1]
  )
  assert result.rows == uninterrupted[0].rows


@pytest.mark.parametrize('algorithm', ['fed_bn'], indirect=True)
def test_killed_program(algorithm, train, uninterrupted, tmp_path):
  workers = training_example.train_and_kill(tmp_path, algorithm)
  assert list(workers) == ['worker_binary']

  result = train(tmp_path)

  assert result.resumed_from in (2, 4, 6)
  assert training_fakes.snapshot(tmp_path) == training_fakes.snapshot(
      uninterrupted[1]
  )
  for worker in workers.values():
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize('algorithm', ['scaffold'], indirect=True)
def test_control_variates_are_stored_but_are_not_models(
    algorithm, uninterrupted
):
  del algorithm
  _, run_dir = uninterrupted

  assert not saved_models.SavedModels(run_dir / 'model').client_ids
  header = (run_dir / 'metrics.csv').read_text().splitlines()[0]
  assert header.endswith(',megabytes,full_rounds,repeated_rounds')
  with client_state_store.ClientStateStore(
      run_dir / 'client_states.sqlite'
  ) as store:
    states = [store.get(client_id) for client_id in store.client_ids()]
  assert len(states) == 4
  for state in states:
    names = sorted(state)
    assert sum(name.startswith('control_variate_') for name in names) == 6
    # And what clients need to derive the server's control variates.
    assert sum(name.startswith('received_') for name in names) == 6
    assert {'last_rate_sum', 'last_round'} < set(names) and len(names) == 14
    assert all(np.any(value != 0) for value in state.values())
