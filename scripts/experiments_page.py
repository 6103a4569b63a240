"""Writes docs/experiments.md from the files of the experiments.

Run it after a change of an experiment, of the measured times or of a result.
"""

from collections.abc import Iterator
import csv
import itertools
import pathlib
import re
from typing import Optional

from tff_bn.papers.experiments import agreement
from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_plan
from tff_bn.papers.experiments import experiment_smoke
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.results import tables

_ROOT = pathlib.Path(__file__).parents[1]
PAGE = _ROOT / 'docs' / 'experiments.md'
# Seconds of training with one example, by model and shape.
SECONDS = _ROOT / 'benchmarks' / 'results' / 'example_seconds.csv'
# The experiment.md of finished experiments at the digits scale.
RESULTS = _ROOT / 'benchmarks' / 'results' / 'experiments'
# How much faster a GPU is assumed to be than the measured core of a CPU.
GPU_FACTOR = 50
_PAPERS = {
    'fedtan': 'FedTAN (Wang et al., arXiv:2301.02982)',
    'fbn': 'FBN (Guerraoui et al., arXiv:2405.14670)',
    'fedbn': 'FedBN (Li et al., ICLR 2021, arXiv:2102.07623)',
    'fedpan': 'FedPAN (Li et al., CVPR 2022)',
    'fedbs': 'FedBS (Janati Idrissi et al., ICTAI 2021)',
    'tff_bn': 'Our own',
}
# The number of training examples, by the last part of a dataset's name.
_NUM_TRAIN = {
    'mnist': 60_000,
    'fashion_mnist': 60_000,
    'fashion_mnist_domains': 60_000,
    'femnist': 671_585,
    'svhn_cropped': 73_257,
    'cifar10': 50_000,
    'cifar100': 50_000,
    'cinic10': 90_000,
    'gtsrb': 39_209,
    'usps': 7_438,
    'synth_digits': 391_162,
    'mnist_m': 60_000,
}
_FASHION_MNIST = (
    "Debian's package dataset-fashion-mnist, or downloaded by TensorFlow"
    ' Datasets'
)
_SCALES = '\n'.join(
    f'| `--scale={scale}` | {text}'
    + (' (default) |' if scale == experiment_files.PAPER else ' |')
    for scale, text in experiment_files.SCALES.items()
)
_INTRODUCTION = f"""# The papers' experiments

<!-- Written by scripts/experiments_page.py: change the files of the experiments
instead. -->

`tff-bn-compare --experiment=PAPER/NAME` trains what a table or a figure of a
paper shows, with the paper's data, model, split, rounds and learning rates. It
shows the result in the same form beside the paper's numbers: `experiment.md`,
`experiment.csv` and `plots/experiment.png` in
`runs/experiments/PAPER/NAME-SCALE`. `--experiment=list` prints the names.
`--experiment=fbn/figure_3` runs all parts of a figure, here `figure_3_a` and
`figure_3_b_c`.

| flag | meaning |
| --- | --- |
{_SCALES}
| `--list` | prints the runs and an estimate of the time, and trains nothing |
| `--jobs=N` | trains N runs at a time |
| `--seeds=0 --rounds=100` | overrules the experiment's flags; the task stays |
| `--sweep=FLAG=V1,V2` | varies one more flag |

The same command continues an experiment that was stopped. The files of the
experiments are in [papers/experiments](../papers/experiments). They say
where in the paper each value is from, and what the paper leaves open.

The hours are a rough estimate for one GPU, for all runs with all seeds. They
are extrapolated from the CPU time of training with one example on one core
([example_seconds.csv](../benchmarks/results/example_seconds.csv)), without
evaluations and exchanges. The page assumes that the GPU is {GPU_FACTOR} times
as fast as this core; no GPU was measured. `–` means that the number of examples
is unknown.

Core hours are the measured time of all trainings of a result, each on one CPU
core. Most are extrapolated from the first rounds. Another processor can take
half or twice as long.
"""

_RESULTS = f"""
## Results

At the digits scale, unless a name says `--scale=fashion`.
*{agreement.CLAIM}* is what the text of the paper claims, and
*{agreement.FOUND}* what came out. The files of the results have the tables, and
say in which settings this scale differs from the paper.
"""


