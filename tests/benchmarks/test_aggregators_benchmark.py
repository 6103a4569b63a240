"""Tests of benchmarks/aggregators.py."""

import re
import subprocess
import sys

import benchmark_files
import numpy as np
import pytest

benchmark = benchmark_files.import_benchmark('aggregators')

_WAYS = (*benchmark.NUMPY, benchmark.TF_DISTANCES, *benchmark.RULES)


def _seconds(**changes):
  return {**{way: [1.0, 2.0, 4.0] for way in _WAYS}, **changes}


def _measurements(seconds, small_seconds=None):
  return benchmark.Measurements(
      ['A machine'],
      2**18,
      seconds,
      {number: dict.fromkeys(benchmark.RULES, 7.4) for number in (100, 1000)},
      2**10,
      small_seconds or {10: _seconds()},
      {10: {name: [0.5, 0.25, 3.0] for name in benchmark.TFF_RULES}},
  )


def test_report_has_medians_of_paired_ratios():
  hundred = _seconds(
      CoordinateMedian=[0.5, 2.0, 3.0],
      TrimmedMean=[0.5, 1.0, 3.0],
      NNM=[2.0, 3.0, 9.0],
  )
  text, are_floors_met = benchmark.report(
      _measurements({100: hundred, 1000: _seconds(NNM=[99.0] * 3)})
  )
  assert are_floors_met
  tables = benchmark_files.tables(text)
  seconds, ratios, small, small_ratios, memory, whole = tables
  assert 'ByzFL was not installed.' in text
  assert seconds[0] == ['', '100 clients', '1000 clients']
  assert ['CoordinateMedian', '2.0000', '2.0000'] in seconds
  assert len(seconds) == 1 + len(_WAYS)
  # The medians of 0.5, 1 and 0.75; of 0.5, 0.5 and 0.75; of 2, 1.5 and 2.25.
  assert ratios[1:6] == [
      ['100', 'CoordinateMedian / NumPy median', '0.75 (0.50–1.00)']
      + ['≤ 1.00', 'yes'],
      ['100', 'CoordinateMedian / NumPy sort', '0.75 (0.50–1.00)']
      + ['≤ 1.00', 'yes'],
      ['100', 'TrimmedMean / NumPy sort', '0.50 (0.50–0.75)', '≤ 1.00', 'yes'],
      ['100', 'NNM / NumPy distances', '2.00 (1.50–2.25)', '≤ 2.00', 'yes'],
      ['100', 'NNM / TensorFlow distances', '2.00 (1.50–2.25)', '–', '–'],
  ]
  assert [row[4] for row in ratios[6:]] == ['yes'] * 3 + ['–'] * 2
  assert '1,024 columns' in text
  assert small[0] == ['', '10 clients']
  assert ['TrimmedMean', '2.00000'] in small
  assert [row[3:] for row in small_ratios[1:]] == [['≤ 1.00', 'yes']] * 3
  assert memory[1] == ['the matrix', '100', '1000']
  assert memory[2] == ['Mean', '7', '7']
  assert whole[1] == ['Mean', '0.5000']


def test_report_compares_with_the_better_form_of_byzfl():
  krum = {
      'Krum': [1.0, 3.0, 2.0],
      benchmark.peer('Krum', 'NumPy'): [9.0, 9.0, 9.0],
      benchmark.peer('Krum', 'PyTorch'): [2.0, 2.0, 2.0],
      'Mean': [8.0, 8.0, 8.0],
      benchmark.peer('Mean', 'NumPy'): [2.0, 2.0, 2.0],
  }
  measurements = _measurements({10: _seconds(**krum)})
  for number, (ours, numpy, torch) in {
      100: (5.0, 7.0, 6.0),
      1000: (5.0, 4.0, 9.0),
  }.items():
    measurements.megabytes[number].update(
        {
            'Krum': ours,
            benchmark.peer('Krum', 'NumPy'): numpy,
            benchmark.peer('Krum', 'PyTorch'): torch,
        }
    )
  text, are_floors_met = benchmark.report(measurements)
  assert not are_floors_met
  tables = benchmark_files.tables(text)
  seconds, ratios, _, _, memory, memory_ratios, _ = tables
  assert ['ByzFL Krum', '2.0000'] in seconds
  assert ratios[-2:] == [
      ['10', 'Mean / ByzFL Mean, NumPy', '4.00 (4.00–4.00)', '–', '–'],
      ['10', 'Krum / ByzFL Krum, PyTorch', '1.00 (0.50–1.50)', '≤ 1.00', 'yes'],
  ]
  assert ['ByzFL Krum', '6', '4'] in memory
  assert memory_ratios[1:] == [
      ['100', 'Krum / ByzFL Krum, PyTorch', '0.83', '≤ 1.00', 'yes'],
      ['1000', 'Krum / ByzFL Krum, NumPy', '1.25', '≤ 1.00', '**no**'],
  ]


