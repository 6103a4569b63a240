"""Tests for the flags of the loss, the metrics and the weights of classes."""

import re

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


def one_hot_loss():
  return keras.losses.CategoricalCrossentropy(from_logits=True)


def loss_of_each_sample():
  return keras.losses.LogCosh(reduction=None)


def metric_named_loss():
  return keras.metrics.MeanAbsoluteError(name='loss')


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
        # The labels are integers.
        (
            [f'--loss={__name__}:one_hot_loss'],
            "--loss: the loss of the model's output",
        ),
        (
            ['--metrics=MeanAbsoluteError'],
            '--metrics=mae is for regression, but the task is classification;',
        ),
        (
            ['--dataset=diabetes', '--loss=CosineSimilarity'],
            '--loss=cosine_similarity needs at least 2 outputs, but the model'
            ' has 1.',
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


class _OwnTraining(keras.Sequential):

  def train_step(self, data):
    raise NotImplementedError


def own_training(input_shape, num_outputs):
  del input_shape
  return _OwnTraining([keras.Input([3]), keras.layers.Dense(num_outputs)])


@pytest.mark.parametrize(
    'flag,name,message',
    [
        ('loss', 'loss_of_each_sample', '--loss: the loss of the model'),
        ('metrics', 'metric_named_loss', '--metrics returns metrics named'),
        ('model', 'own_training', 'of --model (_OwnTraining) has its own'),
    ],
)
def test_errors_of_the_model_name_flags(flag, name, message):
  settings = _settings('--model=mlp3', f'--{flag}={__name__}:{name}')
  with pytest.raises(ValueError, match=re.escape(message)) as caught:
    run_building.build_model(settings, _data([(1, 1), (1, 1)]))
  assert '_fn' not in str(caught.value)


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


def test_names_of_keras():
  settings = _settings(
      '--metrics=SparseCategoricalAccuracy,KLDivergence',
      '--loss=categorical_hinge',
      '--model=mlp3',
  )
  assert settings.metrics == ('accuracy', 'kl_divergence')
  model = run_building.build_model(settings, _data([(1, 1), (1, 1)]))
  assert model.loss_fn().name == 'categorical_hinge'
  assert list(model.metric_shapes) == ['accuracy', 'kl_divergence']


def test_a_model_has_the_loss_and_the_metrics():
  settings = _settings(
      f'--loss={__name__}:my_loss', '--metrics=f1,accuracy', '--model=mlp3'
  )
  model = run_building.build_model(settings, _data([(1, 1), (1, 1)]))
  assert isinstance(model.loss_fn(), keras.losses.LogCosh)
  assert list(model.metric_shapes) == ['f1', 'accuracy']
