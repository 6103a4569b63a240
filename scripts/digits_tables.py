"""Tables of benchmarks/results/digits.csv for pages of the documentation."""

from collections.abc import Sequence
import csv
import pathlib
import re

RESULTS = pathlib.Path(__file__).parents[1] / 'benchmarks/results/digits.csv'
# What a page has around its table: the schemes of the rows, a line each.
_MARKED = re.compile(r'(<!-- digits:\n(.*?)-->\n)(.*?)(<!-- end -->)', re.S)
# For comparison, the first rows of every table.
_REFERENCES = ('Centralized', 'FedAvg')
_ACCURACY = 'test_accuracy'
# The data and the columns of the CSV file that a table shows.
COLUMNS = {
    'one class': ('one class', _ACCURACY),
    'two classes': ('two classes', _ACCURACY),
    'Dirichlet 0.1': ('Dirichlet 0.1', _ACCURACY),
    'Dirichlet 0.1, own data': ('Dirichlet 0.1', f'client_{_ACCURACY}'),
    'Dirichlet 1': ('Dirichlet 1', _ACCURACY),
    'feature shift': ('feature shift', _ACCURACY),
    'feature shift, own domain': ('feature shift', f'client_{_ACCURACY}'),
}
_STEPS = ('1 step', '5 steps')
_CAPTION = (
    'Ten clients of [digits](../../benchmarks/results/digits.md), the same'
    ' learning rate for\nall; test accuracy in % with one / five local steps,'
    ' mean of three seeds:\n\n'
)


def with_tables(text: str) -> str:
  """Returns a page's text with current tables of results."""

  def replace(match: re.Match[str]) -> str:
    start, schemes, _, end = match.groups()
    return f'{start}{_CAPTION}{_table(schemes.splitlines())}{end}'

  return _MARKED.sub(replace, text)


def _table(schemes: Sequence[str]) -> str:
  with RESULTS.open(encoding='utf-8') as file:
    means = {
        (row['scheme'], row['data'], row['steps'], row['column']): row['mean']
        for row in csv.DictReader(file)
    }
  lines = [
      f'| scheme | {" | ".join(COLUMNS)} |',
      f'| --- |{" ---: |" * len(COLUMNS)}',
  ]
  for scheme in dict.fromkeys((*_REFERENCES, *schemes)):
    cells = [
        ' / '.join(
            f'{float(means[scheme, data, steps, column]):.1f}'
            for steps in _STEPS
        )
        for data, column in COLUMNS.values()
    ]
    lines.append(f'| {scheme} | {" | ".join(cells)} |')
  return ''.join(f'{line}\n' for line in lines)