def _datasets(name: str) -> list[str]:
  """Returns the datasets of an experiment at the paper's scale."""
  experiment = experiment_files.load(name)
  texts = [experiment.flags.get('dataset')]
  for axis in experiment.axes:
    texts += [point.flags.get('dataset') for point in axis.points]
  sources = []
  for text in texts:
    if text is not None:
      for part in text.removeprefix('domains:').split(','):
        kind, colon, rest = part.rpartition('=')[2].partition(':')
        # The domains of a dataset are in one folder.
        folder, slash, _ = rest.partition('/')
        sources.append(kind + colon + (f'{folder}/*' if slash else rest))
  return list(dict.fromkeys(sources))


def _how_to_get(dataset: str) -> str:
  kind, colon, _ = dataset.partition(':')
  if not colon:
    return {
        'digits': 'part of scikit-learn',
        'digits_domains': 'made from the digits of scikit-learn',
        'fedbn_synthetic': 'generated',
        'discs': 'generated',
        'fashion_mnist': _FASHION_MNIST,
        'fashion_mnist_domains': f'made from `fashion_mnist`: {_FASHION_MNIST}',
        'femnist': 'downloaded by TensorFlow Federated',
        'emnist': 'downloaded by TensorFlow Federated',
    }[dataset]
  return {
      'tfds': 'downloaded by TensorFlow Datasets, into `--data_dir`',
      'folder': 'images that you put into `train/LABEL/` and `test/LABEL/` of'
      ' this folder in the working folder',
      'npz': 'a file that you put into the working folder: arrays `x_train`,'
      ' `y_train`, `x_test`, `y_test`',
      'generated': 'generated',
  }[kind]


def _last_part(dataset: str) -> str:
  return re.split('[:/]', dataset.removesuffix('.npz'))[-1]


def num_examples(settings: settings_lib.RunSettings) -> Optional[float]:
  """Returns with how many examples a run trains, if it is known."""
  sources = settings.dataset.removeprefix('domains:').split(',')
  sources = [source.rpartition('=')[2] for source in sources]
  num_clients = settings.num_clients or len(sources)
  clients = settings.clients_per_round or num_clients
  if settings.local_epochs is None:
    batch_size = settings.centralized_batch_size
    if batch_size is None:
      batch_size = clients * settings.batch_size
    return float(settings.rounds * settings.local_steps * batch_size)
  sizes = [
      settings.samples_per_domain or _NUM_TRAIN.get(_last_part(source))
      for source in sources
  ]
  if None in sizes:
    return None
  share = settings.train_share or 1
  total = sum(size for size in sizes if size is not None) * share
  if settings.samples_per_client is not None:
    total = settings.samples_per_client * num_clients
  return settings.rounds * settings.local_epochs * total * clients / num_clients


def model_and_shape(
    name: str, settings: settings_lib.RunSettings
) -> tuple[str, str, int]:
  """Returns the model, the shape and the classes that a run has."""
  source = settings.dataset.removeprefix('domains:').partition(',')[0]
  flags = {}
  if settings.image_size is not None:
    flags['image_size'] = settings.image_size
  shape, num_classes = experiment_smoke.find_shape(
      source.rpartition('=')[2], flags, name
  )
  return settings.model, shape, num_classes


def read_seconds() -> dict[tuple[str, str], float]:
  """Returns the measured seconds for one example, by model and shape."""
  with SECONDS.open(encoding='utf-8') as file:
    return {
        (row['model'], row['shape']): float(row['seconds_per_example'])
        for row in csv.DictReader(file)
    }


def _hours(
    name: str, plan: experiment_plan.Plan, seconds: dict[tuple[str, str], float]
) -> str:
  """Returns an estimate of the hours of all runs."""
  if plan.comparison is None:
    return '0'
  total = 0.0
  for run in plan.comparison.trained():
    examples = num_examples(run.settings)
    try:
      key = model_and_shape(name, run.settings)[:2]
    except ValueError:
      return '–'
    if examples is None or key not in seconds:
      return '–'
    total += examples * seconds[key]
  hours = total / GPU_FACTOR / 3600
  if hours < 0.1:
    return 'less than 0.1'
  return f'{hours:.1f}' if hours < 10 else f'{hours:.0f}'


