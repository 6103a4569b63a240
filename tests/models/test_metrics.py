"""Tests for the metrics of tasks, against scikit-learn on the union."""

import keras
import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics
import tensorflow as tf

from tff_bn.catalog import tasks
from tff_bn.keras_model import batch
from tff_bn.keras_model import model_metrics
from tff_bn.keras_model import outputs as outputs_lib
from tff_bn.models import metrics

_N = 60


def _data(task, num_outputs):
  """Returns labels and outputs that are related, as a batch of a task."""
  rng = np.random.default_rng(0)
  shape = (_N, 4, 3) if task == tasks.SEGMENTATION else (_N,)
  outputs = rng.normal(size=(*shape, num_outputs)).astype(np.float32)
  noise = rng.normal(size=outputs.shape).astype(np.float32)
  match task:
    case tasks.REGRESSION:
      return 1000 + outputs + 0.5 * noise, 1000 + outputs
    case tasks.BINARY:
      return (outputs + noise > 0.5).astype(np.int32)[:, 0], 3 * outputs
    case tasks.MULTILABEL:
      return (outputs + noise > 0.5).astype(np.int32), 3 * outputs
  return np.argmax(outputs + noise, axis=-1).astype(np.int32), outputs


def _flat(task, y, outputs):
  """Returns labels and predictions as scikit-learn takes them."""
  if task in tasks.EXCLUSIVE:
    return y.ravel(), outputs.argmax(axis=-1).ravel()
  return y.reshape(outputs.shape), (outputs > 0).astype(int)


def _mean_score(function, **more):
  def compute(task, y, outputs):
    average = 'binary' if task == tasks.BINARY else 'macro'
    return function(*_flat(task, y, outputs), average=average, **more)

  return compute


def _accuracy(task, y, outputs):
  true, predicted = _flat(task, y, outputs)
  return np.mean(true == predicted)


def _without_background(function):
  def compute(task, y, outputs):
    classes = range(1, outputs.shape[-1])
    return function(*_flat(task, y, outputs), labels=classes, average='macro')

  return compute


_EXPECTED = {
    'accuracy': _accuracy,
    'top_5_accuracy': lambda task, y, outputs: (
        sklearn_metrics.top_k_accuracy_score(
            y, outputs, k=5, labels=range(outputs.shape[-1])
        )
    ),
    'auc': lambda task, y, outputs: sklearn_metrics.roc_auc_score(
        y, outputs if task == tasks.MULTILABEL else outputs[:, 0]
    ),
    'f1': _mean_score(sklearn_metrics.f1_score),
    'precision': _mean_score(sklearn_metrics.precision_score),
    'recall': _mean_score(sklearn_metrics.recall_score),
    'mae': lambda task, y, outputs: (
        sklearn_metrics.mean_absolute_error(y, outputs)
    ),
    'rmse': lambda task, y, outputs: np.sqrt(
        sklearn_metrics.mean_squared_error(y, outputs)
    ),
    'r2': lambda task, y, outputs: sklearn_metrics.r2_score(y, outputs),
    'dice': _without_background(sklearn_metrics.f1_score),
    'mean_iou': _mean_score(sklearn_metrics.jaccard_score),
}
_CASES = [
    (name, task, num_outputs)
    for name, entry in tasks.METRICS.items()
    for task, num_outputs in (
        (tasks.CLASSIFICATION, 7),
        (tasks.BINARY, 1),
        (tasks.MULTILABEL, 3),
        (tasks.REGRESSION, 2),
        (tasks.SEGMENTATION, 3),
    )
    # `test_keras_objectives` has the others.
    if task in entry.tasks and name in _EXPECTED
]


def _build(name, task, num_outputs):
  metric = tasks.METRICS[name].load()(task, num_outputs)
  assert metric.name == name
  return metric


@pytest.mark.parametrize('name,task,num_outputs', _CASES)
def test_sums_of_clients_give_the_metric_of_the_union(name, task, num_outputs):
  y, outputs = _data(task, num_outputs)
  clients = [slice(0, 7), slice(7, 40), slice(40, _N)]
  sums = None
  for client in clients:
    metric = _build(name, task, num_outputs)
    metric.update_state(y[client], outputs[client])
    values = [v.numpy() for v in metric.variables]
    sums = values if sums is None else [a + b for a, b in zip(sums, values)]
  total = _build(name, task, num_outputs)
  # Some metrics of Keras create variables at the first batch.
  total.update_state(y, outputs)
  for variable, value in zip(total.variables, sums, strict=True):
    variable.assign(value)
  expected = _EXPECTED[name](task, y, outputs)
  tolerance = 2e-3 if name == 'auc' else 1e-5
  np.testing.assert_allclose(float(total.result()), expected, atol=tolerance)


