"""Datasets, splits and models of users, by `module:NAME`."""

import pickle
import re
import sys

import csv_rows
import printed
import pytest
import tiny_runs

from tff_bn import data as tff_bn_data
from tff_bn import models
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings
from tff_bn.programs.runs import run_data

_MODULE = """
from tff_bn import data
from tff_bn import models
from tff_bn.catalog import datasets
from tff_bn.catalog import models as model_catalog
from tff_bn.data import splits


def digits():
  return data.load_dataset('digits')


DOMAINS = datasets.Source(
    'x', 'domains', lambda: data.load_dataset('digits_domains'),
    has_domains=True,
)
STORED = datasets.Source(
    'x', 'stored', lambda data_dir: digits() if data_dir else None,
    (datasets.DATA_DIR,),
)
MISSING = datasets.Source('x', 'missing', 'my_parts:Missing')


def number():
  return 3


def fails():
  raise RuntimeError('no luck')


def iid(task):
  return splits.split_iid(len(task.labels), task.num_clients, task.seed)


CLASSES = splits.Split(
    'x', 'by classes', splits.SPLITS['classes'].builds,
    (splits.CLASSES_PER_CLIENT,),
)


def one_part(task):
  return [[0]]


def empty_parts(task):
  return [[]] * task.num_clients


def far_parts(task):
  return [[len(task.labels)]] * task.num_clients


def texts(task):
  return ['a'] * task.num_clients


def mlp(input_shape, num_classes, normalization):
  return models.build_mlp3(input_shape, num_classes, normalization)


LARGE = model_catalog.Model('x', 'for large images', mlp, smallest=20)
constant = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
  """The working folder has the module."""
  (tmp_path / 'my_parts.py').write_text(_MODULE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  yield tmp_path
  sys.modules.pop('my_parts', None)


def _settings(*arguments):
  flags = command_line.parse(train.define_flags, arguments)
  settings.check(flags)
  return settings.resolve(flags, flags.algorithm, flags.seed)


def _split(*arguments):
  run = _settings(*arguments)
  return run.split_over_clients(run.load(), 0)


def test_entries_decide_which_options_have_an_effect():
  run = _settings('--dataset=my_parts:DOMAINS')
  assert (run.split, run.num_clients) == ('domains', None)
  assert run.load().domain_names[0] == 'plain'
  run = _settings('--dataset=my_parts:digits')
  assert (run.split, run.num_clients) == ('classes', 10)
  with pytest.raises(ValueError, match='--data_dir=x has no effect with --d'):
    _settings('--dataset=my_parts:digits', '--data_dir=x')
  assert _settings('--dataset=my_parts:STORED', '--data_dir=x').load()

  expected = _split('--split=classes', '--classes_per_client=3')
  data = _split('--split=my_parts:CLASSES', '--classes_per_client=3')
  assert data.fingerprint() == expected.fingerprint()
  with pytest.raises(ValueError, match='--gamma=0.5 is only for --split=gamma'):
    _settings('--split=my_parts:CLASSES', '--gamma=0.5')
  run = _settings('--model=my_parts:LARGE')
  with pytest.raises(ValueError, match='model=my_parts:LARGE needs images of'):
    run.build_model_fn((8, 8, 1), 10)
  assert run.build_model_fn((20, 20, 1), 10)


def test_in_python():
  sys.path.insert(0, '')
  dataset = tff_bn_data.load_dataset('my_parts:digits', image_size=(4, 4))
  assert dataset.name == 'my_parts:digits'
  assert dataset.input_shape == (4, 4, 1)
  domains = tff_bn_data.load_dataset('domains:a=my_parts:digits,b=digits')
  assert domains.domain_names == ('a', 'b')
  data = tff_bn_data.split_dataset(dataset, 'my_parts:iid', 3, 0)
  assert data.client_ids == ('client_0', 'client_1', 'client_2')
  assert models.build_model_fn('my_parts:mlp', (4, 4, 1), 10, 'none')


@pytest.mark.parametrize(
    ('flag', 'value', 'message'),
    [
        ('dataset', 'no_such:x', "'no_such' can not be imported"),
        ('dataset', 'my_parts:digit', "no 'digit'. Did you mean digits?"),
        (
            'dataset',
            'my_parts:constant',
            'must be a function that returns a tff_bn.data.Dataset, .* of type',
        ),
        ('dataset', 'domains:a=digits,b=my_parts:x', "has no 'x'"),
        ('dataset', 'my_parts:MISSING', "has no 'Missing'"),
        ('split', 'no_such:x', "'no_such' can not be imported"),
        ('split', 'my_parts:idd', "has no 'idd'. Did you mean iid?"),
        (
            'split',
            'my_parts:constant',
            'must be a function of a tff_bn.data.Split',
        ),
        ('split', 'idd', 'must be one of iid, .* or a function .* mean iid?'),
        ('model', 'my_parts:nlp', "has no 'nlp'. Did you mean mlp?"),
        ('model', 'my_parts:constant', 'must be a function of the shape'),
    ],
)
def test_wrong_parts(flag, value, message, module, capsys):
  assert train.run([f'--{flag}={value}', '--output_dir=out']) == 2
  error = printed.error(capsys.readouterr().err)
  assert f'--{flag}={value}: ' in error
  assert re.search(message, error)
  assert not (module / 'out').exists()


@pytest.mark.parametrize(
    ('flag', 'value', 'message'),
    [
        ('dataset', 'number', 'its function returned int, not a tff_bn.data.D'),
        ('dataset', 'fails', r'its function failed \(RuntimeError: no luck\)'),
        ('split', 'number', r'its function failed \(TypeError: '),
        ('split', 'one_part', 'returned 1 parts; it must return a list of 10 '),
        ('split', 'empty_parts', r'part 0 .* \(0,\) .* and each at least one'),
        ('split', 'far_parts', 'from 1437 to 1437, but there are 1437 train'),
        ('split', 'texts', r'part 0 of its result has the shape \(\) and the'),
    ],
)
def test_wrong_results(flag, value, message):
  with pytest.raises(ValueError, match=message) as error:
    _split(f'--{flag}=my_parts:{value}')
  assert str(error.value).startswith(f'{flag}=my_parts:{value}: ')


def test_parsing_imports_nothing(module):
  (module / 'my_parts.py').write_text('raise RuntimeError')
  names = ('dataset', 'split', 'model')
  arguments = [f'--{name}=my_parts:x' for name in names]
  command_line.parse(train.define_flags, arguments)


def test_a_recipe_names_the_parts():
  run = _settings('--dataset=my_parts:digits', '--split=my_parts:iid')
  recipe = run_data.DataRecipe.of(run)
  pickled = pickle.dumps(recipe)
  assert b'my_parts:digits' in pickled and len(pickled) < 2000
  sys.modules.pop('my_parts')
  again = pickle.loads(pickled)
  assert (again, hash(again)) == (recipe, hash(recipe))
  assert 'my_parts' not in sys.modules
  assert again().fingerprint() == recipe().fingerprint()


def _losses(folder):
  return [row['test_loss'] for row in csv_rows.read(folder / 'metrics.csv')]


@pytest.mark.slow
@pytest.mark.parametrize('jobs', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_comparison_equals_our_own_parts(jobs, module, capsys):
  flags = [*tiny_runs.FLAGS, '--split=iid', f'--seed={jobs - 1}']
  assert train.run([*flags, '--output_dir=ours']) == 0
  arguments = [
      *tiny_runs.FLAGS,
      *('--dataset=my_parts:digits', '--split=my_parts:iid'),
      *('--model=my_parts:mlp', '--algorithms=fedavg', f'--jobs={jobs}'),
      f'--seeds={",".join(map(str, range(jobs)))}',
      '--output_dir=theirs',
  ]
  assert compare.run(arguments) == 0
  run = module / f'theirs/runs/fedavg-seed{jobs - 1}'
  assert _losses(run) == _losses(module / 'ours')
  capsys.readouterr()
  assert evaluate.run([f'--run={run}']) == 2
  assert 'names code' in capsys.readouterr().err
  assert evaluate.run([f'--run={run}', '--trust_run']) == 0
  # Other data that the command names needs no trust.
  assert evaluate.run(['--run=ours', '--dataset=my_parts:digits']) == 0
