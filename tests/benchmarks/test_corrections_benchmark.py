"""Tests of benchmarks/corrections.py."""

import dataclasses
import re

import benchmark_files
import numpy as np
import pytest

from tff_bn import runtime
from tff_bn.processes import stateful_process

benchmark = benchmark_files.import_benchmark('corrections')

_RESNET20 = benchmark.Row('resnet20', 4, 5, 32)
_SMALL_CNN = benchmark.Row('small_cnn', 10, 5, 32)


def _timing(**later):
  later = {way: later.get(way, later['FedAvg']) for way in benchmark.WAYS}
  return benchmark.Timing(dict.fromkeys(later, 9.0), later)


def _measurements(row, **later):
  return benchmark.Measurements(['A machine'], {row: _timing(**later)})


def test_report_has_medians_of_paired_ratios():
  text, are_floors_met = benchmark.report(
      benchmark.Measurements(
          ['A machine'],
          {
              _RESNET20: _timing(
                  FedAvg=[1.0, 2.0, 4.0],
                  FedProx=[1.1, 2.0, 4.8],
                  SCAFFOLD=[1.2, 2.4, 4.8],
                  MOON=[2.5, 4.0, 12.0],
                  clipped=[9.0, 9.0, 9.0],
              ),
              _SMALL_CNN: _timing(FedAvg=[1.0]),
              benchmark.Row('resnet20', 4, 2, 32): _timing(
                  FedAvg=[1.0], MOON=[9.0]
              ),
          },
      )
  )
  assert are_floors_met
  times, ratios, first = benchmark_files.tables(text)
  name = 'resnet20, 4 clients × 5 × 32'
  assert times[1] == (
      [name, '2.000', '2.000', '2.400', '4.000', '2.000', '2.000', '9.000']
      + ['2.000', '3']
  )
  # The median of 2.5/1, 4/2 and 12/4: not of the seconds, 4/2.
  assert ratios[1:8] == [
      [name, 'FedProx', '1.10 (1.00–1.20)', '≤ 1.10', 'yes'],
      [name, 'SCAFFOLD', '1.20 (1.20–1.20)', '≤ 1.20', 'yes'],
      [name, 'MOON', '2.50 (2.00–3.00)', '≤ 2.50', 'yes'],
      [name, 'FedBS by losses', '1.00 (1.00–1.00)', '–', '–'],
      [name, 'FedBS switched', '1.00 (1.00–1.00)', '–', '–'],
      [name, 'clipped', '4.50 (2.25–9.00)', '–', '–'],
      [name, 'warm-up', '1.00 (1.00–1.00)', '–', '–'],
  ]
  # The floors are those of certain rounds.
  assert [row[3] for row in ratios[8:11]] == ['≤ 1.10', '≤ 1.20', '≤ 2.50']
  assert {row[3] for row in ratios[15:]} == {'–'}
  assert first[1] == [name, *['9.00'] * 8]
  assert 'images of 32×32×3 or 8×8×1 pixels' in text


@pytest.mark.parametrize('row', [_RESNET20, _SMALL_CNN], ids=str)
@pytest.mark.parametrize(
    'later',
    [{'FedProx': [1.11]}, {'SCAFFOLD': [1.21]}, {'MOON': [2.51]}],
    ids=lambda later: next(iter(later)),
)
def test_report_says_which_floor_is_missed(row, later):
  text, are_floors_met = benchmark.report(
      _measurements(row, FedAvg=[1.0], **later)
  )
  assert not are_floors_met
  assert text.count('**no**') == 1


@pytest.fixture(name='problem', scope='module')
def fixture_problem():
  return benchmark._Problem(benchmark.Row('mlp3', 2, 2, 4))


@pytest.fixture(name='fed_avg', scope='module')
def fixture_fed_avg(problem):
  """FedAvg's result after two rounds."""
  with runtime.in_process_runtime():
    training = benchmark._Training(problem, problem.build_process('FedAvg'))
    for round_num in range(2):
      training.next_round(problem.client_datasets(round_num))
    return training.result


def test_clients_differ(problem):
  clients = [list(dataset) for dataset in problem.client_datasets(3)]
  assert [[x.shape for x, _ in batches] for batches in clients] == [
      [(4, 8, 8, 1)] * 2
  ] * 2
  brightness = [np.mean([x.numpy().mean() for x, _ in b]) for b in clients]
  assert brightness[1] > brightness[0] * 1.3
  classes = [set(np.concatenate([y for _, y in b])) for b in clients]
  assert not classes[0] & classes[1]


@pytest.mark.parametrize(
    'way, arguments',
    [
        ('FedProx', {'proximal_strength': 20.0}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ('MOON', {'contrastive_weight': 9.0}),
                ('FedBS switched', {'proximal_strength': 20.0}),
                ('clipped', {'client_gradient_clip_norm': 0.1}),
                ('warm-up', {'client_warmup_steps': 2}),
            )
        ),
    ],
)
def test_effect_that_should_not_be_is_found(
    monkeypatch, problem, fed_avg, way, arguments
):
  assert arguments.keys() == benchmark._WITHOUT_EFFECT[way].keys()
  monkeypatch.setattr(benchmark, '_WITHOUT_EFFECT', {way: arguments})
  with (
      runtime.in_process_runtime(),
      pytest.raises(RuntimeError, match=f'{way!r} differ'),
  ):
    benchmark.check_without_effect(problem, fed_avg)


