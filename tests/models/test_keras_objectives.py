"""Tests for the losses and metrics of Keras in the catalog.

The truth is Keras itself, given probabilities and one-hot labels.
"""

import keras
from keras.src import losses as keras_losses
from keras.src import metrics as keras_metrics
import numpy as np
import pytest

from tff_bn.catalog import tasks

# What Keras cannot build without arguments, or is no metric of labels and
# outputs.
_NO_METRICS = {
    'Mean',
    'Sum',
    'Metric',
    'MeanMetricWrapper',
    'IoU',
    'OneHotIoU',
    'SpecificityAtSensitivity',
    'SensitivityAtSpecificity',
    'RecallAtPrecision',
    'PrecisionAtRecall',
}
# What has no number for each sample, or is no loss of labels and outputs.
_NO_LOSSES = {
    'Loss',
    'LossFunctionWrapper',
    'Dice',
    'Tversky',
    'tversky',
    'Circle',
    'circle',
    'CTC',
    'ctc',
}
_SHAPES = {
    tasks.CLASSIFICATION: (8, 4),
    tasks.BINARY: (8, 1),
    tasks.MULTILABEL: (8, 3),
    tasks.REGRESSION: (8, 3),
    tasks.SEGMENTATION: (2, 3, 2, 4),
}


def _is_known(parts, name):
  return parts.name_of(name) in parts


def test_all_metrics_of_keras_are_known():
  for name, found in keras_metrics.ALL_OBJECTS_DICT.items():
    is_left_out = found.__name__ in _NO_METRICS
    assert _is_known(tasks.METRICS, name) != is_left_out, name


def test_all_losses_of_keras_are_known():
  for name in keras_losses.ALL_OBJECTS_DICT:
    assert _is_known(tasks.LOSSES, name) != (name in _NO_LOSSES), name


def _data(task):
  """Returns labels and outputs of a task, and what Keras gets for them."""
  rng = np.random.default_rng(1)
  shape = _SHAPES[task]
  outputs = 2 * rng.normal(size=shape).astype(np.float32)
  if task in tasks.EXCLUSIVE:
    y = rng.integers(shape[-1], size=shape[:-1])
    powers = np.exp(outputs)
    return (
        y,
        outputs,
        np.eye(shape[-1], dtype=np.float32)[y],
        (powers / powers.sum(axis=-1, keepdims=True)),
    )
  if task in tasks.YES_OR_NO:
    y = rng.integers(2, size=shape)
    probabilities = 1 / (1 + np.exp(-outputs))
    labels = y[:, 0] if task == tasks.BINARY else y
    return labels, outputs, y.astype(np.float32), probabilities
  outputs = np.abs(outputs)
  y = np.abs(outputs + rng.normal(size=shape).astype(np.float32))
  return y, outputs, y, outputs


def _class_name(part):
  """Returns the name of a class of Keras, if the entry builds it."""
  return next((a for a in part.aliases if a[0].isupper()), None)


# The catalog has these with its own definition for several outputs.
_OWN = {'accuracy', 'top_5_accuracy', 'auc', 'f1', 'precision', 'recall'}
_OWN |= {'mean_iou', 'r2', 'rmse'}
_CASES = [
    (kind, name, task)
    for kind, parts in (('losses', tasks.LOSSES), ('metrics', tasks.METRICS))
    for name, part in parts.items()
    for task in part.tasks
    if _class_name(part) and name not in _OWN
]


@pytest.mark.parametrize('kind,name,task', _CASES)
def test_equal_to_keras(kind, name, task):
  part = (tasks.LOSSES if kind == 'losses' else tasks.METRICS)[name]
  expected = getattr(keras, kind).get(_class_name(part))
  y, outputs, labels, probabilities = _data(task)
  if part.name in ('hinge', 'squared_hinge', 'categorical_hinge'):
    probabilities = outputs
  num_outputs = outputs.shape[-1]
  arguments = (task,) if kind == 'losses' else (task, num_outputs)
  found = part.load()(*arguments)
  weight = np.arange(1, len(y) + 1, dtype=np.float32)
  if task == tasks.SEGMENTATION:
    # Keras wants as many weights as losses.
    weight = np.broadcast_to(weight[:, None, None], y.shape)
  # Keras's IoU of several labels fails with a weight for each sample.
  cases: list[dict] = [{}]
  if name != 'binary_iou':
    cases.append({'sample_weight': weight})
  for weights in cases:
    np.testing.assert_allclose(
        float(found(y, outputs, **weights)),
        float(expected(labels, probabilities, **weights)),
        rtol=2e-5,
    )


@pytest.mark.parametrize(
    'name,task',
    [(name, task) for kind, name, task in _CASES if kind == 'metrics'],
)
def test_sums_of_clients_give_the_metric_of_the_union(name, task):
  y, outputs, *_ = _data(task)
  client, other, union = (
      tasks.METRICS[name].load()(task, outputs.shape[-1]) for _ in range(3)
  )
  assert client.name == name
  client.update_state(y[:1], outputs[:1])
  other.update_state(y[1:], outputs[1:])
  union.update_state(y, outputs)
  for mine, others in zip(client.variables, other.variables, strict=True):
    mine.assign_add(others)
  assert float(client.result()) == pytest.approx(float(union.result()))


@pytest.mark.parametrize('name', ['precision', 'recall', 'auc', 'f1', 'rmse'])
def test_own_metrics_equal_kerass_for_one_output(name):
  task = tasks.REGRESSION if name == 'rmse' else tasks.BINARY
  part = tasks.METRICS[name]
  y, outputs, labels, probabilities = _data(task)
  arguments = dict(threshold=0.5) if name == 'f1' else {}
  expected = getattr(keras.metrics, _class_name(part))(**arguments)
  found = part.load()(task, outputs.shape[-1])
  assert float(found(y, outputs)) == pytest.approx(
      float(np.squeeze(expected(labels, probabilities))), rel=1e-3
  )


def test_names_of_keras_stand_for_names_of_the_catalog():
  assert tasks.METRICS_OPTION.values.parse('MeanAbsoluteError,AUC') == (
      'mae',
      'auc',
  )
  with pytest.raises(ValueError, match='mae is in the list twice'):
    tasks.METRICS_OPTION.values.parse('mae,mean_absolute_error')
  assert tasks.LOSS.values.parse('mse') == 'mean_squared_error'
  # A result of this name is a user's.
  assert tasks.kind('MAE').name == 'MAE'


def test_too_few_outputs():
  for option in (
      {'loss': 'cosine_similarity'},
      {'metrics': ['CosineSimilarity']},
  ):
    tasks.check(tasks.REGRESSION, **option, num_outputs=2)
    with pytest.raises(ValueError, match='needs at least 2 outputs, but the'):
      tasks.check(tasks.REGRESSION, **option, num_outputs=1)
