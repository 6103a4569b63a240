"""Tests for the choice of the best round and for the early end of runs."""

import csv
import dataclasses
import json
import math

import numpy as np
import pytest
import training_fakes

from tff_bn.training import best_round
from tff_bn.training import client_metrics
from tff_bn.training import evaluation
from tff_bn.training import run_entries

pytestmark = pytest.mark.slow

_CONFIG = dataclasses.replace(
    training_fakes.CONFIG, evaluate_every=1, keep_best='loss', rounds=6
)


def _rows(values, metric='accuracy'):
  return [{'round': n, f'validation_{metric}': v} for n, v in enumerate(values)]


class TestChoice:

  @pytest.mark.parametrize(
      ('metric', 'values', 'expected'),
      [
          ('accuracy', [0.9, 0.1, 0.5, 0.5, 0.4], 2),
          ('loss', [0.1, 3.0, 2.0, 2.0, 2.5], 2),
          ('mae', [0.1, math.nan, 2.0, math.inf, 3.0], 2),
          ('accuracy', [0.9, math.nan, None], None),
          ('accuracy', [0.9], None),
      ],
  )
  def test_first_best_round_after_the_initial_one(
      self, metric, values, expected
  ):
    assert best_round.BestRound(metric).find(_rows(values, metric)) == expected

  @pytest.mark.parametrize(
      ('values', 'patience', 'expected'),
      [
          ([0.9, 0.5, 0.4, 0.3], 2, True),
          ([0.9, 0.5, 0.4], 2, False),
          ([0.9, 0.5, 0.4, 0.5], 2, True),
          ([0.9, 0.5, 0.4, 0.6], 2, False),
          ([0.9, 0.5, 0.4, 0.3], None, False),
          ([0.9, math.nan, math.nan], 2, True),
          ([0.9], 1, False),
      ],
  )
  def test_end(self, values, patience, expected):
    best = best_round.BestRound('accuracy')
    assert best.ends(_rows(values), patience) is expected

  def test_unknown_direction(self):
    with pytest.raises(
        ValueError, match='keep_best=mine is impossible: .*loss'
    ):
      best_round.BestRound('mine')

  def test_missing_metric_or_validation_data(self):
    best = best_round.BestRound('auc')
    with pytest.raises(
        ValueError, match='keep_best=auc: .*only loss, accuracy'
    ):
      best.check(['loss', 'accuracy'], has_validation=True)
    with pytest.raises(ValueError, match='keep_best=auc needs validation data'):
      best.check(['loss', 'auc'], has_validation=False)


def _train(model, run_dir, stateful=True, config=_CONFIG, **kwargs):
  data = training_fakes.ValidatedData()
  return training_fakes.train(
      model, run_dir, config, stateful, data=data, **kwargs
  )


def _models(folder):
  """The weights of a folder of models, and the clients' records."""
  found = {}
  with np.load(folder / 'weights.npz') as arrays:
    found = {name: arrays[name].tobytes() for name in arrays.files}
  path = folder / 'clients.npy'
  records = path.read_bytes() if path.exists() else b''
  manifest = json.loads((folder / 'manifest.json').read_bytes())
  return found, records, manifest['clients'], manifest['round']


@pytest.fixture(scope='module')
def runs(model, tmp_path_factory):
  """Runs whose best round is neither the first nor the last one."""
  found = {}
  for stateful in (False, True):
    for seed in range(20):
      folder = tmp_path_factory.mktemp('best')
      config = dataclasses.replace(_CONFIG, seed=seed)
      result = _train(model, folder, stateful, config)
      if 1 < result.best_round < config.rounds - 1:
        found[stateful] = folder, config, result
        break
  return found


@training_fakes.both_kinds
def test_models_are_those_of_a_run_that_ends_there(
    model, runs, tmp_path, stateful
):
  folder, config, result = runs[stateful]
  losses = [row['validation_loss'] for row in result.rows]
  assert losses[result.best_round] == min(losses[1:])
  assert _models(folder / 'model')[-1] == config.rounds
  shorter = dataclasses.replace(config, rounds=result.best_round)
  _train(model, tmp_path, stateful, shorter)
  assert _models(folder / 'model' / run_entries.BEST) == _models(
      tmp_path / 'model'
  )


def test_validation_is_the_mean_over_the_clients_models(model, runs):
  folder, _, result = runs[False]
  assert folder.exists()
  data = training_fakes.ValidatedData()
  evaluator = evaluation.Evaluator(model)
  losses = [
      evaluator.evaluate(
          result.model_weights, data.client_validation_dataset(c, 256)
      )['loss']
      for c in training_fakes.CLIENT_IDS[:-1]
  ]
  assert result.rows[-1]['validation_loss'] == pytest.approx(
      np.mean(losses), rel=1e-6
  )


def _client_rows(folder):
  with open(folder / 'client_metrics.csv', encoding='utf-8') as file:
    return list(csv.DictReader(file))


@training_fakes.both_kinds
def test_clients_of_the_best_and_the_last_round(runs, stateful):
  folder, config, result = runs[stateful]
  rounds = {int(row['round']) for row in _client_rows(folder)}
  assert rounds == {result.best_round, config.rounds}


