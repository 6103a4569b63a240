"""`report.html`: a page about a run or a comparison that needs no network."""

import base64
from collections.abc import Mapping, Sequence
import csv
import dataclasses
import functools
import math
import os
import pathlib
import re
import shlex
from typing import TYPE_CHECKING, Any, Optional
import urllib.parse

import jinja2
import numpy as np
import pandas as pd

from tff_bn.catalog import columns
from tff_bn.catalog import tasks
from tff_bn.common import files
from tff_bn.imports import versions
from tff_bn.programs.results import charts
from tff_bn.programs.results import curve_points
from tff_bn.programs.results import detailed_tables
from tff_bn.programs.results import page_details
from tff_bn.programs.results import report
from tff_bn.programs.results import tables
from tff_bn.programs.runs import run_folder
from tff_bn.programs.runs import run_timing
from tff_bn.training import measures

if TYPE_CHECKING:
  from tff_bn.data import federated

_TEMPLATES = pathlib.Path(__file__).parents[1] / 'templates'
_FIGURES = re.compile(
    '<!-- figures: begin -->.*<!-- figures: end -->', re.DOTALL
)
# Flags that tell what was run, with their names in the list.
_FACTS = {
    'experiment': 'Experiment',
    'algorithm': 'Algorithm',
    'algorithms': 'Algorithms',
    'sweep': 'Sweep',
    'model': 'Model',
    'initial_model': 'Initial model',
    'frozen_layers': 'Frozen layers',
    'local_layers': 'Local layers',
    'head_layers': 'Layers of the head',
    'normalization': 'Normalization',
    'loss': 'Loss',
    'class_weight': 'Weights of the classes',
    'rounds': 'Rounds',
    'local_steps': 'Local steps',
    'local_epochs': 'Local epochs',
    'client_learning_rate': "Clients' learning rate",
    'batch_size': 'Batch size',
    'seed': 'Seed',
    'seeds': 'Seeds',
}
# More lines can't be told apart, and would make the page slow.
_MAX_LINES = 100
_VERSIONS = ('tff_bn', 'tensorflow-federated', 'tensorflow', 'keras', 'python')
# Files of a run, with their names in links.
_FILES = {
    run_folder.METRICS: 'metrics',
    run_folder.FLAGS_FILE: 'flags',
}


@dataclasses.dataclass(frozen=True)
class Page:
  """What a page is about.

  Attributes:
    title: Its title.
    program: The program that trained.
    flags: The flags that define what it trained, by name.
    runs: The runs.
    folders: Their folders.
    num_averaged: The number of evaluated rounds over which tables average.
    varied: The names of the labels that differ between runs.
    data: The data of the first run, whose labels are shown.
    data_title: A description of the data.
    held_out: The table of clients that took no part in training, if there are
      any: its titles and its lines.
    held_out_notes: Sentences that explain this table.
  """

  title: str
  program: str
  flags: Mapping[str, str]
  runs: Sequence[report.Run]
  folders: Sequence[pathlib.Path]
  num_averaged: int
  varied: Sequence[str]
  data: 'federated.FederatedData'
  data_title: str
  held_out: Sequence[Sequence[str]] = ()
  held_out_notes: Sequence[str] = ()


def name_algorithms(runs: Sequence[report.Run]) -> str:
  """Returns the algorithms of runs, or what names the runs without them."""
  return ', '.join(
      dict.fromkeys(run.labels.get(report.ALGORITHM, run.name) for run in runs)
  )


