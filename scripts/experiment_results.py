"""Runs experiments and keeps their results, those of papers on digits.

  python scripts/experiment_results.py FOLDER [PAPER/NAME[:SCALE] ...]

trains in FOLDER, all experiments on digits by default, and writes
benchmarks/results/experiments/PAPER_NAME.md (at the scale fashion
PAPER_NAME_fashion.md) with its numbers (.csv) and plots for
docs/experiments.md, and benchmarks/results/digits.md. It goes on with what
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

_SCALES = (
    experiment_files.DIGITS,
    experiment_files.FASHION,
    experiment_files.PAPER,
)
# As many as a palette has; the file has a third of the size of all colors.
_NUM_COLORS = 256


def keep(name: str, scale: str, output: pathlib.Path) -> None:
  """Keeps the result of an experiment: its text, its numbers and its plots.

  Args:
    name: PAPER/NAME.
    scale: The scale.
    output: The folder of the experiment.
  """
  path = experiments_page.result_path(name, scale)

  def copy(link: re.Match[str]) -> str:
    plot = output / link['plot']
    copied = path.with_name(f'{path.stem}_{plot.name}')
    with Image.open(plot) as image, files.replacing(copied) as temporary:
      # Other methods merge the colors of lines that others hide.
      reduced = image.convert('RGB').quantize(
          _NUM_COLORS, Image.Quantize.MAXCOVERAGE
      )
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
      scale: experiment_runs.ExperimentRuns(pathlib.Path(folder) / scale, scale)
      for scale in _SCALES
  }
  experiments_page.RESULTS.mkdir(exist_ok=True)
  failed = []
  for given in names or experiment_files.names():
    name, _, scale = given.partition(':')
    kept = experiments_page.result_scales(name)
    if not kept:
      continue
    scale = scale or kept[0]
    print(f'\n=== {given}', flush=True)
    try:
      output = runs[scale].run(name)
    except RuntimeError as error:
      print(error, flush=True)
      failed.append(given)
      continue
    keep(name, scale, output)
  if failed:
    print(f'Failed: {", ".join(failed)}')
  return len(failed)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
