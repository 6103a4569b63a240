"""Shows the finished runs of an experiment in the paper's form."""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import csv
import io
import os
import pathlib
from typing import Any

from tff_bn.common import files
from tff_bn.common import progress
from tff_bn.papers import analyze
from tff_bn.papers import figures
from tff_bn.papers.experiments import agreement
from tff_bn.papers.experiments import experiment_figures
from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_numbers
from tff_bn.papers.experiments import experiment_plan
from tff_bn.papers.experiments import paper_form
from tff_bn.papers.run_analyses import analysis_programs
from tff_bn.programs import evaluate
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import comparison
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.results import html_report
from tff_bn.programs.results import report
from tff_bn.programs.runs import run_folder
from tff_bn.programs.testing import evaluation_file
from tff_bn.training import finished as finished_lib
from tff_bn.training import measures

_PLOT = 'experiment'
# The file with the results of clients that took no part in training.
_HELD_OUT = 'held_out'
_Runs = Sequence[tuple[comparison.Run, pathlib.Path]]


def write(plan: experiment_plan.Plan, folder: pathlib.Path) -> None:
  """Writes and prints the result of an experiment, and runs its analyses.

  Args:
    plan: The experiment and its runs, finished.
    folder: The comparison's folder, claimed.
  """
  experiment = plan.experiment
  finished = []
  if plan.comparison is not None:
    finished = [
        (run, folder / run_folder.RUNS / run.folder)
        for run in plan.comparison.runs
        if run_folder.is_complete(
            folder / run_folder.RUNS / run.folder, run.settings.to_flags()
        )
    ]
  lines = _heading(experiment, plan.overruled)
  if experiment.shown is not None:
    lines += _show(experiment, finished, plan.flags.average_last, folder)
  else:
    lines += ['', *(f'- {text}' for text in agreement.findings(experiment))]
  for number, analysis in enumerate(experiment.analyses):
    if analysis.runs is not None and not finished:
      lines += ['', f'Analysis {analysis.name}: no run is finished.']
      continue
    target = analysis_folder(experiment.analyses, number)
    progress.say(f'Analysis {target}')
    _analyze(experiment, analysis, finished, folder / target)
    lines += ['', f'## Analysis {target.name}', '']
    lines += _result_of_analysis(folder, target, analysis.name)
  files.replace(
      folder / run_folder.EXPERIMENT_MARKDOWN, '\n'.join(lines) + '\n'
  )
  html_report.refresh_figures(folder)
  print('\n'.join(['', *lines]))
  print(f'\nResult: {folder / run_folder.EXPERIMENT_MARKDOWN}')


def _heading(
    experiment: experiment_files.Experiment, overruled: Sequence[str]
) -> list[str]:
  command = f'tff-bn-compare --experiment={experiment.name}'
  if experiment.scale != experiment_files.PAPER:
    command += f' --scale={experiment.scale}'
  scale = f' ({experiment_files.SCALES[experiment.scale]})'
  if experiment_files.is_ours(experiment.name):
    scale = ''  # It is of no paper.
  lines = [
      f'# {experiment.title}',
      '',
      f'`{" ".join([command, *overruled])}`{scale}',
  ]
  if overruled:
    lines += [
        '',
        f"Not the experiment's own: {', '.join(overruled)}.",
    ]
  return lines


def _result_of_analysis(
    folder: pathlib.Path, target: pathlib.Path, name: str
) -> list[str]:
  """Returns the text and the plots of an analysis."""
  text = (folder / target / f'{name}.md').read_text(encoding='utf-8')
  lines = [text.strip(), '']
  for plot in sorted((folder / target / run_folder.PLOTS).glob('*.png')):
    lines.append(f'![{plot.stem}]({target / run_folder.PLOTS / plot.name})')
  return lines


def _show(
    experiment: experiment_files.Experiment,
    finished: _Runs,
    average_last: int,
    folder: pathlib.Path,
) -> list[str]:
  """Writes the numbers and the figure; returns the text with the table."""
  assert experiment.shown is not None
  show = experiment.shown
  runs = [
      report.Run(
          run.labels,
          run.settings.seed,
          report.read_rows(path),
          has_client_models=settings_lib.has_client_models(run.settings),
      )
      for run, path in finished
  ]
  if paper_form.CLIENT in show.dimensions:
    average_last = 1  # These are results of final models.
    measurements = [
        measurement
        for run, path in finished
        for measurement in by_client(run, path, show.value)
    ]
  else:
    measurements = [
        experiment_numbers.Measurement(
            run.labels, run.seed, column, float(value)
        )
        for run, row in zip(
            runs, report.results(runs, average_last).to_dict('records')
        )
        for column, value in row.items()
        if column in (show.value or show.y) and value != ''
    ]
  numbers = experiment_numbers.collect(
      measurements, show, experiment.axes, experiment.paper
  )
  files.replace(
      folder / run_folder.EXPERIMENT_CSV, experiment_numbers.to_csv(numbers)
  )
  figures.save(
      folder / run_folder.PLOTS,
      {
          _PLOT: experiment_figures.draw(
              numbers, show, runs, _title(experiment), experiment.axes
          )
      },
  )
  return [
      '',
      experiment_numbers.to_markdown(numbers, show),
      '',
      _explain(numbers, experiment, runs, average_last),
      '',
      *(
          f'- {sentence}'
          for sentence in agreement.sentences(numbers, experiment)
      ),
      '',
      f'![The figure]({run_folder.PLOTS}/{_PLOT}.png)',
  ]


