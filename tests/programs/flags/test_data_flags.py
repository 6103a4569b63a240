"""Tests of the flags of the data."""

import contextlib
import re

from absl import logging
import numpy as np
import pytest

from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.flags import data_flags
from tff_bn.programs.plan import settings


def _flags(*arguments):
  return command_line.parse(train.define_flags, arguments)


def _texts(*arguments):
  flags = _flags(*arguments)
  settings.check(flags)
  return settings.resolve(flags, flags.algorithm, 0).to_flags()


def test_defaults_are_not_in_the_file_of_flags():
  names = (
      *('pixel_scaling', 'train_share', 'samples_per_domain', 'dirichlet_by'),
      *('augment', 'held_out_clients', 'held_out_prior'),
  )
  # Runs from before these flags can be continued.
  assert not set(names) & _texts('--split=dirichlet').keys()
  given = _texts(
      *('--pixel_scaling=unit', '--train_share=1', '--dirichlet_by=class'),
      *('--augment=none', '--split=dirichlet'),
  )
  assert given == _texts('--split=dirichlet')


@pytest.mark.parametrize(
    ('dataset', 'is_downloaded'),
    [
        ('digits', False),
        ('domains:digits,a=npz:x.npz', False),
        ('emnist', True),
        ('tfds:mnist', True),
        ('domains:digits,a=tfds:mnist', True),
    ],
)
def test_data_dir_is_for_downloaded_data(dataset, is_downloaded, tmp_path):
  arguments = (f'--dataset={dataset}', f'--data_dir={tmp_path}')
  if is_downloaded:
    assert _texts(*arguments)['data_dir'] == str(tmp_path)
    return
  message = f'--data_dir={tmp_path} has no effect with --dataset={dataset}, '
  with pytest.raises(ValueError, match=re.escape(message)):
    _texts(*arguments)
  # A flag of the command overrules a file.
  (tmp_path / 'flags').write_text(f'--dataset=emnist\n--data_dir={tmp_path}\n')
  overruled = _texts(f'--flagfile={tmp_path}/flags', f'--dataset={dataset}')
  assert 'data_dir' not in overruled


@pytest.mark.parametrize(
    'dataset', ['digits', 'emnist', 'domains:a=digits_domains,b=digits']
)
def test_domain_strength_is_for_digits_domains(dataset):
  flag = '--domain_strength=0.5'
  texts = _texts('--dataset=digits_domains', flag)
  assert texts['domain_strength'] == '0.5'
  message = f'{flag} has no effect with --dataset={dataset}; it is for digits_d'
  with pytest.raises(ValueError, match=re.escape(message)):
    _texts(f'--dataset={dataset}', flag)
  assert 'domain_strength' not in _texts(f'--dataset={dataset}')


