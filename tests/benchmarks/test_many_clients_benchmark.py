"""Tests of benchmarks/many_clients.py."""

import benchmark_files
import pytest

benchmark = benchmark_files.import_benchmark('many_clients')

_ROW = benchmark.Row(100_000, 100, 20)
_MEGABYTE = 2**20


def _run(later=(1.0, 2.0, 4.0), end=5.0, memory=(1, 1000, 2000, 1050)):
  return benchmark.Run(9.0, later, end, 1978, [m * _MEGABYTE for m in memory])


def _report(many, few=None, row=_ROW):
  return benchmark.report(
      benchmark.Measurements(['A machine'], {row: (many, few or _run())})
  )


def test_report():
  text, are_floors_met = _report(
      _run(later=(2.4, 2.4, 9.0)), _run(later=(1.0, 2.0, 4.0), end=70)
  )
  assert are_floors_met
  name = '100,000 clients, 100 a round, 20 rounds'
  seconds, rounds, end, memory = benchmark_files.tables(text)
  assert seconds[1] == [name, '9.00', '9.00', '2.400', '2.000', '1,978']
  assert rounds[1] == [name, '1.20', '≤ 1.2', 'yes']
  assert end[1] == [name, '5.00', '≤ 5 s', 'yes']
  assert memory[1] == [name, '1000.0', '1050.0', '1.050', '≤ 1.05', 'yes']


@pytest.mark.parametrize(
    'many',
    [
        _run(later=(2.42, 2.42, 9.0)),
        _run(end=5.01),
        _run(memory=(1, 1000, 1051)),
    ],
)
def test_report_says_which_floor_is_missed(many):
  text, are_floors_met = _report(many)
  assert not are_floors_met
  cells = [
      table[1][-1]
      for table in benchmark_files.tables(text)
      if 'met' in table[0]
  ]
  assert sorted(cells) == ['**no**', 'yes', 'yes']


def test_other_runs_have_no_floors():
  text, are_floors_met = _report(
      _run(end=99.0), row=benchmark.Row(1000, 100, 20)
  )
  assert are_floors_met
  assert '≤' not in text


@pytest.mark.slow
def test_program(monkeypatch, capsys, tmp_path):
  returncode, text = benchmark_files.run(
      benchmark, monkeypatch, capsys, tmp_path, '--rows=30x4x4'
  )
  assert returncode == 0
  seconds, *_ = benchmark_files.tables(text)
  name, *times, num_saved = seconds[1]
  assert name == '30 clients, 4 a round, 4 rounds'
  assert all(float(time) > 0 for time in times)
  assert 4 <= int(num_saved) <= 16
