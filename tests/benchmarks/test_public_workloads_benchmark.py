"""Tests of benchmarks/public_workloads.py."""

import dataclasses
import importlib.util
import sys

import benchmark_files
import numpy as np
import pytest

benchmark = benchmark_files.import_benchmark('public_workloads')
# The folder of the benchmark is on the path now.
workload_data = importlib.import_module('workload_data')
workload_process = importlib.import_module('workload_process')

_ALL = tuple(benchmark.TITLES)
_TINY = dict(
    num_clients=4,
    samples_per_client=5,
    clients_per_round=2,
    batch_size=3,
    test_samples=20,
    test_every=2,
    rounds=3,
)


def _workload(name, **changes):
  return workload_data.Workload(
      name, **{**benchmark._WORKLOADS[name], **changes}
  )


def _run(rounds=(9.0, 1.0, 2.0, 4.0), tests=(5.0, 3.0), losses=(2.3, 0.5)):
  return benchmark.Run(rounds, tests, losses, [0.1] * (len(losses) - 1) + [0.9])


def _report(runs, missing=(), name='pfl_cifar10'):
  return benchmark.report(
      benchmark.Measurements(
          ['A machine'],
          missing,
          {name: _workload(name)},
          {name: 1_626_442},
          {name: runs},
      )
  )


def test_report():
  runs = {way: _run() for way in _ALL}
  runs['pfl'] = _run(rounds=(1.0, 2.0, 5.0, 8.0))
  runs['pfl2'] = _run(rounds=(1.0, 4.0, 4.0, 8.0))
  text, are_floors_met = _report(runs)
  assert are_floors_met
  assert 'Not installed' not in text
  assert 'A whole run' not in text
  workloads, medians, fastest, ratios, first, tests, losses = (
      benchmark_files.tables(text)
  )
  assert workloads[1] == (
      ['pfl_cifar10', 'CNN', '1,626,442', '32×32×3', '10', '1,000', '50']
      + ['50', '10', '250', '0.1']
  )
  assert medians[0][1:] == [*benchmark.TITLES.values(), 'rounds']
  assert medians[1] == (
      ['pfl_cifar10', '2.000', '2.000', '2.000', '5.000', '4.000', '2.000']
      + ['2.000', '3']
  )
  assert fastest[1][4:6] == ['2.000', '4.000']
  # The median of 1/2, 2/5 and 4/8.
  assert ratios[3:5] == [
      ['pfl_cifar10', 'pfl', '0.50 (0.40–0.50)', '≤ 0.50', 'yes'],
      ['pfl_cifar10', 'pfl, 2 processes', '0.50 (0.25–0.50)', '≤ 0.50', 'yes'],
  ]
  assert all(row[3:] == ['–', '–'] for row in ratios[1:3] + ratios[5:])
  assert first[1][1] == '9.00'
  assert tests[1][:4] == ['pfl_cifar10', '10,000', '10', '3.000']
  assert losses[1][:4] == ['pfl_cifar10', '6', '2.300', '0.500 (90 %)']


@pytest.mark.parametrize('slow', ['pfl', 'pfl2'])
@pytest.mark.parametrize('name', ['pfl_cifar10', 'pfl_cifar10_bn'])
def test_report_says_which_floor_is_missed(name, slow):
  runs = {way: _run() for way in _ALL}
  for way in ('pfl', 'pfl2'):
    runs[way] = _run(rounds=[2.0 if way == slow else 1e6] * 4)
  runs['tff_bn'] = _run(rounds=[1.01] * 4)
  text, are_floors_met = _report(runs, name=name)
  assert not are_floors_met
  assert text.count('**no**') == 1


def test_report_names_missing_peers():
  runs = {way: _run() for way in ('tff_bn', 'keras', 'jax')}
  text, are_floors_met = _report(runs, missing=['PyTorch', 'pfl'])
  assert are_floors_met
  assert 'Not installed: PyTorch, pfl.' in text
  assert benchmark_files.tables(text)[1][0] == (
      ['Workload', 'tff_bn', 'Keras', 'JAX', 'rounds']
  )


def test_report_of_a_whole_run():
  runs = {way: _run() for way in ('tff_bn', 'keras')}
  runs['flower'] = _run(rounds=(1.0, 39.0), tests=(4.0, 4.0))
  text, _ = _report(runs, name='flute_lr')
  *_, whole, _ = benchmark_files.tables(text)
  assert whole[1:] == [
      ['seconds', '24.0', '24.0', '48.0'],
      ['tff_bn / peer', '1.00', '1.00', '0.50'],
  ]