def test_paths_of_domains_do_not_depend_on_the_working_folder(
    tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  texts = _texts(
      '--dataset=domains:a=x/y.npz,npz:b.npz,folder:c,tfds:mnist,digits,'
      'r=generated:4x4x1:10'
  )
  assert texts['dataset'] == (
      f'domains:a={tmp_path}/x/y.npz,b=npz:{tmp_path}/b.npz,'
      f'c=folder:{tmp_path}/c,mnist=tfds:mnist,digits=digits,'
      'r=generated:4x4x1:10'
  )
  # Written to a file and read again, they stay the same.
  again = _texts(f'--dataset={texts["dataset"]}')
  assert again == texts


@pytest.mark.parametrize(
    'dataset, message',
    [
        (
            'domains:a=digits,b=digitts',
            r"the domain 'b', whose dataset digitts must be one of .*Did",
        ),
        ('domains:', '^must have the form domains:NAME=DATASET'),
        ('npz:', '^must have the form npz:PATH.$'),
        (
            'domains:a=tfds:,b=digits',
            "the domain 'a', .* must have the form tfds:NAME.$",
        ),
    ],
)
def test_wrong_datasets(dataset, message):
  with pytest.raises(command_line.UsageError) as error:
    _flags(f'--dataset={dataset}')
  start, text = f'--dataset={dataset}: ', str(error.value)
  assert text.startswith(start)
  assert re.search(message, text.removeprefix(start))


@pytest.mark.parametrize(
    'arguments, split, num_clients',
    [
        ([], 'classes', '10'),
        # Domains are the clients.
        (['--dataset=digits_domains'], 'domains', None),
        (['--dataset=domains:digits,a=generated:8x8x1:10'], 'domains', None),
        (['--dataset=digits_domains', '--num_clients=10'], 'domains', '10'),
        # What is given counts.
        (['--dataset=digits_domains', '--split=classes'], 'classes', '10'),
        (['--split=domains'], 'domains', None),
    ],
)
def test_default_split(arguments, split, num_clients, tmp_path):
  texts = _texts(*arguments)
  assert (texts['split'], texts.get('num_clients')) == (split, num_clients)
  # A run that is repeated with its own flags, or those of a preset.
  flags = [f'--{name}={text}' for name, text in texts.items()]
  assert _texts(*flags) == texts
  (tmp_path / 'flags').write_text('\n'.join(flags))
  assert _texts(f'--flagfile={tmp_path}/flags') == texts


def test_parameters_of_splits_that_domains_exclude():
  arguments = ('--dataset=digits_domains', '--classes_per_client=2')
  with pytest.raises(ValueError, match='=2 is only for --split=classes'):
    _texts(*arguments)
  assert _texts(*arguments, '--split=classes')['classes_per_client'] == '2'
  assert 'classes_per_client' not in _texts(arguments[0])


def _without_seconds(capsys):
  """Returns the printed lines, without those that only a slow machine has."""
  lines = capsys.readouterr().err.splitlines()
  return [line for line in lines if not line.startswith('… took')]


def test_classes_that_domains_lack_are_printed(tmp_path, capsys):
  for name, number in (('a', 3), ('b', 2)):
    y = np.arange(6) % number
    x = np.ones((6, 4), np.float32)
    np.savez(tmp_path / f'{name}.npz', x_train=x, y_train=y, x_test=x, y_test=y)
  flags = _flags(f'--dataset=domains:{tmp_path}/a.npz,{tmp_path}/b.npz')
  settings.resolve(flags, 'fedavg', 0).load()
  assert _without_seconds(capsys) == [
      'Loading domains a, b …',
      'Classes: 0, 1, 2. Domains without training samples of a class: b (2).',
  ]
  flags = _flags(f'--dataset=domains:{tmp_path}/a.npz,c={tmp_path}/a.npz')
  settings.resolve(flags, 'fedavg', 0).load()
  assert _without_seconds(capsys) == ['Loading domains a, c …']


def _errors(capsys, folder, *arguments):
  assert train.run([*arguments, f'--output_dir={folder}']) == 2
  return capsys.readouterr().err


def test_errors_name_the_flags(tmp_path, capsys):
  vectors = '--dataset=generated:5:10'
  for arguments, message in (
      (
          [vectors, '--model=mlp3', '--augment=flip_crop'],
          '--augment=flip_crop is for images, but --dataset=generated:5:10 has'
          ' vectors of 5 features; use --augment=none.',
      ),
      (
          [vectors],
          'but the samples have the shape (5,); use --model=tabular, mlp3, ',
      ),
      (
          [vectors, '--model=mlp3', '--pixel_scaling=symmetric'],
          'of 5 features; use --pixel_scaling=standardized.',
      ),
      (['--train_share=1e-6'], '--train_share=1e-06 leaves none of the 1437'),
      (
          ['--samples_per_domain=9'],
          '--samples_per_domain=9 needs a dataset with domains',
      ),
      (
          ['--held_out_clients=client_77'],
          '--held_out_clients=client_77: there is no client client_77',
      ),
      (
          ['--dataset=domains:a=digits,b=generated:9x8x1:10'],
          'have different shapes (a: 8x8x1, b: 9x8x1); pass --image_size=',
      ),
  ):
    assert re.search(
        re.escape(message),
        _errors(capsys, tmp_path / 'run', '--rounds=1', *arguments),
    )


def _warnings_of(x, folder, monkeypatch, *flags):
  """Returns the warnings when a file with these samples is loaded."""
  y = np.arange(6) % 2
  np.savez(folder / 'f.npz', x_train=x, y_train=y, x_test=x, y_test=y)
  warnings = []
  monkeypatch.setattr(
      logging, 'warning', lambda text, *args: warnings.append(text % args)
  )
  flags = _flags(f'--dataset={folder}/f.npz', *flags)
  settings.resolve(flags, 'fedavg', 0).load()
  return warnings


def test_unscaled_floats_are_warned_of(tmp_path, monkeypatch):
  x = np.linspace(0, 255, 6 * 16, dtype=np.float32).reshape(6, 4, 4)
  (warning,) = _warnings_of(x, tmp_path, monkeypatch)
  start = f'--dataset={tmp_path}/f.npz has images of floats from 0 to 255,'
  assert warning.startswith(start)
  assert '--pixel_scaling=standardized' in warning
  scaling = '--pixel_scaling=standardized'
  assert not _warnings_of(x, tmp_path, monkeypatch, scaling)


def test_features_of_different_sizes_are_warned_of(tmp_path, monkeypatch):
  x = np.linspace(0, 1, 6)[:, np.newaxis] * [1.0, 1, 1, 90]
  assert not _warnings_of(x, tmp_path, monkeypatch)
  x[:, 3] *= 110 / 90
  scaling = '--pixel_scaling=standardized'
  assert not _warnings_of(x, tmp_path, monkeypatch, scaling)
  assert _warnings_of(x, tmp_path, monkeypatch) == [
      f'--dataset={tmp_path}/f.npz has features of very different sizes: the'
      ' values of 3 of 4 features are less than 1/100 of the largest feature,'
      ' so that models hardly learn from them. Use'
      ' --pixel_scaling=standardized.'
  ]


@pytest.mark.parametrize('verbosity', [-2, -1])
def test_loading_is_announced(tmp_path, verbosity, capsys):
  """Before it begins, and only if it can take long."""
  logging.set_verbosity(verbosity)
  path = tmp_path / 'folder' / 'mine.npz'
  for dataset in ('digits', f'npz:{path}'):
    flags = data_flags.DataFlags(
        **{
            **dict.fromkeys(data_flags.DataFlags.specs()),
            'dataset': dataset,
        }
    )
    with contextlib.suppress(ValueError):  # The file does not exist.
      flags.load()
  expected = '' if verbosity == -2 else 'Loading mine …\n'
  assert capsys.readouterr().err == expected
