"""Tests for the attack on labels."""

import numpy as np
import pytest

from tff_bn.papers.privacy import label_attack


def _softmax(logits):
  exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return exponents / exponents.sum(axis=-1, keepdims=True)


def _client(rng, num_labels=4, num_examples=16):
  """Returns softmax regression's bias gradient, p and shares of a client."""
  labels = rng.integers(num_labels, size=num_examples)
  x = rng.standard_normal((num_examples, 3)) + labels[:, np.newaxis]
  p = _softmax(x @ rng.standard_normal((3, num_labels)))
  one_hot = np.eye(num_labels)[labels]
  # The gradient of the mean cross-entropy with respect to the bias.
  return (p - one_hot).mean(0), p.mean(0), one_hot.mean(0)


def test_softmax_regression_reveals_the_shares():
  for seed in range(3):
    gradient, predicted, shares = _client(np.random.default_rng(seed))
    np.testing.assert_allclose(
        label_attack.shares_from_bias(gradient, predicted), shares, atol=1e-12
    )


def test_regression_learns_the_formula():
  rng = np.random.default_rng(0)
  shares = rng.dirichlet(np.ones(4), 50)
  predicted = np.array([0.4, 0.3, 0.2, 0.1])
  gradients = predicted - shares
  model = label_attack.fit(gradients[:30], shares[:30])
  np.testing.assert_allclose(
      model.predict(gradients[30:]), shares[30:], atol=1e-4
  )


def test_regression_ignores_noise():
  rng = np.random.default_rng(0)
  shares = rng.dirichlet(np.ones(4), 200)
  model = label_attack.fit(rng.standard_normal((200, 6)), shares)
  predicted = model.predict(rng.standard_normal((20, 6)))
  np.testing.assert_allclose(
      predicted, np.tile(shares.mean(0), (20, 1)), atol=0.1
  )


def test_fit_minimizes_the_leave_one_out_error(monkeypatch):
  """Compares with a loop that leaves out each client in turn."""
  rng = np.random.default_rng(1)
  features = rng.standard_normal((12, 3))
  shares = label_attack.to_shares(
      0.3
      + 0.1 * features @ rng.standard_normal((3, 3))
      + 0.05 * rng.standard_normal((12, 3))
  )
  penalties = np.array([1e-3, 0.1, 10.0])
  monkeypatch.setattr(label_attack, '_PENALTIES', penalties)
  x = (features - features.mean(0)) / features.std(0)
  with_one = np.c_[x, np.ones(12)]

  def coefficients(rows, penalty):
    matrix = with_one[rows].T @ with_one[rows]
    matrix += 12 * penalty * np.diag([1, 1, 1, 0])
    return np.linalg.solve(matrix, with_one[rows].T @ shares[rows])

  errors = [
      np.mean(
          [
              np.square(
                  shares[i]
                  - with_one[i] @ coefficients(np.arange(12) != i, penalty)
              )
              for i in range(12)
          ]
      )
      for penalty in penalties
  ]
  best = coefficients(np.arange(12) >= 0, penalties[np.argmin(errors)])
  model = label_attack.fit(features, shares)
  np.testing.assert_allclose(model.coefficients, best[:-1], atol=1e-9)
  np.testing.assert_allclose(model.mean_shares, best[-1], atol=1e-9)
  assert len(set(errors)) == 3
  left, singular, _ = np.linalg.svd(x, full_matrices=False)
  for penalty, error in zip(penalties, errors):
    kept = singular**2 / (singular**2 + 12 * penalty)
    np.testing.assert_allclose(
        label_attack.leave_one_out_error(left, kept, shares - shares.mean(0)),
        error,
    )


def test_a_constant_feature_says_nothing():
  shares = np.random.default_rng(0).dirichlet(np.ones(3), 10)
  model = label_attack.fit(np.ones((10, 1)), shares)
  np.testing.assert_allclose(model.predict(np.ones((1, 1))), [shares.mean(0)])


@pytest.mark.parametrize(
    ('values', 'expected'),
    [
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
        ([1.2, 0.4, -0.6], [0.9, 0.1, 0.0]),
        ([5.0, 0.0, 0.0], [1.0, 0.0, 0.0]),
        ([0.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_closest_shares(values, expected):
  np.testing.assert_allclose(
      label_attack.to_shares(np.array([values])), [expected], atol=1e-12
  )


def test_total_variation():
  np.testing.assert_allclose(
      label_attack.total_variation(
          np.array([0.5, 0.5, 0.0]),
          np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.4, 0.5, 0.1]]),
      ),
      [0.0, 1.0, 0.1],
  )


def test_features():
  np.testing.assert_array_equal(
      label_attack.features_of([np.ones((2, 1)), np.array([3.0])]), [1, 1, 3]
  )