def test_sizes_of_the_published_models():
  sizes = {
      name: sum(v.size for v in workload_data.initial_weights(_workload(name)))
      for name in benchmark._WORKLOADS
  }
  assert sizes == {
      'pfl_cifar10': 1_626_442,
      # Four values for each of the 32 + 64 channels.
      'pfl_cifar10_bn': 1_626_442 + 4 * 96,
      'flute_lr': 28 * 28 * 10 + 10,
      'flute_femnist': 1_206_590,
  }


@pytest.mark.parametrize('name', benchmark._WORKLOADS)
def test_workload(name):
  workload = _workload(name, **_TINY)
  assert workload_data.Workload.from_json(workload.to_json()) == workload
  assert workload.steps_per_round == 4
  assert list(workload.events()) == (
      ['test', 'round', 'round', 'test', 'round', 'test']
  )
  clients = workload.clients_of_round(1)
  assert clients == sorted(set(clients))
  assert len(clients) == 2
  data, again = (workload_data.Data(workload) for _ in range(2))
  x, y = data.client(3)
  assert x.shape == (5, *workload.image_shape)
  assert x.dtype == np.uint8
  assert set(y) <= set(range(workload.num_classes))
  np.testing.assert_array_equal(x, again.client(3)[0])
  np.testing.assert_array_equal(data.scaled_client(3)[0], x / np.float32(255))
  assert len(data.x_test) == len(data.y_test) == 20


def test_tests_of_the_published_run_of_logistic_regression():
  workload = _workload('flute_lr')
  tested = [r for r in range(1, 101) if workload.is_tested(r)]
  assert tested == [20, 40, 60, 80, 100]


def test_each_framework_has_a_process():
  assert workload_process.FRAMEWORKS.keys() == benchmark.TITLES.keys()
  assert {*benchmark.OURS, *benchmark.PACKAGES} == set(_ALL)


def test_different_losses_are_not_reported():
  workload = benchmark.without_randomness(_workload('pfl_cifar10_bn'))
  assert workload.clients_per_round == workload.num_clients
  assert workload.steps_per_client == 1
  runs = {way: _run(losses=(2.0, 1.5, 1.0)) for way in _ALL}
  runs['pfl'] = _run(losses=(2.0, 9.0, 9.0))  # Other statistics.
  benchmark.check_losses(workload, runs)
  for losses in ((2.02, 1.5, 1.0), (2.0, 1.48, 1.0), (2.0, 1.5, np.nan)):
    with pytest.raises(RuntimeError, match='test losses of JAX are'):
      benchmark.check_losses(workload, {**runs, 'jax': _run(losses=losses)})
  without_bn = dataclasses.replace(workload, kind='cnn')
  with pytest.raises(RuntimeError, match='test losses of pfl are'):
    benchmark.check_losses(without_bn, runs)


def test_versions_of_peers():
  versions = benchmark.peer_versions(sys.executable)
  assert set(versions) <= {'torch', 'pfl', 'flwr', 'ray', 'jax'}
  assert 'jax' in versions  # TFF needs it.


def test_process_that_fails_is_named():
  workload = _workload('flute_lr', **{**_TINY, 'clients_per_round': 5})
  with pytest.raises(
      RuntimeError, match=r'JAX failed with .* flute_lr: (?s:.)*larger'
  ):
    benchmark.time_workload(workload, ['jax'], sys.executable)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['pfl_cifar10_bn', 'flute_lr'])
def test_program(monkeypatch, capsys, tmp_path, name):
  """Runs the benchmark with the peers that are installed."""
  small = {**benchmark._WORKLOADS[name], **_TINY}
  monkeypatch.setattr(benchmark, '_WORKLOADS', {name: small})
  monkeypatch.setattr(benchmark, '_MAX_RATIOS', {})
  returncode, text = benchmark_files.run(
      *(benchmark, monkeypatch, capsys, tmp_path),
      f'--workloads={name}',
  )
  assert returncode == 0
  workloads, medians, *_ = benchmark_files.tables(text)
  assert workloads[1][0] == name
  assert {'tff_bn', 'Keras', 'JAX'} <= set(medians[0])
  assert all(float(seconds) > 0 for seconds in medians[1][1:-1])
  assert medians[1][-1] == '2'
  if importlib.util.find_spec('pfl') is None:
    assert 'pfl' in text.partition('Not installed: ')[2].splitlines()[0]
