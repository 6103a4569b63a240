"""Tests for the points of curves."""

import example_runs
import numpy as np

from tff_bn.programs.results import curve_points
from tff_bn.programs.results import report


def test_what_is_not_finite_is_left_out():
  rows = (
      [dict(round=1, test_loss=1.0), dict(round=2, test_loss=np.inf)],
      [dict(round=1, test_loss=np.nan), dict(round=3, test_loss=4.0)],
      [dict(round=2, test_loss=9.0)],
  )
  runs = [report.Run({'algorithm': 'a'}, n, r) for n, r in enumerate(rows)]
  points = curve_points.values({'a': runs})
  assert [(p['round'], p['test_loss']) for p in points] == [
      (1, 1),
      (2, 9),
      (3, 4),
  ]
  assert not any(p['test_loss_deviation'] for p in points)
  assert 'test_loss' not in curve_points.values({'a': runs[:1]})[1]


def test_undefined_metrics_have_no_curve():
  rows = [dict(round=r, test_auc=0.5, client_test_auc=np.nan) for r in (0, 1)]
  run = report.Run({'algorithm': 'a'}, 0, rows)
  (column,) = curve_points.columns_of([run])
  assert column.name == 'test_auc'


def test_values_of_lines():
  groups = curve_points.by_name(example_runs.RUNS)
  first, *_, last = curve_points.values(groups, {'fedbn': 2.0, 'fedavg': None})
  assert first == {
      'name': 'fedavg',
      'round': 1,
      'exchanges': 1.0,
      'test_accuracy': 0.2,
      'test_accuracy_deviation': 0.141421,
      'test_loss': 9.0,
      'test_loss_deviation': 0.0,
  }
  assert (last['name'], last['round'], last['seconds']) == ('fedbn', 3, 6.0)
  columns = curve_points.columns_of(example_runs.RUNS)
  assert [column.name for column in columns] == [
      *('test_accuracy', 'client_test_accuracy'),
      *('test_loss', 'client_test_loss'),
  ]
