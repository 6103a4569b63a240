"""Tests of the tables that scripts/catalog_tables.py writes."""

import re

import catalog_tables
import pytest


@pytest.mark.parametrize(
    'path', list(catalog_tables.DOCS.rglob('*.md')), ids=lambda path: path.stem
)
def test_page_is_up_to_date(path):
  text = path.read_text(encoding='utf-8')
  # After a change, run scripts/catalog_tables.py.
  assert catalog_tables.updated(text) == text


def test_every_table_is_shown():
  pages = ''.join(
      path.read_text(encoding='utf-8')
      for path in catalog_tables.DOCS.rglob('*.md')
  )
  shown = re.findall(r'catalog_tables.py: begin (\w+) -->', pages)
  assert sorted(shown) == sorted(catalog_tables.TABLES)


def test_all_tables_of_a_page_are_written():
  page = ''.join(
      f'a\n<!-- Written by x: begin {name} -->\nold\n<!-- end {name} -->\nb\n'
      for name in ('wrappers', 'attacks')
  )
  found = catalog_tables.updated(page)
  assert found == page.replace(
      'old', catalog_tables.table('wrappers'), 1
  ).replace('old', catalog_tables.table('attacks'))


def test_rows():
  table = catalog_tables.table('rules')
  # The numbers of clients in the rules' papers.
  for name, clients in (
      ('mean', '1'),
      ('median', '2f + 1'),
      ('centered_clipping', '2f + 1'),
      ('krum', '2f + 3'),
      ('multi_krum', '2f + 3'),
      ('bulyan', '4f + 3'),
  ):
    row = rf'^\| `{name}` +\| .* \| {re.escape(clients)} +\|$'
    assert re.search(row, table, re.M), name
  assert 'without its `--num_byzantine` largest' in table
  table = catalog_tables.table('attacks')
  assert re.search(r'^\| `foe` +\| .* \| 3 +\|$', table, re.M)
  assert re.search(r'^\| `sf` +\| .* \| – +\|$', table, re.M)
