"""The smoke scale of an experiment: random data, two rounds, few runs.

It shows that every run of the experiment starts and finishes, with the paper's
algorithms, splits, rules and analyses. The data has the right shape, and small
models replace the deep ones. Its results mean nothing.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
import re
from typing import Optional

from absl import flags as absl_flags

from tff_bn.catalog import algorithms
from tff_bn.catalog import datasets
from tff_bn.catalog import models
from tff_bn.data import splits
from tff_bn.papers import analyze
from tff_bn.papers.experiments import experiment_files
from tff_bn.programs.cli import parsers
from tff_bn.programs.plan import axes as axes_lib

_GENERATED = 'generated:'
_DOMAINS = 'domains:'
# The shape and the number of classes of datasets, by the last part of a name.
SHAPES = {
    'digits': ('8x8x1', 10),
    'mnist': ('28x28x1', 10),
    'emnist': ('28x28x1', 10),
    'femnist': ('28x28x1', 62),
    'fashion_mnist': ('28x28x1', 10),
    'usps': ('16x16x1', 10),
    'mnist_m': ('32x32x3', 10),
    'mnistm': ('32x32x3', 10),
    'synthdigits': ('32x32x3', 10),
    'synth_digits': ('32x32x3', 10),
    'syn': ('32x32x3', 10),
    'svhn': ('32x32x3', 10),
    'svhn_cropped': ('32x32x3', 10),
    'cifar10': ('32x32x3', 10),
    'cinic10': ('32x32x3', 10),
    'cifar100': ('32x32x3', 100),
    'gtsrb': ('32x32x3', 43),
    'office_caltech10': ('256x256x3', 10),
    'domainnet': ('256x256x3', 10),
    'abide': ('5995', 2),
}
# Datasets that are small and offline, with groups of samples of their own.
_KEPT = ('digits_domains', 'fedbn_synthetic', 'emnist_synthetic')
_NUM_TRAIN = 240
_NUM_TEST = 40
# Of each domain.
_DOMAIN_TRAIN = 40
_DOMAIN_TEST = 10
_MAX_SIDE = 96  # Pixels.
_NUM_CLIENTS = 5
# Robust rules need many honest clients.
_NUM_CLIENTS_WITH_ATTACKERS = 10
_CLIENTS_PER_ROUND = 4
_BATCH_SIZE = 8
# It takes TensorFlow seconds to trace a deep model.
_SMALL_MODELS = {
    **dict.fromkeys(
        (
            *('alexnet_bn', 'digits_cnn', 'fbn_cnn', 'resnet20'),
            *('resnet20_wide', 'vgg9', 'vgg11', 'vgg13'),
        ),
        'small_cnn',
    ),
    'mlp4': 'mlp3',
}
# The number of groups must divide the channels of the small model.
_GROUP_NORMALIZATION = 'group8'
# Flags that depend on the real data or on the number of rounds, and flags whose
# values make no difference to what runs.
_DROPPED = (
    'data_dir',
    'image_size',
    'average_last',
    'client_learning_rate_schedule',
    'client_warmup_rounds',
)
_FIXED = {
    'rounds': '2',
    'evaluate_every': '1',
    'checkpoint_every': '2',
    'seeds': '0',
    # Large steps may make a loss infinite, which ends a run.
    'client_learning_rate': '0.01',
}
# Values that take the place of others that are not 0: then experiments share
# runs, and no client of a small dataset is without examples.
_IF_NOT_ZERO = {
    'after_sync_factor': '0.1',
    'client_momentum': '0.9',
    'client_warmup_steps': '10',
    'client_weight_decay': '0.0001',
    'dirichlet_alpha': '1',
    'dsgd_momentum': '0.9',
    'gamma': '0.5',
    'moon_temperature': '0.5',
    'moon_weight': '1',
    'pan_amplitude': '0.1',
    'pan_period': '1',
    'proximal_strength': '0.01',
    'samples_per_client': '8',
    'samples_per_domain': '16',
    'server_learning_rate': '1',
    'server_momentum': '0.9',
    'shuffle_times': '0.5',
    'train_share': '0.5',
}
_AT_MOST = {
    'batch_size': _BATCH_SIZE,
    'local_steps': 1,
    'local_epochs': 1,
}
# The small models have no layers of these names, and an analysis of a dataset
# has a default that needs no download.
_ANALYSIS_DROPPED = ('layers', 'dataset', 'image_size')
# Flags of analyses that decide how long they take.
_ANALYSIS_AT_MOST = {
    'num_examples': 4,
    'repeats': 2,
    'num_rounds': 1,
    'num_epochs': 1,
    'rounds': 2,
    'num_clients': 2,
    'num_units': 8,
    'num_steps': 10,
}


def load(name: str) -> experiment_files.Experiment:
  """Reads an experiment at the smoke scale.

  Args:
    name: Its name, PAPER/NAME.

  Returns:
    The experiment. Its axes are the paper's; `cells` has the flags of the runs.

  Raises:
    ValueError: If its files have a mistake, or name a dataset whose shape is
      unknown.
  """
  paper = experiment_files.load(name)
  overrides, removed = experiment_files.smoke_overrides(name)
  flags = paper.flags
  if paper.trains:
    flags = reduced(flags, overrides, removed, name)
  return dataclasses.replace(
      paper,
      scale=experiment_files.SMOKE,
      flags=flags,
      analyses=tuple(map(_reduced_analysis, paper.analyses)),
  )


def cells(name: str, axes: Sequence[axes_lib.Axis]) -> list[axes_lib.Cell]:
  """Returns the runs of an experiment at the smoke scale.

  Args:
    name: Its name, PAPER/NAME.
    axes: What is varied: the experiment's axes, and more.

  Returns:
    As few combinations of points as have each point of each axis.
  """
  paper = experiment_files.load(name)
  overrides, removed = experiment_files.smoke_overrides(name)
  base = reduced(paper.flags, overrides, removed, name)
  result = []
  for cell in covering(axes):
    flags = reduced({**paper.flags, **cell.flags}, overrides, removed, name)
    own = {
        key: text
        for key, text in flags.items()
        if key in cell.flags or base.get(key) != text
    }
    result.append(axes_lib.Cell(cell.labels, own))
  return result


def covering(axes: Sequence[axes_lib.Axis]) -> list[axes_lib.Cell]:
  """Returns combinations of points in which each point of each axis occurs.

  Args:
    axes: The axes.

  Returns:
    As many combinations as the longest axis has points.
  """
  number = max((len(axis.points) for axis in axes), default=1)
  result = []
  for index in range(number):
    chosen = [
        dataclasses.replace(
            axis, points=(axis.points[index % len(axis.points)],)
        )
        for axis in axes
    ]
    result += axes_lib.product(chosen)
  return result


def reduced(
    flags: Mapping[str, str],
    overrides: Mapping[str, str],
    removed: Sequence[str],
    name: str,
) -> dict[str, str]:
  """Returns flags for a run that takes seconds and needs no data.

  Args:
    flags: The flags of the paper.
    overrides: Flags that replace those that are computed here.
    removed: Flags that are left out.
    name: The experiment's name, for errors.

  Returns:
    The flags.

  Raises:
    ValueError: If the shape of the dataset is unknown.
  """
  result = {
      key: text
      for key, text in flags.items()
      if key not in (*_DROPPED, *removed)
  }
  result.update(_FIXED)
  if 'model' in result:
    result['model'] = _SMALL_MODELS.get(result['model'], result['model'])
  if models.num_groups(result.get('normalization', '')):
    result['normalization'] = _GROUP_NORMALIZATION
  result.setdefault('batch_size', str(_BATCH_SIZE))
  if 'local_epochs' not in result:
    result.setdefault('local_steps', '1')
  for key, most in _AT_MOST.items():
    if key in result:
      result[key] = str(min(int(result[key]), most))
  for key, text in _IF_NOT_ZERO.items():
    if key in result and float(result[key]):
      result[key] = text
  if result.get('local_steps') == '1' and 'fedtan_every' not in result:
    # There is no later step.
    result.pop('fedtan_statistics', None)
  # A first phase of some rounds must end before the last round.
  for algorithm in algorithms.ALGORITHMS.values():
    phase = algorithm.first_phase
    if phase is not None and phase.name in result:
      result[phase.name] = '1'
  if 'dataset' in result and 'dataset' not in overrides:
    result['dataset'] = _generated(flags, name)
  if result.get('split') == 'natural':
    result['split'] = 'iid'
  _reduce_clients(result)
  result.update(overrides)
  return result


def _reduce_clients(flags: dict[str, str]) -> None:
  """Reduces the numbers of clients so that they still fit each other."""
  num_clients = int(flags.get('num_clients', splits.DEFAULT_NUM_CLIENTS))
  most, most_in_round = _NUM_CLIENTS, _CLIENTS_PER_ROUND
  if 'num_byzantine' in flags or 'num_attackers' in flags:
    most = most_in_round = _NUM_CLIENTS_WITH_ATTACKERS
  if 'num_clients' in flags:
    num_clients = min(num_clients, most)
    num_domains = _num_domains(flags.get('dataset', ''))
    if flags.get('split') == 'domains' and num_domains:
      num_clients = max(num_clients // num_domains, 1) * num_domains
    flags['num_clients'] = str(num_clients)
  if 'clients_per_round' in flags:
    num_clients = min(
        int(flags['clients_per_round']), num_clients, most_in_round
    )
    flags['clients_per_round'] = str(num_clients)
  for key in ('num_byzantine', 'num_attackers'):
    if key in flags:
      most = max((num_clients - 1) // 2, 1)
      flags[key] = str(min(int(flags[key]), most))


def _num_domains(dataset: str) -> int:
  if dataset.startswith(_DOMAINS):
    return dataset.count(',') + 1
  return 5 if dataset == 'digits_domains' else 0


def _generated(flags: Mapping[str, str], name: str) -> str:
  """Returns random data in place of a dataset."""
  dataset = flags['dataset']
  if dataset in _KEPT:
    return dataset
  if not dataset.startswith(_DOMAINS):
    return _generated_source(dataset, flags, name)
  sources = dataset.removeprefix(_DOMAINS).split(',')
  parts = [source.rpartition('=') for source in sources]
  # The domains have one shape.
  shapes = [find_shape(source, flags, name) for *_, source in parts]
  largest = max(shapes, key=lambda shape: _num_values(shape[0]))
  return _DOMAINS + ','.join(
      (
          f'{own or _last_part(source)}='
          + _source(*largest, _DOMAIN_TRAIN, _DOMAIN_TEST)
      )
      for own, _, source in parts
  )


def _generated_source(dataset: str, flags: Mapping[str, str], name: str) -> str:
  return _source(*find_shape(dataset, flags, name))


def _source(
    shape: str,
    num_classes: int,
    num_train: int = _NUM_TRAIN,
    num_test: int = _NUM_TEST,
) -> str:
  num_train = max(num_train, 4 * num_classes)
  num_test = max(num_test, num_classes)
  return f'{_GENERATED}{_smaller(shape)}:{num_classes}:{num_train}:{num_test}'


def _num_values(shape: str) -> int:
  product = 1
  for side in shape.split('x'):
    product *= int(side)
  return product


def _last_part(dataset: str) -> str:
  """Returns the last part of a dataset's name or path, in lower case."""
  name = pathlib.PurePath(datasets.path(dataset)).name
  return name.removesuffix(datasets.NPZ_SUFFIX)


