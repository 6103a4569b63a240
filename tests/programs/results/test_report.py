"""Tests for tables."""

import csv
import dataclasses
import io
import math

import csv_rows
import example_runs
import numpy as np
import pytest

from tff_bn.programs.results import report


def test_read_rows_leaves_out_what_is_missing(tmp_path):
  (tmp_path / 'metrics.csv').write_text(
      'round,test_loss,client_test_loss\n1,nan,\n2,0.5,1e-3\n'
  )
  first, second = report.read_rows(tmp_path)
  assert first.keys() == {'round', 'test_loss'}
  assert np.isnan(first['test_loss'])
  assert second == dict(round=2.0, test_loss=0.5, client_test_loss=0.001)


def _result(run, average_last):
  """Returns the values that a run has."""
  (row,) = report.results([run], average_last).to_dict('records')
  return {name: value for name, value in row.items() if value != ''}


def test_result_averages_the_last_rounds():
  assert _result(example_runs.RUNS[0], 2) == {
      'algorithm': 'fedavg',
      'seed': 0,
      'test_accuracy': pytest.approx(0.6),
      'test_loss': 1.5,
      'rounds': 3,
      'exchanges': 3,
  }
  assert _result(example_runs.RUNS[0], 1)['test_accuracy'] == 0.7
  # More rounds than there are: all of them.
  assert _result(example_runs.RUNS[0], 9)['test_loss'] == 4.0
  # A column that not every round has.
  assert _result(example_runs.RUNS[2], 2)['client_test_loss'] == 0.5


def test_the_untrained_model_is_not_averaged():
  untrained = dict(round=0, test_accuracy=0.1)
  run = report.Run(
      {'algorithm': 'fedavg'}, 0, [untrained, *example_runs.RUNS[0].rows]
  )
  assert report.counted_rows(run, 9) == example_runs.RUNS[0].rows
  assert _result(run, 9) == _result(example_runs.RUNS[0], 9)


def _csv_rows(table):
  return list(csv.DictReader(io.StringIO(report.to_csv(table))))


def test_results_csv():
  rows = _csv_rows(report.results(example_runs.RUNS, 1))
  assert [(row['algorithm'], row['seed']) for row in rows] == [
      ('fedavg', '0'),
      ('fedavg', '1'),
      ('fedbn', '0'),
  ]
  assert float(rows[1]['test_accuracy']) == 0.9
  assert rows[1]['client_test_accuracy'] == ''
  assert float(rows[2]['client_test_accuracy']) == 0.75
  assert rows[2]['rounds'] == '3'


def test_results_markdown():
  results = report.results(example_runs.RUNS, 1)
  text = report.results_markdown(results, 1)
  lines, cells = text.splitlines(), csv_rows.cells(text)
  assert cells[0] == [
      'Algorithm',
      'Accuracy, %',
      'Client accuracy, %',
      'Loss',
      'Rounds',
      'Exchanges',
  ]
  # Sample standard deviations: of 70 and 90, and of 1 and 2.
  assert cells[2] == ['fedavg', '80.0 ± 14.1', '–', '1.50 ± 0.71', '3', '3']
  assert cells[3] == ['fedbn', '–', '75.0', '–', '3', '–']
  assert len({len(line) for line in lines[:4]}) == 1
  notes = '\n'.join(lines[4:])
  means = '- Accuracies and losses: value of the last round; mean over 2 seeds'
  assert lines[4:6] == ['', f'{means} ± standard deviation.']
  for column in cells[0][1:]:
    assert f'- {column}: ' in notes
  averaged = report.results_markdown(results, 5).splitlines()
  assert averaged[5] == (
      '- Accuracies and losses: mean over the last 5 evaluated rounds; mean'
      ' over 2 seeds ± standard deviation. The progress and metrics.csv have'
      ' the values of single rounds.'
  )
  described = report.results_markdown(results, 1, sentences=['One.', 'Two.'])
  # Below the table, before the columns' meanings.
  assert described.splitlines()[4:9] == [
      *('', lines[5], '- One.', '- Two.'),
      lines[6],
  ]


def _accuracy_notes(*runs):
  runs = [
      report.Run(
          {'algorithm': name},
          0,
          [dict(round=1, test_accuracy=0.5, client_test_accuracy=0.5)],
          has_client_models=has_client_models,
      )
      for name, has_client_models in runs
  ]
  results = report.results(runs, 1)
  _, test, client, *_ = report.notes(results, 1, runs)
  assert client == (
      "Client accuracy, %: each client's model on its own test data (mean)."
  )
  return test.removeprefix('Accuracy, %: ')


