"""Tests of the metrics of each class, label or target, against scikit-learn."""

import warnings

import numpy as np
import pytest
from scipy import special
from sklearn import calibration
from sklearn import metrics as sklearn_metrics

from tff_bn import training
from tff_bn.training import detailed_reports


def _check(found, expected):
  np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def _auc(is_positive, scores):
  """The AUC, or NaN where scikit-learn has none."""
  if len(np.unique(is_positive)) < 2:
    return np.nan
  return sklearn_metrics.roc_auc_score(is_positive, scores)


def _calibration_error(is_right, confidences):
  """The error from each bin's predictions alone, with scikit-learn's edges."""
  error = 0.0
  for low, high in zip(np.arange(15) / 15, np.arange(1, 16) / 15):
    inside = (low < confidences) & (confidences <= high)
    if inside.any():
      curve = calibration.calibration_curve(
          is_right[inside], confidences[inside], n_bins=1
      )
      (share,), (mean,) = curve
      error += abs(share - mean) * inside.mean()
  return error


def _check_classes(report, y, predicted, scores, confidences):
  """Checks a report of classes whose outputs are all finite."""
  classes = range(len(report.class_names))
  precision, recall, f1, count = (
      sklearn_metrics.precision_recall_fscore_support(
          y, predicted, labels=classes, zero_division=np.nan
      )
  )
  _check(report.metrics['precision'], precision)
  _check(report.metrics['recall'], recall)
  _check(report.metrics['f1'], f1)
  _check(report.metrics['num_examples'], count)
  _check(report.metrics['auc'], [_auc(y == c, scores[:, c]) for c in classes])
  _check(
      report.confusion,
      sklearn_metrics.confusion_matrix(y, predicted, labels=classes),
  )
  assert report.num_examples == len(y)
  assert not report.unpredicted.any()
  error = _calibration_error(predicted == y, confidences)
  assert report.calibration_error == pytest.approx(error)


_LABELS = {
    'all classes': [0, 1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0],
    'a class that never occurs': [0, 1, 3, 3, 1, 0],
    'one class': [2, 2, 2, 2],
    'one example': [1],
}


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('labels', _LABELS.values(), ids=_LABELS)
def test_classification(labels, seed):
  y = np.array(labels)
  # Multiples of 1/2: some are equal.
  logits = np.random.default_rng(seed).integers(-4, 5, (len(y), 4)) / 2
  logits = logits.astype(np.float32) + [0, 0, 0.25, 0]
  report = training.detailed_report('classification', y, logits)
  shares = special.softmax(logits, axis=1)
  _check_classes(report, y, logits.argmax(axis=1), shares, shares.max(axis=1))
  assert report.class_names == ('0', '1', '2', '3')


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('labels', [[0, 1, 1, 0, 1, 0], [1, 1, 1], [0]])
def test_binary(labels, seed):
  y = np.array(labels)
  logits = np.random.default_rng(seed).integers(-6, 7, (len(y), 1)) / 2
  report = training.detailed_report('binary', y, logits, ['no', 'yes'])
  shares = special.expit(np.concatenate([-logits, logits], axis=1))
  predicted = (logits[:, 0] > 0).astype(int)
  _check_classes(report, y, predicted, shares, shares.max(axis=1))
  assert report.class_names == ('no', 'yes')
  assert report.metrics['auc'][0] == report.metrics['auc'][1] or len(y) < 6


def test_large_logits_of_two_outputs_are_told_apart():
  """In float32, all of their probabilities would be 1."""
  y, logits = np.array([0, 1, 1, 0]), np.float32([30, 25, 32, 20])
  for task, outputs in (
      ('binary', logits),
      ('classification', np.stack([0 * logits, logits], axis=1)),
  ):
    report = training.detailed_report(task, y, outputs)
    _check(report.metrics['auc'], 2 * [_auc(y, logits)])


