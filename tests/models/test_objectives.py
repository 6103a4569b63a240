"""Tests for the choice of losses and metrics by name."""

import keras
import numpy as np
import pytest
from sklearn.utils import class_weight

from tff_bn.catalog import tasks
from tff_bn.models import losses
from tff_bn.models import objectives


def my_loss():
  return keras.losses.LogCosh()


def my_metric():
  return keras.metrics.LogCoshError(name='log_cosh')


def no_loss():
  return 'mse'


def failing():
  raise RuntimeError('Oh no.')


@pytest.mark.parametrize('task', list(tasks.TASKS))
def test_defaults(task):
  assert isinstance(objectives.loss_fn(task)(), keras.losses.Loss)
  build = objectives.metrics_fn(task, 3)
  assert [m.name for m in build()] == list(tasks.TASKS[task].metrics)
  assert build()[0] is not build()[0]


def test_names():
  loss = objectives.loss_fn(tasks.SEGMENTATION, 'dice')()
  assert isinstance(loss, losses.DiceLoss)
  found = objectives.metrics_fn(tasks.REGRESSION, 1, ['rmse', 'r2'])()
  assert [m.name for m in found] == ['rmse', 'r2']


def test_metrics_get_the_number_of_outputs():
  (f1,) = objectives.metrics_fn(tasks.MULTILABEL, 3, ['f1'])()
  f1.update_state(np.eye(3), np.eye(3))
  assert float(f1.result()) == 1


def test_users_functions():
  loss = objectives.loss_fn(tasks.REGRESSION, f'{__name__}:my_loss')()
  assert isinstance(loss, keras.losses.LogCosh)
  found = objectives.metrics_fn(
      tasks.REGRESSION, 1, ['mae', f'{__name__}:my_metric']
  )()
  assert [m.name for m in found] == ['mae', 'log_cosh']


@pytest.mark.parametrize(
    'name,message',
    [
        ('no_loss', 'loss={} must return a Keras loss, but returns a str.'),
        ('failing', 'loss={}: its function failed (RuntimeError: Oh no.).'),
    ],
)
def test_wrong_losses_of_users(name, message):
  name = f'{__name__}:{name}'
  with pytest.raises(ValueError, match=f'^loss={name}') as error:
    objectives.loss_fn(tasks.REGRESSION, name)
  assert str(error.value) == message.format(name)


def test_wrong_metrics_of_users():
  with pytest.raises(ValueError, match='must return a Keras metric, but ret'):
    objectives.metrics_fn(tasks.BINARY, 1, [f'{__name__}:my_loss'])


def test_other_tasks():
  with pytest.raises(ValueError, match='loss=dice is for segmentation, but'):
    objectives.loss_fn(tasks.REGRESSION, 'dice')
  with pytest.raises(ValueError, match='metrics=auc is for binary and multi'):
    objectives.metrics_fn(tasks.REGRESSION, 1, ['auc'])


def test_balanced_weights():
  labels = np.repeat([0, 1, 3], [5, 1, 2])
  expected = class_weight.compute_class_weight(
      'balanced', classes=np.array([0, 1, 3]), y=labels
  )
  found = objectives.balanced_weights(np.bincount(labels, minlength=5))
  assert [found[label] for label in (0, 1, 3)] == pytest.approx(expected)
  assert found[2] == found[4] == 1
