"""Tests of benchmarks/privacy.py."""

import math

import benchmark_files
import pytest

benchmark = benchmark_files.import_benchmark('privacy')


def _run(method, epsilon, seed, accuracy, *, clip_norm=0.5):
  noise = 0.0 if math.isinf(epsilon) else 7.5
  return benchmark.Run(
      *(
          'fashion_mnist',
          method,
          epsilon,
          1000,
          50,
          clip_norm,
          seed,
          noise,
          accuracy,
      )
  )


def _search(*accuracies, method):
  """Returns the runs that search for the clip norm."""
  return [
      _run(method, 10.0, 1000, accuracy, clip_norm=norm)
      for norm, accuracy in zip((0.25, 0.5, 1.0), accuracies, strict=True)
  ]


def _tables(accuracies):
  """Returns the tables of a report, for accuracies with ε = 10."""
  runs = [
      _run(method, epsilon, seed, accuracy)
      for method in benchmark.METHODS
      for epsilon, values in ((math.inf, (90.0, 91.0)), (10.0, accuracies))
      for seed, accuracy in enumerate(values)
  ]
  for method in benchmark.METHODS:
    runs += _search(1.0, 2.0, math.nan, method=method)
    # Of other settings, and with another clip norm.
    runs.append(_run(method, 3.0, 0, 5.0))
    runs.append(_run(method, 10.0, 0, 5.0, clip_norm=0.25))
  text, are_floors_met = benchmark.report(
      benchmark.Measurements(
          ['A machine'], ['fashion_mnist'], [math.inf, 10.0], runs
      )
  )
  assert are_floors_met
  assert '1000 clients with labels' in text
  assert '2 seeds, learning rate 1, ' in text
  assert 'multiplier is 7.50 for ε = 10.' in text
  return benchmark_files.tables(text)


def test_report():
  (accuracy,) = _tables([70.0, 72.0])
  assert accuracy[0] == ['method', 'clip norm', 'no noise', 'ε = 10']
  assert accuracy[-1] == ['HBN', '0.5', '90.5 (90.0–91.0)', '71.0 (70.0–72.0)']


@pytest.mark.parametrize(
    ('accuracies', 'expected'),
    [
        ([70.0, math.nan], '70.0 (70.0–70.0), 1 failed'),
        ([math.nan, math.nan], 'all failed'),
    ],
)
def test_runs_that_failed_are_counted(accuracies, expected):
  (accuracy,) = _tables(accuracies)
  assert accuracy[1][-1] == expected


@pytest.mark.parametrize(
    ('accuracies', 'expected'),
    [((1.0, 3.0, 2.0), 0.5), ((1.0, math.nan, 2.0), 1.0)],
)
def test_the_best_clip_norm_of_the_search_is_taken(accuracies, expected):
  runs = [
      *_search(*accuracies, method='FBN'),
      *_search(9.0, 8.0, 7.0, method='HBN'),
      _run('FBN', 10.0, 0, 99.0, clip_norm=0.25),
  ]
  assert benchmark.best_clip_norm(runs, 'fashion_mnist', 'FBN') == expected
  assert benchmark.best_clip_norm(runs, 'digits', 'FBN') == 0.5


def test_clients_have_ten_digits_of_the_training_data():
  data = benchmark.client_data('digits', 5)
  assert [len(data.train_indices[c]) for c in data.client_ids] == [10] * 5
  assert data.element_spec[0].shape[1:] == (8, 8, 1)


def test_runs_are_kept_and_found_again(tmp_path):
  path = tmp_path / 'privacy.csv'
  run = _run('FBN', math.inf, 1, 55.5)
  results = benchmark.Results(path)
  results.begin()
  results.add(run)
  results = benchmark.Results(path)
  assert results.runs == [run]
  key = 'fashion_mnist', 'FBN', math.inf, 1000, 50, 0.5
  assert results.has(*key, 1)
  assert not results.has(*key, 2)


def test_noise_is_for_all_rounds():
  one, forty = (benchmark.noise_multiplier(3.0, 50, n) for n in (1, 40))
  assert forty > 5 * one
  assert benchmark.noise_multiplier(math.inf, 50, 40) == 0
