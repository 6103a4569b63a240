"""Tests of benchmarks/onednn.py."""

import benchmark_files
import pytest

benchmark = benchmark_files.import_benchmark('onednn')

_ROW = benchmark.Row('resnet20', 4, 2, 32)


def _report(row=_ROW, factor=1.0):
  seconds = {
      'with': [factor * s for s in (0.5, 2.0, 1.0)],
      'without': [1.0, 2.0, 1.0],
  }
  return benchmark.report(benchmark.Measurements(['A machine'], {row: seconds}))


def test_report():
  text, are_floors_met = _report()
  assert are_floors_met
  ((_, row),) = benchmark_files.tables(text)
  assert row == [
      *('resnet20, 4 clients × 2 × 32', '0.500', '1.000'),
      *('1.00 (0.50–1.00)', '≤ 1.00', 'yes'),
  ]


@pytest.mark.parametrize(
    ('row', 'are_met'),
    [(_ROW, False), (benchmark.Row('small_cnn_8', 10, 5, 32), True)],
)
def test_floors(row, are_met):
  text, are_floors_met = _report(row, factor=1.01)
  assert are_floors_met is are_met
  assert ('**no**' in text) is not are_met


@pytest.mark.slow
def test_program(monkeypatch, capsys, tmp_path):
  _, text = benchmark_files.run(
      *(benchmark, monkeypatch, capsys, tmp_path),
      *('--rows=small_cnn_8:2x1x2', '--repeats=1'),
  )
  ((_, (name, *seconds, ratio, floor, met)),) = benchmark_files.tables(text)
  assert name == 'small_cnn_8, 2 clients × 1 × 2'
  assert all(float(s) > 0 for s in seconds)
  assert float(ratio.split()[0]) > 0
  assert (floor, met) == ('–', '–')


def test_variable_decides(monkeypatch):
  """Each process gets the value of its way, and the next one the other."""
  values = []

  def in_new_process(function, *args):
    values.append(benchmark.os.environ.get(benchmark.onednn.VARIABLE))
    return [] if function is benchmark.harness.describe_machine else 1.0

  monkeypatch.setenv(benchmark.onednn.VARIABLE, 'mine')
  monkeypatch.setattr(benchmark.harness, 'in_new_process', in_new_process)
  found = benchmark.measure([_ROW], repeats=2)
  assert values == ['1', '0', '1', '0', 'mine']
  assert found.seconds == {_ROW: {'with': [1.0, 1.0], 'without': [1.0, 1.0]}}
