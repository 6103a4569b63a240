"""Tests for the columns of results."""

from tff_bn.catalog import columns
from tff_bn.catalog import tasks


def _of(task):
  return columns.of([tasks.kind(name) for name in tasks.TASKS[task].metrics])


def test_orders():
  found = _of(tasks.CLASSIFICATION)
  found = [column for column in found if not column.is_optional]
  assert [column.name for column in columns.averaged(found)] == [
      *('test_accuracy', 'test_loss', 'client_test_accuracy'),
      *('client_test_loss', 'train_loss'),
  ]
  assert [c.name for c in columns.by_kind(found) if c.in_table] == [
      *('test_accuracy', 'client_test_accuracy', 'test_loss', 'train_loss'),
      *('rounds', 'exchanges', 'megabytes'),
  ]
  assert [c.name for c in columns.costs()] == ['exchanges', 'megabytes']


def test_several_metrics():
  found = _of(tasks.SEGMENTATION)
  optional = [column for column in found if column.is_optional]
  assert [c.title for c in optional if c.in_table] == [
      'Validation Dice, %',
      'Client training loss',
      'Best round',
      'ε',
  ]
  assert [c.title for c in optional if not c.has_curve] == [
      'Dice, deviation over clients, %',
      'Dice, worst tenth of clients, %',
  ]
  found = [column for column in found if not column.is_optional]
  assert [c.title for c in columns.by_kind(found) if c.in_table] == [
      *('Dice, %', 'Client Dice, %', 'Mean IoU, %', 'Accuracy, %'),
      *('Loss', 'Training loss', 'Rounds', 'Exchanges', 'MB'),
  ]
  assert [c.name for c in found if not c.in_table] == [
      *('client_test_mean_iou', 'client_test_accuracy', 'client_test_loss')
  ]


def test_numbers_and_shares():
  mae, r2 = (tasks.kind(name) for name in ('mae', 'r2'))
  assert [c.title for c in columns.of([mae, r2])][:2] == ['MAE', 'R²']
  assert mae.text(0.12345) == '0.123'
  assert tasks.kind('dice').text(0.12345) == '12.3'
  assert mae.higher_is_better is False and r2.higher_is_better
  assert mae.range == (None, None) and r2.range == (None, 1)


def test_directions():
  kinds = [metric.kind for metric in tasks.METRICS.values()]
  lower = {kind.name for kind in kinds if not kind.higher_is_better}
  assert lower == {
      *('mae', 'rmse', 'mean_squared_error', 'mean_absolute_percentage_error'),
      *('mean_squared_logarithmic_error', 'log_cosh_error', 'poisson'),
      *('categorical_crossentropy', 'binary_crossentropy', 'kl_divergence'),
      *('hinge', 'squared_hinge', 'categorical_hinge'),
      *('false_positives', 'false_negatives'),
  }
  assert columns.LOSS.higher_is_better is False
