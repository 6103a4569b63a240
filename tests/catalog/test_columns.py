"""Tests for the columns of results."""

from tff_bn.catalog import columns


def test_orders():
  assert [column.name for column in columns.averaged()] == [
      *('test_accuracy', 'test_loss', 'client_test_accuracy'),
      *('client_test_loss', 'train_loss'),
  ]
  assert [c.name for c in columns.by_kind() if c.in_table] == [
      *('test_accuracy', 'client_test_accuracy', 'test_loss', 'train_loss'),
      *('rounds', 'exchanges', 'megabytes'),
  ]
  assert [c.name for c in columns.costs()] == ['exchanges', 'megabytes']
