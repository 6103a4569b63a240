"""Writes the pictures and tables of docs/algorithms/, and docs/segmentation.md.

Run it after a change of what an algorithm sends, and of the results on digits
(`digits_tables`) or discs (`segmentation_tables`). The pictures show
`algorithm_pictures.PICTURES`. The numbers are computed from the algorithms'
computations by `tff_bn.analysis`.
"""

from collections.abc import Iterator, Sequence
import pathlib
import re
import shlex

import algorithm_pictures
import digits_tables
import segmentation_tables

from tff_bn import analysis
from tff_bn.processes import phased_process
from tff_bn.processes import short_rounds
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import run_building

PAGES = pathlib.Path(__file__).parents[1] / 'docs' / 'algorithms'
_KILOBYTE = 2**10
# What a page has around its table: the flags of each row.
_MARKED = re.compile(r'(<!-- traffic:\n(.*?)-->\n)(.*?)(<!-- end -->)', re.S)
_HEADER = (
    '| flags | rounds | exchanges a round | server to all clients, KB'
    ' | each client to server, KB |\n'
    '| --- | --- | ---: | ---: | ---: |\n'
)


def main() -> None:
  """Writes the files."""
  for name, steps in algorithm_pictures.PICTURES.items():
    picture_path(name).write_text(
        algorithm_pictures.draw(steps), encoding='utf-8'
    )
  for path in sorted(PAGES.glob('*.md')):
    text = path.read_text(encoding='utf-8')
    text = digits_tables.with_tables(with_traffic(text))
    path.write_text(text, encoding='utf-8')
  page = segmentation_tables.PAGE
  text = with_traffic(page.read_text(encoding='utf-8'))
  page.write_text(segmentation_tables.with_table(text), encoding='utf-8')


def picture_path(name: str) -> pathlib.Path:
  """Returns the path of a picture."""
  return PAGES / 'images' / f'{name}.svg'


def with_traffic(text: str) -> str:
  """Returns a page's text with current tables of traffic."""

  def replace(match: re.Match[str]) -> str:
    start, commands, _, end = match.groups()
    rows = ''.join(
        f'| {" | ".join(row)} |\n'
        for command in commands.strip().splitlines()
        for row in _rows(shlex.split(command))
    )
    return f'{start}{_HEADER}{rows}{end}'

  return _MARKED.sub(replace, text)


def _rows(flags: Sequence[str]) -> Iterator[tuple[str, ...]]:
  """Yields the rows of the table for a run of `tff-bn-train`."""
  parsed = command_line.parse(train.define_flags, [*flags, '--rounds=100'])
  settings_lib.check(parsed)
  settings = settings_lib.resolve(parsed, parsed.algorithm, parsed.seed)
  data = run_building.split_dataset(settings, settings.load())
  process = run_building.build_process(
      settings, run_building.build_model(settings, data), data
  )
  shown = ' '.join(f'`{flag}`' for flag in flags)
  for rounds, computation in _computations(process.next):
    traffic = analysis.computation_traffic(computation)
    yield (
        shown,
        rounds,
        str(traffic.exchanges),
        f'{traffic.download_bytes / _KILOBYTE:.1f}',
        f'{traffic.upload_bytes / _KILOBYTE:.1f}',
    )


def _computations(next_computation) -> Iterator[tuple[str, object]]:
  """Yields the computations of rounds that send different things."""
  if isinstance(next_computation, phased_process.PhasedComputation):
    names = ('until the statistics are fixed', 'later')
    if next_computation.phases[-1].num_rounds is not None:
      names = ('synchronized', 'between')
    for name, phase in zip(names, next_computation.phases, strict=True):
      yield name, phase.computation
  elif isinstance(next_computation, short_rounds.ShortRounds):
    yield 'with derived control variates', next_computation.short
    yield 'other', next_computation.full
  else:
    yield 'all', next_computation


if __name__ == '__main__':
  main()
