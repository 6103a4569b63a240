"""Tests of an experiment's numbers, table and sentences."""

import dataclasses
import math

import csv_rows
import pytest

from tff_bn.papers.experiments import agreement
from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_numbers
from tff_bn.papers.experiments import paper_form
from tff_bn.programs.plan import axes

_TABLE = paper_form.Show(
    'table', rows=('method',), columns=('data',), value=('test_accuracy',)
)


def _axis(name, *labels):
  return axes.Axis(name, tuple(axes.Point(label, {}) for label in labels))


_AXES = (_axis('method', 'a', 'b', 'c'), _axis('data', 'iid', 'skewed'))


def _measured(column='test_accuracy', **by_labels):
  """Measurements of runs `METHOD_DATA`, a value for each seed."""
  return [
      experiment_numbers.Measurement(
          dict(zip(('method', 'data'), name.split('_'))), seed, column, value
      )
      for name, values in by_labels.items()
      for seed, value in enumerate(values)
  ]


def _printed(column='test_accuracy', **by_labels):
  """Numbers of the paper, with a deviation if there are two."""
  return tuple(
      paper_form.PaperNumber(
          dict(zip(('method', 'data'), name.split('_'))),
          column,
          values[0],
          values[1] if len(values) > 1 else None,
      )
      for name, values in by_labels.items()
  )


def _experiment(paper=(), scale='paper', shown=_TABLE):
  return experiment_files.Experiment(
      'new/table_1',
      scale,
      'New',
      'section 5',
      'A is best.',
      'A is best here.' if scale == 'digits' else None,
      None,
      {},
      _AXES,
      shown,
      (),
      paper,
  )


def _sentences(measured, paper=(), scale='paper', shown=_TABLE):
  experiment = _experiment(paper, scale, shown)
  numbers = experiment_numbers.collect(measured, shown, _AXES, paper)
  return agreement.sentences(numbers, experiment)


def test_means_over_seeds_in_percent():
  numbers = experiment_numbers.collect(
      _measured(a_iid=[0.5, 0.7], b_skewed=[0.25]),
      _TABLE,
      _AXES,
      _printed(a_iid=[61.0, 2.0]),
  )

  number = numbers.ours[('a', 'iid'), 'test_accuracy']
  assert number.mean == pytest.approx(60)
  assert number.deviation == pytest.approx(math.sqrt(200))
  assert number.count == 2
  assert numbers.ours[('b', 'skewed'), 'test_accuracy'] == (
      experiment_numbers.Number(25.0, None, 1)
  )
  assert len(numbers.ours) == 2
  assert numbers.paper == {
      (('a', 'iid'), 'test_accuracy'): experiment_numbers.Number(61.0, 2.0)
  }


def test_paper_numbers_of_points_that_a_scale_lacks_are_left_out():
  numbers = experiment_numbers.collect(
      [], _TABLE, (_axis('method', 'a'), _AXES[1]), _printed(b_iid=[1.0])
  )

  assert numbers.paper == {}


@pytest.mark.parametrize(
    'column, expected', [('test_accuracy', 40.0), ('test_loss', 0.8)]
)
def test_worst_over_an_axis(column, expected):
  show = paper_form.Show(
      'table', rows=('method',), value=(column,), worst_over=('data',)
  )

  numbers = experiment_numbers.collect(
      # The mean over the seeds comes first: 40 and 60, not 30.
      _measured(column, a_iid=[0.3, 0.5], a_skewed=[0.8, 0.8, 0.8]),
      show,
      _AXES,
      (),
  )

  assert numbers.ours[('a',), column].mean == pytest.approx(expected)


def test_mean_over_an_axis_is_one_more_point():
  show = paper_form.Show(
      'table',
      rows=('method',),
      columns=('data',),
      value=('client_test_dice',),
      with_mean=('data',),
  )

  numbers = experiment_numbers.collect(
      # Of the two seeds, the means over the data are 0.3 and 0.7.
      _measured('client_test_dice', a_iid=[0.2, 0.8], a_skewed=[0.4, 0.6]),
      show,
      _AXES,
      (),
  )

  mean = numbers.ours[('a', 'mean'), 'client_test_dice']
  assert mean.mean == pytest.approx(50)
  assert mean.deviation == pytest.approx(math.sqrt(2 * 20**2))
  assert mean.count == 2
  header, _, row = csv_rows.cells(experiment_numbers.to_markdown(numbers, show))
  assert header == ['method', 'iid', 'skewed', 'mean']
  assert row == ['a', '50.00 ± 42.43', '50.00 ± 14.14', '50.00 ± 28.28']


