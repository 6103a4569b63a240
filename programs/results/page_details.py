"""The part of a page with the metrics of each class, label or target."""

from collections.abc import Sequence
import pathlib
from typing import NamedTuple, Optional

from tff_bn.catalog import tasks
from tff_bn.programs.results import detailed_tables
from tff_bn.programs.results import report
from tff_bn.programs.runs import run_folder
from tff_bn.training import detailed_reports
from tff_bn.training import measures

# Pages with more lines in all tables would be slow.
_MAX_LINES = 5000
# The largest number of classes in the confusion matrix of a client.
_MAX_CLIENT_CLASSES = 30
_MERGED = (
    'If the clients have own models, the global model is merged from them.'
)


class Table(NamedTuple):
  """A table of metrics, and maybe a confusion matrix.

  `lines` does not have the titles.
  """

  caption: str
  titles: Sequence[str]
  lines: Sequence[Sequence[str]]
  matrix: Optional[detailed_tables.Matrix] = None
  is_folded: bool = True


class Section(NamedTuple):
  """The part of the page: its tables, and sentences that explain them.

  `noun` is 'class', 'label' or 'target'.
  """

  noun: str
  tables: Sequence[Table]
  notes: Sequence[str]


def section(
    runs: Sequence[report.Run], folders: Sequence[pathlib.Path], task: str
) -> Section:
  """Reads the details of runs.

  A single run has the tables of the global model and of each client. Several
  runs have a table of the global model for each name of a run, with means over
  the seeds.

  Args:
    runs: The runs.
    folders: Their folders.
    task: Their task.

  Returns:
    The part of the page, without tables if there are no details.
  """
  if len(runs) == 1:
    tables, notes = _of_run(detailed_tables.read(folders[0], task), task)
    notes.append(f'{_sentence(report.over_rounds(1, runs))}.')
  else:
    tables, notes = _of_runs(runs, folders, task)
  if not tables:
    return Section('', (), ())
  if sum(len(table.lines) for table in tables) > _MAX_LINES:
    path = detailed_tables.metrics_file(task)
    tables, notes = [], [
        f'There are more than {_MAX_LINES} lines; see {path} in the folder of'
        ' each run.'
    ]
  elif report.have_client_models(runs) is not False:
    notes.append(_MERGED)
  return Section(detailed_tables.noun(task), tables, notes)


def _of_run(
    details: Sequence[detailed_tables.Details], task: str
) -> tuple[list[Table], list[str]]:
  """Returns the tables of a single run, and notes."""
  if not details:
    return [], []
  whole, *clients = details
  titles = detailed_tables.titles(task, whole.names)
  matrix = detailed_tables.matrix(whole)
  found = [
      Table(
          _caption(_sentence(measures.GLOBAL_MODEL), whole),
          titles,
          detailed_tables.cells(whole),
          matrix,
          is_folded=False,
      )
  ]
  if task == tasks.REGRESSION and clients:
    found.append(
        Table(
            _sentence(measures.OF_CLIENT),
            ['Client', *titles],
            [
                [client.client, *line]
                for client in clients
                for line in detailed_tables.cells(client)
            ],
        )
    )
  else:
    found += [
        Table(
            _caption(f'{client.client} ({client.model} model)', client),
            titles,
            detailed_tables.cells(client),
            detailed_tables.matrix(client, _MAX_CLIENT_CLASSES),
        )
        for client in clients
    ]
  notes = [_undefined(task)]
  if whole.calibration_error is not None:
    notes.append(
        'Expected calibration error: mean distance between the confidence of'
        ' the predictions and the share of right ones, in'
        f' {detailed_reports.CALIBRATION_BINS} bins of the confidence.'
    )
  if whole.confusion and matrix is None:
    notes.append(
        'The confusion matrix is too large to be drawn; see'
        f' {run_folder.CONFUSION}.'
    )
  return found, notes


def _caption(text: str, details: detailed_tables.Details) -> str:
  """Adds what is known of a whole model to its name."""
  parts = [text]
  if details.num_examples is not None:
    number = details.num_examples
    parts.append(f'{number} example{"" if number == 1 else "s"}')
  parts.append(detailed_tables.calibration(details))
  return ', '.join(filter(None, parts))


def _of_runs(
    runs: Sequence[report.Run], folders: Sequence[pathlib.Path], task: str
) -> tuple[list[Table], list[str]]:
  """Returns a table for each name of a run, and notes."""
  groups: dict[str, list[detailed_tables.Details]] = {}
  for run, folder in zip(runs, folders, strict=True):
    found = detailed_tables.read(folder, task, only_global=True)
    groups.setdefault(run.name, []).extend(found)
  tables = [
      Table(name, *detailed_tables.means(task, details))
      for name, details in groups.items()
      if details
  ]
  over = ''
  if len({run.seed for run in runs}) > 1:
    over = '; mean over the seeds ± standard deviation'
  rounds = report.over_rounds(1, runs)
  note = f'{_sentence(measures.GLOBAL_MODEL)}; {rounds}{over}.'
  return tables, [note, _undefined(task)]


def _undefined(task: str) -> str:
  example = (
      f'the precision of a {detailed_tables.noun(task)} without predictions'
  )
  if task == tasks.REGRESSION:
    example = 'R² of a single example'
  return f'–: undefined, such as {example}.'


def _sentence(text: str) -> str:
  return f'{text[:1].upper()}{text[1:]}'