def find_shape(
    dataset: str, flags: Mapping[str, str], name: str
) -> tuple[str, int]:
  """Returns the shape and the number of classes of a dataset.

  Args:
    dataset: The dataset, not several domains.
    flags: The flags of a run, of which `image_size` decides the shape.
    name: The experiment's name, for errors.

  Returns:
    The shape as HxWxC, and the number of classes.

  Raises:
    ValueError: If they are unknown.
  """
  found: Optional[tuple[str, int]] = None
  if dataset.startswith(_GENERATED):
    first, second, *_ = dataset.removeprefix(_GENERATED).split(':')
    found = first, int(second)
  else:
    # tfds:domainnet/real and folder:office_caltech10/amazon are parts of one.
    parts = re.split('[:/]', dataset.lower().removesuffix('.npz'))
    for part in reversed(parts):
      found = found or SHAPES.get(part)
  if found is None:
    raise ValueError(
        f'--scale={experiment_files.SMOKE}: the shape of the data'
        f' {dataset!r} of {name} is unknown. Give random data of this shape in'
        f' the file of the experiment: [smoke.flags] dataset ='
        f' "{_GENERATED}32x32x3:10", or "{_DOMAINS}NAME={_GENERATED}..." for'
        ' domains.'
    )
  shape, num_classes = found
  if 'image_size' in flags:
    height, width = datasets.parse_image_size(flags['image_size'])
    shape = f'{height}x{width}x{shape.rpartition("x")[2]}'
  return shape, num_classes


def _smaller(shape: str) -> str:
  """Returns a shape with smaller images, if they are large."""
  sides = [int(side) for side in shape.split('x')]
  if len(sides) > 1:
    sides = [min(side, _MAX_SIDE) for side in sides]
  return 'x'.join(map(str, sides))


def _reduced_analysis(
    analysis: experiment_files.Analysis,
) -> experiment_files.Analysis:
  """Returns an analysis that takes seconds."""
  values = absl_flags.FlagValues()
  analyze.ANALYSES[analysis.name].define_flags(values)
  flags = {
      key: text
      for key, text in analysis.flags.items()
      if key not in _ANALYSIS_DROPPED
  }
  for key, most in _ANALYSIS_AT_MOST.items():
    if key not in values:
      continue
    text = flags.get(key, parsers.to_text(values[key].default))
    numbers = [] if text == 'None' else text.split(',')
    # Some flags are lists of numbers.
    less = dict.fromkeys(str(min(int(number), most)) for number in numbers)
    if less:
      flags[key] = ','.join(less)
  return dataclasses.replace(analysis, flags=flags)
