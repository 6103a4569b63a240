"""Runs experiments at the digits scale and keeps their results.

  python scripts/experiment_results.py FOLDER [PAPER/NAME ...]

trains in FOLDER, all experiments by default, and writes
benchmarks/results/experiments/PAPER_NAME.md for docs/experiments.md. It goes on
with what FOLDER holds.
"""

import pathlib
import sys

import experiment_runs
import experiments_page

from tff_bn.common import files
from tff_bn.programs import run_folder
from tff_bn.programs.experiments import files as experiment_files

_SCALE = experiment_files.DIGITS


def main(arguments: list[str]) -> int:
  """Runs the experiments; returns the number of failures."""
  if not arguments:
    print(__doc__)
    return 1
  folder, *names = arguments
  runs = experiment_runs.ExperimentRuns(pathlib.Path(folder), _SCALE)
  experiments_page.RESULTS.mkdir(exist_ok=True)
  failed = []
  for name in names or experiment_files.names():
    if _SCALE not in experiment_files.scales(name):
      continue
    print(f'\n=== {name}', flush=True)
    try:
      output = runs.run(name)
    except RuntimeError as error:
      print(error, flush=True)
      failed.append(name)
      continue
    text = (output / run_folder.EXPERIMENT_MARKDOWN).read_text(encoding='utf-8')
    files.replace(experiments_page.result_path(name), text)
  if failed:
    print(f'Failed: {", ".join(failed)}')
  return len(failed)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