def write(folder: pathlib.Path, page: Page) -> None:
  """Writes `report.html` into the folder of a run or a comparison."""
  results = report.results(page.runs, page.num_averaged)
  run_cells, run_links = _runs(folder, page, results)
  shown = report.columns_of(page.runs)
  kind = report.main_kind(shown)
  whole, page = page, _with_best_lines(page, results, shown[0])
  axes = _axes(page)
  clients = _clients(page, kind)
  text = (
      _environment()
      .get_template('report.html')
      .render(
          page=page,
          facts=_facts(page),
          cells=report.table_cells(results, page.varied),
          num_labels=len(page.varied),
          notes=report.notes(results, page.num_averaged, whole.runs),
          over_rounds=f'{report.over_rounds(page.num_averaged, whole.runs)}.',
          hidden_lines=_hidden_lines(whole, page, shown[0]),
          over_one_round=report.over_rounds(1, page.runs),
          band=_sentence(curve_points.band_note(page.runs)),
          num_seeds=len({run.seed for run in page.runs}),
          colors=charts.COLORS,
          axes=axes,
          filters=_filters(page.runs, page.varied),
          columns=[
              dict(
                  name=column.name,
                  title=curve_points.title(column, page.runs),
              )
              for column in curve_points.columns_of(page.runs)
          ],
          data=_data(page, axes, clients, kind),
          measured=report.measured_words(shown),
          metric=kind,
          task=tasks.TASKS[page.data.task],
          of_client=measures.OF_CLIENT,
          max_clients=measures.MAX_CLIENTS,
          max_table_clients=measures.MAX_TABLE_CLIENTS,
          max_label_clients=charts.MAX_CLIENTS,
          client_cells=_client_cells(
              clients, list(dict.fromkeys(run.name for run in page.runs)), kind
          ),
          details=page_details.section(page.runs, page.folders, page.data.task),
          hidden_clients=len(page.data.client_ids) > charts.MAX_CLIENTS,
          figures=_figures(folder),
          run_cells=run_cells,
          run_links=run_links,
          command=_command(page),
          library=_library(),
      )
  )
  files.replace(folder / run_folder.REPORT, text)


def _with_best_lines(
    page: Page, results: pd.DataFrame, column: columns.Column
) -> Page:
  """Returns the page with the runs of the lines that its charts show.

  Of more than `_MAX_LINES` lines, they are those with the best mean of a column
  over the seeds, or the first ones if it is unknown which value is better.
  """
  means = report.means(results, page.varied, [column.name])[column.name]
  if len(means) <= _MAX_LINES:
    return page
  if column.kind.higher_is_better is not None:
    means = means.sort_values(
        ascending=not column.kind.higher_is_better,
        kind='stable',
        na_position='last',
    )
  best = set(means.index[:_MAX_LINES])
  chosen = [
      (run, folder)
      for run, folder in zip(page.runs, page.folders, strict=True)
      if _key(run, page.varied) in best
  ]
  runs, folders = zip(*chosen)
  return dataclasses.replace(page, runs=runs, folders=folders)


def _key(run: report.Run, varied: Sequence[str]) -> Any:
  """Returns the index of a run in `report.means`."""
  labels = tuple(run.labels[name] for name in varied)
  return labels if len(labels) > 1 else labels[0]


def _hidden_lines(whole: Page, page: Page, column: columns.Column) -> str:
  """Says which lines the charts show; empty if they show all."""
  num_lines, num_shown = (
      len({run.name for run in part.runs}) for part in (whole, page)
  )
  if num_shown == num_lines:
    return ''
  which = 'first lines'
  if column.kind.higher_is_better is not None:
    which = f'lines with the best “{column.title}”'
  return (
      f'There are {num_lines} lines. The charts, and the tables of clients and'
      f' of each {detailed_tables.noun(page.data.task)}, show the {num_shown}'
      f' {which}. The tables “Results” and “Runs” have all lines.'
  )


def _axes(page: Page) -> list[charts.Axis]:
  """Returns the horizontal axes among which the reader chooses."""
  has_costs = {
      axis.name: bool(curve_points.totals(page.runs, axis.name))
      for axis in charts.COSTS
  }
  has_costs[charts.SECONDS.name] = bool(seconds_per_round(page.folders))
  return [axis for axis in charts.AXES if has_costs.get(axis.name, True)]


def _data(
    page: Page,
    axes: Sequence[charts.Axis],
    clients: pd.DataFrame,
    kind: columns.Kind,
) -> dict[str, Any]:
  """Returns the charts, their data and the lines, as JSON expresses them.

  `kind` is the kind of the main metric, which `clients` has.
  """
  groups = curve_points.by_name(page.runs)
  folders: dict[str, list[pathlib.Path]] = {name: [] for name in groups}
  for run, folder in zip(page.runs, page.folders, strict=True):
    folders[run.name].append(folder)
  seconds = {name: seconds_per_round(found) for name, found in folders.items()}
  styles = charts.styles(groups)
  drawn: dict[str, Any] = {
      column.name: dict(
          data='points',
          by_axis={
              axis.name: charts.curves(page.runs, column, axis, styles)
              for axis in axes
          },
      )
      for column in curve_points.columns_of(page.runs)
  }
  drawn['clients'] = dict(
      data='clients', spec=charts.client_metrics(styles, kind)
  )
  client_ids = page.data.client_ids
  drawn['labels'] = dict(
      data='labels',
      spec=charts.labels(
          len(client_ids),
          len(charts.column_names(page.data)),
          tasks.TASKS[page.data.task],
      ),
  )
  return dict(
      series=[
          dict(name=name, labels=dict(runs[0].labels), **styles[name])
          for name, runs in groups.items()
      ],
      data=dict(
          points=curve_points.values(groups, seconds),
          clients=clients.to_dict('records'),
          labels=charts.label_values(page.data),
      ),
      charts=drawn,
      configs={scheme: charts.config(scheme) for scheme in ('light', 'dark')},
  )


