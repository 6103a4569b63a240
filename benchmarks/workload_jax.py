"""The public workloads in plain JAX, in the form of FedJAX.

As in FedJAX, a client is an `init`, a `step` and a `final` function, compiled
once each, and a Python loop goes over the clients of a round and their batches.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import numpy as np
import workload_data
from workload_data import ROUND
from workload_data import TEST
from workload_data import TEST_BATCH_SIZE

_MOMENTUM, _EPSILON = 0.9, 1e-5


def build_apply(
    workload: workload_data.Workload,
) -> Callable[..., tuple[Any, list[Any]]]:
  """Returns a function that computes the model's outputs.

  Args:
    workload: The workload.

  Returns:
    A function of the weights in Keras's order, the images and a key for
    dropout, `None` in tests. It returns logits, and the weights with new
    running statistics.
  """
  import jax
  from jax import numpy as jnp

  def drop(x, rate, key):
    if key is None or not workload.has_dropout:
      return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)

  def apply(weights, x, key):
    remaining, new = list(weights), []

    def take(number):
      taken = remaining[:number]
      del remaining[:number]
      return taken

    def normalize(x):
      gamma, beta, mean, variance = take(4)
      if key is not None:
        batch_mean, batch_variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        new.extend([gamma, beta])
        for old, value in ((mean, batch_mean), (variance, batch_variance)):
          new.append(_MOMENTUM * old + (1 - _MOMENTUM) * value)
        mean, variance = batch_mean, batch_variance
      return gamma * (x - mean) / jnp.sqrt(variance + _EPSILON) + beta

    def convolve(x):
      kernel, bias = take(2)
      new.extend([kernel, bias])
      x = jax.lax.conv_general_dilated(
          x, kernel, (1, 1), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
      )
      x = x + bias
      if workload.kind == 'cnn_bn':
        x = normalize(x)
      return jax.nn.relu(x)

    def multiply(x):
      kernel, bias = take(2)
      new.extend([kernel, bias])
      return x @ kernel + bias

    if workload.kind == 'linear':
      return multiply(x.reshape(len(x), -1)), new
    keys = (None, None) if key is None else jax.random.split(key)
    x = convolve(convolve(x))
    x = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID'
    )
    x = drop(x, 0.25, keys[0]).reshape(len(x), -1)
    x = drop(jax.nn.relu(multiply(x)), 0.5, keys[1])
    return multiply(x), new

  return apply


def run(workload: workload_data.Workload, turns: workload_data.Turns) -> None:
  """Trains the workload."""
  import jax
  from jax import numpy as jnp

  source = workload_data.Data(workload)
  apply = build_apply(workload)

  def losses_of(outputs, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1)

  def loss_of(weights, x, y, key):
    outputs, new = apply(weights, x, key)
    return losses_of(outputs, y).mean(), new

  @jax.jit
  def init(weights, key):
    # Copies, because a step reuses the memory of the state.
    return [jnp.copy(value) for value in weights], key, jnp.zeros(())

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, x, y):
    weights, key, total = state
    key, own = jax.random.split(key)
    (loss, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(
        weights, x, y, own
    )
    # Running statistics have no gradients.
    weights = [
        value - workload.learning_rate * gradient
        for value, gradient in zip(new, gradients)
    ]
    return weights, key, total + loss

  @jax.jit
  def final(weights, state):
    return [new - old for new, old in zip(state[0], weights)]

  @jax.jit
  def add(a, b):
    return [x + y for x, y in zip(a, b)]

  @jax.jit
  def update(weights, total):
    return [w + t / workload.clients_per_round for w, t in zip(weights, total)]

  @jax.jit
  def evaluate(weights, x, y):
    outputs, _ = apply(weights, x, None)
    return losses_of(outputs, y).sum(), (outputs.argmax(1) == y).sum()

  x_test, y_test = workload_data.scale(source.x_test), source.y_test

  def test(weights: Sequence[Any]) -> None:
    turns.begin()
    sums = np.zeros(2)
    for start in range(0, len(y_test), TEST_BATCH_SIZE):
      part = slice(start, start + TEST_BATCH_SIZE)
      values = evaluate(weights, x_test[part], y_test[part])
      sums += [float(value) for value in values]
    loss, accuracy = sums / len(y_test)
    turns.end(TEST, loss=loss, accuracy=accuracy)

  weights = [jnp.asarray(w) for w in workload_data.initial_weights(workload)]
  turns.ready()
  test(weights)
  for round_num in range(1, workload.rounds + 1):
    turns.begin()
    total, losses = None, []
    for number in workload.clients_of_round(round_num):
      x, y = source.scaled_client(number)
      seed = round_num * workload.num_clients + number
      order = np.random.default_rng(seed).permutation(len(y))
      state = init(weights, jax.random.key(seed))
      for start in range(0, len(y), workload.batch_size):
        part = order[start : start + workload.batch_size]
        state = step(state, x[part], y[part])
      delta = final(weights, state)
      total = delta if total is None else add(total, delta)
      losses.append(state[2])
    weights = jax.block_until_ready(update(weights, total))
    loss = np.mean([float(loss) for loss in losses]) / workload.steps_per_client
    turns.end(ROUND, loss=loss)
    if workload.is_tested(round_num):
      test(weights)
