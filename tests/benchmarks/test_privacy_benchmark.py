"""Tests of benchmarks/privacy.py."""

import math

import benchmark_files
import pytest

benchmark = benchmark_files.import_benchmark('privacy')


def _tables(accuracies):
  """Returns the tables of a report, for accuracies with ε = 10."""
  runs = [
      benchmark.Run(method, epsilon, 1000, 50, seed, noise, accuracy)
      for method in benchmark.METHODS
      for epsilon, noise, values in (
          (math.inf, 0.0, (90.0, 91.0)),
          (10.0, 7.5, accuracies),
      )
      for seed, accuracy in enumerate(values)
  ]
  text, are_floors_met = benchmark.report(
      benchmark.Measurements(['A machine'], [math.inf, 10.0], 2, runs)
  )
  assert are_floors_met
  assert '1000 clients with 10' in text
  return benchmark_files.tables(text)


def test_report():
  # The third seed is not in the table.
  accuracy, noise = _tables([70.0, 72.0, 1.0])
  assert accuracy[0] == ['method', 'no noise', 'ε = 10']
  assert accuracy[-1] == ['HBN', '90.5 (90.0–91.0)', '71.0 (70.0–72.0)']
  assert noise == [['ε = 10'], ['7.50']]


@pytest.mark.parametrize(
    ('accuracies', 'expected'),
    [
        ([70.0, math.nan], '70.0 (70.0–70.0), 1 failed'),
        ([math.nan, math.nan], 'all failed'),
    ],
)
def test_runs_that_failed_are_counted(accuracies, expected):
  accuracy, *_ = _tables(accuracies)
  assert accuracy[1][-1] == expected


def test_clients_have_ten_digits_of_the_training_data():
  data = benchmark.client_data(5)
  assert [len(data.train_indices[c]) for c in data.client_ids] == [10] * 5
  assert data.element_spec[0].shape[1:] == (8, 8, 1)


def test_runs_are_kept_and_found_again(tmp_path):
  path = tmp_path / 'privacy.csv'
  run = benchmark.Run('FBN', math.inf, 20, 3, 1, 0.0, 55.5)
  results = benchmark.Results(path)
  results.begin()
  results.add(run)
  results = benchmark.Results(path)
  assert results.runs == [run]
  assert results.has('FBN', math.inf, 20, 3, 1)
  assert not results.has('FBN', math.inf, 20, 3, 2)


def test_noise_is_for_all_rounds():
  one, forty = (benchmark.noise_multiplier(3.0, 50, n) for n in (1, 40))
  assert forty > 5 * one
  assert benchmark.noise_multiplier(math.inf, 50, 40) == 0