def refresh_figures(folder: pathlib.Path) -> None:
  """Shows the plots of new analyses in the page of a folder, if it has one."""
  path = folder / run_folder.REPORT
  if path.exists():
    text = path.read_text(encoding='utf-8')
    files.replace(path, _FIGURES.sub(lambda _: _figures(folder), text))


@functools.cache
def _environment() -> jinja2.Environment:
  return jinja2.Environment(
      loader=jinja2.FileSystemLoader(_TEMPLATES),
      autoescape=True,
      undefined=jinja2.StrictUndefined,
      trim_blocks=True,
      lstrip_blocks=True,
  )


@functools.cache
def _library() -> str:
  """Returns the JavaScript of Vega-Lite, which draws the plots."""
  # Imported late: it is large.
  import vl_convert

  # The argument is optional, which the package's type stub misses.
  return vl_convert.javascript_bundle()  # type: ignore[call-arg]


def seconds_per_round(folders: Sequence[pathlib.Path]) -> Optional[float]:
  """Returns the mean time of a round in runs; None if no time is known."""
  timings = [run_timing.read(folder) for folder in folders]
  known = [t.seconds / t.rounds for t in timings if t is not None and t.rounds]
  return float(np.mean(known)) if known else None


def _seconds_per_client(folder: pathlib.Path) -> Optional[float]:
  """Returns the mean time of a client in a round; None if it is unknown."""
  path = folder / run_folder.CLIENT_SECONDS
  if not path.exists():
    return None
  found = pd.read_csv(path)
  return float(np.average(found['seconds_per_round'], weights=found['rounds']))


def _filters(
    runs: Sequence[report.Run], varied: Sequence[str]
) -> dict[str, list[str]]:
  """Returns the values of each label, if several labels vary."""
  values = {
      name: list(dict.fromkeys(run.labels[name] for run in runs))
      for name in varied
  }
  if len(values) < 2:
    return {}
  return {name: texts for name, texts in values.items() if len(texts) > 1}


def client_numbers(
    folder: pathlib.Path, metric: str, round_num: Optional[int] = None
) -> list[tuple[str, float]]:
  """Reads the ids and a metric of a run's clients, if they are there.

  They are of the last round, or of the given one.

  Raises:
    ValueError: If the file is damaged. A run that failed has no checksum of it.
  """
  path = folder / run_folder.CLIENT_METRICS
  if not path.exists():
    return []
  try:
    with path.open(encoding='utf-8', newline='') as file:
      rows = list(csv.DictReader(file))
    if round_num is None:
      round_num = max((int(row['round']) for row in rows), default=0)
    return [
        (row['client'], float(row[metric]))
        for row in rows
        if int(row['round']) == round_num
    ]
  except (ValueError, KeyError, TypeError, csv.Error) as error:
    raise ValueError(
        f'{path} is damaged. Remove it; the command of the run writes it again.'
    ) from error


def _clients(page: Page, kind: columns.Kind) -> pd.DataFrame:
  """Returns a row for each run and client with the client's main metric.

  Clients for which it is undefined are left out.
  """
  return pd.DataFrame(
      [
          (run.name, run.seed, client, number)
          for run, folder in zip(page.runs, page.folders, strict=True)
          for client, number in client_numbers(
              folder, kind.name, run.best_round
          )
          if not math.isnan(number)
      ],
      columns=['name', 'seed', 'client', kind.name],
  )


def _client_cells(
    clients: pd.DataFrame, names: Sequence[str], kind: columns.Kind
) -> list[list[str]]:
  """Returns the table of the main metric of each client.

  There are titles, and a line for each client with a column for each name of a
  run: the mean and the standard deviation over the seeds. The table is empty
  without clients, and with more than `MAX_TABLE_CLIENTS`.
  """
  if not 0 < clients['client'].nunique() <= measures.MAX_TABLE_CLIENTS:
    return []
  lines = clients.pivot_table(
      index='client',
      columns='name',
      values=kind.name,
      aggfunc=lambda numbers: tables.mean_and_deviation(
          kind.factor * numbers, kind.digits
      ),
      sort=False,
      fill_value='–',
  ).reindex(columns=names, fill_value='–')
  return [
      ['Client', *(f'{name}{kind.unit}' for name in names)],
      *lines.reset_index().to_numpy().tolist(),
  ]


