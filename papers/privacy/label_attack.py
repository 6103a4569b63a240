"""Infers the shares of labels among a client's examples from its message.

In softmax regression on the last layer, the gradient of the bias is the mean of
p − y over the examples: the predicted minus the true shares of the labels. So
true shares are predicted shares minus the gradient (Zhao, Mopuri, Bilen, iDLG,
arXiv:2001.02610, and Wainakh et al., User-Level Label Leakage from Gradients in
Federated Learning, arXiv:2105.09369). The attacker does not know the
predictions. So it fits a ridge regression from the values in the message to the
shares, with messages of clients that it simulates with its own pictures. The
regression learns the formula above, how much noise to ignore, and what the
statistics say about labels, for which there is no formula.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Penalties among which the leave-one-out error chooses, in relation to the
# number of clients. The largest one predicts the mean shares.
_PENALTIES = np.logspace(-6, 6, 25)
_SMALLEST_DEVIATION = 1e-12


def shares_from_bias(
    gradient: np.ndarray, predicted_shares: np.ndarray
) -> np.ndarray:
  """Returns the shares of the labels, by the formula above.

  Args:
    gradient: The gradient of the last layer's bias.
    predicted_shares: The mean of the predicted probabilities.
  """
  return predicted_shares - gradient


class RidgeRegression(NamedTuple):
  """A linear model from features to shares of labels.

  Attributes:
    center: The mean of each feature.
    deviation: The deviation of each feature.
    coefficients: `[features, labels]`, for standardized features.
    mean_shares: The mean shares of the clients it was fitted to.
  """

  center: np.ndarray
  deviation: np.ndarray
  coefficients: np.ndarray
  mean_shares: np.ndarray

  def predict(self, features: np.ndarray) -> np.ndarray:
    """Returns shares, which are not negative and add up to 1.

    Args:
      features: `[clients, features]`.
    """
    standardized = (features - self.center) / self.deviation
    return to_shares(self.mean_shares + standardized @ self.coefficients)


def fit(features: np.ndarray, shares: np.ndarray) -> RidgeRegression:
  """Fits a ridge regression; the leave-one-out error chooses the penalty.

  Args:
    features: `[clients, features]`.
    shares: `[clients, labels]`.
  """
  features = features.astype(float)
  center, deviation = features.mean(0), features.std(0)
  deviation = np.maximum(deviation, _SMALLEST_DEVIATION)
  mean_shares = shares.mean(0)
  targets = shares - mean_shares
  left, singular, right = np.linalg.svd(
      (features - center) / deviation, full_matrices=False
  )
  projected = left.T @ targets
  best, smallest = np.zeros((features.shape[1], shares.shape[1])), np.inf
  for penalty in _PENALTIES * len(features):
    kept = singular**2 / (singular**2 + penalty)
    error = leave_one_out_error(left, kept, targets)
    if error < smallest:
      smallest = error
      factors = singular / (singular**2 + penalty)
      best = right.T @ (factors[:, np.newaxis] * projected)
  return RidgeRegression(center, deviation, best, mean_shares)


def leave_one_out_error(
    left: np.ndarray, kept: np.ndarray, targets: np.ndarray
) -> float:
  """Returns the mean squared error for clients that the fit does not know.

  Args:
    left: The left singular vectors of the standardized features.
    kept: The share of each that the penalty keeps.
    targets: The deviations of the shares from their mean.
  """
  residuals = targets - left @ (kept[:, np.newaxis] * (left.T @ targets))
  # The share of its own target in each prediction; 1/n is the mean's.
  own_share = np.square(left) @ kept + 1 / len(left)
  own_share = np.minimum(own_share, 1 - _SMALLEST_DEVIATION)[:, np.newaxis]
  return float(np.mean(np.square(residuals / (1 - own_share))))


def to_shares(values: np.ndarray) -> np.ndarray:
  """Returns the closest shares to values `[clients, labels]`.

  Shares are not negative and add up to 1.
  """
  ordered = -np.sort(-values, axis=1)
  # The largest number of positive shares decides what is subtracted.
  excess = (np.cumsum(ordered, 1) - 1) / np.arange(1, values.shape[1] + 1)
  num_positive = np.sum(ordered > excess, axis=1)
  return np.maximum(
      values - excess[np.arange(len(values)), num_positive - 1, np.newaxis], 0
  )


def total_variation(shares: np.ndarray, true_shares: np.ndarray) -> np.ndarray:
  """Returns half the sum of the absolute differences, for each client."""
  return np.abs(shares - true_shares).sum(axis=-1) / 2


def features_of(arrays: Sequence[np.ndarray]) -> np.ndarray:
  """Returns arrays as one vector."""
  return np.concatenate([np.ravel(array) for array in arrays])