def test_forms_of_byzfl(monkeypatch):
  monkeypatch.setattr(benchmark, 'is_byzfl_installed', lambda: True)
  assert benchmark.peer_forms('Krum', 10, 100) == ['NumPy', 'PyTorch']
  assert benchmark.peer_forms('Krum', 100, 100) == ['PyTorch']
  assert benchmark.peer_forms('TrimmedMean', 100, 100) == ['NumPy']
  assert benchmark.peer_forms('Mean', 100, 100) == ['NumPy', 'PyTorch']
  # The neighbours of each client would need terabytes.
  assert benchmark.peer_forms('NNM', 10_000, 10**6) == []
  monkeypatch.setattr(benchmark, 'is_byzfl_installed', lambda: False)
  assert benchmark.peer_forms('Krum', 10, 100) == []


@pytest.mark.parametrize(
    'slow',
    [
        {'TrimmedMean': [1.1, 2.2, 4.4]},
        {'NNM': [2.1, 4.2, 8.4]},
    ],
)
def test_report_says_which_floor_is_missed(slow):
  text, are_floors_met = benchmark.report(
      _measurements({100: _seconds(**slow)})
  )
  assert not are_floors_met
  assert text.count('**no**') == 1
  (row,) = [line for line in text.splitlines() if '**no**' in line]
  assert f'| {next(iter(slow))} / ' in row


def test_small_vectors_have_floors():
  slow = {
      'TrimmedMean': [2.0, 4.0, 8.0],
      benchmark.peer('TrimmedMean', 'NumPy'): [1.0, 2.0, 4.0],
  }
  text, are_floors_met = benchmark.report(
      _measurements({100: _seconds()}, {10: _seconds(**slow)})
  )
  assert not are_floors_met
  assert text.count('**no**') == 2


def test_different_results_are_not_reported():
  values = benchmark.random_matrix(10, 4)
  ordered = np.sort(values, axis=0)
  results = {
      'Mean': values.mean(axis=0),
      'CoordinateMedian': np.median(values, axis=0),
      'TrimmedMean': ordered[2:8].mean(axis=0),
  }
  benchmark.check_results(10, results, values)
  for name in results:
    for wrong in (results[name] + 1e-3, results[name] * np.nan):
      with pytest.raises(RuntimeError, match=f'{name} of 10 clients differs'):
        benchmark.check_results(10, {**results, name: wrong}, values)


def test_rise_of_memory():
  # As TensorFlow's, NumPy's memory counts once it is written to.
  rise = benchmark.rise_of_memory(lambda: np.full(2**24, 1.0, np.float32))
  assert 50 < rise < 500
  assert benchmark.rise_of_memory(lambda: None) < 50


@pytest.mark.slow
def test_memory_of_a_rule():
  # In a new process, because this one has memory that it has used before.
  code = f"""
import sys
sys.path.insert(0, {str(benchmark_files.FOLDER)!r})
import aggregators
print(aggregators.memory_of_rule('NNM', 10, 2**20))
"""
  result = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, check=True, text=True
  )
  # The means of neighbours are another matrix, of 40 MB.
  assert 20 < float(result.stdout.split()[-1]) < 400


@pytest.mark.slow
def test_program(tmp_path):
  """Runs the benchmark in new processes, as a user does."""
  result = subprocess.run(
      [
          *(sys.executable, 'aggregators.py', f'--output_dir={tmp_path}'),
          *('--clients=10', '--memory_clients=', '--tff_clients=5'),
          *('--size=300', '--small_size=20', '--repeats=2'),
      ],
      cwd=benchmark_files.FOLDER,
      capture_output=True,
      text=True,
      check=False,
  )
  text = (tmp_path / 'aggregators.md').read_text()
  assert text in result.stdout
  # A floor is missed on such small matrices.
  assert result.returncode == ('**no**' in text), result.stderr
  tables = benchmark_files.tables(text)
  seconds, ratios, small, small_ratios, memory, whole = tables
  assert [row[0] for row in seconds[1:]] == list(_WAYS)
  assert all(float(cell) >= 0 for row in seconds[1:] for cell in row[1:])
  assert all(
      re.fullmatch(r'\d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\)', row[2])
      for row in ratios[1:] + small_ratios[1:]
  )
  assert len(memory) == 2 + len(benchmark.RULES)
  assert memory[0] == ['']
  assert whole[0] == ['', '5 clients']
  assert '300 columns' in text
  assert '20 columns' in text
  assert len(small) == 3 + len(benchmark.SORTING_RULES)
