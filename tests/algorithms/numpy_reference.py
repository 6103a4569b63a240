"""Federated averaging of dense, batch norm, ReLU, dense; in NumPy, float64.

Written from the papers' formulas alone, without TensorFlow, as a truth to
compare with. The weights are in Keras's order: hidden kernel and bias, γ, β,
moving mean and variance, output kernel and bias.
"""

import numpy as np

MEAN, VARIANCE = 4, 5
STATISTICS = (MEAN, VARIANCE)
AFFINE = (2, 3)
_EPSILON = 2**-10


def gradients(weights, x, y, fixed=False):
  """The mean cross-entropy, its gradients, and the batch's statistics.

  With `fixed` it normalizes by the running statistics, which are constants.
  """
  w1, b1, gamma, beta, running_mean, running_variance, w2, b2 = weights
  n = len(x)
  z = x @ w1 + b1
  mean, variance = z.mean(0), z.var(0)
  used = (running_mean, running_variance) if fixed else (mean, variance)
  inv = 1 / np.sqrt(used[1] + _EPSILON)
  z_hat = (z - used[0]) * inv
  a = z_hat * gamma + beta
  h = np.maximum(a, 0)
  logits = h @ w2 + b2
  p = np.exp(logits - logits.max(1, keepdims=True))
  p /= p.sum(1, keepdims=True)
  loss = -np.log(p[np.arange(n), y]).mean()
  d = p.copy()
  d[np.arange(n), y] -= 1
  d /= n
  dw2, db2 = h.T @ d, d.sum(0)
  da = (d @ w2.T) * (a > 0)
  dgamma, dbeta = (da * z_hat).sum(0), da.sum(0)
  dz_hat = da * gamma
  dz = inv * dz_hat
  if not fixed:
    dz -= inv * (dz_hat.mean(0) + z_hat * (dz_hat * z_hat).mean(0))
  grads = [x.T @ dz, dz.sum(0), dgamma, dbeta, None, None, dw2, db2]
  return loss, grads, mean, variance


def train(
    weights,
    batches,
    learning_rate,
    momentum=0.0,
    weight_decay=0.0,
    bn_momentum=0.75,
):
  """Local training: new weights, number of examples, sum of the losses."""
  weights = [w.copy() for w in weights]
  velocity = [np.zeros_like(w) for w in weights]
  num_examples, loss_sum = 0, 0.0
  for x, y in batches:
    loss, grads, mean, variance = gradients(weights, x, y)
    for i, g in enumerate(grads):
      if g is not None:
        velocity[i] = momentum * velocity[i] + g + weight_decay * weights[i]
        weights[i] = weights[i] - learning_rate * velocity[i]
    weights[MEAN] = bn_momentum * weights[MEAN] + (1 - bn_momentum) * mean
    weights[VARIANCE] = (
        bn_momentum * weights[VARIANCE] + (1 - bn_momentum) * variance
    )
    num_examples += len(x)
    loss_sum += loss * len(x)
  return weights, num_examples, loss_sum


def average(values, counts):
  """The mean of arrays, weighted by counts."""
  return sum(c * v for c, v in zip(counts, values)) / sum(counts)


def pool(means, variances, counts):
  """The law of total variance."""
  mean = average(means, counts)
  second = average([v + m**2 for m, v in zip(means, variances)], counts)
  return mean, second - mean**2


def split(x, y, batch_size=8):
  """The batches that `tf.data` makes."""
  return [
      (x[i : i + batch_size], y[i : i + batch_size])
      for i in range(0, len(x), batch_size)
  ]
