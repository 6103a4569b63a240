"""Tests of benchmarks/runtime.py."""

import dataclasses
import re

import benchmark_files
import numpy as np
import psutil
import pytest

benchmark = benchmark_files.import_benchmark('runtime')


def _timing(native, in_process, bare):
  later = {'native': native, 'in process': in_process, 'bare': bare}
  return benchmark.Timing(dict.fromkeys(later, 9.0), later)


def _measurements(**changes):
  measurements = benchmark.Measurements(
      ['A machine'],
      {
          benchmark.Row('small_cnn', 100, 5, 32): _timing(
              [2.0, 3.0, 4.0], [1.0, 2.0, 2.0], [1.0, 1.0, 2.0]
          ),
          benchmark.Row('small_cnn', 10, 5, 32): _timing(
              [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]
          ),
          benchmark.Row('small_cnn', 1000, 5, 32): _timing([2.0], [1.0], [0.1]),
          benchmark.Row('resnet20', 5, 5, 128): _timing([2.0], [0.9], [1.0]),
      },
      {},
      [benchmark.Memory('lazy', {10: 500.0, 1000: 600.0})],
      [9.0, 10.0, 30.0],
  )
  return dataclasses.replace(measurements, **changes)


def test_report_has_medians_of_paired_ratios():
  text, are_floors_met = benchmark.report(_measurements())
  assert are_floors_met
  times, first, memory, startup = benchmark_files.tables(text)
  # The median of 1/1, 2/1 and 2/2, which isn't that of the seconds, 2/1.
  assert times[1] == (
      ['small_cnn, 100 clients × 5 × 32', '3.000', '2.000', '1.000']
      + ['1.00 (1.00–2.00)', '≤ 1.05', 'yes']
      + ['0.50 (0.50–0.67)', '< 1', 'yes', '3']
  )
  assert times[2][5:7] == ['≤ 1.05', 'yes']
  assert times[3][5:7] == ['–', '–']
  assert times[4][5:7] == ['≤ 1.00', 'yes']
  assert first[1][1:] == ['9.00'] * 3
  assert memory[1:] == [['lazy', '500', '600', '1.20', '≤ 1.30', 'yes']]
  assert startup[1:] == [['10.00 (9.00–30.00)', '≤ 15', 'yes']]


def test_report_with_pytorch():
  times = {
      'native': [2.0, 2.0],
      'in process': [1.0, 1.0],
      'bare': [1.0, 1.0],
      'PyTorch': [0.5, 2.0],
  }
  row = benchmark.Row('small_cnn', 10, 5, 32)
  text, are_floors_met = benchmark.report(
      _measurements(timings={row: benchmark.Timing.of(times)})
  )
  assert are_floors_met
  times, first, *_ = benchmark_files.tables(text)
  assert times[0][1:5] == ['native', 'in process', 'bare', 'PyTorch']
  assert times[0][-2] == 'in process / PyTorch'
  assert times[1][-2] == '0.50 (0.50–0.50)'
  assert first[1][4] == '0.50'


def _divided(model, clients, steps, batch, pytorch):
  """A row's times with divided cores: 1 second in process."""
  later = {'in process': [1.0], 'bare': [4.0], 'PyTorch': [pytorch]}
  timing = benchmark.Timing(dict.fromkeys(later, 9.0), later)
  return {benchmark.Row(model, clients, steps, batch): timing}


def test_report_of_divided_cores():
  text, are_floors_met = benchmark.report(
      _measurements(
          divided=_divided('small_cnn', 10, 5, 32, pytorch=1.0)
          | _divided('resnet20', 5, 5, 128, pytorch=0.5)
      )
  )
  assert are_floors_met
  _, _, divided, *_ = benchmark_files.tables(text)
  assert divided[0][1:4] == ['in process', 'bare', 'PyTorch']
  assert divided[1][1:5] == ['1.000', '4.000', '1.000', '0.25 (0.25–0.25)']
  assert divided[1][5:] == ['1.00 (1.00–1.00)', '≤ 1.00', 'yes']
  assert divided[2][5:] == ['2.00 (2.00–2.00)', '–', '–']


def test_report_of_a_peer_that_does_not_know_all_rows():
  divided = _divided('small_cnn', 100, 1, 2, pytorch=1.0)
  divided |= _divided('resnet20', 5, 5, 128, pytorch=0.5)
  timing = divided[benchmark.Row('small_cnn', 100, 1, 2)]
  timing.later['JAX'], timing.first['JAX'] = [1.0], 9.0
  _, are_floors_met = benchmark.report(
      _measurements(timings={}, divided=divided)
  )
  assert are_floors_met
  timing.later['JAX'] = [0.6]
  text, are_floors_met = benchmark.report(
      _measurements(timings={}, divided=divided)
  )
  assert not are_floors_met
  header, small, large = benchmark_files.tables(text)[0]
  assert header[4] == 'JAX'
  assert header[-3:] == ['in process / JAX', 'floor', 'met']
  assert small[4] == '0.600'
  assert small[-3:] == ['1.67 (1.67–1.67)', '≤ 1.50', '**no**']
  assert large[4] == '–'
  assert large[-3:] == ['–'] * 3