@pytest.mark.parametrize(
    'column, expected',
    [
        ('test_accuracy', 'Test accuracy, %'),
        ('client_test_dice', 'Client test Dice, %'),
        ('test_mean_iou', 'Test mean IoU, %'),
        ('test_auc', 'Test AUC'),
        ('train_loss', 'Train loss'),
        ('megabytes', 'Megabytes'),
    ],
)
def test_titles_of_columns(column, expected):
  assert experiment_numbers.title(column) == expected


def test_table_has_the_papers_number_in_parentheses():
  numbers = experiment_numbers.collect(
      _measured(a_iid=[0.5, 0.7], b_iid=[0.25], b_skewed=[math.nan]),
      _TABLE,
      _AXES,
      _printed(a_iid=[61.0, 2.0], b_skewed=[7.5]),
  )

  cells = csv_rows.cells(experiment_numbers.to_markdown(numbers, _TABLE))

  assert cells[0] == ['method', 'iid', 'skewed']
  assert cells[2:] == [
      ['a', '60.00 ± 14.14 (61.00 ± 2.00)', '–'],
      ['b', '25.00', '– (7.50)'],
  ]


def test_table_of_several_columns_of_metrics():
  show = paper_form.Show(
      'table', rows=('method', 'data'), value=('test_accuracy', 'train_loss')
  )
  numbers = experiment_numbers.collect(
      _measured(a_skewed=[0.5]) + _measured('train_loss', a_skewed=[0.125]),
      show,
      _AXES,
      (),
  )

  lines = experiment_numbers.to_markdown(numbers, show).splitlines()

  assert lines[0].split('|')[1].strip() == 'method, data'
  assert 'Test accuracy, %' in lines[0] and 'Train loss' in lines[0]
  assert '50.00' in lines[2] and '0.125' in lines[2]
  assert lines[2].startswith('| a, skewed')
  assert len(lines) == 3


def test_a_wide_table_becomes_a_table_for_each_point_of_its_first_axis():
  steps = ('1', '2', '3', '4', '5')
  numbers = experiment_numbers.Numbers(
      ('method', 'data', 'steps'),
      {'method': ('a', 'b'), 'data': ('iid', 'skewed'), 'steps': steps},
      ('test_accuracy',),
      {
          (('a', data, step), 'test_accuracy'): experiment_numbers.Number(
              start + float(step)
          )
          for data, start in (('iid', 50), ('skewed', 20))
          for step in steps
      },
      {},
  )
  show = paper_form.Show(
      'table',
      rows=('method',),
      columns=('data', 'steps'),
      value=('test_accuracy',),
  )

  text = experiment_numbers.to_markdown(numbers, show)

  first, iid, second, skewed = text.split('\n\n')
  assert (first, second) == ('**iid**', '**skewed**')
  for table, start in ((iid, 50), (skewed, 20)):
    header, _, row = csv_rows.cells(table)
    assert header == ['method', *(f'steps = {step}' for step in steps)]
    assert row == ['a', *(f'{start + float(step):.2f}' for step in steps)]


def test_csv_has_both_numbers(tmp_path):
  numbers = experiment_numbers.collect(
      _measured(a_iid=[0.5, 0.7]),
      _TABLE,
      _AXES,
      _printed(a_iid=[61.0], c_skewed=[7.5, 0.5]),
  )
  path = tmp_path / 'experiment.csv'
  path.write_text(experiment_numbers.to_csv(numbers))

  rows = csv_rows.read(path)

  assert len(rows) == 2
  assert rows[0]['method'] == 'a' and rows[0]['data'] == 'iid'
  assert float(rows[0]['mean']) == pytest.approx(60)
  assert (rows[0]['seeds'], rows[0]['paper']) == ('2', '61')
  assert (rows[1]['mean'], rows[1]['paper_deviation']) == ('', '0.5')


def test_the_same_order_and_the_largest_difference():
  sentences = _sentences(
      _measured(a_iid=[0.9], b_iid=[0.7], a_skewed=[0.6], b_skewed=[0.5]),
      _printed(a_iid=[80.0], b_iid=[75.0], a_skewed=[60.0], b_skewed=[43.5]),
  )

  assert sentences == [
      'The paper, section 5: A is best.',
      "iid, Test accuracy, %: the paper's order.",
      "skewed, Test accuracy, %: the paper's order.",
      'The largest difference from the paper is 10 points (a, iid: 90.00, in'
      ' the paper 80.00).',
  ]


