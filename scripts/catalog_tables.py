"""Writes the tables of the catalog's parts into the documentation.

Run it after a change of the catalog. A page has a table between
`<!-- catalog: NAME -->` and `<!-- end -->`, where NAME is a key of `TABLES`.
"""

from collections.abc import Callable, Iterator
import pathlib
import re
from typing import NamedTuple

from tff_bn.catalog import algorithms
from tff_bn.catalog import parts
from tff_bn.catalog import rules
from tff_bn.programs.cli import parsers

DOCS = pathlib.Path(__file__).parents[1] / 'docs'
_MARKED = re.compile(
    r'(<!-- catalog: (\w+) -->\n)(.*?)(<!-- end -->)', re.DOTALL
)


class Table(NamedTuple):
  """A table.

  Attributes:
    columns: The titles of its columns.
    rows: Yields the cells of each row.
  """

  columns: tuple[str, ...]
  rows: Callable[[], Iterator[tuple[str, ...]]]


def _rules() -> Iterator[tuple[str, ...]]:
  for name, rule in rules.RULES.items():
    yield f'`{name}`', _described(rule), _needed_clients(rule)


def _wrappers() -> Iterator[tuple[str, ...]]:
  for name, wrapper in rules.WRAPPERS.items():
    yield f'`{name}+`', _described(wrapper)


def _attacks() -> Iterator[tuple[str, ...]]:
  for name, attack in rules.ATTACKS.items():
    strength = ''
    if attack.strength is not None:
      strength = attack.strength.default_text
    yield f'`{name}`', _described(attack), strength


def _corrections() -> Iterator[tuple[str, ...]]:
  for name, correction in algorithms.CORRECTIONS.items():
    yield f'[`+{name}`](algorithms/{name}.md)', _described(correction)


def _algorithm_options() -> Iterator[tuple[str, ...]]:
  for option in algorithms.OPTIONS:
    users = ', '.join(f'`{name}`' for name in algorithms.users(option.name))
    default = option.default_text or parsers.to_text(option.default)
    yield f'`--{option.name}`', users, _with_code(default)


TABLES = {
    'corrections': Table(('name', 'what it does'), _corrections),
    'algorithm_options': Table(('option', 'of', 'default'), _algorithm_options),
    'rules': Table(('rule', 'result', 'clients'), _rules),
    'wrappers': Table(('step', 'what it does'), _wrappers),
    'attacks': Table(
        ('attack', 'what attackers send', '`--attack_strength`'), _attacks
    ),
}


def with_tables(text: str) -> str:
  """Returns a page's text with current tables."""

  def replace(match: re.Match[str]) -> str:
    start, name, _, end = match.groups()
    table = TABLES[name]
    lines = [table.columns, ['---'] * len(table.columns), *table.rows()]
    return start + ''.join(f'| {" | ".join(x)} |\n' for x in lines) + end

  return _MARKED.sub(replace, text)


def _described(part: parts.Part) -> str:
  """Returns a part's description with its flags as code."""
  return _with_code(part.description)


def _with_code(text: str) -> str:
  """Returns a text with its flags as code."""
  return re.sub(r'--\w+', r'`\g<0>`', text)


def _needed_clients(rule: rules.Rule) -> str:
  """Returns the number of clients that tolerate f attackers."""
  if not rule.has(rules.NUM_BYZANTINE.name):
    return '1'
  arguments = {
      option.argument: option.default
      for option in rule.options
      if option is not rules.NUM_BYZANTINE
  }
  built = rule.load()(num_byzantine=1, **arguments)
  needed = [built.min_clients(f) for f in range(3)]
  slope = needed[1] - needed[0]
  assert needed[2] - needed[1] == slope
  return f'{slope}f + {needed[0]}'


def main() -> None:
  """Writes the pages."""
  for path in sorted(DOCS.rglob('*.md')):
    text = path.read_text(encoding='utf-8')
    if '<!-- catalog' in text:
      path.write_text(with_tables(text), encoding='utf-8')


if __name__ == '__main__':
  main()
