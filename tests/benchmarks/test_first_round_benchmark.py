"""Tests of benchmarks/first_round.py."""

import benchmark_files
import pytest

benchmark = benchmark_files.import_benchmark('first_round')


def _report(first=2.0, later=0.2):
  ours = [benchmark.Seconds(first * s, later, 1234.0) for s in (0.5, 2.0, 1.0)]
  keras = [benchmark.Seconds(s, 0.2, 900.0) for s in (0.5, 2.0, 1.0)]
  ways = {'Keras': keras, 'fed_avg': ours, 'fed_bn': ours, 'fbn': ours}
  seconds = {'resnet50': {**ways, 'fedtan': ours}}
  return benchmark.report(benchmark.Measurements(['A machine'], seconds))


def test_report():
  text, are_floors_met = _report()
  assert are_floors_met
  (_, *first), (_, *later), (_, memory) = benchmark_files.tables(text)
  assert len(first) == len(later) == 4
  assert first[0] == [
      *('resnet50, fed_avg', '2.00', '1.00', '2.00 (2.00–2.00)'),
      *('≤ 2.00', 'yes'),
  ]
  assert later[3][:3] == ['resnet50, fedtan', '0.20', '0.20']
  assert memory == ['resnet50', '900', '1,234', '1,234', '1,234', '1,234']


@pytest.mark.parametrize('slow', [{'first': 2.1}, {'later': 0.3}])
def test_floors(slow):
  text, are_floors_met = _report(**slow)
  assert not are_floors_met
  # FedTAN's first round has a floor of 3.
  assert text.count('**no**') == (3 if 'first' in slow else 4)


@pytest.mark.slow
def test_program(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(benchmark, '_MAX_FIRST_RATIOS', {'fed_bn': 2.0})
  _, text = benchmark_files.run(
      *(benchmark, monkeypatch, capsys, tmp_path),
      *('--models=mobilenet_v2', '--repeats=1'),
  )
  (_, first), (_, later), (_, memory) = benchmark_files.tables(text)
  for name, ours, keras, ratio, _, _ in (first, later):
    assert name == 'mobilenet_v2, fed_bn'
    assert float(ours) > 0
    assert float(ratio.split()[0]) == pytest.approx(
        float(ours) / float(keras), rel=0.1
    )
  assert len(memory) == 3
