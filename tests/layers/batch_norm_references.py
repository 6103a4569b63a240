"""The batch normalization layers in NumPy, forward and backward."""

import numpy as np

from tff_bn.layers import BatchRenormalization
from tff_bn.layers import FederatedBatchNormalization
from tff_bn.layers import HybridBatchNormalization


class _Reference:
  """A step of a layer; all vectors have the rank of the input.

  A subclass computes the normalized values, `_inputs_gradient` from the
  gradient of these values, and the statistics after the step.
  """

  def __init__(self, layer, x, mask=None):
    axis = layer.axis % x.ndim
    self._reduced = tuple(i for i in range(x.ndim) if i != axis)
    self._layer = layer

    def spread(variable, default=None):
      if variable is None:
        return default
      value = np.asarray(variable, np.float64)
      return value.reshape([-1 if i == axis else 1 for i in range(x.ndim)])

    self._gamma = spread(layer.gamma, 1.0)
    self._beta = spread(layer.beta, 0.0)
    self._mean = spread(layer.moving_mean)
    self._variance = spread(layer.moving_variance)
    self._theta = spread(getattr(layer, 'mixing', None))
    self._x = x.astype(np.float64)
    mask = True if mask is None else mask[..., np.newaxis]
    self._weights = np.broadcast_to(mask, x.shape).astype(np.float64)
    self._count = self._sum(self._weights)
    self._present = np.maximum(self._count, 1)
    self._batch_mean = self._sum(self._weights * self._x) / self._present
    deviation = self._weights * (self._x - self._batch_mean) ** 2
    self._batch_variance = self._sum(deviation) / self._present
    self._normalized = self._normalize()
    self.output = self._gamma * self._normalized + self._beta

  def _sum(self, values):
    return values.sum(self._reduced, keepdims=True)

  def gradients(self, dy):
    """The gradients of the inputs and the weights by name."""
    return {
        'x': self._inputs_gradient(dy * self._gamma),
        'gamma': self._sum(dy * self._normalized),
        'beta': self._sum(dy),
    }

  def _moved(self, mean, variance):
    momentum = np.where(self._count > 0, self._layer.momentum, 1)
    return (
        momentum * self._mean + (1 - momentum) * mean,
        momentum * self._variance + (1 - momentum) * variance,
    )


class _Federated(_Reference):
  """Algorithm 2 of FBN's paper with one client."""

  def _normalize(self):
    self._inverse = 1 / np.sqrt(self._variance + self._layer.epsilon)
    return (self._x - self._mean) * self._inverse

  def _inputs_gradient(self, d_normalized):
    # The statistics are constants.
    return d_normalized * self._inverse

  def statistics(self):
    count = self._count
    factor = np.where(count > 1, count / np.maximum(count - 1, 1), 1)
    return self._moved(self._batch_mean, factor * self._batch_variance)


class _Renormalized(_Reference):
  """The gradients have r and d as constants."""

  def _normalize(self):
    # Without values, the moving statistics take the place of the batch's.
    is_empty = self._count == 0
    self._center = np.where(is_empty, self._mean, self._batch_mean)
    variance = np.where(is_empty, self._variance, self._batch_variance)
    epsilon, r_max, d_max = (
        getattr(self._layer, name) for name in ('epsilon', 'r_max', 'd_max')
    )
    self._sigma = np.sqrt(variance + epsilon)
    moving_sigma = np.sqrt(self._variance + epsilon)
    self._r = np.clip(self._sigma / moving_sigma, 1 / r_max, r_max)
    d = np.clip((self._center - self._mean) / moving_sigma, -d_max, d_max)
    return self._r * (self._x - self._center) / self._sigma + d

  def _inputs_gradient(self, d_normalized):
    upstream = d_normalized * self._r
    deviation = self._x - self._center
    d_mean = -self._sum(upstream) / self._sigma
    d_variance = -0.5 * self._sum(upstream * deviation) / self._sigma**3
    share = self._weights / self._present
    return upstream / self._sigma + share * (
        d_mean + 2 * deviation * d_variance
    )

  def statistics(self):
    return self._moved(self._batch_mean, self._batch_variance)


class _Hybrid(_Reference):
  """The statistics are mixtures of the moving ones and the batch's."""

  def _normalize(self):
    self._share = np.where(self._count > 0, 1 / (1 + np.exp(-self._theta)), 0)

    def mix(moving, batch):
      return moving + self._share * (batch - moving)

    self._deviation = self._x - mix(self._mean, self._batch_mean)
    variance = mix(self._variance, self._batch_variance)
    self._inverse = 1 / np.sqrt(variance + self._layer.epsilon)
    return self._deviation * self._inverse

  def _statistics_gradients(self, d_normalized):
    return (
        -self._inverse * self._sum(d_normalized),
        -0.5 * self._inverse**3 * self._sum(d_normalized * self._deviation),
    )

  def _inputs_gradient(self, d_normalized):
    d_mean, d_variance = self._statistics_gradients(d_normalized)
    through_statistics = self._share * (
        d_mean + 2 * (self._x - self._batch_mean) * d_variance
    )
    return (
        d_normalized * self._inverse
        + self._weights / self._present * through_statistics
    )

  def gradients(self, dy):
    d_mean, d_variance = self._statistics_gradients(dy * self._gamma)
    d_share = d_mean * (self._batch_mean - self._mean) + d_variance * (
        self._batch_variance - self._variance
    )
    mixing = self._share * (1 - self._share) * d_share
    return {**super().gradients(dy), 'mixing': mixing}

  def statistics(self):
    return self._mean, self._variance


_REFERENCES = {
    FederatedBatchNormalization: _Federated,
    BatchRenormalization: _Renormalized,
    HybridBatchNormalization: _Hybrid,
}


def reference(layer, x, mask=None):
  """What a layer computes of a batch in training, with its present weights."""
  return _REFERENCES[type(layer)](layer, x, mask)
