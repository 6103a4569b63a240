"""Tests of benchmarks/fedtan.py."""

import dataclasses
import re

import benchmark_files
import keras
import numpy as np
import pytest

from tff_bn import models
from tff_bn import runtime

benchmark = benchmark_files.import_benchmark('fedtan')

_SENT = benchmark.Sent(58, 4.5)


def _data(row):
  return benchmark.harness.unlike_clients(
      row, benchmark._IMAGE_SHAPES[row.model]
  )


def _rounds(fed_avg, two_pass, fused, centralized):
  later = dict(zip(benchmark.WAYS, (fed_avg, two_pass, fused, centralized)))
  sent = {'FedAvg': benchmark.Sent(1, 6.25), 'two_pass': _SENT, 'fused': _SENT}
  return benchmark.Rounds(
      benchmark.Timing(dict.fromkeys(later, 9.0), later), sent
  )


def _first_round(num_layers, build, first):
  return benchmark.FirstRound(num_layers, build, first, 0.5, _SENT)


_RESNET20 = benchmark.Row('resnet20', 5, 1, 128)
_FIRST_ROUNDS = {
    benchmark.Row('mlp3', 2, 1, 8): _first_round(1, 1.0, 2.0),
    benchmark.Row('resnet20', 2, 1, 8): _first_round(19, 1.9, 3.8),
    benchmark.Row('resnet56', 2, 1, 8): _first_round(55, 11.0, 13.75),
    _RESNET20: _first_round(19, 5.0, 10.0),
    benchmark.Row('keras_resnet50', 2, 1, 8): _first_round(53, 20.0, 40.0),
}


def _measurements(**changes):
  measurements = benchmark.Measurements(
      ['A machine'],
      {
          _RESNET20: _rounds(
              [1.0, 2.0, 4.0], [1.5, 2.0, 6.0], [1.1, 2.2, 4.4], [2.0, 2.0, 4.0]
          ),
          benchmark.Row('resnet20', 5, 5, 128): _rounds([1], [9], [9], [1]),
          benchmark.Row('small_cnn', 5, 1, 32): _rounds([1], [9], [9], [1]),
      },
      _FIRST_ROUNDS,
  )
  return dataclasses.replace(measurements, **changes)


def test_report_has_medians_of_paired_ratios():
  text, are_floors_met = benchmark.report(_measurements())
  assert are_floors_met
  times, ratios, first, sent, first_rounds, layers = benchmark_files.tables(
      text
  )
  name = 'resnet20, 5 clients × 1 × 128'
  assert times[1] == [name, '2.000', '2.000', '2.200', '2.000', '3']
  # The medians of 1.5, 1 and 1.5, and of 0.75, 1 and 1.5: not of the seconds.
  assert ratios[1] == (
      [name, 'two_pass', '1.50 (1.00–1.50)', '≤ 1.50', 'yes']
      + ['1.00 (0.75–1.50)', '≤ 1.20', 'yes']
  )
  assert ratios[2][:3] == [name, 'fused', '1.10 (1.10–1.10)']
  assert ratios[3][3:5] == ratios[3][6:] == ['–'] * 2
  assert first[1] == [name, *['9.00'] * 4]
  assert sent[1:3] == [
      [name, 'FedAvg', '1', '6.250'],
      [name, 'two_pass', '58', '4.500'],
  ]
  assert first_rounds[1] == (
      ['mlp3, 2 clients × 1 × 8', '1', '1.00', '2.00', '3.00', '–', '–']
      + ['0.50', '58', '4.500']
  )
  assert first_rounds[4][4:7] == ['15.00', '≤ 15', 'yes']
  assert first_rounds[5][4:7] == ['60.00', '≤ 60', 'yes']
  assert layers[1:] == [
      ['resnet56 / resnet20, 2 clients × 1 × 8', '0.300', '0.450', '1.50']
      + ['≤ 1.50', 'yes']
  ]


