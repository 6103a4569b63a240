"""Tests of the analysis of fusion: its training, measurements and output."""

import csv_rows
import numpy as np
import pytest
import tensorflow as tf
import tiny_runs

from tff_bn.data import federated
from tff_bn.papers import units


class _Fusion:
  """Records the models, examples and training data of a fusion."""

  def __init__(self, monkeypatch):
    self.models = None
    self.x = None
    self.halves = []
    self.batches = []
    self.lengths = []
    align = units.align
    client_dataset = federated.FederatedData.client_dataset

    def spied_align(first, second, x):
      # The trained models before alignment.
      self.models, self.x = (first, second), x
      return align(first, second, x)

    def spied_dataset(data, client_ids, **length):
      dataset = client_dataset(data, client_ids, **length)
      if len(client_ids) == 1:
        self.halves.append(data.train_indices[client_ids[0]])
        self.batches.append(list(dataset))
        self.lengths.append(length)
      return dataset

    monkeypatch.setattr(units, 'align', spied_align)
    monkeypatch.setattr(
        federated.FederatedData, 'client_dataset', spied_dataset
    )


_FUSION = ('--epochs=2', '--coefficients=1,0,0.3', '--num_examples=50')


def _fuse(run, *arguments, folder):
  with pytest.MonkeyPatch.context() as monkeypatch:
    seen = _Fusion(monkeypatch)
    result = tiny_runs.analyze('fusion', run, *arguments, folder=folder)
  return seen, result


def _expected_fusion(seen, coefficients, change=lambda model: model):
  data = tiny_runs.split()
  first, second = seen.models
  others = dict(average=second, transport=units.align(first, second, seen.x))
  return {
      (method, coefficient): tiny_runs.evaluate(
          change(units.interpolate(first, other, coefficient)), data
      )
      for method, other in others.items()
      for coefficient in coefficients
  }


def _fusion_values(rows, name):
  return {
      (row['method'], float(row['coefficient'])): (
          float(row['accuracy']),
          float(row['loss']),
      )
      for row in rows
      if row['run'] == name
  }


def _assert_same_results(found, expected):
  assert list(found) == list(expected)
  for key, (accuracy, loss) in expected.items():
    # One example may be at the border of two classes.
    assert found[key][0] == pytest.approx(accuracy, abs=1.5 / 360)
    assert found[key][1] == pytest.approx(loss, rel=1e-4)


@pytest.mark.slow
def test_fusion(fedavg, tmp_path):
  run = tiny_runs.with_flags(fedavg, tmp_path / 'fedavg', client_momentum=0.5)
  seen, result = _fuse(run, *_FUSION, folder=tmp_path / 'out')
  columns = ['run', 'seed', 'method', 'coefficient', 'accuracy', 'loss']
  assert list(result.rows[0]) == columns
  found = _fusion_values(result.rows, 'fedavg')
  _assert_same_results(found, _expected_fusion(seen, (0, 0.3, 1)))
  # The ends are the models themselves; permuted units compute the same.
  assert found['average', 0] == found['transport', 0]
  accuracy, loss = found['average', 1]
  assert found['transport', 1][0] == pytest.approx(accuracy, abs=1.5 / 360)
  assert found['transport', 1][1] == pytest.approx(loss, rel=1e-4)
  # Between them it matters.
  assert found['average', 0.3][1] != pytest.approx(found['transport', 0.3][1])
  cells = csv_rows.cells(result.markdown)
  assert cells[0] == ['μ', 'fedavg: average', 'fedavg: optimal transport']
  assert cells[3] == [
      '0.3',
      *(f'{100 * found[m, 0.3][0]:.1f}' for m in ('average', 'transport')),
  ]
  assert 'for 2 epochs, each' in result.markdown
  assert 'interpolated like the weights' in result.markdown
  (axes,) = result.drawings['fusion'].axes
  assert [line.get_label() for line in axes.get_lines()] == cells[0][1:]

  # Each model has a half of the data. A tiny learning rate keeps its initial
  # weights.
  run = tiny_runs.with_flags(
      fedavg, tmp_path / 'start', client_learning_rate=1e-30
  )
  start, _ = _fuse(
      run, '--epochs=1', '--coefficients=0', folder=tmp_path / 'out2'
  )
  for seen_fusion in (start, seen):
    halves = seen_fusion.halves
    assert [len(half) for half in halves] == [719, 718]
    assert sorted(np.concatenate(halves)) == list(range(1437))
    # The halves are random.
    assert np.ptp(halves[0]) > 1400
  for length in seen.lengths:
    assert length['local_epochs'] == 2
    assert length['batch_size'] == 8
    assert length.get('local_steps') is None
  assert len(seen.x) == 50
  kernels = []
  for initial, batches in zip(start.models, seen.batches, strict=True):
    assert len(batches) == 2 * 90
    kernels.append(initial.get_layer('hidden').kernel.numpy())
    # Glorot's uniform initializer.
    assert np.abs(kernels[-1]).max() <= np.sqrt(6 / (64 + 30))
    assert kernels[-1].std() == pytest.approx(np.sqrt(2 / (64 + 30)), rel=0.1)
  assert np.abs(kernels[0] - kernels[1]).max() > 0.1


