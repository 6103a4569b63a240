"""Runs experiments and keeps their results, those of papers on digits.

  python scripts/experiment_results.py FOLDER [PAPER/NAME ...]

trains in FOLDER, all experiments by default, and writes
benchmarks/results/experiments/PAPER_NAME.md with its numbers (.csv) and plots
for docs/experiments.md, and benchmarks/results/digits.md. It goes on with what
FOLDER holds.
"""

import pathlib
import re
import sys

import experiment_runs
import experiments_page
from PIL import Image

from tff_bn.common import files
from tff_bn.papers.experiments import experiment_files
from tff_bn.programs.runs import run_folder

_SCALES = (experiment_files.DIGITS, experiment_files.PAPER)
# Enough for line plots, and a third of the size of all colors.
_NUM_COLORS = 64


def keep(name: str, output: pathlib.Path) -> None:
  """Keeps the result of an experiment: its text, its numbers and its plots.

  Args:
    name: PAPER/NAME.
    output: The folder of the experiment.
  """
  path = experiments_page.result_path(name)

  def copy(link: re.Match[str]) -> str:
    plot = output / link['plot']
    copied = path.with_name(f'{path.stem}_{plot.name}')
    with Image.open(plot) as image, files.replacing(copied) as temporary:
      reduced = image.convert('RGB').quantize(_NUM_COLORS)
      reduced.save(temporary, format='png', optimize=True)
    return f'![{link["title"]}]({copied.name})'

  numbers = output / run_folder.EXPERIMENT_CSV
  if numbers.exists():
    files.replace(path.with_suffix('.csv'), numbers.read_text(encoding='utf-8'))
  text = (output / run_folder.EXPERIMENT_MARKDOWN).read_text(encoding='utf-8')
  files.replace(
      path, re.sub(r'!\[(?P<title>.*?)\]\((?P<plot>.*?)\)', copy, text)
  )


def main(arguments: list[str]) -> int:
  """Runs the experiments; returns the number of failures."""
  if not arguments:
    print(__doc__)
    return 1
  folder, *names = arguments
  runs = {
      scale: experiment_runs.ExperimentRuns(pathlib.Path(folder), scale)
      for scale in _SCALES
  }
  experiments_page.RESULTS.mkdir(exist_ok=True)
  failed = []
  for name in names or experiment_files.names():
    scale = experiments_page.result_scale(name)
    if scale is None:
      continue
    print(f'\n=== {name}', flush=True)
    try:
      output = runs[scale].run(name)
    except RuntimeError as error:
      print(error, flush=True)
      failed.append(name)
      continue
    keep(name, output)
  if failed:
    print(f'Failed: {", ".join(failed)}')
  return len(failed)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
