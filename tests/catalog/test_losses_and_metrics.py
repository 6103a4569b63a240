"""Tests for the losses and metrics in the catalog of tasks."""

import pytest

from tff_bn.catalog import tasks


@pytest.mark.parametrize('name', list(tasks.TASKS))
def test_defaults_fit_their_task(name):
  task = tasks.TASKS[name]
  tasks.check(name, task.loss, task.metrics)
  main = tasks.metrics_of(name, None)[0]
  assert main.name == task.metrics[0]
  assert main.kind.has_direction
  assert tasks.loss_of(name, None).name == task.loss


def test_chosen_ones_come_first():
  assert tasks.loss_of(tasks.REGRESSION, 'huber').word == 'Huber'
  found = tasks.metrics_of(tasks.REGRESSION, ['r2', 'mae'])
  assert [metric.name for metric in found] == ['r2', 'mae']


@pytest.mark.parametrize(
    'arguments,message',
    [
        (
            (tasks.REGRESSION, None, ['mae', 'f1']),
            'metrics=f1 is for classification, binary and multilabel, but the'
            ' task is regression; use mae, rmse, r2, mean_squared_error,'
            ' mean_absolute_percentage_error, mean_squared_logarithmic_error,'
            ' log_cosh_error, poisson, cosine_similarity, pearson_correlation'
            ' or concordance_correlation.',
        ),
        (
            (tasks.CLASSIFICATION, 'dice'),
            'loss=dice is for segmentation, but the task is classification; use'
            ' cross_entropy, focal, categorical_hinge,'
            ' categorical_focal_crossentropy or kl_divergence.',
        ),
        *(
            (
                (task, None, None, 'balanced'),
                'class_weight=balanced needs one class for each sample, but the'
                f' task is {task}.',
            )
            for task in ('multilabel', 'regression', 'segmentation')
        ),
    ],
)
def test_other_tasks(arguments, message):
  with pytest.raises(ValueError, match='but the task') as error:
    tasks.check(*arguments)
  assert str(error.value) == message


def test_weights_of_classes():
  for task in (tasks.CLASSIFICATION, tasks.BINARY):
    tasks.check(task, class_weight='balanced')
  tasks.check(tasks.REGRESSION, class_weight='none')


def test_users_entries():
  loss = tasks.LOSSES[f'{__name__}:_my_loss']
  assert loss.word == '_my_loss'
  assert loss.load()(tasks.BINARY) == 'loss'
  metric = tasks.METRICS[f'{__name__}:_my_loss']
  assert metric.load()(tasks.BINARY, 1) == 'loss'
  assert set(loss.tasks) == set(metric.tasks) == set(tasks.TASKS)
  with pytest.raises(ValueError, match='a function without arguments'):
    _ = tasks.METRICS[f'{__name__}:_NUMBER']


_NUMBER = 3


def _my_loss():
  return 'loss'


def test_unknown_metrics_are_numbers():
  kind = tasks.kind('top_entropy_0')
  assert (kind.title, kind.text(1 / 3)) == ('Top_entropy_0', '0.333')
  assert not kind.has_direction