def test_notes_say_whose_model_is_tested_on_the_whole_test_set():
  global_model = 'global model on the whole test set'
  own_models = "clients' own models on the whole test set (mean)"
  unknown = "global model, or clients' own models (mean), on the whole test set"
  assert _accuracy_notes(('a', False)) == f'{global_model}.'
  assert _accuracy_notes(('a', True), ('b', True)) == f'{own_models}.'
  assert _accuracy_notes(('a', False), ('b', True), ('c', False)) == (
      f'a, c: {global_model}; b: {own_models}.'
  )
  # An algorithm has own models with some of the swept values.
  assert _accuracy_notes(('a', False), ('a', True)) == f'{unknown}.'
  assert _accuracy_notes(('a', None)) == f'{unknown}.'


def test_notes_say_if_lower_is_better():
  row = dict(round=1, test_mae=0.5, test_r2=0.5, test_loss=0.1)
  run = report.Run({'algorithm': 'a'}, 0, [row], has_client_models=False)
  _, mae, r2, loss, *_ = report.notes(report.results([run], 1), 1, [run])
  assert mae == 'MAE: global model on the whole test set; lower is better.'
  assert r2 == 'R²: global model on the whole test set.'
  assert loss == 'Loss: global model on the whole test set; lower is better.'


@pytest.mark.parametrize('loss', [np.nan, np.inf])
def test_table_of_runs_of_which_one_diverged(loss):
  runs = [
      report.Run(
          {'algorithm': 'a'},
          0,
          [dict(round=1, test_accuracy=0.5, test_loss=1.0)],
      ),
      report.Run(
          {'algorithm': 'a'},
          1,
          [dict(round=1, test_accuracy=0.1, test_loss=loss)],
      ),
  ]
  table = report.results(runs, 1)
  assert f'{loss} ± nan' in report.results_markdown(table, 1)
  # It is no missing value.
  assert [row['test_loss'] for row in _csv_rows(table)] == ['1.0', str(loss)]


def _end(rows, has_client_models, keep_best=None):
  return report.describe_end(
      report.Run(
          {},
          0,
          rows,
          has_client_models=has_client_models,
          keep_best=keep_best,
      )
  )


def test_description_of_the_best_and_the_last_round():
  rows = [
      dict(round=r, test_accuracy=a, validation_accuracy=v)
      for r, a, v in ((0.0, 0.9, 0.9), (5.0, 0.5, 0.75), (9.0, 0.6, 0.7))
  ]
  whole = '  global model on the whole test set:                   '
  own = "  each client's model on its own validation data (mean):"
  assert _end(rows, False, 'accuracy').splitlines() == [
      'After round 5, with the best validation accuracy, means over at most 20'
      ' clients:',
      f'{whole} accuracy 0.5000',
      f'{own} accuracy 0.7500',
      'After round 9, the last one, means over at most 20 clients:',
      f'{whole} accuracy 0.6000',
      f'{own} accuracy 0.7000',
  ]
  assert _end(rows[:2], False, 'accuracy').splitlines()[0] == (
      'After round 5, the last one, with the best validation accuracy, means'
      ' over at most 20 clients:'
  )


def test_table_of_the_best_round():
  rows = [
      dict(round=r, test_accuracy=a, validation_accuracy=v, exchanges=r)
      for r, a, v in ((0.0, 0.9, 0.9), (5.0, 0.5, 0.75), (9.0, 0.6, 0.7))
  ]
  runs = [report.Run({'algorithm': 'a'}, 0, rows, keep_best='accuracy')]
  table = report.results(runs, 5)
  row = table.to_dict('records')[0]
  assert row['test_accuracy'] == 0.5 and row['validation_accuracy'] == 0.75
  # The costs are of all rounds.
  assert (row['best_round'], row['rounds'], row['exchanges']) == (5, 9, 9)
  text = report.results_markdown(table, 5, runs=runs)
  assert 'value of the round with the best validation accuracy;' in text
  titles = csv_rows.cells(text)[0]
  assert 'Best round' in titles
  # Other runs have no such columns.
  others = report.results([report.Run({'algorithm': 'a'}, 0, rows[:1])], 5)
  assert 'best_round' not in others


def test_a_run_without_a_best_round_has_its_last_rounds():
  """The validated metric is finite in no round."""
  rows = [
      dict(round=r, test_accuracy=a, validation_accuracy=math.nan)
      for r, a in ((0.0, 0.9), (5.0, 0.5), (9.0, 0.6))
  ]
  runs = [report.Run({'algorithm': 'a'}, 0, rows, keep_best='accuracy')]
  assert report.results(runs, 1).to_dict('records')[0]['test_accuracy'] == 0.6
  assert report.over_rounds(1, runs) == 'value of the last round'


