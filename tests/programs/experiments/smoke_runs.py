"""Runs experiments at the smoke scale, each setting once."""

import shutil

from tff_bn.programs import cli
from tff_bn.programs import compare
from tff_bn.programs import run_folder
from tff_bn.programs.experiments import files as experiment_files
from tff_bn.programs.experiments import plan as experiment_plan

_SCALE = f'--scale={experiment_files.SMOKE}'


def names(*papers):
  """Returns the names of the experiments of some papers."""
  return [
      name
      for name in experiment_files.names()
      if name.partition('/')[0] in papers
  ]


class SmokeRuns:
  """Runs experiments, and reuses the runs of earlier ones.

  Attributes:
    folder: The folder of all output.
  """

  def __init__(self, folder):
    self.folder = folder
    self._finished = {}

  def run(self, name):
    """Runs an experiment and returns its folder."""
    output = self.folder / name.replace('/', '-')
    arguments = [f'--experiment={name}', _SCALE, f'--output_dir={output}']
    flags = cli.parse(compare.define_flags, arguments)
    plan = experiment_plan.plan(flags, name, experiment_files.SMOKE)
    runs = [] if plan.comparison is None else plan.comparison.trained()
    known = [run for run in runs if run.settings in self._finished]
    if known:
      # As if the experiment was stopped after these runs.
      output.mkdir()
      texts = compare.comparison_flags(plan.flags, plan.comparison)
      run_folder.begin(output, compare.PROGRAM.name, texts, overwrite=False)
    for run in known:
      shutil.copytree(
          self._finished[run.settings], output / run_folder.RUNS / run.folder
      )
    assert compare.run(arguments) == cli.OK
    for run in runs:
      folder = output / run_folder.RUNS / run.folder
      assert run_folder.is_finished(folder)
      self._finished[run.settings] = folder
    return output
