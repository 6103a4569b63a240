"""The table of benchmarks/results/segmentation.csv for docs/segmentation.md."""

import csv
import pathlib
import re

_ROOT = pathlib.Path(__file__).parents[1]
PAGE = _ROOT / 'docs' / 'segmentation.md'
RESULTS = _ROOT / 'benchmarks/results/segmentation.csv'
_MARKED = re.compile(r'(<!-- segmentation -->\n)(.*?)(<!-- end -->)', re.S)


def with_table(text: str) -> str:
  """Returns a page's text with the current table of results."""
  return _MARKED.sub(lambda match: f'{match[1]}{_table()}{match[3]}', text)


def _table() -> str:
  with RESULTS.open(encoding='utf-8') as file:
    rows = list(csv.DictReader(file))
  cells = {
      (row['scheme'], row['client']): (
          f'{float(row["mean"]):.1f} ± {float(row["deviation"]):.1f}'
      )
      for row in rows
  }
  clients = list(dict.fromkeys(client for _, client in cells))
  lines = [
      f'| scheme | {" | ".join(clients)} |',
      f'| --- |{" ---: |" * len(clients)}',
  ]
  for scheme in dict.fromkeys(scheme for scheme, _ in cells):
    of_scheme = ' | '.join(cells[scheme, client] for client in clients)
    lines.append(f'| {scheme} | {of_scheme} |')
  return ''.join(f'{line}\n' for line in lines)
