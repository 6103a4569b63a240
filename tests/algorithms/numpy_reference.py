"""Federated averaging of three small models in NumPy, in float64.

Independent of TensorFlow and written from the papers' formulas, as the truth
that tests compare with. Weights are in Keras's order. For dense, batch norm,
ReLU, dense: hidden kernel and bias, γ, β, moving mean and variance, output
kernel and bias. The loss of the two linear models is the mean squared error.
Gradients are `None` at the positions of the statistics.
"""

import numpy as np

MEAN, VARIANCE = 4, 5
STATISTICS = (MEAN, VARIANCE)
AFFINE = (2, 3)
_EPSILON = 2**-10


def gradients(
    weights,
    x,
    y,
    fixed=False,
    feature_gradient=None,
    rows=slice(None),
    averages=(0, 0),
):
  """Returns the mean cross-entropy, its gradients, and the batch's statistics.

  With `fixed`, the model normalizes with the running statistics as constants.
  `feature_gradient` maps the features (the hidden layer's output) to the
  gradient of a term that is added to the loss. The gradients come from `rows`
  of x only. `averages` replace the sums of the output's gradient, and of its
  product with the normalized values, in the backward pass if `fixed`.
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
  dh = d @ w2.T
  if feature_gradient is not None:
    dh = dh + feature_gradient(h)
  da = dh * (a > 0)
  dz_hat = da * gamma
  dz = inv * dz_hat
  if not fixed:
    dz -= inv * (dz_hat.mean(0) + z_hat * (dz_hat * z_hat).mean(0))
  else:
    dz -= inv * gamma * (averages[0] + z_hat * averages[1]) / n
  grads = [
      x[rows].T @ dz[rows],
      dz[rows].sum(0),
      (da * z_hat)[rows].sum(0),
      da[rows].sum(0),
      None,
      None,
      h[rows].T @ d[rows],
      d[rows].sum(0),
  ]
  return loss, grads, mean, variance


def without(positions):
  """Returns `gradients` that are 0 at some positions, which stay fixed."""

  def fixed(weights, x, y, **kwargs):
    loss, grads, mean, variance = gradients(weights, x, y, **kwargs)
    grads = [
        np.zeros_like(g) if i in positions and g is not None else g
        for i, g in enumerate(grads)
    ]
    return loss, grads, mean, variance

  return fixed


def features(weights, x):
  """Returns the hidden layer's output in inference mode."""
  w1, b1, gamma, beta, mean, variance, _, _ = weights
  normalized = (x @ w1 + b1 - mean) / np.sqrt(variance + _EPSILON)
  return np.maximum(normalized * gamma + beta, 0)


def gradients_bn_dense(weights, x, y, fixed=False, feature_gradient=None):
  """Like `gradients`, for batch norm and dense; features: normalized."""
  gamma, beta, running_mean, running_variance, w, b = weights
  mean, variance = x.mean(0), x.var(0)
  used = (running_mean, running_variance) if fixed else (mean, variance)
  x_hat = (x - used[0]) / np.sqrt(used[1] + _EPSILON)
  h = x_hat * gamma + beta
  error = h @ w + b - y
  d = 2 * error / error.size
  dh = d @ w.T
  if feature_gradient is not None:
    dh = dh + feature_gradient(h)
  grads = [(dh * x_hat).sum(0), dh.sum(0), None, None, h.T @ d, d.sum(0)]
  return (error**2).mean(), grads, mean, variance


def features_bn_dense(weights, x):
  """Returns the output of batch norm in inference mode."""
  gamma, beta, mean, variance, _, _ = weights
  return (x - mean) / np.sqrt(variance + _EPSILON) * gamma + beta


def gradients_dense_bn(weights, x, y, fixed=False, feature_gradient=None):
  """Like `gradients`, for dense and batch norm; features: the dense layer's."""
  w, b, gamma, beta, running_mean, running_variance = weights
  z = x @ w + b
  mean, variance = z.mean(0), z.var(0)
  used = (running_mean, running_variance) if fixed else (mean, variance)
  inv = 1 / np.sqrt(used[1] + _EPSILON)
  z_hat = (z - used[0]) * inv
  error = z_hat * gamma + beta - y
  d = 2 * error / error.size
  dz_hat = d * gamma
  dz = inv * dz_hat
  if not fixed:
    dz -= inv * (dz_hat.mean(0) + z_hat * (dz_hat * z_hat).mean(0))
  if feature_gradient is not None:
    dz = dz + feature_gradient(z)
  grads = [x.T @ dz, dz.sum(0), (d * z_hat).sum(0), d.sum(0), None, None]
  return (error**2).mean(), grads, mean, variance