def _one_row(*row, times):
  return {'timings': {benchmark.Row(*row): _timing(*([t] for t in times))}}


_MISSED = {
    '10': {'divided': _divided('small_cnn', 10, 5, 32, pytorch=0.99)},
    '100': {'divided': _divided('small_cnn', 100, 1, 2, pytorch=0.99)},
    '100 × 5': {'divided': _divided('small_cnn', 100, 5, 32, pytorch=0.99)},
    'memory': {'memory': [benchmark.Memory('lazy', {10: 500.0, 1000: 651.0})]},
    'startup': {'startup': [15.1]},
    'small_cnn': _one_row('small_cnn', 100, 5, 32, times=(9.0, 1.06, 1.0)),
    'resnet20': _one_row('resnet20', 5, 5, 128, times=(9.0, 1.01, 1.0)),
    'one step': _one_row('small_cnn', 100, 1, 2, times=(9.0, 1.21, 1.0)),
    'native': _one_row('small_cnn', 10, 5, 32, times=(1.0, 1.01, 1.0)),
}


@pytest.mark.parametrize('changes', _MISSED.values(), ids=_MISSED)
def test_report_says_which_floor_is_missed(changes):
  text, are_floors_met = benchmark.report(_measurements(**changes))
  assert not are_floors_met
  assert text.count('**no**') == 1


def test_different_results_are_not_reported():
  row = benchmark.Row('small_cnn', 1, 1, 2)
  initial = benchmark.fed_avg_rounds.FedAvgRounds(row).initial
  changed = [w + 1 for w in initial]

  def check(weights, loss):
    benchmark.harness.check_results(
        row,
        {
            'in process': benchmark.Result(weights, [loss, 0.5]),
            'bare': benchmark.Result(changed, [1.0, 0.5]),
        },
        'bare',
        initial,
        1e-2,
    )

  check([w + 1e-6 for w in changed], 1.00001)
  with pytest.raises(RuntimeError, match='differ'):
    check([w + 0.1 for w in changed], 1.0)
  with pytest.raises(RuntimeError, match='differ'):
    check([w * np.nan for w in changed], 1.0)
  with pytest.raises(RuntimeError, match='differ'):
    check(changed, 1.1)


@pytest.mark.slow
def test_memory_of_a_round():
  row = benchmark.Row('small_cnn', 2, 1, 4)
  # TensorFlow alone takes some, and nobody has a terabyte.
  assert 100 < benchmark.peak_memory(row, is_shared=False) < 1e6


@pytest.mark.parametrize(
    'model, shape', [('small_cnn', (8, 8, 1)), ('resnet20', (32, 32, 3))]
)
def test_data_of_a_row(model, shape):
  data = benchmark.fed_avg_rounds.federated_data(benchmark.Row(model, 3, 2, 4))
  assert len(data.client_ids) == 3
  for client_id in data.client_ids:
    dataset = data.client_dataset(
        [client_id], seed=0, round_num=0, batch_size=4, local_steps=2
    )
    assert [x.shape for x, _ in dataset] == [(4, *shape)] * 2


def _workers():
  children = psutil.Process().children()
  return {child.pid for child in children if child.name() == 'worker_binary'}


@pytest.mark.slow
def test_program(monkeypatch, capsys, tmp_path):
  before = _workers()
  returncode, text = benchmark_files.run(
      *(benchmark, monkeypatch, capsys, tmp_path),
      *('--rows=small_cnn:2x2x4', '--repeats=2'),
      *('--memory_clients=1,2', '--starts=0'),
  )
  assert _workers() <= before
  # A floor may well be missed on such a small row.
  assert returncode == ('**no**' in text)
  times, first, divided, memory = benchmark_files.tables(text)
  (row,), (first_row,) = times[1:], first[1:]
  assert divided[1][0] == row[0]
  assert all(float(seconds) > 0 for seconds in divided[1][1:3])
  assert row[0] == first_row[0] == 'small_cnn, 2 clients × 2 × 4'
  assert all(float(seconds) > 0 for seconds in (*row[1:4], *first_row[1:]))
  # Peers, if installed, have columns before this one.
  ratio = row[times[0].index('in process / bare')]
  assert re.fullmatch(r'\d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\)', ratio)
  assert row[-1] == '2'
  assert len(memory) == 3
  assert re.search(r'\*   \d+ CPU cores .*GPUs:', text)
  assert 'tensorflow-federated 0.87' in text
