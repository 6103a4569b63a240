"""The definitions of rules and steps before rules in plain NumPy.

They take the rows and the number of attackers among them.
"""

import itertools

import numpy as np


def squared_distances(x):
  return ((x[:, np.newaxis] - x[np.newaxis]) ** 2).sum(axis=2)


def trimmed_mean(x, f):
  return np.array([np.sort(c)[f : len(c) - f].mean() for c in x.T])


def mea_med(x, f):
  result = []
  for column in x.T:
    ascending = np.sort(column)
    nearest = np.argsort(np.abs(ascending - np.median(column)), kind='stable')
    result.append(ascending[nearest[: len(column) - f]].mean())
  return np.array(result)


def krum_order(x, f):
  scores = []
  for i in range(len(x)):
    others = [np.sum((x[i] - x[j]) ** 2) for j in range(len(x)) if j != i]
    scores.append(sum(sorted(others)[: len(x) - f - 2]))
  return np.argsort(scores, kind='stable')


def mixed(x, f):
  rows = []
  for i in range(len(x)):
    lengths = [np.linalg.norm(x[i] - y) for y in x]
    rows.append(x[np.argsort(lengths, kind='stable')[: len(x) - f]].mean(0))
  return np.array(rows)


def clipped(x, center, radius, num_iterations):
  for _ in range(num_iterations):
    steps = []
    for row in x:
      length = np.linalg.norm(row - center)
      steps.append((row - center) * (min(1, radius / length) if length else 1))
    center = center + np.mean(steps, axis=0)
  return center


def first_least(x, f, measure):
  """The mean of the first n - f rows, in lexicographic order, that minimize."""
  rows = itertools.combinations(range(len(x)), len(x) - f)
  return x[list(min(rows, key=measure))].mean(axis=0)


def minimum_diameter(x, f):
  squared = squared_distances(x)
  return first_least(x, f, lambda s: squared[np.ix_(s, s)].max())


def smallest_eigenvalue(x, f):
  def largest(rows):
    centered = x[list(rows)] - x[list(rows)].mean(axis=0)
    # Rounding must not choose between sets with the same eigenvalue.
    return np.linalg.norm(centered, 2).round(9)

  return first_least(x, f, largest)


def near_last(x, f):
  lengths = np.linalg.norm(x - x[-1], axis=1)
  return x[np.argsort(lengths, kind='stable')[: len(x) - f]].mean(axis=0)


def filtered(x, f):
  weights, best, least = np.ones(len(x)), x.mean(axis=0), np.inf
  while weights.sum() > len(x) - 2 * f:
    mean = weights @ x / weights.sum()
    covariance = (weights * (x - mean).T) @ (x - mean) / weights.sum()
    eigenvalues, vectors = np.linalg.eigh(covariance)
    if eigenvalues[-1] < least:
      best, least = mean, eigenvalues[-1]
    tau = ((x - mean) @ vectors[:, -1]) ** 2
    most = tau[weights > 0].max()
    if not most:
      break
    weights = weights * np.maximum(1 - tau / most, 0)
  return best


def bulyan(x, f):
  left, selected = list(range(len(x))), []
  while len(selected) < len(x) - 2 * f:
    num_near = max(len(left) - f - 2, 1)
    scores = []
    for i in left:
      others = sorted(np.sum((x[i] - x[j]) ** 2) for j in left if j != i)
      scores.append(sum(others[:num_near]))
    selected.append(left.pop(np.argmin(scores)))
  return mea_med(x[selected], 2 * f)


def shortened(x, f):
  lengths = np.linalg.norm(x, axis=1)
  longest = np.sort(lengths)[::-1][2 * f * (len(x) - f) // len(x)]
  return x * np.minimum(1, longest / lengths)[:, np.newaxis]