def _missed(row, *first_round):
  changed = {**_FIRST_ROUNDS, row: _first_round(*first_round)}
  return {'first_rounds': changed}


_MISSED = {
    'two_pass': {'rounds': {_RESNET20: _rounds([1.0], [1.51], [1.0], [2.0])}},
    'fused': {'rounds': {_RESNET20: _rounds([1.0], [1.0], [1.51], [2.0])}},
    'centralized': {
        'rounds': {_RESNET20: _rounds([1.0], [1.21], [1.0], [1.0])}
    },
    'resnet20': _missed(_RESNET20, 19, 5.0, 10.1),
    'keras_resnet50': _missed(
        benchmark.Row('keras_resnet50', 2, 1, 8), 53, 20.1, 40.0
    ),
    'layers': _missed(benchmark.Row('resnet56', 2, 1, 8), 55, 11.1, 13.75),
}


@pytest.mark.parametrize('changes', _MISSED.values(), ids=_MISSED)
def test_report_says_which_floor_is_missed(changes):
  text, are_floors_met = benchmark.report(_measurements(**changes))
  assert not are_floors_met
  assert text.count('**no**') == 1


def test_rows_of_other_sizes_have_no_common_layers_table():
  text, _ = benchmark.report(
      _measurements(
          rounds={},
          first_rounds={
              benchmark.Row('resnet20', 2, 1, 8): _first_round(19, 1.0, 1.0),
              benchmark.Row('resnet56', 2, 1, 4): _first_round(55, 99.0, 1.0),
          },
      )
  )
  assert len(benchmark_files.tables(text)) == 1


@pytest.fixture(name='problem', scope='module')
def fixture_problem():
  row = benchmark.Row('small_cnn', 2, 1, 8)
  return benchmark._Problem(row, _data(row))


def _results(problem, trainable, statistics, loss):
  """Results that all are alike, but for what is added to one of FedTAN."""
  right = [
      value + 1 for value in problem.model.from_model_weights(problem.initial)
  ]
  other = [
      value + (trainable if info.trainable else statistics)
      for value, info in zip(right, problem.model.variables)
  ]
  results = {
      way: benchmark.Result(right, [1.0, 0.5])
      for way in ('two_pass', 'fused', 'centralized')
  }
  wrong = [w + 5 for w in right]
  results['FedAvg'] = benchmark.Result(wrong, [3.0, 0.1])
  results['fused'] = benchmark.Result(other, [1.0 + loss, 0.5])
  return results


def test_different_results_are_not_reported(problem):
  problem.check(_results(problem, 1e-3, 1e-3, 1e-3))
  for errors in (
      (0.1, 0.0, 0.0),
      (0.0, 0.1, 0.0),
      (0.0, 0.0, 0.1),
      (np.nan, 0.0, 0.0),
      (0.0, np.nan, 0.0),
      (0.0, 0.0, np.nan),
  ):
    with pytest.raises(RuntimeError, match="'fused' differ"):
      problem.check(_results(problem, *errors))


@pytest.mark.slow
def test_fed_avg_would_not_pass_as_fedtan(problem):
  process = problem.build_process('FedAvg')
  with runtime.in_process_runtime():
    fed_avg = problem.federated_round(
        process, process.initialize(), problem.client_datasets(0)
    )
  centralized = benchmark._build_centralized_steps(problem)(
      problem.union_dataset(0)
  )
  results = dict.fromkeys(benchmark.MOMENTS, centralized)
  results['centralized'] = centralized
  problem.check(results)
  with pytest.raises(RuntimeError, match="'two_pass' differ"):
    problem.check({**results, 'two_pass': fed_avg})