@pytest.mark.slow
def test_halves_are_trained_as_clients(fedavg, tmp_path):
  """One epoch of few batches keeps rounding errors small."""
  flags = dict(batch_size=300, client_momentum=0.5)
  models_of = []
  for rate in (1e-30, 0.05):
    run = tiny_runs.with_flags(
        fedavg, tmp_path / str(rate), client_learning_rate=rate, **flags
    )
    seen, _ = _fuse(
        run, '--epochs=1', '--coefficients=0', folder=tmp_path / 'x'
    )
    models_of.append(seen.models)
  for initial, trained, batches in zip(*models_of, seen.batches, strict=True):
    assert len(batches) == 3
    norm = initial.get_layer('norm')
    norm.moving_mean.assign(tf.zeros_like(norm.moving_mean))
    norm.moving_variance.assign(tf.ones_like(norm.moving_variance))
    tiny_runs.train(initial, batches, 0.05, 0.5)
    for weight, expected in zip(
        trained.get_weights(), initial.get_weights(), strict=True
    ):
      np.testing.assert_allclose(weight, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_seed_of_a_fusion(fedavg, tmp_path):
  found = []
  for seed in (0, 1, 1):
    arguments = ('--epochs=1', '--coefficients=0,1', f'--seed={seed}')
    seen, result = _fuse(fedavg, *arguments, folder=tmp_path)
    found.append((seen.halves[0].tolist(), result.rows))
  assert found[0][0] != found[1][0]
  assert found[0][1] != found[1][1]
  assert found[1] == found[2]


def _with_statistics_of_all_data(model):
  x = tiny_runs.split().dataset.x_train
  z = model.get_layer('hidden')(x.reshape(len(x), -1)).numpy().astype(float)
  norm = model.get_layer('norm')
  norm.moving_mean.assign(z.mean(axis=0))
  norm.moving_variance.assign(z.var(axis=0))
  return model


@pytest.mark.slow
def test_fusion_with_new_statistics(fedavg, tmp_path):
  run = tiny_runs.with_flags(fedavg, tmp_path / 'run', batch_size=160)
  seen, result = _fuse(
      run,
      *('--epochs=1', '--coefficients=0.3', '--num_examples=50'),
      '--reestimate_statistics',
      folder=tmp_path,
  )
  expected = _expected_fusion(seen, [0.3], _with_statistics_of_all_data)
  _assert_same_results(_fusion_values(result.rows, 'run'), expected)
  old = _expected_fusion(seen, [0.3])
  assert expected['average', 0.3][1] != pytest.approx(old['average', 0.3][1])
  assert 'recomputed for each model' in result.markdown
