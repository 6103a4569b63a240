"""Tests of the synthetic data of the FedBN paper."""

import numpy as np
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.data import generated


@pytest.fixture(scope='module')
def dataset():
  return tff_bn_data.load_dataset('fedbn_synthetic')


def test_two_domains_with_balanced_classes(dataset):
  assert dataset.input_shape == (10,)
  assert dataset.num_classes == 2
  data = tff_bn_data.split_dataset(dataset, 'domains', None, 0)
  assert data.client_ids == ('identity', 'correlated')
  np.testing.assert_array_equal(data.label_distribution(), [[250, 250]] * 2)
  for domain in range(2):
    labels = dataset.y_test[dataset.domain_test == domain]
    np.testing.assert_array_equal(np.bincount(labels), [250, 250])


def test_covariances():
  identity, other = generated.covariances()
  np.testing.assert_array_equal(identity, np.eye(10))
  np.testing.assert_array_equal(np.diag(other), np.ones(10))
  assert other[0, 1] == other[5, 4] == 0.5
  assert other[0, 3] == 0.125


@pytest.mark.parametrize('domain', [0, 1])
@pytest.mark.parametrize('label', [0, 1])
def test_moments(dataset, domain, label):
  x = np.concatenate([dataset.x_train, dataset.x_test])
  y = np.concatenate([dataset.y_train, dataset.y_test])
  d = np.concatenate([dataset.domain_train, dataset.domain_test])
  x = x[(y == label) & (d == domain)]
  np.testing.assert_allclose(x.mean(axis=0), 2 * label - 1, atol=0.2)
  covariance = generated.covariances()[domain]
  np.testing.assert_allclose(np.cov(x.T), covariance, atol=0.25)
