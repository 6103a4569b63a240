"""`tff-bn-compare`: trains several algorithms, and sweeps flags.

The console script is `papers/compare_with_experiments.py`. It adds the flag
`--experiment`: it plans the runs of an experiment itself, and gives
`run_planned` a function that shows their results.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from typing import TYPE_CHECKING, NamedTuple, Optional

from absl import flags as absl_flags

from tff_bn.catalog import tasks
from tff_bn.common import files
from tff_bn.common import progress
from tff_bn.imports import dependencies
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli import repeated_warnings
from tff_bn.programs.flags import algorithm_flags
from tff_bn.programs.flags import data_flags
from tff_bn.programs.flags import first_look
from tff_bn.programs.flags import logging_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.flags import runtime_flags
from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.plan import comparison as comparison_lib
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.plan import sweeps
from tff_bn.programs.runs import output_folder
from tff_bn.programs.runs import run_folder

if TYPE_CHECKING:
  import pandas as pd

  from tff_bn.programs.results import report
  from tff_bn.programs.runs import jobs

_OUTPUT_DIR = 'runs/compare'


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  return (
      algorithm_flags.ComparisonFlags.define(values),
      sweeps.define_flags(values),
      *settings_lib.define_shared_flags(values),
      run_flags.RunsFlags.define(values),
      runtime_flags.RuntimeFlags.define(values),
      logging_flags.LoggingFlags.define(values),
      run_flags.OutputFlags.define(values, output_dir=_OUTPUT_DIR),
  )


@dataclasses.dataclass(frozen=True)
class Planned:
  """A comparison that is planned.

  Attributes:
    flags: The program's flags.
    comparison: The runs, all checked.
    texts: The texts of the flags that define the comparison, for `flags.txt`.
    show: Shows the results, given the comparison's folder with all other files.
      None: the program prints its table, and draws the swept flags.
  """

  flags: command_line.ParsedFlags
  comparison: comparison_lib.Comparison
  texts: Mapping[str, str]
  show: Optional[Callable[[pathlib.Path], None]] = None


def plan(flags: command_line.ParsedFlags) -> comparison_lib.Comparison:
  """Returns the runs that the flags ask for, all checked.

  Raises:
    ValueError: If flags contradict one another.
  """
  algorithm_flags.ComparisonFlags.check(flags)
  swept = sweeps.swept_axes(flags)
  if flags.is_given('algorithms'):
    algorithms = sweeps.algorithm_axis(flags)
  else:
    flags = first_look.with_defaults(flags)
    algorithms = first_look.algorithm_axis(flags, swept)
  return comparison_lib.plan(flags, [*swept, algorithms], flags.seeds)


def comparison_flags(
    flags: command_line.ParsedFlags, comparison: comparison_lib.Comparison
) -> dict[str, str]:
  """Returns the texts of the flags of a comparison and of its runs, by name."""
  texts = {
      **sweeps.texts(flags),
      'average_last': parsers.to_text(flags.average_last),
      **comparison_lib.flag_texts(comparison),
  }
  if not flags.is_given('algorithms'):
    # With this flag, the algorithms lose the settings of the first look.
    del texts['algorithms']
  return texts


def main(flags: command_line.ParsedFlags) -> None:
  """Trains all algorithms with all seeds and writes the results."""
  with command_line.checking_input():
    comparison = plan(flags)
    texts = comparison_flags(flags, comparison)
  run_planned(Planned(flags, comparison, texts))


def run_planned(planned: Planned) -> None:
  """Runs a comparison and writes the results.

  Raises:
    RuntimeError: If runs failed; the results have the others.
  """
  flags, comparison = planned.flags, planned.comparison
  with command_line.checking_input():
    runtime_flags.RuntimeFlags.check(flags)
    sweeps.check_jobs(flags)
    runtime = runtime_flags.RuntimeFlags.read(flags)
    folder = output_folder.choose(
        flags, planned.texts, comparison_lib.grown_flags
    )
  if 'split' not in comparison.varied_flags:
    data_flags.announce_split(flags, [run.settings for run in comparison.runs])
  folders = {
      run.folder: folder / run_folder.RUNS / run.folder
      for run in comparison.runs
  }
  if flags.list:
    with command_line.checking_input():
      print(_list(planned, folder, folders))
    return
  with contextlib.ExitStack() as stack:
    with command_line.checking_input():
      run_folder.allow_claims(len(folders))
      # From the first check to the last file, no other program writes there.
      stack.enter_context(run_folder.claim(folder))
      _check_folder(planned, folder)
      states = {}
      for run in comparison.trained():
        subfolder = folders[run.folder]
        stack.enter_context(run_folder.claim(subfolder))
        states[run.folder] = run_folder.check(
            subfolder, run.settings.to_flags(), overwrite=flags.overwrite
        )
    stack.enter_context(run_folder.temporary_files_in(folder))
    finished = {
        name
        for name, state in states.items()
        if state == run_folder.State.FINISHED
    }
    _compare(planned, runtime, folder, folders, finished)


def _check_folder(planned: Planned, folder: pathlib.Path) -> None:
  """Checks that the comparison may be written, or extended, in a folder."""
  run_folder.check(
      folder,
      planned.texts,
      overwrite=planned.flags.overwrite,
      grown=comparison_lib.grown_flags,
  )


def _list(
    planned: Planned, folder: pathlib.Path, folders: Mapping[str, pathlib.Path]
) -> str:
  """Lists the runs and writes nothing."""
  from tff_bn.programs.runs import run_list

  flags = planned.flags
  _check_folder(planned, folder)
  listed = []
  for run in planned.comparison.trained():
    subfolder = folders[run.folder]
    state = run_folder.check(
        subfolder, run.settings.to_flags(), overwrite=flags.overwrite
    )
    listed.append(run_list.look(run, subfolder, state))
  return run_list.text(listed, flags.jobs)


def _compare(
    planned: Planned,
    runtime: runtime_flags.RuntimeFlags,
    folder: pathlib.Path,
    folders: Mapping[str, pathlib.Path],
    finished: Collection[str],
) -> None:
  """Trains in folders that are claimed, and writes the results."""
  flags = planned.flags
  runs = planned.comparison.trained()
  if len(finished) == len(runs) and planned.show is None:
    results = _read_results(planned, folders)
    if _are_written(folder, planned.texts, results):
      progress.say(f'All {len(runs)} runs are finished.')
      print(results.markdown)
      _print_files(planned, folder)
      return
  if flags.jobs > 1:
    # What gRPC does at a fork can abort this process. A process that is started
    # here runs another program at once, so nothing has to be done.
    os.environ.setdefault('GRPC_ENABLE_FORK_SUPPORT', 'false')
  dependencies.require_tff()
  # Imported late: this takes seconds, and wrong flags are found without it.
  from tff_bn.programs.runs import jobs
  from tff_bn.programs.runs import parallel
  from tff_bn.programs.runs import run_building
  from tff_bn.runtime import devices

  builder = jobs.Builder()
  warnings_once = repeated_warnings.WarningsOnce()
  with contextlib.ExitStack() as stack:
    stack.enter_context(warnings_once.installed())
    with command_line.checking_input():
      run_building.divide_cores([run.settings for run in runs])
      if flags.jobs > 1:
        devices.share_gpus()
      metrics_hook = logging_flags.LoggingFlags.read(flags).load()
      stack.enter_context(runtime.enter())
      tasks = [
          jobs.Task(
              run.settings,
              folders[run.folder],
              run.title,
              run.folder in finished,
          )
          for run in runs
      ]
      train_all: Callable[[], list[jobs.Task]] = functools.partial(
          jobs.train, builder, tasks, metrics_hook
      )
      if flags.jobs > 1:
        train_all = stack.enter_context(
            parallel.started(
                tasks,
                flags.jobs,
                _process_arguments(flags),
                warnings_once.shows,
            )
        )
      # All runs are checked before the first one starts, so that a mistake in
      # the last isn't found after hours.
      jobs.check(builder, tasks)
      run_folder.begin(
          folder, PROGRAM.name, planned.texts, overwrite=flags.overwrite
      )
      for task in tasks:
        run_folder.begin(
            task.folder,
            train.PROGRAM.name,
            task.settings.to_flags(),
            overwrite=flags.overwrite,
        )
    failed = train_all()
  _write_results(planned, folder, folders, builder)
  if planned.show is not None:
    planned.show(folder)
  if failed:
    raise RuntimeError(
        f'{len(failed)} of {len(tasks)} runs failed, see the errors above; the'
        f' table has their last results: {"; ".join(t.title for t in failed)}.'
    )


def _process_arguments(flags: command_line.ParsedFlags) -> list[str]:
  """Returns the flags that tell another process how to run."""
  names = (
      'verbosity',
      *runtime_flags.RuntimeFlags.specs(),
      *logging_flags.LoggingFlags.specs(),
  )
  return [flags.text(name) for name in names if flags.is_given(name)]


class _Results(NamedTuple):
  """The results of the runs of a comparison, and the texts of their tables.

  `table` has their numbers, see `report.results`. `num_averaged` is the number
  of evaluated rounds over which they are averaged.
  """

  runs: 'Sequence[report.Run]'
  table: 'pd.DataFrame'
  num_averaged: int
  csv: str
  markdown: str


def _read_results(
    planned: Planned, folders: Mapping[str, pathlib.Path]
) -> _Results:
  """Computes the results from the metrics of the runs."""
  # Imported late: wrong flags are found without NumPy and pandas.
  from tff_bn.programs.results import report
  from tff_bn.programs.results import row_sentences

  comparison = planned.comparison
  average_last = planned.flags.average_last
  rows = {name: report.read_rows(path) for name, path in folders.items()}
  runs = [
      report.Run(
          run.labels,
          run.settings.seed,
          rows[run.folder],
          comparison.further_flags(run),
          settings_lib.has_client_models(run.settings),
          keep_best=run.settings.keep_best,
      )
      for run in comparison.runs
  ]
  table = report.results(runs, average_last)
  # A short run has fewer evaluated rounds.
  num_averaged = max(
      len(report.counted_rows(run, average_last)) for run in runs
  )
  names = [axis.name for axis in comparison.axes]
  sentences: Sequence[str] = ()
  if planned.show is None:
    varied = [name for name in comparison.varied_flags if name not in names]
    sentences = row_sentences.describe(
        table,
        names,
        varied,
        {
            run.labels[axes_lib.ALGORITHM]: run.settings.algorithm
            for run in comparison.runs
        },
        next(
            (
                run.settings.local_layers
                for run in comparison.runs
                if run.settings.local_layers is not None
            ),
            None,
        ),
    )
  return _Results(
      runs,
      table,
      num_averaged,
      report.to_csv(table),
      report.results_markdown(table, num_averaged, names, sentences, runs),
  )


def _are_written(
    folder: pathlib.Path, texts: Mapping[str, str], results: _Results
) -> bool:
  """Whether the folder of a comparison has all its files, of these results."""
  expected = {
      run_folder.RESULTS_CSV: results.csv,
      run_folder.RESULTS_MARKDOWN: results.markdown,
  }
  return (
      (folder / run_folder.FLAGS_FILE).exists()
      and run_folder.read_flags(folder) == texts
      # Its tables would be printed, too.
      and 'held_out_clients' not in texts
      and (folder / run_folder.REPORT).exists()  # It is written last.
      and all(
          (folder / name).exists()
          and (folder / name).read_bytes() == text.encode()
          for name, text in expected.items()
      )
  )


def _write_results(
    planned: Planned,
    folder: pathlib.Path,
    folders: Mapping[str, pathlib.Path],
    builder: 'jobs.Builder',
) -> None:
  """Writes the table, the plots and the page, and prints the table."""
  from tff_bn.programs.results import charts
  from tff_bn.programs.results import html_report
  from tff_bn.programs.results import plots
  from tff_bn.programs.runs import jobs
  from tff_bn.programs.testing import held_out

  comparison = planned.comparison
  names = [axis.name for axis in comparison.axes]
  results = _read_results(planned, folders)
  files.replace(folder / run_folder.RESULTS_CSV, results.csv)
  files.replace(folder / run_folder.RESULTS_MARKDOWN, results.markdown)
  first = comparison.runs[0].settings
  data = builder.data(first)
  title = jobs.describe_data(first, data, comparison.varied_flags)
  runs = [
      dataclasses.replace(
          run, loss=tasks.loss_of(data.task, trained.settings.loss).word
      )
      for run, trained in zip(results.runs, comparison.runs)
  ]
  labels_title = (
      f'{jobs.describe_data(first, data)}\n{comparison.runs[0].title}'
  )
  drawn = plots.label_distribution(data, labels_title)
  if names == [axes_lib.ALGORITHM]:
    drawn |= plots.of_algorithms(runs, title)
  elif planned.show is None:
    drawn |= plots.of_sweep(
        runs,
        results.table,
        results.num_averaged,
        comparison.axes,
        title,
    )
  charts.save(folder / run_folder.PLOTS, drawn)
  if planned.show is None:
    print(results.markdown)
  held_out.write_comparison(
      folder,
      [
          (
              axes_lib.describe(run.labels),
              run.settings.seed,
              folders[run.folder],
          )
          for run in comparison.runs
      ],
  )
  tests, test_notes = held_out.of_runs(
      [
          (run.name, folders[trained.folder])
          for run, trained in zip(runs, comparison.runs)
      ],
      held_out.ALGORITHM,
  )
  html_report.write(
      folder,
      html_report.Page(
          title=f'Comparison of {html_report.name_algorithms(runs)}',
          program=PROGRAM.name,
          flags=planned.texts,
          runs=runs,
          folders=[folders[run.folder] for run in comparison.runs],
          num_averaged=results.num_averaged,
          varied=names,
          data=data,
          data_title=title or jobs.describe_data(first, data),
          held_out=tests,
          held_out_notes=test_notes,
      ),
  )
  _print_files(planned, folder)


def _print_files(planned: Planned, folder: pathlib.Path) -> None:
  """Prints where the results are, and what to do next."""
  print(f'Page:  {folder / run_folder.REPORT}')
  print(
      f'Table: {folder / run_folder.RESULTS_MARKDOWN},'
      f' {folder / run_folder.RESULTS_CSV}'
  )
  print(f'Plots: {folder / run_folder.PLOTS}')
  print(f'Runs:  {folder / run_folder.RUNS}')
  if planned.show is None:
    next_step = first_look.next_step(planned.flags)
    if next_step is not None:
      print(f'Next:  {next_step}')


PROGRAM = command_line.Program(
    name='tff-bn-compare',
    description=(
        'Trains several federated algorithms on the same simulated clients,'
        ' once with each seed and each value of swept flags, and writes a table'
        ' and plots of the results. The same command continues a comparison'
        ' that was stopped, without repeating runs that are finished; with'
        ' more algorithms, seeds or swept values, it adds them. Without'
        ' --algorithms it is a first look: handwritten digits, ten clients of'
        ' one class each, and one local step in a round. One sentence on each'
        ' algorithm says how far it is from centralized training.'
    ),
    examples=(
        'tff-bn-compare',
        'tff-bn-compare --dataset=digits_domains --split=domains'
        ' --output_dir=runs/domains',
        'tff-bn-compare --algorithms=fedavg,fedbn,single --seeds=0,1,2'
        ' --dataset=digits_domains --split=domains',
        'tff-bn-compare --algorithms=fedavg,fbn --sweep=local_steps=1,5'
        ' --sweep=gamma=0,0.1,1 --split=gamma --jobs=2 --output_dir=runs/sweep',
    ),
    define_flags=define_flags,
    main=main,
)


def run(arguments: Optional[Sequence[str]] = None) -> int:
  """Runs the program; returns its exit code."""
  return command_line.run(PROGRAM, arguments)


if __name__ == '__main__':
  sys.exit(run())