@training_fakes.both_kinds
def test_early_end(model, runs, tmp_path, stateful):
  _, config, whole = runs[stateful]
  patient = dataclasses.replace(config, patience=2, rounds=50)
  result = _train(model, tmp_path, stateful, patient)
  best = whole.best_round
  losses = [row['validation_loss'] for row in whole.rows]
  if len(losses) > best + 2:
    assert result.rows == whole.rows[: best + 3]
  assert result.rows[-1]['round'] == result.best_round + 2
  assert _models(tmp_path / 'model')[-1] == result.best_round + 2
  # The same call changes nothing, and more rounds change nothing either.
  before = training_fakes.files(tmp_path / 'model')
  more = dataclasses.replace(patient, rounds=60)
  for config in (patient, more):
    again = _train(model, tmp_path, stateful, config)
    assert again.rows == result.rows
  assert training_fakes.files(tmp_path / 'model') == before
  # Without patience, it goes on.
  impatient = dataclasses.replace(patient, patience=None, rounds=8)
  assert _train(model, tmp_path, stateful, impatient).rows[-1]['round'] == 8


@training_fakes.both_kinds
def test_continued_run_keeps_its_best_round(model, runs, tmp_path, stateful):
  """The best round's checkpoint outlives many later ones."""
  folder, config, result = runs[stateful]
  for rounds in (result.best_round + 1, config.rounds):
    part = dataclasses.replace(config, rounds=rounds)
    _train(model, tmp_path, stateful, part)
  for path in ('model', 'model/best'):
    assert _models(tmp_path / path) == _models(folder / path)
  longer = dataclasses.replace(config, rounds=30, checkpoint_every=1)
  again = _train(model, tmp_path, stateful, longer)
  assert _models(tmp_path / 'model/best')[-1] == again.best_round


def test_last_round_that_is_no_longer_evaluated(model, runs, tmp_path):
  """A round that was best because it was the last one is forgotten."""
  _, config, result = runs[True]
  best = result.best_round
  every = best - 1
  config = dataclasses.replace(config, evaluate_every=every, rounds=best)
  assert _train(model, tmp_path, config=config).best_round == best
  grown = dataclasses.replace(config, rounds=4 * every)
  continued = _train(model, tmp_path, config=grown)
  assert continued.best_round % every == 0
  _train(model, tmp_path / 'fresh', config=grown)
  assert _models(tmp_path / 'model/best') == _models(
      tmp_path / 'fresh/model/best'
  )


def test_no_finite_value(model, tmp_path, monkeypatch):
  monkeypatch.setattr(
      training_fakes.ValidatedData,
      'client_validation_dataset',
      lambda self, client_id, size: self._batches([97], 0, size),
  )
  result = _train(model, tmp_path)
  assert result.best_round is None
  assert not (tmp_path / 'model' / run_entries.BEST).exists()


def test_no_validation_data(model, tmp_path):
  with pytest.raises(ValueError, match='keep_best=loss needs validation data'):
    training_fakes.train(model, tmp_path, _CONFIG)
  assert not (tmp_path / 'metrics.csv').exists()


class TestClientMetrics:

  def test_over_time_also_after_an_interruption(self, model, tmp_path):
    config = dataclasses.replace(
        training_fakes.CONFIG, client_metrics_over_time=True
    )
    training_fakes.train(model, tmp_path / 'whole', config, True)
    expected = _client_rows(tmp_path / 'whole')
    assert [int(row['round']) for row in expected] == sorted(
        int(row['round']) for row in expected
    )
    assert {int(row['round']) for row in expected} == {0, 3, 6, 7}
    process = training_fakes.build_process(model, True, fail_in_round=6)
    with pytest.raises(KeyboardInterrupt):
      training_fakes.train(
          model, tmp_path / 'part', config, True, process=process
      )
    (tmp_path / 'part/client_metrics.csv').write_text('damaged')
    training_fakes.train(model, tmp_path / 'part', config, True)
    assert _client_rows(tmp_path / 'part') == expected
    assert (tmp_path / 'part/metrics.csv').read_bytes() == (
        tmp_path / 'whole/metrics.csv'
    ).read_bytes()

  def test_rounds_that_are_no_longer_evaluated(self, model, tmp_path):
    config = dataclasses.replace(
        training_fakes.CONFIG, client_metrics_over_time=True
    )
    for rounds in (7, 9):
      grown = dataclasses.replace(config, rounds=rounds)
      training_fakes.train(model, tmp_path, grown, True)
    rounds = {int(row['round']) for row in _client_rows(tmp_path)}
    assert rounds == {0, 3, 6, 9}


class TestSpread:

  @pytest.mark.parametrize(
      ('values', 'higher', 'worst'),
      [
          (range(30), True, 1.0),
          (range(30), False, 28.0),
          ([0.25, 0.5], True, 0.25),
          (range(11), True, 0.5),
          ([0.25, math.nan], False, 0.25),
      ],
  )
  def test_deviation_and_worst_tenth(self, values, higher, worst):
    found = client_metrics.spread(list(map(float, values)), higher)
    defined = [v for v in values if not math.isnan(v)]
    assert found == (pytest.approx(np.std(defined)), worst)

  def test_unknown(self):
    assert client_metrics.spread([1.0, 3.0], None) == (
        1.0,
        pytest.approx(math.nan, nan_ok=True),
    )
    assert all(map(math.isnan, client_metrics.spread([math.nan], True)))

  def test_columns_are_of_the_clients_in_the_means(self, model, tmp_path):
    result = training_fakes.train(model, tmp_path, training_fakes.CONFIG)
    accuracies = [float(row['accuracy']) for row in _client_rows(tmp_path)]
    assert len(accuracies) == 3  # One client has no test data.
    last = result.rows[-1]
    assert last['client_deviation_accuracy'] == pytest.approx(
        np.std(accuracies), rel=1e-5
    )
    assert last['client_worst_tenth_accuracy'] == min(accuracies)
