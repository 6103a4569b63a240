"""scikit-learn's tables of patients: real data without a download."""

import numpy as np
from sklearn import datasets
from sklearn import model_selection

from tff_bn.catalog import tasks
from tff_bn.data import dataset as dataset_lib

_SPLIT_SEED = 0
_NUM_CANCER_TESTS = 114
_NUM_DIABETES_TESTS = 90
# Ranges of the target that get the same share of test samples.
_NUM_STRATA = 5


def load_breast_cancer() -> dataset_lib.Dataset:
  """Loads 30 features of breast tumours, which are malignant or benign.

  The features have very different sizes; `pixel_scaling='standardized'` scales
  them.

  Returns:
    455 training and 114 test samples of shape `[30]`, float32, stratified by
    class, for the task binary: 0 is malignant, 1 is benign.
  """
  table = datasets.load_breast_cancer()
  x_train, x_test, y_train, y_test = model_selection.train_test_split(
      table.data.astype(np.float32),
      table.target,
      test_size=_NUM_CANCER_TESTS,
      stratify=table.target,
      random_state=_SPLIT_SEED,
  )
  return dataset_lib.create_dataset(
      'breast_cancer',
      x_train,
      y_train,
      x_test,
      y_test,
      task=tasks.BINARY,
      class_names=tuple(map(str, table.target_names)),
  )


def load_diabetes() -> dataset_lib.Dataset:
  """Loads 10 features of patients and how their diabetes progressed.

  Returns:
    352 training and 90 test samples of shape `[10]`, float32, for the task
    regression. scikit-learn's features have the mean 0 and the sum of squares 1
    over all patients. The target, a measure of the progress after one year, is
    standardized: over the training data, it has the mean 0 and the standard
    deviation 1. Fifths of its range of values are equally frequent in both
    parts.
  """
  table = datasets.load_diabetes()
  ranks = np.argsort(np.argsort(table.target, kind='stable'))
  x_train, x_test, y_train, y_test = model_selection.train_test_split(
      table.data.astype(np.float32),
      table.target,
      test_size=_NUM_DIABETES_TESTS,
      stratify=ranks * _NUM_STRATA // len(ranks),
      random_state=_SPLIT_SEED,
  )
  mean, deviation = y_train.mean(), y_train.std()
  return dataset_lib.create_dataset(
      'diabetes',
      x_train,
      (y_train - mean) / deviation,
      x_test,
      (y_test - mean) / deviation,
      task=tasks.REGRESSION,
  )
