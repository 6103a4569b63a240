"""Rounds of federated averaging with plain JAX, to compare times with.

A round is one compiled call: a scan over the clients, in which a scan goes over
a client's batches. JAX is optional; `pip install jax` installs it.
"""

from collections.abc import Callable, Sequence
import importlib.util
from typing import Any

import fed_avg_rounds
import harness

_EPSILON, _MOMENTUM = 1e-5, 0.9

# The model that it knows.
MODEL = 'small_cnn'


def is_installed() -> bool:
  """Whether JAX can be imported."""
  return importlib.util.find_spec('jax') is not None


def stack(clients: Sequence[Sequence[Any]]) -> list[Any]:
  """Stacks the clients' batches, all of the same shapes.

  Args:
    clients: The batches of each client.

  Returns:
    All images and all labels, of shape [clients, steps, batch size, ...].
  """
  import numpy as np

  parts = zip(*(zip(*client) for client in clients))
  return [np.array([list(batches) for batches in part]) for part in parts]


def build_round(
    problem: fed_avg_rounds.FedAvgRounds,
) -> Callable[[Sequence[Any]], harness.Result]:
  """Returns a function that computes a round.

  Args:
    problem: The round's data, and small_cnn.

  Returns:
    A function of the result of `stack`.
  """
  import jax
  from jax import numpy as jnp
  import numpy as np

  rate = problem.row.learning_rate

  def loss_of(weights, x, y):
    outputs, new = _apply(weights, x)
    of_labels = jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1)
    num_right = (outputs.argmax(1) == y).sum()
    return -of_labels.mean(), (new, num_right)

  def step(weights, batch):
    (loss, (new, num_right)), gradients = jax.value_and_grad(
        loss_of, has_aux=True
    )(weights, *batch)
    # Moving statistics have no gradients.
    new = [value - rate * g for value, g in zip(new, gradients)]
    return new, (loss, num_right)

  @jax.jit
  def average(initial, x, y):
    def client(totals, batches):
      weights, metrics = jax.lax.scan(step, initial, batches)
      return [t + w for t, w in zip(totals, weights)], metrics

    zeros = [jnp.zeros_like(value) for value in initial]
    totals, (losses, num_right) = jax.lax.scan(client, zeros, (x, y))
    means = [total / len(x) for total in totals]
    return means, losses.mean(), num_right.sum() / y.size

  def compute_round(arrays):
    weights, *metrics = average(problem.initial, *arrays)
    return harness.Result(
        [np.asarray(value) for value in weights], [float(m) for m in metrics]
    )

  return compute_round


def convolve(x: Any, kernel: Any) -> Any:
  """Convolves images with a kernel, both in the layout of Keras."""
  import jax

  return jax.lax.conv_general_dilated(
      x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  )


def pool(x: Any) -> Any:
  """Returns the maximum of each 2x2 pixels of images."""
  import jax
  from jax import numpy as jnp

  window = (1, 2, 2, 1)
  return jax.lax.reduce_window(
      x, -jnp.inf, jax.lax.max, window, window, 'VALID'
  )


def _apply(weights: Sequence[Any], x: Any) -> tuple[Any, list[Any]]:
  """Computes small_cnn in training.

  Args:
    weights: The weights in the order of Keras.
    x: The images.

  Returns:
    The logits, and the weights with new moving statistics.
  """
  import jax
  from jax import numpy as jnp

  remaining, new = iter(weights), []

  def block(x):
    kernel, gamma, beta, *old = (next(remaining) for _ in range(5))
    x = convolve(x, kernel)
    moments = mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    new.extend([kernel, gamma, beta])
    new.extend(
        _MOMENTUM * a + (1 - _MOMENTUM) * b for a, b in zip(old, moments)
    )
    x = gamma * (x - mean) / jnp.sqrt(variance + _EPSILON) + beta
    return jax.nn.relu(x)

  x = block(pool(block(pool(block(x)))))
  kernel, bias = remaining
  return x.mean((1, 2)) @ kernel + bias, [*new, kernel, bias]