def features_dense_bn(weights, x):
  """Returns the output of the dense layer."""
  return x @ weights[0] + weights[1]


def train(
    weights,
    batches,
    learning_rate,
    momentum=0.0,
    weight_decay=0.0,
    bn_momentum=0.75,
    *,
    gradients_fn=gradients,
    fixed=False,
    seen=None,
    extra=None,
    feature_gradient=None,
):
  """Trains locally; returns weights, number of examples, sum of the losses.

  `learning_rate` may be a list with a rate for each step. `extra` maps the
  weights to a term that is added to the gradients, and `feature_gradient` maps
  x to a `feature_gradient` of `gradients`. With `fixed`, the running statistics
  do not change. `seen` is a list to which the size, mean and variance of each
  batch are appended.
  """
  weights = [w.copy() for w in weights]
  velocity = [np.zeros_like(w) for w in weights]
  rates = np.broadcast_to(learning_rate, [len(batches)])
  num_examples, loss_sum = 0, 0.0
  for (x, y), rate in zip(batches, rates):
    loss, grads, mean, variance = gradients_fn(
        weights,
        x,
        y,
        fixed=fixed,
        feature_gradient=feature_gradient and feature_gradient(x),
    )
    at_mean, at_variance = (i for i, g in enumerate(grads) if g is None)
    added = extra(weights) if extra else [0.0] * len(weights)
    for i, g in enumerate(grads):
      if g is not None:
        g = g + weight_decay * weights[i] + added[i]
        velocity[i] = momentum * velocity[i] + g
        weights[i] = weights[i] - rate * velocity[i]
    if not fixed:
      for i, value in ((at_mean, mean), (at_variance, variance)):
        weights[i] = bn_momentum * weights[i] + (1 - bn_momentum) * value
    if seen is not None:
      seen.append((len(x), mean, variance))
    num_examples += len(x)
    loss_sum += loss * len(x)
  return weights, num_examples, loss_sum


def proximal(anchor, strength, positions):
  """Returns the gradient of FedProx's term, an `extra` of `train`."""
  return lambda weights: [
      strength * (w - a) if i in positions else 0.0
      for i, (w, a) in enumerate(zip(weights, anchor))
  ]


def contrast(z, z_global, z_previous, temperature):
  """Returns MOON's mean loss over the rows and its gradient by z."""

  def norm(v):
    return np.sqrt(np.maximum((v**2).sum(1, keepdims=True), 1e-12))

  unit, unit_global, unit_previous = (
      v / norm(v) for v in (z, z_global, z_previous)
  )
  a = (unit * unit_global).sum(1, keepdims=True)
  b = (unit * unit_previous).sum(1, keepdims=True)
  share = np.exp(a / temperature) / (
      np.exp(a / temperature) + np.exp(b / temperature)
  )
  d_unit = (1 - share) / temperature * (unit_previous - unit_global)
  tangential = d_unit - unit * (unit * d_unit).sum(1, keepdims=True)
  return -np.log(share).mean(), tangential / norm(z) / len(z)


def average(values, counts):
  """Returns the mean of arrays, weighted by counts."""
  return sum(c * v for c, v in zip(counts, values)) / sum(counts)


def average_models(models, counts):
  """Returns the mean of each weight."""
  return [average(values, counts) for values in zip(*models, strict=True)]


def pool(means, variances, counts):
  """Combines moments by the law of total variance."""
  mean = average(means, counts)
  second = average([v + m**2 for m, v in zip(means, variances)], counts)
  return mean, second - mean**2


def fbn_statistics(before, seen, beta=0.25):
  """Returns FBN's running statistics after a round with the moments `seen`."""
  counts, means, variances = zip(*seen)
  mean, variance = pool(means, variances, counts)
  n = sum(counts)
  return (
      (1 - beta) * before[MEAN] + beta * mean,
      (1 - beta) * before[VARIANCE] + beta * n / (n - 1) * variance,
  )


def fbn_round(truth, **kwargs):
  """Runs a round of a truth and replaces the statistics by FBN's."""
  seen, before = [], list(truth.models[0])
  truth.round(fixed=True, seen=seen, **kwargs)
  statistics = fbn_statistics(before, seen)
  for weights in truth.models:
    weights[MEAN], weights[VARIANCE] = statistics


def split(x, y, batch_size=8):
  """Returns the batches that `tf.data` makes."""
  return [
      (x[i : i + batch_size], y[i : i + batch_size])
      for i in range(0, len(x), batch_size)
  ]
