"""Tests of benchmarks/one_exchange.py."""

import math

import benchmark_files
import pytest

benchmark = benchmark_files.import_benchmark('one_exchange')

_SEARCH = 100


def _runs(model='mlp3', ours=(97.0, 96.0)):
  """Returns a run of each candidate, and two seeds with the best one."""
  runs = []
  for method, how in benchmark.METHODS.items():
    *others, best = map(str, how.candidates)
    method_of_runs = how.runs_of or method
    runs += [
        benchmark.Run(model, method_of_runs, settings, 300, _SEARCH, accuracy)
        for settings, accuracy in (
            *((settings, math.nan) for settings in others),
            (best, 50.0),
        )
    ]
    accuracies = ours if method == benchmark.RECOMMENDED else (98.0, 99.0)
    runs += [
        benchmark.Run(model, method_of_runs, best, 300, seed, accuracy)
        for seed, accuracy in enumerate(accuracies)
    ]
  return runs


def _report(runs, num_seeds=2):
  traffic = {
      ('mlp3', method): benchmark.Traffic(1, 0.25)
      for method in benchmark.METHODS
  }
  return benchmark.report(
      benchmark.Measurements(['A machine'], num_seeds, runs, traffic)
  )


def test_report():
  text, are_floors_met = _report(_runs())
  assert are_floors_met
  accuracy, settings, traffic, floors = benchmark_files.tables(text)
  assert accuracy[0] == ['method', 'mlp3']
  assert accuracy[1] == ['centralized', '98.5 (98.0–99.0)']
  assert accuracy[-1] == ['FBN, recommended', '96.5 (96.0–97.0)']
  # A candidate that diverged is not the best.
  assert settings[1] == ['centralized', '0.3; no clipping; 0.1']
  assert settings[-1] == ['FBN, recommended', '0.1; norm ≤ 3; 0.1']
  assert ['FBN', '1; 0.2500'] in traffic
  assert 'centralized' not in [row[0] for row in traffic]
  assert floors[1] == ['mlp3', '2.00', '≤ 2.0', 'yes']


@pytest.mark.parametrize('ours', [(97.0, 95.9), (97.0, math.nan)])
def test_report_says_which_floor_is_missed(ours):
  text, are_floors_met = _report(_runs(ours=ours))
  assert not are_floors_met
  *_, floors = benchmark_files.tables(text)
  assert floors[1][-1] == '**no**'


def test_runs_that_diverged_are_counted():
  text, _ = _report(_runs(ours=(97.0, math.nan)))
  assert '| FBN, recommended | 97.0 (97.0–97.0), 1 diverged |' in text
  text, _ = _report(_runs(ours=(math.nan, math.nan)))
  assert '| FBN, recommended | all diverged |' in text


def test_finished_runs_are_kept(tmp_path):
  path = tmp_path / 'new' / 'runs.csv'
  results = benchmark.Results(path)
  assert results.runs == []
  run = benchmark.Run('mlp3', 'FBN', '0.1; no clipping; 0.1', 300, 0, 97.5)
  results.add(run)
  results.add(benchmark.Run('mlp3', 'FBN', '1; norm ≤ 1; 0.1', 300, 1, 96.0))
  again = benchmark.Results(path)
  assert again.runs == results.runs
  assert again.has('mlp3', 'FBN', '0.1; no clipping; 0.1', 300, 0)
  assert not again.has('mlp3', 'FBN', '0.1; no clipping; 0.1', 200, 0)


@pytest.mark.slow
def test_a_short_run(tmp_path):
  path = tmp_path / 'runs.csv'
  method = benchmark.RECOMMENDED
  benchmark.compare_settings('mlp3', method, 2, 2, path)
  runs = benchmark.Results(path).runs
  assert [run.seed for run in runs] == [0, 1]
  assert all(0 <= run.accuracy <= 100 for run in runs)
  # Other seeds have other weights and batches.
  assert runs[0].accuracy != runs[1].accuracy
  # What is there is not repeated.
  traffic = benchmark.compare_settings('mlp3', method, 2, 2, path)
  assert benchmark.Results(path).runs == runs
  assert traffic.exchanges == 1