def test_description_of_the_last_row():
  rows = [
      dict(round=1.0, test_accuracy=0.1, client_test_accuracy=0.2),
      dict(
          round=2.0,
          train_loss=9.0,
          test_accuracy=0.5,
          test_loss=1.25,
          client_test_accuracy=0.75,
      ),
  ]
  own_data = "  each client's model on its own test data (mean):"
  assert _end(rows, True).splitlines() == [
      'After round 2, means over at most 20 clients:',
      "  clients' own models on the whole test set (mean): accuracy 0.5000,"
      ' loss 1.2500',
      f'{own_data}  accuracy 0.7500',
  ]
  assert _end(rows, False).splitlines()[1:] == [
      '  global model on the whole test set:              accuracy 0.5000, loss'
      ' 1.2500',
      f'{own_data} accuracy 0.7500',
  ]


def test_costs_of_a_result():
  run = report.Run(
      {'algorithm': 'a'}, 0, [dict(round=1, exchanges=2.0, megabytes=0.75)]
  )
  result = _result(run, 1)
  assert result['exchanges'] == 2 and isinstance(result['exchanges'], int)
  assert result['megabytes'] == 0.75


def test_table_of_evaluations():
  text = report.evaluation_table(
      [
          report.Evaluation(
              'global', '', 360, {'accuracy': 0.625, 'loss': 1 / 3}
          ),
          report.Evaluation(
              'own', 'client_0', 0, {'accuracy': None, 'loss': None}
          ),
      ]
  )
  titles, _, *rows = csv_rows.cells(text)
  assert titles == ['Test data', 'Model', 'Examples', 'Accuracy, %', 'Loss']
  assert rows == [
      ['whole test set', 'global', '360', '62.5', '0.3333'],
      ['client_0', 'own', '0', '–', '–'],
  ]


def test_table_of_reestimated_statistics_names_their_data():
  text = report.evaluation_table(
      [
          report.Evaluation(
              'global', '', 360, {'accuracy': 0.625, 'loss': 1 / 3}
          ),
          report.Evaluation(
              'global', 'rome', 10, {'accuracy': 0.5, 'loss': 1.0}
          ),
      ],
      reestimated=True,
  )
  titles, _, *rows = csv_rows.cells(text)
  assert titles[1:3] == ['Model', 'BN statistics from']
  assert [row[2] for row in rows] == [
      'training data of all clients',
      'training data of rome alone',
  ]
  assert {len(row) for row in rows} == {len(titles)} == {6}


def test_evaluations_have_the_names_of_the_training():
  evaluations = [
      report.Evaluation('global', '', 360, {'accuracy': 0.625, 'loss': 0.25}),
      report.Evaluation('own', 'client_0', 10, {'accuracy': 0.5, 'loss': 1.0}),
      report.Evaluation('own', 'client_1', 0, {'accuracy': None, 'loss': None}),
      # Its own mean does not depend on the number of examples.
      report.Evaluation('own', 'client_2', 90, {'accuracy': 1.0, 'loss': 2.0}),
  ]
  lines = report.describe_evaluation(evaluations).splitlines()
  trained = _end(
      [dict(round=1, test_accuracy=0.5, client_test_accuracy=0.5)], True
  )
  means_of_own, of_each_client = (
      line.partition(':')[0].strip() for line in trained.splitlines()[1:]
  )
  assert lines[:2] == [
      'Means over 2 clients:',
      '  global model on the whole test set:                     loss 0.2500,'
      ' accuracy 0.6250',
  ]
  assert lines[2] == (
      f'  {of_each_client}:        loss 1.5000, accuracy 0.7500'
  )
  own_data = of_each_client.removesuffix(' (mean)')
  assert lines[3:5] == [
      f'  {own_data} (deviation):   accuracy 0.2500',
      f'  {own_data} (worst tenth): accuracy 0.5000',
  ]
  # The other number of the training is named as another one.
  assert lines[5].startswith('The global model is merged from the own models.')
  assert lines[5].endswith(f'another number: {means_of_own}.')
  # Without own models there is no other number.
  shared = [dataclasses.replace(e, model='global') for e in evaluations]
  assert report.describe_evaluation(shared).splitlines() == lines[:5]
  assert report.describe_evaluation(shared[:1]).splitlines() == [
      'Means over 0 clients:',
      '  global model on the whole test set:              loss 0.2500, accuracy'
      ' 0.6250',
  ]


def _swept(labels, seed, accuracy, **flags):
  row = dict(round=3, test_accuracy=accuracy)
  return report.Run(labels, seed, [row], flags)


def test_name_of_a_run():
  labels = {'gamma': '0.5', 'algorithm': 'fbn', 'split': 'iid'}
  assert report.Run(labels, 0, []).name == 'fbn, gamma=0.5, split=iid'
  assert report.Run({'scheme': 'a b'}, 0, []).name == 'scheme=a b'