def test_centralized_steps_train_as_keras_does(problem):
  row = dataclasses.replace(problem.row, num_steps=3)
  problem = benchmark._Problem(row, _data(row))
  dataset = problem.union_dataset(0)
  train = benchmark._build_centralized_steps(problem)
  train(dataset)
  result = train(dataset)  # From the initial model again.

  keras_model = problem.model.to_keras()
  keras_model.compile(
      keras.optimizers.SGD(0.01),
      problem.model.loss_fn(),
      metrics=problem.model.metrics_fn(),
  )
  history = keras_model.fit(dataset, shuffle=False, verbose=0).history
  for actual, expected in zip(result.weights, keras_model.get_weights()):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(
      result.metrics, [history['loss'][0], history['accuracy'][0]], rtol=1e-5
  )


@pytest.mark.parametrize(
    'model, shape', [('digits_cnn', (8, 8, 1)), ('resnet20', (32, 32, 3))]
)
def test_all_ways_train_on_the_same_samples(model, shape):
  row = benchmark.Row(model, 3, 2, 4)
  problem = benchmark._Problem(row, _data(row))
  clients = [list(dataset) for dataset in problem.client_datasets(5)]
  assert [[x.shape for x, _ in batches] for batches in clients] == [
      [(4, *shape)] * 2
  ] * 3
  # No two clients have a class in common.
  classes = [set(np.concatenate([y for _, y in b])) for b in clients]
  assert sum(map(len, classes)) == len(set.union(*classes))
  union = list(problem.union_dataset(5))
  assert [x.shape for x, _ in union] == [(12, *shape)] * 2

  def sums(batches):
    return sorted(np.concatenate([x for x, _ in batches]).sum((1, 2, 3)))

  assert sums(union) == sums(sum(clients, []))


@pytest.mark.slow
def test_residual_network_is_that_of_the_package():
  keras.utils.set_random_seed(0)
  expected = models.build_resnet20((32, 32, 3), 10)
  model = benchmark._build_resnet(3)
  assert len(model.layers) == len(expected.layers)
  model.set_weights(expected.get_weights())
  x = np.random.default_rng(0).normal(size=(4, 32, 32, 3))
  for training in (False, True, False):
    np.testing.assert_allclose(
        model(x, training=training), expected(x, training=training), 1e-5, 1e-5
    )


@pytest.mark.slow
def test_rounds_are_checked_before_they_are_reported(monkeypatch):
  build_process = benchmark._Problem.build_process
  monkeypatch.setattr(
      benchmark._Problem,
      'build_process',
      lambda self, way: build_process(self, 'FedAvg'),
  )
  with pytest.raises(RuntimeError, match='differ'):
    benchmark.time_row(benchmark.Row('mlp3', 2, 1, 8), 1)


@pytest.mark.slow
def test_first_round_has_the_number_of_layers():
  first_round = benchmark.time_first_round(benchmark.Row('small_cnn', 2, 1, 4))
  assert first_round.num_layers == 3
  assert first_round.sent.exchanges == 3 * 3 + 1
  assert first_round.total > first_round.build > 0
  assert first_round.first > first_round.second > 0


@pytest.mark.slow
def test_program(monkeypatch, capsys, tmp_path):
  returncode, text = benchmark_files.run(
      *(benchmark, monkeypatch, capsys, tmp_path),
      # Each client's second step is not a step of centralized training.
      '--rows=mlp3:2x1x4,mlp3:1x2x4',
      '--repeats=2',
      '--first_rounds=mlp3:1x1x2',
  )
  assert returncode == 0
  times, ratios, first, sent, first_rounds = benchmark_files.tables(text)
  assert times[1][0] == first[1][0] == 'mlp3, 2 clients × 1 × 4'
  assert all(float(seconds) > 0 for seconds in times[1][1:5] + first[1][1:])
  assert times[1][-1] == '2'
  assert re.fullmatch(r'\d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\)', ratios[1][2])
  assert [row[2] for row in sent[1:]] == ['1', '4', '3'] * 2
  assert first_rounds[1][:2] == ['mlp3, 1 client × 1 × 2', '1']
  assert 'tensorflow-federated 0.87' in text
