"""Local training in NumPy with clipped gradients and a rate for each step."""

import numpy as np
import numpy_reference as reference


def clip(grads, clip_norm):
  """Scales gradients to a global norm of at most `clip_norm`."""
  norm = np.sqrt(sum((g**2).sum() for g in grads if g is not None))
  factor = min(1.0, clip_norm / norm)
  return [None if g is None else factor * g for g in grads]


def train(
    weights,
    batches,
    rates,
    *,
    momentum=0.0,
    weight_decay=0.0,
    clip_norm=np.inf,
    bn_momentum=0.75,
):
  """Makes a step with each batch.

  Args:
    weights: As in `numpy_reference`.
    batches: The batches.
    rates: The learning rate, or one for each batch.
    momentum: SGD's momentum.
    weight_decay: λ of the L2 decay, added after clipping.
    clip_norm: The largest global norm of a batch's gradients.
    bn_momentum: The momentum of the running statistics.

  Returns:
    The new weights.
  """
  velocity = [np.zeros_like(w) for w in weights]
  rates = np.broadcast_to(rates, len(batches))
  for (x, y), rate in zip(batches, rates, strict=True):
    _, grads, *statistics = reference.gradients(weights, x, y)
    new = list(weights)
    for i, g in enumerate(clip(grads, clip_norm)):
      if g is not None:
        velocity[i] = momentum * velocity[i] + g + weight_decay * weights[i]
        new[i] = weights[i] - rate * velocity[i]
    for i, seen in zip(reference.STATISTICS, statistics):
      new[i] = bn_momentum * weights[i] + (1 - bn_momentum) * seen
    weights = new
  return weights
