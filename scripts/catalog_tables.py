"""Writes the tables of the catalog into the pages of docs/.

Run it after a change of `tff_bn/catalog`.
"""

import pathlib
import re

from tff_bn.catalog import columns
from tff_bn.programs.results import tables as tables_lib
from tff_bn.training import measures

DOCS = pathlib.Path(__file__).parents[1] / 'docs'
_PART = re.compile('(<!-- .*: begin (.*) -->\n).*?(<!-- end .* -->)', re.DOTALL)


def tables() -> dict[str, str]:
  """Returns the tables by their names in the pages."""
  cells = [['column', 'title in the table', 'value', 'meaning']]
  for column in columns.COLUMNS:
    cells.append(
        [
            f'`{column.name}`',
            column.title if column.in_table else '–',
            'mean' if column.kind.is_averaged else 'last round',
            column.explanation or measures.name(column.name, None),
        ]
    )
  return {'columns': tables_lib.markdown(cells, num_labels=4)}


def updated(page: str) -> str:
  """Returns the text of a page with the tables that it names."""
  found = tables()
  return _PART.sub(lambda m: f'{m[1]}{found[m[2]]}\n{m[3]}', page)


def main() -> None:
  """Writes the tables into all pages."""
  for path in DOCS.rglob('*.md'):
    text = path.read_text(encoding='utf-8')
    if (new := updated(text)) != text:
      path.write_text(new, encoding='utf-8')


if __name__ == '__main__':
  main()