def result_path(name: str, scale: str) -> pathlib.Path:
  """Returns where the result of an experiment at a scale is kept."""
  if experiment_files.is_ours(name):
    return RESULTS.parent / f'{name.partition("/")[2]}.md'
  suffix = '' if scale == experiment_files.DIGITS else f'_{scale}'
  return RESULTS / f'{name.replace("/", "_")}{suffix}.md'


def result_scales(name: str) -> list[str]:
  """Returns the scales of the results that are kept."""
  if experiment_files.is_ours(name):
    return [experiment_files.PAPER]
  kept = (experiment_files.DIGITS, experiment_files.FASHION)
  scales = experiment_files.scales(name)
  return [scale for scale in kept if scale in scales]


def _finished(name: str) -> list[str]:
  """Returns the scales whose result is there."""
  return [s for s in result_scales(name) if result_path(name, s).exists()]


def _rows(names: list[str]) -> Iterator[list[str]]:
  seconds = read_seconds()
  for name in names:
    plans = experiment_plan.check_all(name)
    plan = plans['paper']
    num_runs = len(plan.comparison.trained()) if plan.comparison else 0
    links = [_link_with_hours(name, scale) for scale in _finished(name)]
    missing = 'not run' if result_scales(name) else '–'
    yield [
        f'`{name}`',
        plan.experiment.title.replace('|', '\\|'),
        ', '.join(f'`{data}`' for data in _datasets(name)) or '–',
        str(num_runs),
        _hours(name, plan, seconds),
        ', '.join(links) or missing,
    ]


def _link(name: str, scale: str) -> str:
  """Returns the link from the page to a result."""
  return f'../{result_path(name, scale).relative_to(_ROOT)}'


def _link_with_hours(name: str, scale: str) -> str:
  """Returns the link to a result, and how long its trainings took."""
  text = 'result' if scale == experiment_files.PAPER else scale
  hours = experiment_files.load(name, scale).core_hours
  measured = '' if hours is None else f' ({hours:g} core hours)'
  return f'[{text}]({_link(name, scale)}){measured}'


def _result(name: str, scale: str) -> str:
  """Returns what the paper claims, and the result."""
  text = result_path(name, scale).read_text(encoding='utf-8')
  main_part = text.partition('\n## ')[0]
  sentences = [
      line.removeprefix('- ')
      for line in main_part.splitlines()
      if line.startswith('- ') and not line.endswith(agreement.ONLY_ORDER)
  ]
  by_start: dict[str, list[str]] = {}
  for sentence in sentences:
    by_start.setdefault(agreement.start(sentence), []).append(sentence)
  shown = by_start.pop(agreement.CLAIM, [])
  by_start.pop(agreement.DIFFERENCES, None)
  results = by_start.pop(agreement.FOUND, [])
  others = [s for each in by_start.values() for s in each]
  # Orders of our own numbers are details of a result.
  shown += results
  shown += [s for s in others if agreement.is_comparison(s) or not results]
  link = f'- [`{name}`]({_link(name, scale)})'
  if scale != experiment_files.DIGITS:
    link += f', `--scale={scale}`'
  return '\n'.join([link, *(f'    - {sentence}' for sentence in shown)])


def page() -> str:
  """Returns the text of the page."""
  blocks = [_INTRODUCTION, '## Data\n']
  names = experiment_files.names()
  datasets = list(
      dict.fromkeys(data for name in names for data in _datasets(name))
  )
  blocks.append(
      tables.markdown(
          [
              ['dataset', 'how to get it'],
              *([f'`{data}`', _how_to_get(data)] for data in sorted(datasets)),
          ],
          num_labels=2,
      )
  )
  for paper, group in itertools.groupby(
      names, lambda name: name.partition('/')[0]
  ):
    blocks.append(f'\n## {_PAPERS.get(paper, paper)}\n')
    titles = ['--experiment=', 'shows', 'data', 'runs', 'GPU hours', 'results']
    rows = [titles, *_rows(list(group))]
    blocks.append(tables.markdown(rows, num_labels=3))
  finished = [
      (name, scale)
      for name in names
      if not experiment_files.is_ours(name)
      for scale in _finished(name)
  ]
  if finished:
    blocks.append(_RESULTS)
    blocks += itertools.starmap(_result, finished)
  return '\n'.join(blocks).rstrip() + '\n'


if __name__ == '__main__':
  PAGE.write_text(page(), encoding='utf-8')
  print(f'Page: {PAGE}')