def _title(experiment: experiment_files.Experiment) -> str:
  """Returns the title of the figure."""
  if experiment.scale == experiment_files.PAPER:
    return experiment.title
  size, _, _ = experiment_files.SCALES[experiment.scale].partition(',')
  return f'{experiment.title}\n(here: {size})'


def _explain(
    numbers: experiment_numbers.Numbers,
    experiment: experiment_files.Experiment,
    runs: Sequence[report.Run],
    average_last: int,
) -> str:
  """Explains the numbers of the table."""
  assert experiment.shown is not None
  show = experiment.shown
  has_client_models = report.have_client_models(runs)
  columns = []
  for column in numbers.columns:
    measured = measures.name(column, has_client_models)
    if column.startswith(_HELD_OUT):
      measured = measures.HELD_OUT
    elif paper_form.CLIENT in show.dimensions:
      measured = measures.OF_CLIENT
    columns.append(
        experiment_numbers.title(column)
        + (
            f' ({measured}; {report.over_rounds(average_last)})'
            * bool(measured)
        )
    )
  text = f'{" and ".join(columns)}.'
  counts = {number.count for number in numbers.ours.values()}
  if max(counts, default=1) > 1:
    text += f' Mean ± sample standard deviation over {max(counts)} seeds.'
  tried = [
      label
      for name in show.best
      for label, num_tries in collections.Counter(
          show.shown_label(name, point.label)
          for point in experiment.axis(name).points
      ).items()
      if num_tries > 1
  ]
  if tried:
    text += f' The best of the tried settings of {", ".join(tried)}.'
  if numbers.paper:
    text += " In parentheses: the paper's number."
  return text


def by_client(
    run: comparison.Run, path: pathlib.Path, columns: Sequence[str]
) -> list[experiment_numbers.Measurement]:
  """Returns the results on the clients' own test data.

  Args:
    run: The run.
    path: Its folder.
    columns: The columns that are shown: `client_test_accuracy` of the model
      that each client uses, or `held_out_STATISTICS_accuracy` of clients that
      took no part in training; in the same way, losses and other metrics.

  Returns:
    The results.
  """
  found: list[tuple[str, dict[str, Any]]] = []
  if not all(column.startswith(_HELD_OUT) for column in columns):
    models = finished_lib.read_models_manifest(run_folder.models_folder(path))
    subject = evaluation_file.Subject.of(
        run.settings, path, models['round'], reestimates_statistics=False
    )
    evaluation = path / run_folder.EVALUATION
    if subject not in evaluation_file.read(evaluation):
      # Its table has many rows.
      with contextlib.redirect_stdout(io.StringIO()):
        evaluate.evaluate(
            run.settings, path, path, reestimates_statistics=False
        )
    for result in evaluation_file.read(evaluation)[subject]:
      if result.client:
        # They are the same for one client.
        row = {'client': result.client, **result.metrics}
        found += [('test', row), ('client_test', row)]
  held_out = path / f'{_HELD_OUT}.csv'
  if held_out.exists():
    found += [
        (f'{_HELD_OUT}_{row["statistics"]}', row) for row in _read_csv(held_out)
    ]
  return [
      experiment_numbers.Measurement(
          {**run.labels, paper_form.CLIENT: row['client']},
          run.settings.seed,
          f'{kind}_{name}',
          float(value),
      )
      for kind, row in found
      for name, value in row.items()
      if value not in ('', None) and f'{kind}_{name}' in columns
  ]


def _read_csv(path: pathlib.Path) -> list[dict[str, str]]:
  with path.open(encoding='utf-8') as file:
    return list(csv.DictReader(file))


def analysis_folder(
    analyses: Sequence[experiment_files.Analysis], number: int
) -> pathlib.Path:
  """Returns the folder of an analysis in the comparison's folder.

  Args:
    analyses: The analyses of the experiment.
    number: The position of the analysis.

  Returns:
    The path. The first analysis of a name has the name, the next one NAME-2.
  """
  name = analyses[number].name
  before = sum(other.name == name for other in analyses[:number])
  suffix = f'-{before + 1}' if before else ''
  return pathlib.Path(run_folder.ANALYSES) / f'{name}{suffix}'


def _analyze(
    experiment: experiment_files.Experiment,
    analysis: experiment_files.Analysis,
    finished: _Runs,
    folder: pathlib.Path,
) -> None:
  """Runs an analysis, which writes into a folder of its own."""
  program = analyze.ANALYSES[analysis.name]
  arguments = [f'--{key}={text}' for key, text in analysis.flags.items()]
  arguments.append(f'--output_dir={os.fspath(folder)}')
  flags = command_line.parse(program.define_flags, arguments)
  if analysis.runs is None:
    program.main(flags)
    return
  named = {
      path: (_name(experiment, analysis.runs, run.labels), run.settings)
      for run, path in finished
  }
  analysis_programs.analyze(analysis.name, named, folder, flags)


def _name(
    experiment: experiment_files.Experiment,
    axis: str,
    labels: Mapping[str, str],
) -> str:
  """Returns the name of a run in an analysis, the same for all seeds."""
  others = [
      labels[other.name]
      for other in experiment.axes
      if other.name != axis and len(other.points) > 1
  ]
  return ', '.join([labels[axis], *others])
