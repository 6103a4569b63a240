"""`tff-bn-train`: trains a model with one federated algorithm."""

from collections.abc import Sequence
import contextlib
import pathlib
import sys
from typing import Optional

from absl import flags as absl_flags

from tff_bn.catalog import algorithms
from tff_bn.catalog import tasks
from tff_bn.imports import dependencies
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.flags import algorithm_flags
from tff_bn.programs.flags import data_flags
from tff_bn.programs.flags import logging_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.flags import runtime_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import output_folder
from tff_bn.programs.runs import run_folder
from tff_bn.training import finished

_OUTPUT_DIR = 'runs/train'


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  return (
      algorithm_flags.AlgorithmFlags.define(values),
      *settings_lib.define_shared_flags(values),
      run_flags.RunFlags.define(values),
      runtime_flags.RuntimeFlags.define(values),
      logging_flags.LoggingFlags.define(values),
      run_flags.OutputFlags.define(values, output_dir=_OUTPUT_DIR),
  )


def main(flags: command_line.ParsedFlags) -> None:
  """Trains one model."""
  with command_line.checking_input():
    settings_lib.check(flags)
    runtime_flags.RuntimeFlags.check(flags)
    runtime = runtime_flags.RuntimeFlags.read(flags)
    settings = settings_lib.resolve(flags, flags.algorithm, flags.seed)
    data_flags.announce_split(flags, [settings])
    folder = output_folder.choose(flags, settings.to_flags())
  with contextlib.ExitStack() as stack:
    with command_line.checking_input():
      # From the first check to the last file, no other program writes into it.
      stack.enter_context(run_folder.claim(folder))
      state = run_folder.check(
          folder, settings.to_flags(), overwrite=flags.overwrite
      )
    stack.enter_context(run_folder.temporary_files_in(folder))
    if state == run_folder.State.FINISHED and (
        (folder / run_folder.REPORT).exists()  # It is written last.
    ):
      print('This run is finished.')
    else:
      _train_and_plot(
          settings,
          runtime,
          logging_flags.LoggingFlags.read(flags),
          folder,
          overwrite=flags.overwrite,
      )
    _print_result(settings, folder)


def _print_result(
    settings: settings_lib.RunSettings, folder: pathlib.Path
) -> None:
  """Prints how good the model is, and where the files are."""
  # Imported late: wrong flags are found without NumPy and pandas.
  from tff_bn.programs.results import report
  from tff_bn.programs.testing import keras_files

  trust = settings_lib.trust_flag(settings)
  evaluate = f'tff-bn-evaluate --run={folder}{trust}'
  run = report.Run(
      {},
      settings.seed,
      report.read_rows(folder),
      has_client_models=settings_lib.has_client_models(settings),
      keep_best=settings.keep_best,
  )
  print(report.describe_end(run))
  models = run_folder.models_folder(folder)
  code = keras_files.prediction_code(
      models / run_folder.MODEL_FILE,
      finished.read_models_manifest(models),
      settings.parsed_image_size,
  )
  print('Model:   ' + '\n         '.join(code))
  if (models / run_folder.CLIENTS).exists():
    print(
        f"         and the clients' own models in {models / run_folder.CLIENTS}"
    )
  elif (models / run_folder.CLIENTS_ARRAYS).exists():
    print(f"         and a client's own model by {evaluate} --export_client=ID")
  print(f'Metrics: {folder / run_folder.METRICS}')
  print(f'Plots:   {folder / run_folder.PLOTS}')
  print(f'Page:    {folder / run_folder.REPORT}')
  print(f'Evaluate it, also on other data: {evaluate}')


def _train_and_plot(
    settings: settings_lib.RunSettings,
    runtime: runtime_flags.RuntimeFlags,
    logging: logging_flags.LoggingFlags,
    folder: pathlib.Path,
    *,
    overwrite: bool,
) -> None:
  """Trains one model and draws its metrics."""
  dependencies.require_tff()
  # Imported late: this takes seconds, and wrong flags are found without it.
  from tff_bn.programs.results import charts
  from tff_bn.programs.results import html_report
  from tff_bn.programs.results import plots
  from tff_bn.programs.results import report
  from tff_bn.programs.runs import jobs
  from tff_bn.programs.runs import run_building
  from tff_bn.programs.testing import held_out

  with contextlib.ExitStack() as stack:
    with command_line.checking_input():
      run_building.divide_cores([settings])
      metrics_hook = logging.load()
      stack.enter_context(runtime.enter())
      job = jobs.Builder().build(settings, folder)
      run_folder.begin(
          folder, PROGRAM.name, settings.to_flags(), overwrite=overwrite
      )
    jobs.train_one(job, metrics_hook)
  label = algorithms.labels([settings.algorithm])[settings.algorithm]
  run = report.Run(
      {report.ALGORITHM: label},
      settings.seed,
      report.read_rows(folder),
      has_client_models=settings_lib.has_client_models(settings),
      loss=tasks.loss_of(job.data.task, settings.loss).word,
      keep_best=settings.keep_best,
  )
  data_title = jobs.describe_data(settings, job.data)
  title = f'{settings.algorithm}: {data_title}'
  charts.save(
      folder / run_folder.PLOTS,
      {
          **plots.of_algorithms([run], title),
          **plots.label_distribution(job.data, f'{title}, seed {run.seed}'),
      },
  )
  tests, test_notes = held_out.of_runs([('', folder)], held_out.CLIENT)
  html_report.write(
      folder,
      html_report.Page(
          title=f'Run of {settings.algorithm}',
          program=PROGRAM.name,
          flags=settings.to_flags(),
          runs=[run],
          folders=[folder],
          num_averaged=1,
          varied=[report.ALGORITHM],
          data=job.data,
          data_title=data_title,
          held_out=tests,
          held_out_notes=test_notes,
      ),
  )


PROGRAM = command_line.Program(
    name='tff-bn-train',
    description=(
        'Trains a Keras model with one federated algorithm on simulated clients'
        ' and writes the model, its metrics, checkpoints and plots into one'
        ' folder. The same command continues a run that was stopped.'
    ),
    examples=(
        'tff-bn-train --algorithm=fedbn --split=domains'
        ' --dataset=digits_domains --output_dir=runs/fedbn',
        'tff-bn-train --flagfile=runs/fedbn/flags.txt --seed=1'
        ' --output_dir=runs/fedbn-1',
    ),
    define_flags=define_flags,
    main=main,
)


def run(arguments: Optional[Sequence[str]] = None) -> int:
  """Runs the program; returns its exit code."""
  return command_line.run(PROGRAM, arguments)


if __name__ == '__main__':
  sys.exit(run())
