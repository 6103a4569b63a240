"""Tests of the smoke scale of experiments."""

import pytest

from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_plan
from tff_bn.papers.experiments import experiment_smoke
from tff_bn.programs.flags import data_flags
from tff_bn.programs.plan import axes


def _reduced(overrides=None, removed=(), **flags):
  return experiment_smoke.reduced(
      flags, overrides or {}, removed, 'new/table_1'
  )


def _axis(name, *labels):
  return axes.Axis(
      name, tuple(axes.Point(label, {name: label}) for label in labels)
  )


def test_covering_has_each_point_of_each_axis_once_or_more():
  axes_ = [_axis('a', '1', '2'), _axis('b', '1', '2', '3'), _axis('c', '1')]

  cells = experiment_smoke.covering(axes_)

  assert [tuple(cell.labels.values()) for cell in cells] == [
      ('1', '1', '1'),
      ('2', '2', '1'),
      ('1', '3', '1'),
  ]
  assert cells[1].flags == {'a': '2', 'b': '2', 'c': '1'}


def test_covering_of_no_axes_is_one_run():
  assert experiment_smoke.covering([]) == [axes.Cell({}, {})]


@pytest.mark.parametrize(
    'dataset, expected',
    [
        ('tfds:cifar10', 'generated:32x32x3:10:240:40'),
        ('tfds:cifar100', 'generated:32x32x3:100:400:100'),
        ('tfds:mnist', 'generated:28x28x1:10:240:40'),
        ('femnist', 'generated:28x28x1:62:248:62'),
        ('folder:data/cinic10', 'generated:32x32x3:10:240:40'),
        ('/home/data/usps.npz', 'generated:16x16x1:10:240:40'),
        ('npz:abide/NYU.npz', 'generated:5995:2:240:40'),
        ('generated:7:3', 'generated:7:3:240:40'),
        ('digits_domains', 'digits_domains'),
        (
            'domains:SVHN=tfds:svhn_cropped,npz:usps.npz',
            'domains:SVHN=generated:32x32x3:10:40:10,'
            'usps=generated:32x32x3:10:40:10',
        ),
    ],
)
def test_data_is_random_and_has_the_shape(dataset, expected):
  assert _reduced(dataset=dataset)['dataset'] == expected


def test_an_unknown_shape_is_an_error_that_says_what_to_do():
  with pytest.raises(ValueError, match=r"'tfds:new' of new/table_1 is unknown"):
    _reduced(dataset='tfds:new')

  given = {'dataset': 'generated:5x5x1:3'}
  assert _reduced(given, dataset='tfds:new')['dataset'] == 'generated:5x5x1:3'


def test_runs_are_short():
  flags = _reduced(
      dataset='tfds:mnist',
      rounds='3000',
      local_epochs='20',
      batch_size='64',
      client_learning_rate_schedule='1001:0.5',
      sync_rounds='2000',
      fixbn_rounds='1500',
      seeds='0,1,2',
  )

  assert flags == {
      'dataset': 'generated:28x28x1:10:240:40',
      'rounds': '2',
      'local_epochs': '1',
      'batch_size': '8',
      'client_learning_rate': '0.01',
      'sync_rounds': '1',
      'fixbn_rounds': '1',
      'seeds': '0',
      'evaluate_every': '1',
      'checkpoint_every': '2',
  }


@pytest.mark.parametrize(
    'flags, expected',
    [
        (dict(data_dir='/data'), dict(data_dir=None)),
        (
            dict(dataset='tfds:cifar10', image_size='48x40'),
            dict(dataset='generated:48x40x3:10:240:40', image_size=None),
        ),
        (
            dict(dataset='folder:domainnet/real'),
            dict(dataset='generated:96x96x3:10:240:40'),
        ),
        # It takes seconds to trace a deep model.
        (dict(model='alexnet_bn'), dict(model='small_cnn')),
        (dict(model='resnet20_wide'), dict(model='small_cnn')),
        (dict(model='mlp4'), dict(model='mlp3')),
        (dict(model='mlp3'), dict(model='mlp3')),
        (dict(model='abide_mlp'), dict(model='abide_mlp')),
        # The small models have fewer channels.
        (dict(normalization='group32'), dict(normalization='group8')),
        (dict(normalization='layer'), dict(normalization='layer')),
        # One step has no later ones whose statistics could be left out.
        (
            dict(local_steps='5', fedtan_statistics='first_step'),
            dict(local_steps='1', fedtan_statistics=None),
        ),
        (
            dict(fedtan_every='2', fedtan_statistics='first_step'),
            dict(fedtan_every='2', fedtan_statistics='first_step'),
        ),
        # Defaults are reduced, too.
        ({}, dict(local_steps='1', batch_size='8', model=None)),
        (dict(batch_size='2'), dict(batch_size='2')),
        (dict(local_epochs='3'), dict(local_epochs='1', local_steps=None)),
        # Values that make no difference are shared, but 0 stays.
        (dict(client_momentum='0.5'), dict(client_momentum='0.9')),
        (dict(client_momentum='0.0'), dict(client_momentum='0.0')),
        # Random data has no writers.
        (dict(split='natural'), dict(split='iid')),
    ],
)
def test_reduced_flags(flags, expected):
  result = _reduced(**flags)

  assert {name: result.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    'flags, expected',
    [
        ({'num_clients': '100', 'clients_per_round': '10'}, ['5', '4']),
        ({'num_clients': '3', 'clients_per_round': '2'}, ['3', '2']),
        (
            {'num_clients': '10', 'num_byzantine': '3', 'num_attackers': '3'},
            ['10', None, '3', '3'],
        ),
        (
            {
                'num_clients': '50',
                'clients_per_round': '5',
                'num_byzantine': '9',
            },
            ['10', '5', '2'],
        ),
        (
            {
                'num_clients': '20',
                'split': 'domains',
                'dataset': 'domains:tfds:mnist,tfds:usps,tfds:svhn_cropped',
            },
            ['3'],
        ),
        (
            {
                'num_clients': '20',
                'split': 'domains',
                'dataset': 'domains:'
                + ','.join(f'{name}=tfds:mnist' for name in 'abcdefg'),
            },
            ['7'],
        ),
    ],
)
def test_numbers_of_clients_fit_each_other(flags, expected):
  result = _reduced(**flags)

  names = ('num_clients', 'clients_per_round', 'num_byzantine', 'num_attackers')
  assert [result.get(name) for name in names][: len(expected)] == expected


