"""What several local steps between two exchanges lose, and where.

Ten clients have one class of scikit-learn's digits each. The clients' training
is simulated in plain JAX, all clients at once, step by step. So in a step, a
client can use its own value of each of these, or that of all clients together:

*   the statistics with which batch normalization normalizes,
*   the gradients of the loss with respect to these statistics,
*   the gradients of the weights: with the mean gradient, models do not drift
    apart.

If clients share all three, it is centralized training. The server averages the
weights. The model is evaluated with the statistics of a batch of all clients,
so that the table shows what happens to the weights. The program contains
nothing of this package but its data, and writes a Markdown report.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import statistics as statistics_lib
from typing import Any

from absl import app
from absl import flags
import harness
import jax_scan

flags.adopt_module_key_flags(harness)

_ROUNDS = flags.DEFINE_integer('rounds', 60, 'Number of rounds.', lower_bound=1)
_STEPS = flags.DEFINE_integer(
    'steps', 5, 'Number of local steps in a round.', lower_bound=2
)
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Number of seeds.', lower_bound=1)

_NUM_CLIENTS = 10
_BATCH_SIZE = 32
_LEARNING_RATE = 0.1
_EPSILON = 1e-3
_CHANNELS = (16, 32, 32)

OWN, ALL, NONE = 'own', 'all clients', 'none'
# The weights of the last layer.
_HEAD = ('kernel', 'bias')


@dataclasses.dataclass(frozen=True)
class Case:
  """Whose values a client uses in a local step.

  Attributes:
    statistics: `OWN` or `ALL`.
    of_statistics: The gradients with respect to the statistics: `OWN`, `ALL`,
      or `NONE`, which takes the statistics as constants.
    of_body: The gradients of the weights of all layers but the last: `OWN` or
      `ALL`.
    of_head: The gradients of the weights of the last layer: `OWN` or `ALL`.
    first_only: Whether this holds for the first step of a round only. In the
      others, a client uses its own values.
  """

  statistics: str = OWN
  of_statistics: str = OWN
  of_body: str = OWN
  of_head: str = OWN
  first_only: bool = False


CASES: Mapping[str, Case] = {
    'FedAvg': Case(),
    'FedAvg without drift': Case(of_body=ALL, of_head=ALL),
    'statistics alone': Case(ALL),
    'statistics alone, without drift': Case(ALL, of_body=ALL, of_head=ALL),
    'statistics as constants': Case(ALL, NONE),
    'statistics as constants, without drift': Case(
        ALL, NONE, of_body=ALL, of_head=ALL
    ),
    'statistics and their gradients': Case(ALL, ALL),
    'these in the first step of a round (FedTAN)': Case(
        ALL, ALL, first_only=True
    ),
    'these, and no drift of the last layer': Case(ALL, ALL, of_head=ALL),
    'these, and no drift of the other layers': Case(ALL, ALL, of_body=ALL),
    'all (centralized training)': Case(ALL, ALL, ALL, ALL),
}


def shared_statistics(mean: Any, variance: Any, of_statistics: str) -> Any:
  """Computes the statistics of the union of batches of the same size.

  Args:
    mean: The mean of each client's batch, of shape [clients, channels].
    variance: Their variances.
    of_statistics: See `Case`. The loss is the sum of the clients' losses.

  Returns:
    The mean and the variance of the union, for each client the same values, in
    the shape of `mean`.
  """
  import jax
  from jax import numpy as jnp

  constant = jax.lax.stop_gradient
  all_mean = jnp.broadcast_to(mean.mean(0), mean.shape)
  square = variance + (mean - constant(all_mean)) ** 2
  all_square = jnp.broadcast_to(square.mean(0), mean.shape)
  if of_statistics == ALL:
    return all_mean, all_square
  if of_statistics == NONE:
    return constant(all_mean), constant(all_square)
  return (
      mean + constant(all_mean - mean),
      square + constant(all_square - square),
  )


def _logits(weights: Any, x: Any, case: Case, fixed: Any = None) -> Any:
  """Returns the logits of all clients, and the statistics of each layer.

  `fixed` are the statistics of each layer to normalize with, if given.
  """
  from jax import numpy as jnp

  def for_each(function, *arguments):
    return jnp.stack([function(*client) for client in zip(*arguments)])

  def channels(vector):
    return vector[:, None, None, None]

  used = []
  for layer in range(len(_CHANNELS)):
    if layer:
      x = for_each(jax_scan.pool, x)
    x = for_each(jax_scan.convolve, x, weights[f'kernel_{layer}'])
    mean, variance = x.mean((1, 2, 3)), x.var((1, 2, 3))
    if fixed is not None:
      mean, variance = fixed[layer]
    elif case.statistics == ALL:
      mean, variance = shared_statistics(mean, variance, case.of_statistics)
    used.append((mean, variance))

    x = (x - channels(mean)) / jnp.sqrt(channels(variance) + _EPSILON)
    x = x * channels(weights[f'gamma_{layer}']) + channels(
        weights[f'beta_{layer}']
    )
    x = jnp.maximum(x, 0)
  logits = jnp.einsum('nbc,nco->nbo', x.mean((2, 3)), weights['kernel'])
  return logits + weights['bias'][:, None], used


@functools.cache
def _compiled() -> Any:
  """Returns the compiled training step and evaluation."""
  import jax
  from jax import numpy as jnp

  def loss(weights, x, y, case):
    logits, _ = _logits(weights, x, case)
    of_labels = jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], 2)
    return -of_labels.mean((1, 2)).sum()

  def step(weights, x, y, case):
    gradients = jax.grad(loss)(weights, x, y, case)
    new = {}
    for name, gradient in gradients.items():
      whose = case.of_head if name in _HEAD else case.of_body
      if whose == ALL:
        gradient = jnp.broadcast_to(gradient.mean(0), gradient.shape)
      new[name] = weights[name] - _LEARNING_RATE * gradient
    return new

  def correct(weights, x, x_test, y_test):
    _, used = _logits(weights, x, Case(ALL, ALL))
    one = {name: value[:1] for name, value in weights.items()}
    fixed = [(mean[:1], variance[:1]) for mean, variance in used]
    logits, _ = _logits(one, x_test[None], Case(), fixed)
    return (logits[0].argmax(-1) == y_test).mean()

  return jax.jit(step, static_argnums=3), jax.jit(correct)


def initial_weights(rng: Any) -> Any:
  """Draws the weights of a model (Glorot, uniform)."""
  import numpy as np

  def glorot(*shape):
    fan = np.prod(shape[:-2], dtype=int) * (shape[-2] + shape[-1])
    limit = np.sqrt(6 / fan)
    return rng.uniform(-limit, limit, shape).astype(np.float32)

  weights, num_inputs = {}, 1
  for layer, channels in enumerate(_CHANNELS):
    weights[f'kernel_{layer}'] = glorot(3, 3, num_inputs, channels)
    weights[f'gamma_{layer}'] = np.ones(channels, np.float32)
    weights[f'beta_{layer}'] = np.zeros(channels, np.float32)
    num_inputs = channels
  weights['kernel'] = glorot(num_inputs, harness.NUM_CLASSES)
  weights['bias'] = np.zeros(harness.NUM_CLASSES, np.float32)
  return weights


def train(case: Case, num_rounds: int, num_steps: int, seed: int) -> float:
  """Trains a model.

  Args:
    case: Whose values a client uses in a step.
    num_rounds: The number of rounds.
    num_steps: The number of local steps in a round.
    seed: Determines the initial weights and the batches.

  Returns:
    The test accuracy in percent.
  """
  import jax
  from jax import numpy as jnp
  import numpy as np

  from tff_bn import data

  step, correct = _compiled()
  digits = data.load_dataset('digits')
  members = [
      np.flatnonzero(digits.y_train == label) for label in range(_NUM_CLIENTS)
  ]
  rng = np.random.default_rng(seed)

  def for_all_clients(value):
    return jnp.broadcast_to(value, (_NUM_CLIENTS, *value.shape))

  weights = jax.tree.map(for_all_clients, initial_weights(rng))
  for _ in range(num_rounds):
    for number in range(num_steps):
      batch = np.stack([rng.choice(m, _BATCH_SIZE, False) for m in members])
      x, y = digits.x_train[batch], digits.y_train[batch]
      alone = case.first_only and number > 0
      weights = step(weights, x, y, Case() if alone else case)
    weights = jax.tree.map(lambda w: for_all_clients(w.mean(0)), weights)
  return 100 * float(correct(weights, x, digits.x_test, digits.y_test))


@dataclasses.dataclass(frozen=True)
class Measurements:
  """The measurements that a report shows.

  Attributes:
    machine: Lines about the machine and versions.
    rounds: The number of rounds.
    steps: The number of local steps in a round.
    accuracies: The test accuracies in percent of each case.
  """

  machine: Sequence[str]
  rounds: int
  steps: int
  accuracies: Mapping[str, Sequence[float]]


def _all_seeds(name: str, rounds: int, steps: int, seeds: int) -> list[float]:
  return [train(CASES[name], rounds, steps, seed) for seed in range(seeds)]


def measure(rounds: int, steps: int, seeds: int) -> Measurements:
  """Trains the model in all cases.

  Args:
    rounds: The number of rounds.
    steps: The number of local steps in a round.
    seeds: The number of seeds.

  Returns:
    The measurements.
  """
  accuracies = {}
  for name in CASES:
    harness.progress(f'Training: {name} ...')
    accuracies[name] = harness.in_new_process(
        _all_seeds, name, rounds, steps, seeds
    )
  machine = harness.in_new_process(harness.describe_machine, 'jax')
  return Measurements(machine, rounds, steps, accuracies)


def report(measurements: Measurements) -> tuple[str, bool]:
  """Writes the report.

  Args:
    measurements: The measurements.

  Returns:
    The report in Markdown, and whether all floors are met; it has none.
  """
  rows = []
  for name, accuracies in measurements.accuracies.items():
    case = CASES[name]
    mean = statistics_lib.mean(accuracies)
    rows.append(
        [
            name,
            case.statistics,
            case.of_statistics,
            case.of_body,
            case.of_head,
            f'{mean:.1f} ({min(accuracies):.1f}–{max(accuracies):.1f})',
        ]
    )
  num_seeds = len(next(iter(measurements.accuracies.values())))
  lines = [
      *harness.head(
          'What several local steps lose', 'local_steps', measurements.machine
      ),
      '',
      "Ten clients with one class of scikit-learn's digits each,"
      f' {measurements.rounds} rounds of {measurements.steps} local steps with'
      f' {_BATCH_SIZE} examples, small_cnn, learning rate {_LEARNING_RATE}. The'
      ' columns say whether a client uses its own values in a step, or those of'
      ' all clients together. Evaluation uses the statistics of a batch of all'
      f' clients. Test accuracy in %, mean (range) of {num_seeds} seeds.',
      '',
      *harness.table(
          [
              'case',
              'statistics',
              'gradients of statistics',
              'gradients of the body',
              'gradients of the last layer',
              'accuracy',
          ],
          rows,
      ),
      '',
  ]
  return '\n'.join(lines), True


def _parse_flags() -> dict[str, Any]:
  return dict(rounds=_ROUNDS.value, steps=_STEPS.value, seeds=_SEEDS.value)


def main(argv: Sequence[str]) -> int:
  """Runs the benchmark."""
  return harness.run('local_steps', argv, _parse_flags, measure, report)


if __name__ == '__main__':
  app.run(main)
