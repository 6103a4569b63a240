"""Runs experiments one after another, and their common runs once."""

from collections.abc import Callable
import pathlib
import shutil

from tff_bn.papers import compare_with_experiments
from tff_bn.papers.experiments import experiment_plan
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import run_folder


class ExperimentRuns:
  """Runs experiments, and reuses the runs of earlier ones.

  Attributes:
    folder: The folder of all output; each experiment has a folder in it.
    scale: The scale of the experiments.
    compare: Runs `tff-bn-compare` with some arguments.
  """

  def __init__(
      self,
      folder: pathlib.Path,
      scale: str,
      compare: Callable[[list[str]], int] = compare_with_experiments.run,
  ):
    self.folder = folder
    self.scale = scale
    self.compare = compare
    self._finished: dict[settings_lib.RunSettings, pathlib.Path] = {}

  def run(self, name: str) -> pathlib.Path:
    """Runs an experiment, or continues it.

    Args:
      name: PAPER/NAME.

    Returns:
      Its folder.

    Raises:
      RuntimeError: If the experiment fails; the program prints the reason.
    """
    output = self.folder / name.replace('/', '_')
    arguments = [
        f'--experiment={name}',
        f'--scale={self.scale}',
        f'--output_dir={output}',
    ]
    flags = command_line.parse(compare_with_experiments.define_flags, arguments)
    plan = experiment_plan.plan(flags, name, self.scale)
    runs = [] if plan.comparison is None else plan.comparison.trained()
    known = [run for run in runs if run.settings in self._finished]
    if known and not output.exists():
      # As if the experiment was stopped after these runs.
      output.mkdir(parents=True)
      texts = compare_with_experiments.experiment_flags(plan)
      run_folder.begin(
          output, compare_with_experiments.PROGRAM.name, texts, overwrite=False
      )
      for run in known:
        shutil.copytree(
            self._finished[run.settings], output / run_folder.RUNS / run.folder
        )
    if self.compare(arguments) != command_line.OK:
      raise RuntimeError(f'--experiment={name} failed, see above.')
    for run in runs:
      folder = output / run_folder.RUNS / run.folder
      self._finished[run.settings] = folder
    return output