@pytest.mark.parametrize(
    'way, changes',
    [
        ('SCAFFOLD', (1.0, 0.0)),
        ('SCAFFOLD', (0.0, 1.0)),
        ('MOON', (1.0, 0.0)),
        ('FedBS by losses', (0.0, 1.0)),
    ],
)
def test_other_first_round_is_found(problem, fed_avg, way, changes):
  results = dict.fromkeys(benchmark.WAYS, fed_avg)
  # The weights of FedBS's mean are others.
  results['FedBS by losses'] = _changed(fed_avg, 1.0, 0.0)
  benchmark.check_first_round(problem, results)
  results[way] = _changed(fed_avg, *changes)
  with pytest.raises(RuntimeError, match=f'{way!r} differ'):
    benchmark.check_first_round(problem, results)


def _changed(result, weights, metrics):
  return benchmark.Result(
      [value + weights for value in result.weights],
      [value + metrics for value in result.metrics],
  )


@dataclasses.dataclass
class _DoneTraining:
  """A training as it is after the last round."""

  result: benchmark.Result
  is_switched: bool = False


def test_way_without_effect_is_found(problem, fed_avg):

  def trainings():
    done = {
        way: _DoneTraining(_changed(fed_avg, 1e-3, 0.0))
        for way in benchmark.WAYS
    }
    done['FedAvg'].result = fed_avg
    done['FedBS switched'].is_switched = True
    return done

  benchmark.check_effects(problem, trainings())
  for way in benchmark.WAYS[1:]:
    for change in (0.0, np.nan):
      wrong = trainings()
      wrong[way].result = _changed(fed_avg, change, 1.0)
      with pytest.raises(RuntimeError, match=f'of {way!r} differs'):
        benchmark.check_effects(problem, wrong)
  for way in ('FedBS switched', 'FedBS by losses'):
    wrong = trainings()
    wrong[way].is_switched = not wrong[way].is_switched
    with pytest.raises(RuntimeError, match=f'{way!r} has'):
      benchmark.check_effects(problem, wrong)


def test_training_hands_on_what_the_clients_keep(problem):
  given = []

  class Process:
    """Records what it is given; each state says what it is the state of."""

    def initialize(self):
      return 'server 0'

    def initialize_client(self, state):
      return f'client 0 of {state}'

    def next(self, state, client_states, datasets):
      given.append((state, client_states, datasets))
      number = len(given)
      return stateful_process.StatefulProcessOutput(
          f'server {number}', [f'client {number}'] * 2, {}
      )

  training = benchmark._Training(problem, Process())
  training.next_round('data 0')
  training.next_round('data 1')
  assert given == [
      ('server 0', ['client 0 of server 0'] * 2, 'data 0'),
      ('server 1', ['client 1'] * 2, 'data 1'),
  ]


def test_ways_take_turns_and_are_checked(monkeypatch, problem):
  log = []

  class Training:
    """Records the rounds."""

    def __init__(self, problem, process):
      self.way = self.result = process

    def next_round(self, datasets):
      log.append(self.way)

  monkeypatch.setattr(benchmark, '_Training', Training)
  monkeypatch.setattr(
      benchmark._Problem, 'build_process', lambda self, way: way
  )
  for name in ('check_first_round', 'check_without_effect', 'check_effects'):
    monkeypatch.setattr(benchmark, name, lambda *_, name=name: log.append(name))
  timing = benchmark.time_row(problem.row, 2)

  ways = list(benchmark.WAYS)
  assert log == [
      *(*ways, 'check_first_round'),
      *(*ways[1:], *ways[:1], 'check_without_effect'),
      *(*ways[2:], *ways[:2], 'check_effects'),
  ]
  for way in ways:
    assert timing.first[way] > 0
    assert len(timing.later[way]) == 2


@pytest.mark.slow
def test_program(monkeypatch, capsys, tmp_path):
  given = ('--rows=mlp3:2x2x4', '--repeats=2')
  returncode, text = benchmark_files.run(
      benchmark, monkeypatch, capsys, tmp_path, *given
  )
  assert returncode == 0
  times, ratios, first = benchmark_files.tables(text)
  assert times[0] == ['Round', *benchmark.WAYS, 'rounds']
  assert times[1][0] == first[1][0] == 'mlp3, 2 clients × 2 × 4'
  assert all(float(seconds) > 0 for seconds in times[1][1:-1] + first[1][1:])
  assert times[1][-1] == '2'
  assert [row[1] for row in ratios[1:]] == list(benchmark.WAYS[1:])
  assert re.fullmatch(r'\d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\)', ratios[1][2])
  assert 'tensorflow-federated 0.87' in text
