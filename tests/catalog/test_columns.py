"""Tests for the columns of results."""

import catalog_tables
import pytest

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


@pytest.mark.parametrize(
    'path', list(catalog_tables.DOCS.rglob('*.md')), ids=lambda path: path.stem
)
def test_pages_have_the_tables(path):
  text = path.read_text(encoding='utf-8')
  assert catalog_tables.updated(text) == text


def test_the_table_of_columns_is_in_the_docs():
  page = (catalog_tables.DOCS / 'programs.md').read_text(encoding='utf-8')
  assert catalog_tables.tables()['columns'] in page
