"""Tests of benchmarks/ray_runtime.py."""

import dataclasses
import re

import benchmark_files
import numpy as np
import pytest

benchmark = benchmark_files.import_benchmark('ray_runtime')


def _timing(in_process, ray):
  return benchmark.Timing(
      {'in process': 9.0, 'ray': 8.0}, {'in process': in_process, 'ray': ray}
  )


def _overhead(num_workers, state_size, program_seconds):
  return benchmark.Overhead(
      num_workers,
      state_size,
      {'ours': 0.005, 'bare Ray': 0.004},
      {'ours': 0.003, 'bare Ray': 0.002},
      {'ours': program_seconds, 'bare Ray': 0.001},
  )


def _measurements(**changes):
  measurements = benchmark.Measurements(
      ['A machine'],
      {
          benchmark.Row('resnet20', 5, 1, 128): _timing(
              [1.0, 1.0, 2.0], [1.0, 1.3, 2.2]
          ),
          benchmark.Row('small_cnn', 10, 5, 32): _timing([1.0], [3.0]),
      },
      {1: 7.0, 16: 60.0},
      [
          _overhead(1, 10, 0.5),
          _overhead(16, 10, 0.002),
          _overhead(16, 5_000_000, 0.004),
      ],
  )
  return dataclasses.replace(measurements, **changes)


def test_report():
  text, are_floors_met = benchmark.report(_measurements())
  assert are_floors_met
  times, first, overheads, starts, paper = benchmark_files.tables(text)
  assert times[1] == (
      ['resnet20, 5 clients × 1 × 128', '1.000', '1.300']
      + ['1.10 (1.00–1.30)', '≤ 1.20', 'yes', '3']
  )
  assert times[2][4:6] == ['–', '–']
  assert first[1][1:] == ['9.00', '8.00']
  assert overheads[1] == (
      ['1', '0.04 kB', '5.00', '4.00', '3.00', '2.00', '500.00', '1.00']
  )
  assert starts[1:] == [['1', '7.0'], ['16', '60.0']]
  # Of the most workers. 2 ms a client; 20 MB at 1.25 GB/s take 16 ms.
  assert paper[1:] == [
      ['0.04 kB', '500', '0.20', '0.00', '2.0'],
      ['20000 kB', '62', '1.60', '1600.00', '16.0'],
  ]


def test_report_says_that_a_floor_is_missed():
  row = benchmark.Row('resnet20', 5, 1, 128)
  text, are_floors_met = benchmark.report(
      _measurements(timings={row: _timing([1.0], [1.21])})
  )
  assert not are_floors_met
  assert text.count('**no**') == 1


def test_other_bits_are_not_reported():
  weights = [np.ones(3, np.float32)]
  other = [np.nextafter(weights[0], np.float32(2))]

  def check(there, loss):
    benchmark.check_same_bits(
        benchmark.Row('small_cnn', 1, 1, 2),
        {
            'in process': benchmark.harness.Result(weights, [0.5, 1.0]),
            'ray': benchmark.harness.Result(there, [loss, 1.0]),
        },
    )

  check([w.copy() for w in weights], 0.5)
  for there, loss in ((other, 0.5), (weights, np.nextafter(0.5, 1.0))):
    with pytest.raises(RuntimeError, match='in process and ray differ'):
      check(there, loss)


@pytest.mark.slow
def test_program(monkeypatch, capsys, tmp_path):
  # This process may use all cores.
  monkeypatch.setattr(benchmark, '_use_few_cores', lambda: None)
  returncode, text = benchmark_files.run(
      *(benchmark, monkeypatch, capsys, tmp_path),
      *('--rows=small_cnn:2x2x4', '--repeats=2'),
      *('--workers=1', '--clients=5'),
  )
  assert returncode == 0
  times, _, overheads, _, paper = benchmark_files.tables(text)
  assert all(float(seconds) > 0 for seconds in times[1][1:3])
  assert [row[:2] for row in overheads[1:]] == [
      ['1', '0.04 kB'],
      ['1', '1000 kB'],
  ]
  assert len(paper) == 3
  assert re.search(r', ray \d+\.\d+', text)
