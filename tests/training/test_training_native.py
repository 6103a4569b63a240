"""Tests the training loop with real algorithms in TFF's runtimes."""

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


@pytest.mark.slow
def test_killed_program(model, data, tmp_path):
  process = training_example.build_process('fed_bn', model)
  folders = tmp_path / 'uninterrupted', tmp_path / 'killed'
  workers = training_example.train_and_kill(folders[1], 'fed_bn')
  assert list(workers) == ['worker_binary']

  with runtime.native_runtime():
    uninterrupted, result = (
        training.train(process, model, data, _CONFIG, folder)
        for folder in folders
    )

  assert result.resumed_from in (2, 4, 6)
  assert training_fakes.snapshot(folders[1]) == training_fakes.snapshot(
      folders[0]
  )
  for worker in workers.values():
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
  # It learns.
  rows = uninterrupted.rows
  assert [row['round'] for row in rows] == [0, 3, 6, 8]
  assert rows[-1]['train_loss'] < rows[1]['train_loss']
  assert rows[-1]['test_accuracy'] > 0.2
  assert rows[-1]['num_clients'] == 2
  assert rows[-1]['num_dropped_clients'] == 0


@pytest.mark.slow
@pytest.mark.usefixtures('in_process_runtime')
def test_control_variates_are_stored_but_are_not_models(model, data, tmp_path):
  process = training_example.build_process('scaffold', model)

  def train(folder, rounds):
    config = dataclasses.replace(_CONFIG, rounds=rounds, local_steps=4)
    return training.train(process, model, data, config, folder)

  at_once, run_dir = train(tmp_path / 'at_once', 5), tmp_path / 'resumed'
  train(run_dir, 3)
  result = train(run_dir, 5)

  assert result.resumed_from == 3
  assert training_fakes.snapshot(run_dir) == training_fakes.snapshot(
      tmp_path / 'at_once'
  )
  assert result.rows == at_once.rows
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