@pytest.mark.parametrize('num_labels', [1, 3])
@pytest.mark.parametrize('num_examples', [1, 2, 30])
@pytest.mark.parametrize('seed', range(3))
def test_multilabel(num_examples, num_labels, seed):
  rng = np.random.default_rng(seed)
  shape = num_examples, num_labels
  y = rng.integers(2, size=shape) * (np.arange(num_labels) != 1)  # One is 0.
  logits = rng.normal(size=shape).round(1)
  report = training.detailed_report('multilabel', y, logits)
  for label in range(num_labels):
    found = {name: values[label] for name, values in report.metrics.items()}
    pair = y[:, label], logits[:, label] > 0
    precision, recall, f1, count = (
        sklearn_metrics.precision_recall_fscore_support(
            *pair, labels=[1], zero_division=np.nan
        )
    )
    (tn, fp), (fn, tp) = sklearn_metrics.confusion_matrix(*pair, labels=[0, 1])
    expected = dict(
        num_examples=count[0],
        precision=precision[0],
        recall=recall[0],
        f1=f1[0],
        auc=_auc(y[:, label], logits[:, label]),
        true_positives=tp,
        false_positives=fp,
        false_negatives=fn,
        true_negatives=tn,
    )
    assert list(found) == list(expected)
    _check(list(found.values()), list(expected.values()))
  share = special.expit(logits).ravel()
  error = _calibration_error(
      (logits > 0).ravel() == y.ravel(), np.maximum(share, 1 - share)
  )
  assert report.calibration_error == pytest.approx(error)
  assert report.confusion is None


@pytest.mark.parametrize('has_batches', [False, True])
def test_segmentation(has_batches):
  rng = np.random.default_rng(0)
  y = rng.choice([0, 1, 3], size=(7, 4, 5))
  logits = rng.normal(size=(7, 4, 5, 5)) - [0, 0, 0, 0, 9]
  names = tuple('abcde')
  if has_batches:
    report = detailed_reports.report_of_batches(
        'segmentation',
        ((y[rows], logits[rows]) for rows in (slice(0, 3), slice(3, 7))),
        names,
    )
  else:
    report = training.detailed_report('segmentation', y, logits, names)
  pair = y.ravel(), logits.argmax(axis=-1).ravel()
  precision, recall, f1, count = (
      sklearn_metrics.precision_recall_fscore_support(
          *pair, labels=range(5), zero_division=np.nan
      )
  )
  _check(report.metrics['num_pixels'], count)
  _check(report.metrics['dice'], f1)
  _check(report.metrics['precision'], precision)
  _check(report.metrics['recall'], recall)
  _check(
      report.confusion, sklearn_metrics.confusion_matrix(*pair, labels=range(5))
  )
  # Class 2 occurs only among the predictions, and class 4 nowhere.
  assert report.metrics['dice'][2] == 0 and np.isnan(report.metrics['dice'][4])
  assert report.calibration_error is None
  assert report.num_examples == 7


@pytest.mark.parametrize('num_examples', [1, 2, 20])
def test_regression(num_examples):
  rng = np.random.default_rng(0)
  y = rng.normal(size=(num_examples, 3))
  y[:, 2] = 0.5
  outputs = rng.normal(size=y.shape)
  report = training.detailed_report('regression', y, outputs)
  pair = y.astype(np.float32), outputs
  _check(
      report.metrics['mae'],
      sklearn_metrics.mean_absolute_error(*pair, multioutput='raw_values'),
  )
  _check(
      report.metrics['rmse'],
      sklearn_metrics.root_mean_squared_error(*pair, multioutput='raw_values'),
  )
  r2 = np.full(3, np.nan)
  if num_examples > 1:
    r2 = sklearn_metrics.r2_score(*pair, multioutput='raw_values')
    r2[2] = np.nan  # Equal targets have no variance.
  _check(report.metrics['r2'], r2)
  assert report.class_names == ('target_1', 'target_2', 'target_3')
  single = training.detailed_report('regression', y[:, 0], outputs[:, 0])
  assert single.class_names == ('target',)
  for name, (number,) in single.metrics.items():
    _check(number, report.metrics[name][0])


_EMPTY = {
    'classification': ((0,), (0, 3)),
    'binary': ((0,), (0, 1)),
    'multilabel': ((0, 3), (0, 3)),
    'regression': ((0, 3), (0, 3)),
    'segmentation': ((0, 4, 4), (0, 4, 4, 3)),
}


@pytest.mark.parametrize('task', _EMPTY)
def test_without_examples(task):
  y, outputs = map(np.zeros, _EMPTY[task])
  names = ('a', 'b', 'c')[: 2 if task == 'binary' else 3]
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    reports = (
        training.detailed_report(task, y.astype(int), outputs, names),
        detailed_reports.report_of_batches(task, (), names),
    )
  for report in reports:
    assert report.num_examples == 0
    for name, values in report.metrics.items():
      is_count = values.dtype.kind == 'i'
      assert len(values) == len(names)
      assert (values == 0).all() if is_count else np.isnan(values).all(), name
    if report.confusion is not None:
      assert not report.confusion.any()
    if report.calibration_error is not None:
      assert np.isnan(report.calibration_error)


