"""Tests of scikit-learn's tables."""

import numpy as np
import pytest
from sklearn import datasets
from sklearn import linear_model

from tff_bn import data as tff_bn_data


@pytest.mark.parametrize(
    ('name', 'load', 'num_test'),
    [
        ('breast_cancer', datasets.load_breast_cancer, 114),
        ('diabetes', datasets.load_diabetes, 90),
    ],
)
def test_each_patient_of_scikit_learn_occurs_once(name, load, num_test):
  original = load()
  dataset = tff_bn_data.load_dataset(name)
  assert len(dataset.x_test) == num_test
  ours = np.concatenate([dataset.x_train, dataset.x_test])
  theirs = original.data.astype(np.float32)
  order, expected = np.lexsort(ours.T), np.lexsort(theirs.T)
  np.testing.assert_array_equal(ours[order], theirs[expected])
  y = np.concatenate([dataset.y_train, dataset.y_test]).reshape(-1)
  target = original.target.astype(float)
  if name == 'diabetes':
    # The target is a linear function of the original one.
    slope, start = np.polyfit(target[expected], y[order], 1)
    target = slope * target + start
  np.testing.assert_allclose(y[order], target[expected], atol=1e-5)


def test_breast_cancer():
  dataset = tff_bn_data.load_dataset('breast_cancer')
  assert (dataset.task, dataset.num_outputs) == ('binary', 1)
  assert dataset.class_names == ('malignant', 'benign')
  assert abs(dataset.y_train.mean() - dataset.y_test.mean()) < 0.01


def test_diabetes():
  dataset = tff_bn_data.load_dataset('diabetes')
  assert (dataset.task, dataset.num_outputs) == ('regression', 1)
  assert dataset.num_classes is None
  np.testing.assert_allclose(dataset.y_train.mean(), 0, atol=1e-6)
  np.testing.assert_allclose(dataset.y_train.std(), 1, rtol=1e-6)
  # The parts have similar targets, which features explain in part.
  assert abs(dataset.y_test.mean()) < 0.15
  model = linear_model.LinearRegression().fit(dataset.x_train, dataset.y_train)
  assert 0.35 < model.score(dataset.x_test, dataset.y_test) < 0.65
