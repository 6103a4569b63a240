"""`tff-bn-compare`: trains several algorithms on the same data."""

from collections.abc import Mapping, Sequence
import contextlib
import pathlib
import sys
from typing import Optional

from absl import flags as absl_flags

from tff_bn.common import files
from tff_bn.imports import dependencies
from tff_bn.programs import algorithm_flags
from tff_bn.programs import cli
from tff_bn.programs import flag_groups
from tff_bn.programs import parsers
from tff_bn.programs import run_flags
from tff_bn.programs import run_folder
from tff_bn.programs import runtime_flags
from tff_bn.programs import settings as settings_lib
from tff_bn.programs import train

_OUTPUT_DIR = 'runs/compare'


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  return (
      algorithm_flags.ComparisonFlags.define(values),
      *settings_lib.define_shared_flags(values),
      run_flags.RunsFlags.define(values),
      runtime_flags.RuntimeFlags.define(values),
      run_flags.OutputFlags.define(values, output_dir=_OUTPUT_DIR),
  )


def comparison_flags(
    flags: cli.ParsedFlags, runs: Sequence[settings_lib.RunSettings]
) -> dict[str, str]:
  """Returns the flags that define a comparison.

  Args:
    flags: The program's flags.
    runs: The settings of all its runs.

  Returns:
    The flags' texts by name: the flags of the comparison and of its runs.
  """
  texts = {
      name: parsers.to_text(getattr(flags, name))
      for name in ('algorithms', 'seeds', 'average_last')
  }
  for settings in runs:
    texts.update(settings.to_flags())
  return {
      name: text
      for name, text in texts.items()
      if name not in ('algorithm', 'seed')
  }


def main(flags: cli.ParsedFlags) -> None:
  """Trains all algorithms with all seeds and writes the results.

  Args:
    flags: The program's flags.
  """
  folder = pathlib.Path(flags.output_dir).expanduser()
  with cli.checking_input():
    settings_lib.check(flags)
    runtime_flags.RuntimeFlags.check(flags)
    runtime = runtime_flags.RuntimeFlags.read(flags)
    runs = [
        settings_lib.resolve(flags, algorithm, seed)
        for seed in flags.seeds
        for algorithm in flags.algorithms
    ]
    texts = comparison_flags(flags, runs)
  folders = [
      folder / run_folder.RUNS / f'{run.algorithm}-seed{run.seed}'
      for run in runs
  ]
  with contextlib.ExitStack() as stack:
    with cli.checking_input():
      # From the first check to the last file, no other program writes there.
      stack.enter_context(run_folder.claim(folder))
      run_folder.check(folder, texts, overwrite=flags.overwrite)
      for run, subfolder in zip(runs, folders):
        stack.enter_context(run_folder.claim(subfolder))
        run_folder.check(subfolder, run.to_flags(), overwrite=flags.overwrite)
    stack.enter_context(run_folder.temporary_files_in(folder))
    _compare(flags, runs, runtime, folder, folders, texts)


def _compare(
    flags: cli.ParsedFlags,
    runs: Sequence[settings_lib.RunSettings],
    runtime: runtime_flags.RuntimeFlags,
    folder: pathlib.Path,
    folders: Sequence[pathlib.Path],
    texts: Mapping[str, str],
) -> None:
  """Trains in folders that are claimed, and writes the results."""
  dependencies.require_tff()
  # Imported late: this takes seconds, and wrong flags are found without it.
  from tff_bn.programs import experiment
  from tff_bn.programs import held_out
  from tff_bn.programs import plots
  from tff_bn.programs import report

  with contextlib.ExitStack() as stack:
    with cli.checking_input():
      experiment.divide_cores(runs)
      stack.enter_context(runtime.enter())
      # All runs are prepared before the first one starts, so that a mistake in
      # the last isn't found after hours.
      jobs = experiment.prepare(
          runs, folders, skip_finished=not flags.overwrite
      )
      run_folder.begin(folder, PROGRAM.name, texts, overwrite=flags.overwrite)
      for job in jobs:
        run_folder.begin(
            job.folder,
            train.PROGRAM.name,
            job.settings.to_flags(),
            overwrite=flags.overwrite,
        )
    failures = experiment.train(jobs)
  finished = [
      report.read_run(job.settings.algorithm, job.settings.seed, job.folder)
      for job in jobs
  ]
  results = [report.result(run, flags.average_last) for run in finished]
  # A short run has fewer evaluated rounds.
  num_averaged = max(
      len(report.last_rows(run, flags.average_last)) for run in finished
  )
  table = report.results_markdown(results, num_averaged)
  files.replace(folder / run_folder.RESULTS_CSV, report.results_csv(results))
  files.replace(folder / run_folder.RESULTS_MARKDOWN, table)
  plots.save_figures(
      folder / run_folder.PLOTS,
      finished,
      jobs[0].data.label_distribution(),
      jobs[0].data.client_ids,
      experiment.describe_data(jobs[0]),
  )
  print(f'\n{table}')
  held_out.write_comparison(
      folder,
      [(job.settings.algorithm, job.settings.seed, job.folder) for job in jobs],
  )
  print(
      f'Table: {folder / run_folder.RESULTS_MARKDOWN},'
      f' {folder / run_folder.RESULTS_CSV}'
  )
  print(f'Plots: {folder / run_folder.PLOTS}')
  print(f'Runs:  {folder / run_folder.RUNS}')
  if failures:
    names = [
        f'{failure.job.settings.algorithm} with seed'
        f' {failure.job.settings.seed}'
        for failure in failures
    ]
    raise RuntimeError(
        f'{len(failures)} of {len(jobs)} runs failed, see the errors above; the'
        f' table has their last results: {", ".join(names)}.'
    )


PROGRAM = cli.Program(
    name='tff-bn-compare',
    description=(
        'Trains several federated algorithms on the same simulated clients,'
        ' once with each seed, and writes a table and plots of the results.'
        ' The same command continues a comparison that was stopped, without'
        ' repeating runs that are finished. Without flags it compares'
        ' algorithms on handwritten digits; each client has only a few of the'
        ' classes.'
    ),
    examples=(
        'tff-bn-compare',
        'tff-bn-compare --algorithms=fedavg,fedbn,single --seeds=0,1,2'
        ' --dataset=digits_domains --split=domains',
    ),
    define_flags=define_flags,
    main=main,
)


def run(arguments: Optional[Sequence[str]] = None) -> int:
  """Runs the program; returns its exit code."""
  return cli.run(PROGRAM, arguments)


if __name__ == '__main__':
  sys.exit(run())