def test_tables_of_a_sweep():
  runs = [
      _swept({'gamma': gamma, 'algorithm': 'fbn'}, seed, accuracy)
      for gamma, seed, accuracy in [
          ('0', 0, 0.5),
          ('1', 0, 0.25),
          ('0', 1, 0.7),
          ('1', 1, 0.25),
      ]
  ]
  results = report.results(runs, 1)
  rows = _csv_rows(results)
  assert list(rows[0])[:4] == ['algorithm', 'gamma', 'seed', 'test_accuracy']
  assert [(r['gamma'], r['seed']) for r in rows] == [
      ('0', '0'),
      ('1', '0'),
      ('0', '1'),
      ('1', '1'),
  ]
  text = report.results_markdown(results, 1, ['gamma', 'algorithm'])
  cells = csv_rows.cells(text)
  assert cells[0] == ['Algorithm', 'gamma', 'Accuracy, %', 'Rounds']
  # Labels are to the left, numbers to the right.
  assert [rule[-1] for rule in cells[1]] == ['-', '-', ':', ':']
  assert cells[2] == ['fbn', '0', '60.0 ± 14.1', '3']
  assert cells[3] == ['fbn', '1', '25.0 ± 0.0', '3']


def test_further_flags_are_columns():
  runs = [
      _swept({'scheme': 'A'}, 0, 0.5, algorithm='fbn', pooled=''),
      _swept({'scheme': 'B'}, 0, 0.5, algorithm='fbn', pooled='true'),
  ]
  results = report.results(runs, 1)
  first, second = _csv_rows(results)
  assert list(first)[:4] == ['algorithm', 'scheme', 'pooled', 'seed']
  assert (first['pooled'], second['pooled']) == ('', 'true')
  table = report.results_markdown(results, 1, ['scheme'])
  assert table.startswith('| scheme | Accuracy, % |')


def test_rounds_can_be_swept():
  results = report.results([_swept({'rounds': '3'}, 0, 0.5)], 1)
  assert results['rounds'].tolist() == ['3']
  assert '| 3      |' in report.results_markdown(results, 1, ['rounds'])


_REGRESSION = [
    dict(
        round=number,
        train_loss=0.5,
        train_mae=0.25,
        train_r2=0.5,
        test_loss=1.0,
        test_mae=0.5 / number,
        test_r2=0.25,
        client_test_loss=2.0,
        client_test_mae=0.75,
        client_test_r2=0.125,
    )
    for number in (1, 2)
]


def test_other_metrics():
  runs = [
      report.Run({'algorithm': 'fedavg', 'train_share': '0.5'}, 0, _REGRESSION)
  ]
  table = report.results(runs, 1)
  assert list(table.columns) == [
      *('algorithm', 'train_share', 'seed', 'test_mae', 'test_r2', 'test_loss'),
      *('client_test_mae', 'client_test_r2', 'client_test_loss', 'train_loss'),
      *('rounds', 'exchanges', 'megabytes'),
  ]
  titles, cells = report.table_cells(table)
  assert titles == [
      *('Algorithm', 'MAE', 'Client MAE', 'R²', 'Loss', 'Training loss'),
      'Rounds',
  ]
  assert cells == ['fedavg', '0.250', '0.750', '0.250', '1.00', '0.50', '2']
  first, *_ = report.notes(table, 1, runs)
  assert first == 'Metrics and losses: value of the last round; one seed.'


def test_evaluations_of_other_metrics():
  rows = [
      report.Evaluation('global', '', 9, {'mae': 0.5, 'loss': 0.25}),
      report.Evaluation('global', 'a', 4, {'mae': 0.25, 'loss': 1.0}),
      report.Evaluation('global', 'b', 5, {'mae': 0.75, 'loss': 0.0}),
  ]
  titles, _, first, *_ = csv_rows.cells(report.evaluation_table(rows))
  assert titles[3:] == ['MAE', 'Loss'] and first[3:] == ['0.500', '0.2500']
  assert 'loss 0.5000, mae 0.5000' in report.describe_evaluation(rows)


def test_clients_for_which_a_metric_is_undefined_do_not_count():
  """As in metrics.csv; the loss of a client is always defined."""

  def describe(*numbers):
    rows = [
        report.Evaluation('global', str(n), 4, dict(auc=auc, f1=nan, loss=loss))
        for n, (auc, loss) in enumerate(numbers)
    ]
    return report.describe_evaluation(rows)

  nan = math.nan
  found = describe((0.5, 1.0), (nan, 2.0), (1.0, 3.0))
  assert 'loss 2.0000, auc 0.7500, f1 nan' in found
  assert 'loss nan, auc 0.5000' in describe((0.5, 1.0), (nan, nan))
