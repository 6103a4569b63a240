"""Tests of finished runs: their clients, examples and further training."""

import numpy as np
import pytest
import tiny_runs

from tff_bn import runtime
from tff_bn.programs import train


@pytest.mark.slow
def test_clients_that_are_drawn(fedavg, tmp_path):
  run = tiny_runs.analyzed(
      tiny_runs.with_flags(fedavg, tmp_path / 'a', clients_per_round=3)
  )
  ids = run.data.client_ids
  drawn = [tuple(run.draw_clients(2, seed)) for seed in range(5)]
  assert len(set(drawn)) > 1
  for first, second in drawn:
    assert ids.index(first) < ids.index(second)
  assert run.draw_clients(2, 0) == list(drawn[0])
  # The default is the number in a round, or all.
  assert len(run.draw_clients(None, 0)) == 3
  assert tiny_runs.analyzed(fedavg).draw_clients(None, 0) == list(ids)


@pytest.mark.slow
def test_examples_that_are_drawn(comparison):
  run, other = (
      tiny_runs.analyzed(comparison / 'runs' / f'fedavg-seed{seed}')
      for seed in (0, 1)
  )
  data = tiny_runs.split().dataset
  x, y = run.test_examples(20, 0)
  # All runs have the same examples, which are from the whole test set.
  np.testing.assert_array_equal(other.test_examples(20, 0)[0], x)
  assert not np.array_equal(run.test_examples(20, 1)[0], x)
  same = (data.x_test[None] == x[:, None]).all(axis=(2, 3, 4))
  positions = same.argmax(axis=1)
  assert same.any(axis=1).all()
  assert len(set(positions)) >= 19 and positions.max() > 200
  np.testing.assert_array_equal(y, data.y_test[positions])
  # There may be fewer.
  np.testing.assert_array_equal(run.test_examples(1000, 0)[0], data.x_test)


@pytest.mark.slow
def test_frozen_weights_are_always_the_runs(frozen):
  run = tiny_runs.analyzed(frozen)
  names = [run.model.variables[p].name for p in run.model.constants]
  assert sorted(names) == ['other_state_0', 'other_state_1']
  client_ids = run.data.client_ids[:2]
  with runtime.in_process_runtime():
    found = [w for part in run.train_rounds(client_ids, 2) for w in part]
    found += run.train_halves(1, 0)
  expected = run.model.from_model_weights(run.weights)
  for weights in found:
    values = run.model.from_model_weights(weights)
    for p, (a, b) in enumerate(zip(values, expected)):
      assert np.array_equal(a, b) == (p in run.model.constants)
  expected[1] = expected[1] + 1
  with pytest.raises(
      ValueError, match='1 of .* variables that training cannot'
  ):
    run.client_state(run.model.to_model_weights(expected))


@pytest.mark.slow
def test_new_clients_have_personal_phases(tmp_path):
  flags = (*tiny_runs.FLAGS, '--pan=add', '--pan_personal_share=0.5')
  folders = {number: tmp_path / str(number) for number in (2, 4)}
  for number, folder in folders.items():
    arguments = [f'--clients_per_round={number}', f'--output_dir={folder}']
    assert train.run([*flags, *arguments]) == 0
  run = tiny_runs.analyzed(folders[2])
  with runtime.in_process_runtime():
    trained = run.train_clients(run.data.client_ids)
  phases = set()
  for client, weights in zip(run.data.client_ids, trained, strict=True):
    # In the other run, all clients take part, so all phases are saved.
    expected = tiny_runs.load(folders[4], client)
    # Training leaves them as they are.
    for model in (run.client_weights(client), weights):
      own, saved = (
          m.get_layer('hidden_position').personal_phase.numpy()
          for m in (run.model.to_keras(model), expected)
      )
      assert own == saved
    phases.add(own)
  assert len(phases) == 4
