"""Tests of generated data in domains that differ in their features."""

import numpy as np
import pytest
from sklearn import neighbors

from tff_bn import data as tff_bn_data


@pytest.mark.parametrize(
    ('name', 'task', 'shape', 'num_outputs', 'num_train', 'num_test'),
    [
        ('discs', 'segmentation', (32, 32, 1), 2, 60, 30),
        ('findings', 'multilabel', (16, 16, 1), 4, 200, 100),
        ('sensor_windows', 'classification', (32, 3), 4, 120, 60),
    ],
)
def test_domains_have_other_features_and_the_same_labels(
    name, task, shape, num_outputs, num_train, num_test
):
  dataset = tff_bn_data.load_dataset(name)
  assert dataset.task == task
  assert dataset.input_shape == shape
  assert dataset.num_outputs == len(dataset.class_names) == num_outputs
  data = tff_bn_data.split_dataset(dataset, 'domains', None, 0)
  assert data.client_ids == dataset.domain_names
  counts = data.label_distribution()
  # Up to chance, domains have as many samples of each label.
  np.testing.assert_allclose(counts / counts.mean(axis=0), 1, atol=0.15)
  moments = []
  for domain, (train, test) in enumerate(
      zip(data.train_indices.values(), data.test_indices.values())
  ):
    assert (len(train), len(test)) == (num_train, num_test)
    assert (dataset.domain_train[train] == domain).all()
    x = dataset.x_train[train].reshape(-1, shape[-1])
    assert np.isfinite(x).all()
    moments.append(np.concatenate([x.mean(axis=0), x.std(axis=0)]))
    test_x = dataset.x_test[test].reshape(-1, shape[-1])
    np.testing.assert_allclose(test_x.mean(axis=0), x.mean(axis=0), atol=0.15)
  for first in range(4):
    for other in range(first):
      assert abs(moments[first] - moments[other]).max() > 0.05
  if task != 'classification':
    assert dataset.x_train.min() >= 0
    assert dataset.x_train.max() <= 1


def dice(mask, found):
  return 2 * (mask & found).sum() / (mask.sum() + found.sum())


def test_a_threshold_finds_discs_of_one_domain_only():
  dataset = tff_bn_data.load_dataset('discs')
  masks = dataset.y_train == 1
  x = dataset.x_train[..., 0]
  limits = np.linspace(0, 1, 41)

  def best(chosen, sign):
    return max(dice(masks[chosen], sign * x[chosen] > sign * t) for t in limits)

  everything = np.ones(len(x), bool)
  assert max(best(everything, 1), best(everything, -1)) < 0.4
  for domain, name in enumerate(dataset.domain_names):
    own = best(dataset.domain_train == domain, -1 if name == 'inverted' else 1)
    assert 0.5 < own < 0.9


def test_discs_are_whole_and_never_everything():
  masks = tff_bn_data.load_dataset('discs').y_train
  shares = masks.mean(axis=(1, 2))
  assert shares.min() > 0
  assert shares.max() < 0.5


def test_findings_are_independent():
  y = tff_bn_data.load_dataset('findings').y_train
  np.testing.assert_allclose(y.mean(axis=0), 0.4, atol=0.05)
  correlations = np.corrcoef(y.T) - np.eye(4)
  assert abs(correlations).max() < 0.1
  assert (y.sum(axis=1) == 0).any()
  assert (y.sum(axis=1) > 2).any()


def test_labels_name_the_findings():
  dataset = tff_bn_data.load_dataset('findings')
  # The pictures of a scanner with much contrast that have one finding.
  chosen = (dataset.domain_train == dataset.domain_names.index('contrasty')) & (
      dataset.y_train.sum(axis=1) == 1
  )
  bright = dataset.x_train[chosen, ..., 0] > 0.4
  # Pairs of bright neighbors.
  vertical = (bright[:, 1:] & bright[:, :-1]).sum(axis=(1, 2))
  horizontal = (bright[:, :, 1:] & bright[:, :, :-1]).sum(axis=(1, 2))
  found = {
      name: (vertical[is_kind].mean(), horizontal[is_kind].mean())
      for name, is_kind in zip(
          dataset.class_names, dataset.y_train[chosen].T == 1
      )
  }
  down, right = found.pop('stripes')
  assert down > 15 > 3 > right
  line, spot, ring = (found[name] for name in ('line', 'spot', 'ring'))
  assert max(line) < 3 < min(spot) < max(spot) < 10 < min(ring)


def test_frequencies_tell_motions_apart_within_a_domain():
  dataset = tff_bn_data.load_dataset('sensor_windows')
  x_train, x_test = (
      np.abs(np.fft.rfft(x, axis=1))[:, 1:].reshape(len(x), -1)
      for x in (dataset.x_train, dataset.x_test)
  )
  own, others = [], []
  for domain in range(4):
    train = dataset.domain_train == domain
    model = neighbors.NearestCentroid()
    model.fit(x_train[train], dataset.y_train[train])
    right = model.predict(x_test) == dataset.y_test
    is_own = dataset.domain_test == domain
    own.append(right[is_own].mean())
    others.append(right[~is_own].mean())
  assert min(own) > 0.85
  # What was learned in one domain is wrong in the others.
  assert np.mean(others) < np.mean(own) - 0.2