@pytest.mark.parametrize(
    ('task', 'wrong'), [('classification', 0), ('binary', 0)]
)
def test_an_output_that_is_nan_predicts_no_class(task, wrong):
  rng = np.random.default_rng(0)
  y = np.array([1, 0, 1, 0, 1, 0])
  shape = (6, 2) if task == 'classification' else (6, 1)
  logits = rng.normal(size=shape)
  logits[wrong, 0] = np.nan
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    report = training.detailed_report(task, y, logits)
  is_larger = logits[:, -1] > (logits[:, 0] if shape[1] > 1 else 0)
  # A label that is no class stands for none.
  predicted = np.where(np.arange(6) == wrong, 2, is_larger)
  precision, recall, f1, _ = sklearn_metrics.precision_recall_fscore_support(
      y, predicted, labels=[0, 1], zero_division=np.nan
  )
  _check(report.metrics['precision'], precision)
  _check(report.metrics['recall'], recall)
  _check(report.metrics['f1'], f1)
  assert np.isnan(report.metrics['auc']).all()
  assert np.isnan(report.calibration_error)
  assert report.unpredicted.tolist() == [0, 1]
  assert report.confusion.sum() == 5


def test_nan_in_other_tasks():
  y = np.array([[1, 0], [0, 1], [1, 1], [0, 0]])
  logits = np.array([[1.0, 2], [-1, np.nan], [3, 1], [-2, np.nan]])
  report = training.detailed_report('multilabel', y, logits)
  # A yes is missed, and a no is neither right nor wrong.
  assert [values[1] for values in report.metrics.values()][5:] == [1, 1, 1, 0]
  assert report.metrics['recall'].tolist() == [1, 0.5]
  assert report.metrics['auc'][0] == 1 and np.isnan(report.metrics['auc'][1])

  outputs = np.array([[1.0, np.inf], [2, 1]])
  report = training.detailed_report('regression', [[1.0, 2], [3, 4]], outputs)
  assert report.metrics['mae'][0] == 0.5
  for name in ('mae', 'rmse', 'r2'):
    assert np.isnan(report.metrics[name][1])

  masks = np.zeros((1, 2, 2), int)
  outputs = np.zeros((1, 2, 2, 2))
  outputs[0, 0, 0, 1] = np.nan
  report = training.detailed_report('segmentation', masks, outputs)
  assert report.unpredicted.tolist() == [1, 0]
  assert report.metrics['recall'][0] == 0.75


def test_infinite_logits():
  report = training.detailed_report(
      'binary', [0, 1, 1], np.array([-np.inf, np.inf, 1])
  )
  assert report.metrics['auc'].tolist() == [1, 1]
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    report = training.detailed_report(
        'classification', [0, 1], np.array([[np.inf, 0], [0, 1]])
    )
  assert report.confusion.tolist() == [[1, 0], [0, 1]]
  assert np.isnan(report.metrics['auc']).all()


def test_confidences_on_edges_of_bins():
  found = detailed_reports.calibration_error(
      np.array([True, False]), np.array([9 / 15, 9.5 / 15])
  )
  # The edge belongs to the lower bin, so there are two bins.
  assert found == pytest.approx((6 / 15 + 9.5 / 15) / 2)
  assert detailed_reports.calibration_error(
      np.array([True]), np.array([1.0])
  ) == pytest.approx(0)


_LOGITS = np.zeros((2, 3))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('boost', [0, 1], _LOGITS), "task='boost' must be one of"),
        (('classification', [0, 3], _LOGITS), 'outside the 3 classes 0..2: 3'),
        (('classification', [0, -1], _LOGITS), 'negative label -1'),
        (('classification', [0], _LOGITS), 'do not fit task=classification'),
        (('classification', [0, 1], _LOGITS[:, 0]), r'of shape \(2,\) and dt'),
        (('classification', [0, 0], _LOGITS[:, :1]), 'do not fit task=class'),
        (('binary', [0, 1], _LOGITS), 'one logit'),
        (('binary', [0, 2], _LOGITS[:, 0]), 'labels must be 0 or 1'),
        (('multilabel', [[0, 1]], _LOGITS[:1]), 'do not fit task=multilabel'),
        (('regression', [0.5, 1], _LOGITS), 'as many outputs'),
        (('segmentation', [0, 1], _LOGITS), 'do not fit task=segmentation'),
        (
            ('classification', [0, 1], _LOGITS, ['a']),
            'has 1 names, but there are 3 classes',
        ),
    ],
)
def test_wrong_arguments(arguments, message):
  with pytest.raises(ValueError, match=message):
    training.detailed_report(*arguments)