def test_overrides_and_removed_flags():
  flags = _reduced(
      {'model': 'mlp3'}, ['normalization'], model='vgg9', normalization='none'
  )

  assert flags['model'] == 'mlp3'
  assert 'normalization' not in flags


@pytest.fixture(name='load')
def fixture_load(tmp_path, monkeypatch):
  """Writes an experiment, and returns its plan at the smoke scale."""
  monkeypatch.setattr(experiment_files, 'FOLDER', tmp_path)
  parser = data_flags.DataFlags.specs()['dataset'].values
  monkeypatch.setattr(parser, 'is_other', lambda name: True)

  def load(toml):
    (tmp_path / 'new').mkdir()
    (tmp_path / 'new' / 'table_1.toml').write_text(toml, encoding='utf-8')
    return experiment_plan.check_all('new/table_1')['smoke']

  return load


_TOML = """
title = "T"
place = "P"
finding = "F"
[flags]
dataset = "tfds:cifar10"
num_clients = 50
rounds = 3000
local_epochs = 5
[axes.method]
"a" = { algorithm = "fedavg" }
"b" = { algorithm = "fixbn", fixbn_rounds = 1500 }
"c" = { algorithm = "fbn", local_steps = 1 }
[axes.data]
"i.i.d." = { split = "iid" }
"skewed" = { split = "dirichlet", dirichlet_alpha = 0.1, num_clients = 4 }
[show]
kind = "curves"
x = "round"
y = "test_accuracy"
lines = "method"
panels = "data"
[[analyses]]
name = "preference"
runs = "method"
flags = { layers = "conv_relu_5", num_clients = 7 }
"""


def test_plan_covers_the_axes_with_reduced_flags(load):
  plan = load(_TOML)

  runs = plan.comparison.runs
  assert [(run.labels['method'], run.labels['data']) for run in runs] == [
      ('a', 'i.i.d.'),
      ('b', 'skewed'),
      ('c', 'i.i.d.'),
  ]
  settings = [run.settings for run in runs]
  assert [s.rounds for s in settings] == [2, 2, 2]
  assert [s.num_clients for s in settings] == [5, 4, 5]
  assert [s.local_epochs for s in settings] == [1, 1, None]
  assert settings[2].local_steps == 1
  assert settings[1].fixbn_rounds == 1
  assert settings[1].dirichlet_alpha == 1
  assert plan.experiment.scale == 'smoke'


def test_analyses_are_short_also_by_default(load):
  (analysis,) = load(_TOML).experiment.analyses

  # The small model has no such layer.
  assert analysis.flags == {'num_clients': '2', 'num_examples': '4'}


def test_lists_of_numbers_in_analyses(load):
  toml = (
      'title = "T"\nplace = "P"\nfinding = "F"\n[[analyses]]\n'
      'name = "kept_share"\n'
      'flags = { num_units = "4,8,16,1024", num_steps = 100 }\n'
  )

  (analysis,) = load(toml).experiment.analyses

  assert analysis.flags == {
      'num_units': '4,8',
      'num_steps': '10',
      'repeats': '2',
  }


def test_the_file_can_help(load):
  plan = load(_TOML + '[smoke.flags]\nmodel = "mlp3"\n')

  assert {run.settings.model for run in plan.comparison.runs} == {'mlp3'}


def test_mistakes_in_the_smoke_table(load):
  with pytest.raises(ValueError, match='smoke.flag is not understood'):
    load(_TOML + '[smoke.flag]\nmodel = "mlp3"\n')
