"""Tests for the flags of the loss, the metrics and the weights of classes."""

import keras
import numpy as np
import printed
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import run_building


def my_loss():
  return keras.losses.LogCosh()


def no_loss():
  return 3


def _settings(*arguments):
  flags = command_line.parse(train.define_flags, arguments)
  settings_lib.check(flags)
  return settings_lib.resolve(flags, flags.algorithm, flags.seed)


@pytest.mark.parametrize(
    'arguments,message',
    [
        (
            ['--metrics=acuracy'],
            "--metrics=acuracy: 'acuracy': must be one of accuracy,",
        ),
        (['--metrics=acuracy'], 'Did you mean accuracy?'),
        (['--metrics=mae,mae'], 'mae is in the list twice.'),
        (['--loss=crossentropy'], 'Did you mean cross_entropy?'),
        (['--task=regresion'], 'Did you mean regression?'),
        (['--class_weight=3'], 'must be one of none, balanced'),
        (
            ['--task=regression', '--metrics=dice'],
            '--metrics=dice is for segmentation, but the task is regression;',
        ),
        (
            ['--task=regression', '--class_weight=balanced'],
            '--class_weight=balanced needs one class for each sample',
        ),
        # The labels of the default dataset are classes.
        (['--metrics=mae'], '--metrics=mae is for regression, but the task is'),
        (['--loss=dice'], '--loss=dice is for segmentation, but the task is'),
        (
            ['--dataset=diabetes', '--split=iid', '--class_weight=balanced'],
            '--class_weight=balanced needs one class for each sample',
        ),
        (['--loss=no_module:loss'], '--loss=no_module:loss: '),
        (
            [f'--loss={__name__}:no_loss'],
            f'--loss={__name__}:no_loss must return a Keras loss, but returns a'
            ' int.',
        ),
        (
            [f'--metrics={__name__}:my_loss'],
            f'--metrics={__name__}:my_loss must return a Keras metric, but',
        ),
    ],
)
def test_errors_come_before_the_training(arguments, message, tmp_path, capsys):
  folder = tmp_path / 'run'
  arguments = [*arguments, '--model=mlp3', f'--output_dir={folder}']
  assert train.run(arguments) == command_line.USAGE_ERROR
  assert message in printed.error(capsys.readouterr().err)
  assert not (folder / 'flags.txt').exists()


def _data(counts):
  """Returns two clients with these numbers of samples of each class."""
  y = np.concatenate([np.repeat(np.arange(len(c)), c) for c in counts])
  x = np.zeros((len(y), 3), np.float32)
  dataset = tff_bn_data.Dataset('mine', x, y, x, y, len(counts[0]))
  size = sum(counts[0])
  indices = {'a': np.arange(size), 'b': np.arange(size, len(y))}
  return tff_bn_data.FederatedData(dataset, indices, indices)


def test_balanced_weights_are_of_all_clients():
  data = _data([(1, 0, 3), (0, 6, 2)])
  found = _settings('--class_weight=balanced').class_weights(data)
  # n / (k * c)
  assert found['class_weight'] == pytest.approx({0: 4, 1: 12 / 18, 2: 12 / 15})


@pytest.mark.parametrize('arguments', [[], ['--class_weight=none']])
def test_no_weights(arguments):
  assert not _settings(*arguments).class_weights(_data([(1, 1), (1, 1)]))


def test_a_model_has_the_loss_and_the_metrics():
  settings = _settings(
      f'--loss={__name__}:my_loss', '--metrics=f1,accuracy', '--model=mlp3'
  )
  model = run_building.build_model(settings, _data([(1, 1), (1, 1)]))
  assert isinstance(model.loss_fn(), keras.losses.LogCosh)
  assert list(model.metric_shapes) == ['f1', 'accuracy']