def test_traffic_is_that_of_the_model_at_every_scale():
  shown = paper_form.Show(
      'table', rows=('method',), columns=('data',), value=('megabytes',)
  )
  sentences = _sentences(
      _measured('megabytes', a_iid=[6.2], b_iid=[6.1]),
      _printed('megabytes', a_iid=[6.2], b_iid=[6.1]),
      'digits',
      shown,
  )

  assert sentences[2:] == ["iid, Megabytes: the paper's order."]


def test_pairs_that_are_swapped():
  sentences = _sentences(
      _measured(a_iid=[0.5, 0.52], b_iid=[0.7, 0.72], c_iid=[0.2, 0.2]),
      _printed(a_iid=[80.0], b_iid=[75.0], c_iid=[10.0]),
      'digits',
  )

  assert sentences[1] == 'Result: A is best here.'
  assert sentences[2] == (
      "iid, Test accuracy, %: another order than the paper's: b is above a by"
      ' 20 (in the paper, below it by 5).'
  )
  assert 'only the order can be compared' in sentences[3]
  assert len(sentences) == 4


@pytest.mark.parametrize(
    'ours, paper, words',
    [
        ([[0.5, 0.5], [0.6, 0.6]], [[80.0], [79.0]], 'another order'),
        # 10 points and a deviation of 14.14.
        (
            [[0.5, 0.5], [0.5, 0.7]],
            [[80.0], [79.0]],
            "the paper's order, up to differences within our deviations: b is"
            ' above a by 10',
        ),
        # The paper's own difference is within its deviations.
        (
            [[0.5, 0.5], [0.6, 0.6]],
            [[80.0, 1.0], [79.0, 1.0]],
            "the paper's numbers are within its deviations.",
        ),
        ([[0.5, 0.5], [0.6, 0.6]], [[80.0, 0.5], [79.0, 0.5]], 'another order'),
        (
            [[0.5], [0.6]],
            [[80.0], [80.0]],
            "the paper's numbers are within its deviations.",
        ),
    ],
)
def test_differences_within_the_deviations_are_no_other_order(
    ours, paper, words
):
  sentence = _sentences(
      _measured(a_iid=ours[0], b_iid=ours[1]),
      _printed(a_iid=paper[0], b_iid=paper[1]),
  )[1]

  assert sentence.startswith(f'iid, Test accuracy, %: {words}')


def test_the_paper_compares_columns():
  shown = dataclasses.replace(_TABLE, compared=('data',))
  sentences = _sentences(
      _measured(a_iid=[0.9], a_skewed=[0.6], b_iid=[0.2], b_skewed=[0.3]),
      _printed(a_iid=[80.0], a_skewed=[70.0], b_iid=[90.0], b_skewed=[80.0]),
      'digits',
      shown,
  )

  assert sentences[2:4] == [
      "a, Test accuracy, %: the paper's order.",
      "b, Test accuracy, %: another order than the paper's: skewed is above iid"
      ' by 10 (in the paper, below it by 10).',
  ]


@pytest.mark.parametrize(
    'column, expected', [('test_accuracy', 60.0), ('test_loss', 0.3)]
)
def test_best_of_some_tries(column, expected):
  shown = dataclasses.replace(_TABLE, value=(column,), best=('method',))
  axes_ = (_axis('method', 'a: 1', 'a: 2', 'a: 3', 'b'), _AXES[1])
  tries = {'a: 1_iid': [0.1, 0.5], 'a: 2_iid': [0.6, 0.6]}

  numbers = experiment_numbers.collect(
      # The mean over the seeds comes first.
      _measured(column, **{'a: 3_iid': [math.inf, 0.2]}, **tries),
      shown,
      axes_,
      _printed(column, a_iid=[70.0]),
  )

  assert numbers.labels['method'] == ('a', 'b')
  key = ('a', 'iid'), column
  assert numbers.ours[key].mean == pytest.approx(expected)
  assert list(numbers.ours) == list(numbers.paper) == [key]