@pytest.mark.parametrize('name,task,num_outputs', _CASES)
def test_models_take_all_metrics(name, task, num_outputs):
  y, outputs = (
      tf.TensorSpec((None, *a.shape[1:]), a.dtype)
      for a in _data(task, num_outputs)
  )
  specs = batch.Batch(None, y)
  output = outputs_lib.Output('', (), '', outputs)
  built = model_metrics.build(
      [_build(name, task, num_outputs)], [], None, [output], specs
  )
  assert list(model_metrics.check(built, specs)) == [name]


@pytest.mark.parametrize(
    'name,task,num_outputs',
    [
        case
        for case in _CASES
        if isinstance(
            _build(*case),
            (metrics.ClassScore, metrics.AreaUnderCurve, metrics.R2),
        )
    ],
)
def test_weights_repeat_examples(name, task, num_outputs):
  y, outputs = _data(task, num_outputs)
  # Their sum is not the number of examples.
  repeats = np.resize((2, 0, 3), _N)
  weighted, repeated = (_build(name, task, num_outputs) for _ in range(2))
  weighted.update_state(y, outputs, sample_weight=repeats)
  repeated.update_state(
      np.repeat(y, repeats, 0), np.repeat(outputs, repeats, 0)
  )
  np.testing.assert_allclose(
      float(weighted.result()), float(repeated.result()), rtol=1e-5
  )


def test_classes_that_do_not_occur_do_not_count():
  y = np.array([[[0, 1], [1, 1]]])
  predicted = np.array([[[0, 1], [1, 0]]])
  logits = keras.ops.one_hot(predicted, 4)
  dice, iou = (
      _build(name, tasks.SEGMENTATION, 4) for name in ('dice', 'mean_iou')
  )
  for metric in (dice, iou):
    metric.update_state(y, logits)
  assert float(dice.result()) == pytest.approx(2 * 2 / (2 + 3))
  assert float(iou.result()) == pytest.approx((1 / 2 + 2 / 3) / 2)
  # A class that is only predicted has the score 0.
  dice.update_state(y[:, :1, :1], keras.ops.one_hot([[[3]]], 4))
  assert float(dice.result()) == pytest.approx(2 * 2 / (2 + 3) / 2)


@pytest.mark.parametrize('y', [0, 1])
def test_auc_of_one_class_is_undefined(y):
  metric = _build('auc', tasks.BINARY, 1)
  metric.update_state(np.full(3, y), np.ones((3, 1)))
  assert np.isnan(metric.result())


def test_auc_is_the_mean_over_the_labels_that_have_one():
  metric = _build('auc', tasks.MULTILABEL, 2)
  logits = np.array([[0.0, 1.0], [1.0, 2.0], [-50.0, 3.0]])
  metric.update_state(np.array([[0, 1], [1, 1], [1, 1]]), logits)
  assert float(metric.result()) == pytest.approx(0.5)


def test_equal_logits_count_half_in_the_auc():
  metric = _build('auc', tasks.BINARY, 1)
  metric.update_state(np.array([0, 1, 0, 1]), np.zeros((4, 1)))
  assert float(metric.result()) == 0.5


def test_auc_tells_large_logits_apart():
  """A sigmoid would round them to 1."""
  metric = _build('auc', tasks.BINARY, 1)
  metric.update_state(np.array([0, 1]), np.array([[30.0], [40.0]], np.float32))
  assert float(metric.result()) == 1


def test_r2_of_large_numbers_is_exact():
  y = 1e6 + np.arange(4, dtype=np.float32)[:, np.newaxis]
  outputs = y + np.array([[1], [-1], [1], [-1]], np.float32)
  metric = _build('r2', tasks.REGRESSION, 1)
  for part in (slice(1), slice(1, 4)):
    metric.update_state(y[part], outputs[part])
  assert float(metric.result()) == pytest.approx(
      sklearn_metrics.r2_score(y, outputs), abs=1e-6
  )


def test_constant_targets_have_no_r2():
  y = np.array([[0.1, 1], [0.1, 2], [0.1, 3]], np.float32)
  metric = _build('r2', tasks.REGRESSION, 2)
  metric.update_state(y, y + 1)
  assert float(metric.result()) == pytest.approx(1 - 3 / 2, abs=1e-6)
  constant = _build('r2', tasks.REGRESSION, 1)
  constant.update_state(y[:, :1], y[:, :1])
  assert np.isnan(constant.result())
  # The sums of these weighted numbers are rounded.
  constant.reset_state()
  y = np.full((3, 1), 0.7, np.float32)
  constant.update_state(y, y + 1, sample_weight=np.float32([0.1, 0.7, 0.3]))
  assert np.isnan(constant.result())


@pytest.mark.parametrize('name', ['auc', 'f1', 'dice', 'r2'])
def test_without_examples_a_metric_is_undefined(name):
  task = tasks.METRICS[name].tasks[0]
  assert np.isnan(_build(name, task, 2).result())