def _sentence(text: str) -> str:
  return f'{text[:1].upper()}{text[1:]}.' if text else ''


def _facts(page: Page) -> list[tuple[str, str]]:
  """Returns the lines of the list of what was run."""
  facts = [('Program', page.program), ('Data', page.data_title)]
  if page.data.task != tasks.CLASSIFICATION:
    facts.append(('Task', page.data.task))
  if page.data.class_names:
    facts.append(('Classes', ', '.join(page.data.class_names)))
  facts += [
      (title, page.flags[name].replace(',', ', ').replace('\n', '; '))
      for name, title in _FACTS.items()
      if name in page.flags
  ]
  known = versions.versions()
  facts.append(
      ('Versions', ', '.join(f'{name} {known[name]}' for name in _VERSIONS))
  )
  return facts


def _command(page: Page) -> str:
  """Returns the command that repeats what the page is about."""
  arguments = [
      shlex.quote(f'--{name}={line}')
      for name, text in page.flags.items()
      for line in text.split('\n')
  ]
  return ' \\\n    '.join([page.program, *arguments, '--output_dir=NEW_FOLDER'])


def _runs(
    folder: pathlib.Path, page: Page, results: pd.DataFrame
) -> tuple[list[list[str]], list[list[tuple[str, str]]]]:
  """Returns the table of the single runs, and the links of each of them."""
  names = [*page.varied, 'seed']
  cells = report.table_cells(results, names)
  cells[0][len(page.varied)] = 'Seed'
  cells[0] += ['Seconds per round', 'Seconds per client']
  all_links = []
  for row, run in zip(cells[1:], page.folders, strict=True):
    seconds = seconds_per_round([run])
    of_client = _seconds_per_client(run)
    row += [
        '–' if number is None else f'{number:.3g}'
        for number in (seconds, of_client)
    ]
    links = [('folder', _link(folder, run, '.'))]
    model = run_folder.models_folder(run) / run_folder.MODEL_FILE
    files_of_run = {**_FILES, str(model.relative_to(run)): 'model'}
    links += [
        (title, _link(folder, run, name))
        for name, title in files_of_run.items()
        if (run / name).exists()
    ]
    all_links.append(links)
  return cells, all_links


def _link(folder: pathlib.Path, run: pathlib.Path, name: str) -> str:
  relative = pathlib.PurePath(os.path.relpath(run, folder), name).as_posix()
  # A name with a colon would look like a protocol.
  return urllib.parse.quote(f'./{relative}')


def _figures(folder: pathlib.Path) -> str:
  """Returns the part of the page with the plots of analyses."""
  plot_folder = folder / run_folder.PLOTS
  groups: list[dict[str, Any]] = []
  if (folder / run_folder.EXPERIMENT_MARKDOWN).exists():
    groups.append(
        _group(
            folder,
            "The paper's experiment",
            [plot_folder / 'experiment.png'],
            [folder / run_folder.EXPERIMENT_MARKDOWN],
        )
    )
  sources = folder / run_folder.SOURCES_MARKDOWN
  if sources.exists():
    groups.append(
        _group(
            folder,
            "Each client's model on each source",
            [plot_folder / f'{sources.stem}.png'],
            [sources, folder / run_folder.SOURCES_CSV],
        )
    )
  for name, drawings in run_folder.RUN_ANALYSES.items():
    table = folder / f'{name}.md'
    if table.exists():
      images = [plot_folder / f'{drawing}.png' for drawing in drawings]
      groups.append(_group(folder, f'Analysis: {name}', images, [table]))
  for path in sorted((folder / run_folder.ANALYSES).glob('*/')):
    groups.append(
        _group(
            folder,
            f'Analysis: {path.name}',
            sorted((path / run_folder.PLOTS).glob('*.png')),
            sorted(path.glob('*.md')),
        )
    )
  template = _environment().get_template('report_figures.html')
  return template.render(groups=groups).strip()


def _group(
    folder: pathlib.Path,
    title: str,
    images: Sequence[pathlib.Path],
    tables: Sequence[pathlib.Path],
) -> dict[str, Any]:
  """Describes a heading with images and links to tables."""
  return {
      'title': title,
      'images': [
          (path.stem, base64.b64encode(path.read_bytes()).decode('ascii'))
          for path in images
          if path.exists()
      ],
      'links': [_link(folder, path.parent, path.name) for path in tables],
  }