@pytest.mark.parametrize(
    'column, winner', [('test_accuracy', 'b'), ('test_loss', 'a')]
)
def test_share_of_settings_in_which_a_point_is_the_best(column, winner):
  show = paper_form.Show(
      'bars', x=('method',), value=(column,), wins_over=('data',)
  )

  numbers = experiment_numbers.collect(
      _measured(
          column,
          # The mean over the seeds decides.
          a_iid=[0.9, 0.2],
          b_iid=[0.6, 0.7],
          a_skewed=[0.1, 0.1],
          b_skewed=[0.3, 0.3],
      ),
      show,
      _AXES,
      (paper_form.PaperNumber({'method': 'a'}, column, 13.0, None),),
  )

  (shown,) = numbers.columns
  assert numbers.ours == {
      ((name,), shown): experiment_numbers.Number(100.0 * (name == winner))
      for name in 'ab'
  }
  assert numbers.paper[('a',), shown].mean == 13
  tied = experiment_numbers.collect(
      _measured(column, a_iid=[0.5], b_iid=[0.5]), show, _AXES, ()
  )
  assert [number.mean for number in tied.ours.values()] == [50, 50]
  title = f'Share of settings with the best {column.replace("_", " ")}, %'
  assert experiment_numbers.title(shown) == title
  assert experiment_numbers.is_share(shown)


def test_printed_numbers_without_runs_are_shown():
  shown = dataclasses.replace(_TABLE, printed={'method': ('cited',)})
  measured, paper = _measured(a_iid=[0.9]), _printed(cited_iid=[95.0])
  numbers = experiment_numbers.collect(measured, shown, _AXES, paper)

  cells = csv_rows.cells(experiment_numbers.to_markdown(numbers, shown))

  assert cells[2:] == [['a', '90.00'], ['cited', '– (95.00)']]
  assert _sentences(measured, paper, shown=shown) == [
      'The paper, section 5: A is best.',
      'iid, Test accuracy, %: a 90.',
  ]


def test_many_swapped_pairs_are_counted():
  names = 'abcd'
  axes_ = (_axis('method', *names), _axis('data', 'iid'))
  measured = _measured(**{f'{n}_iid': [0.1 * i] for i, n in enumerate(names)})
  paper = _printed(**{f'{n}_iid': [50.0 - i] for i, n in enumerate(names)})
  numbers = experiment_numbers.collect(measured, _TABLE, axes_, paper)

  sentence = agreement.sentences(numbers, _experiment(paper))[1]

  assert sentence.count('is above') == 5
  assert sentence.endswith('; and 1 more.')


def test_without_numbers_of_the_paper_the_order_is_ours():
  show = paper_form.Show(
      'curves',
      x=('round',),
      y=('test_accuracy',),
      lines=('method',),
      panels=('data',),
  )

  sentences = _sentences(
      _measured(a_iid=[0.5], b_iid=[0.7], c_iid=[math.inf]), shown=show
  )

  assert sentences == [
      'The paper, section 5: A is best.',
      'iid, Test accuracy, %: b 70 > a 50.',
      'Without a finite number: iid, c, Test accuracy, %.',
  ]


def test_names_of_axes_stand_before_their_numbers():
  axes_ = (_axis('gamma', '0.1', '0'), _axis('data', 'iid', '2'))
  show = paper_form.Show(
      'table', rows=('gamma',), columns=('data',), value=('test_accuracy',)
  )
  numbers = experiment_numbers.collect([], show, axes_, ())

  assert numbers.describe(('gamma', 'data'), ('0', '2')) == 'gamma = 0, 2'


def test_own_experiment_has_no_finding_of_a_paper():
  experiment = dataclasses.replace(_experiment(()), name='tff_bn/digits')

  assert agreement.findings(experiment) == ['What follows: A is best.']


def test_claim_settings_and_result_stand_apart():
  experiment = dataclasses.replace(
      _experiment((), 'digits'), differences=('rounds=5 instead of 9', 'no pan')
  )

  assert agreement.findings(experiment) == [
      'The paper, section 5: A is best.',
      'Here: rounds=5 instead of 9; no pan.',
      'Result: A is best here.',
  ]
  agrees = dataclasses.replace(experiment, agrees='in part')
  assert agreement.findings(agrees)[-1] == (
      'Result, in part as claimed: A is best here.'
  )
  silent = dataclasses.replace(experiment, place=None, finding=None)
  assert agreement.findings(silent)[0] == (
      'The paper: it says nothing about this result.'
  )


def test_smoke_results_mean_nothing():
  (sentence,) = _sentences(
      _measured(a_iid=[0.5]), _printed(a_iid=[80.0]), 'smoke'
  )

  assert 'mean nothing' in sentence
