"""Writes the tables of the catalog into the pages of docs/.

Run it after a change of `tff_bn/catalog`. A page names a table of `TABLES` in
comments around it, `begin NAME` and `end NAME`.
"""

from collections.abc import Callable
import pathlib
import re

from tff_bn.catalog import algorithms
from tff_bn.catalog import columns
from tff_bn.catalog import datasets
from tff_bn.catalog import models
from tff_bn.catalog import parts
from tff_bn.catalog import rules
from tff_bn.catalog import tasks
from tff_bn.data import splits
from tff_bn.programs.cli import parsers
from tff_bn.programs.results import tables as tables_lib
from tff_bn.training import measures

DOCS = pathlib.Path(__file__).parents[1] / 'docs'
_PART = re.compile(
    r'(<!-- [^\n]*: begin (\w+) -->\n).*?(<!-- end \2 -->)', re.DOTALL
)

# The cells of each row; the first row has the titles.
Cells = list[list[str]]


def _columns() -> Cells:
  cells = [['column', 'title in the table', 'value', 'meaning']]
  for column in columns.of([tasks.kind('accuracy')]):
    cells.append(
        [
            f'`{column.name}`',
            column.title if column.in_table else '–',
            'mean' if column.kind.is_averaged else 'of all rounds',
            column.explanation or measures.name(column.name, None),
        ]
    )
  return cells


def _rules() -> Cells:
  return [['rule', 'result', 'clients']] + [
      [f'`{name}`', _described(rule), _needed_clients(rule)]
      for name, rule in rules.RULES.items()
  ]


def _wrappers() -> Cells:
  return [['step', 'what it does']] + [
      [f'`{name}+`', _described(wrapper)]
      for name, wrapper in rules.WRAPPERS.items()
  ]


def _attacks() -> Cells:
  cells = [['attack', 'what attackers send', '`--attack_strength`']]
  for name, attack in rules.ATTACKS.items():
    strength = attack.strength.explain_default() if attack.strength else '–'
    cells.append([f'`{name}`', _described(attack), strength])
  return cells


def _datasets() -> Cells:
  cells = [['`--dataset`', 'data']]
  for name, source in datasets.DATASETS.items():
    cells.append([f'`{name}`', _described(source)])
  for kind in datasets.KINDS.values():
    other = f' or {kind.other_form}' if kind.other_form else ''
    cells.append([f'`{kind.prefix}{kind.form}`{other}', _described(kind)])
  return cells


def _splits() -> Cells:
  return [['`--split`', 'clients', 'flags']] + [
      [f'`{name}`', _described(split), _flags(split)]
      for name, split in splits.SPLITS.items()
  ]


def _models() -> Cells:
  cells = [['`--model`', 'layers', 'samples', 'output']]
  for name, model in models.MODELS.items():
    cells.append(
        [
            f'`{name}`',
            _described(model),
            model.describe_samples(),
            model.outputs,
        ]
    )
  return cells


def _tasks() -> Cells:
  cells = [
      ['`--task`', 'labels and output', '`--loss` by default', '`--metrics`']
  ]
  for name, task in tasks.TASKS.items():
    metrics = ', '.join(f'`{metric}`' for metric in task.metrics)
    cells.append([f'`{name}`', task.description, f'`{task.loss}`', metrics])
  return cells


def _losses() -> Cells:
  return [['`--loss`', 'description', 'tasks', 'also']] + [
      [f'`{name}`', _described(loss), ', '.join(loss.tasks), _aliases(loss)]
      for name, loss in tasks.LOSSES.items()
  ]


def _metrics() -> Cells:
  cells = [['`--metrics`', 'description', 'better', 'tasks', 'also']]
  for name, metric in tasks.METRICS.items():
    better = 'higher' if tasks.kind(name).higher_is_better else 'lower'
    for_tasks = ', '.join(metric.tasks)
    cells.append(
        [
            f'`{name}`',
            _described(metric),
            better,
            for_tasks,
            _aliases(metric),
        ]
    )
  return cells


def _aliases(part: parts.Part) -> str:
  return ', '.join(f'`{alias}`' for alias in part.aliases)


def _normalizations() -> Cells:
  cells = [
      ['`--normalization`', 'what it does', 'sent besides kernels and biases']
  ]
  for entry in models.NORMALIZATIONS.values():
    cells.append([f'`{entry.name}`', _described(entry), entry.variables])
  group = models.GROUP_NORMALIZATION
  cells.append([f'`{group.name}`', _described(group), group.variables])
  return cells


def _algorithms() -> Cells:
  return [['name', 'what it does']] + [
      [_linked(name, name), _described(algorithm)]
      for name, algorithm in algorithms.ALGORITHMS.items()
  ]


def _corrections() -> Cells:
  return [['name', 'what it does']] + [
      [_linked(f'+{name}', name), _described(correction)]
      for name, correction in algorithms.CORRECTIONS.items()
  ]


def _linked(text: str, name: str) -> str:
  """Returns code that links to the page of an algorithm or its family."""
  words = name.split('_')
  for length in range(len(words), 0, -1):
    page = f'algorithms/{"_".join(words[:length])}.md'
    if (DOCS / page).exists():
      return f'[`{text}`]({page})'
  return f'`{text}`'


def _algorithm_options() -> Cells:
  cells = [['option', 'of', 'default']]
  for option in algorithms.OPTIONS:
    users = ', '.join(f'`{name}`' for name in algorithms.users(option.name))
    default = option.default_text or parsers.to_text(option.default)
    cells.append([f'`--{option.name}`', users, _with_code(default)])
  return cells


TABLES: dict[str, Callable[[], Cells]] = {
    'algorithms': _algorithms,
    'corrections': _corrections,
    'algorithm_options': _algorithm_options,
    'datasets': _datasets,
    'splits': _splits,
    'models': _models,
    'normalizations': _normalizations,
    'columns': _columns,
    'tasks': _tasks,
    'losses': _losses,
    'metrics': _metrics,
    'rules': _rules,
    'wrappers': _wrappers,
    'attacks': _attacks,
}


def _described(part: parts.Part) -> str:
  """Returns a part's description with its flags as code."""
  return _with_code(part.description)


def _with_code(text: str) -> str:
  """Returns a text with its flags as code."""
  return re.sub(r'--\w+(=\w+)?', r'`\g<0>`', text)


def _flags(part: parts.Part) -> str:
  """Returns the flags of a part's options with their defaults."""
  return ', '.join(
      f'`--{option.name}`'
      + (f' ({option.default})' if option.default is not None else '')
      for option in part.options
  )


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


def table(name: str) -> str:
  """Returns a table as Markdown."""
  cells = TABLES[name]()
  return tables_lib.markdown(cells, num_labels=len(cells[0]))


def updated(page: str) -> str:
  """Returns the text of a page with the tables that it names."""
  return _PART.sub(lambda m: f'{m[1]}{table(m[2])}\n{m[3]}', page)


def main() -> None:
  """Writes the tables into all pages."""
  for path in DOCS.rglob('*.md'):
    text = path.read_text(encoding='utf-8')
    if (new := updated(text)) != text:
      path.write_text(new, encoding='utf-8')


if __name__ == '__main__':
  main()
