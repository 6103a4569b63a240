"""Tests of the tables that scripts/catalog_tables.py writes."""

import re

import catalog_tables
import pytest

_PAGES = {
    path: path.read_text(encoding='utf-8')
    for path in sorted(catalog_tables.DOCS.rglob('*.md'))
}


@pytest.mark.parametrize(
    'path',
    [path for path, text in _PAGES.items() if '<!-- catalog' in text],
    ids=lambda path: path.stem,
)
def test_page_is_up_to_date(path):
  # After a change, run scripts/catalog_tables.py.
  assert catalog_tables.with_tables(_PAGES[path]) == _PAGES[path]


def test_every_table_is_shown():
  shown = re.findall(r'<!-- catalog: (\w+) -->', ''.join(_PAGES.values()))
  assert sorted(shown) == sorted(catalog_tables.TABLES)


def test_rows():
  text = catalog_tables.with_tables(
      'a\n<!-- catalog: rules -->\nold\n<!-- end -->\n'
      '<!-- catalog: attacks -->\n<!-- end -->\nb\n'
  )
  assert 'old' not in text
  assert text.startswith('a\n<!-- catalog: rules -->\n| rule | result |')
  assert text.endswith('<!-- end -->\nb\n')
  # The numbers of clients in the rules' papers.
  for name, clients in (
      ('mean', '1'),
      ('median', '2f + 1'),
      ('centered_clipping', '2f + 1'),
      ('krum', '2f + 3'),
      ('multi_krum', '2f + 3'),
      ('bulyan', '4f + 3'),
  ):
    assert re.search(
        rf'^\| `{name}` \| .* \| {re.escape(clients)} \|$', text, re.M
    )
  assert 'without its `--num_byzantine` largest' in text
  assert re.search(r'^\| `foe` \| .* \| 3 \|$', text, re.M)
  assert re.search(r'^\| `sf` \| .* \|  \|$', text, re.M)
