"""Tests of DSGD."""

import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (8, 5, 8)


def _found(toy, process, num_rounds):
  state = process.initialize()
  for number in range(num_rounds):
    data = [
        toy.dataset(2 * size, 10 * number + i) for i, size in enumerate(_SIZES)
    ]
    state = process.next(state, data).state
  return process.get_model_weights(state)


@pytest.mark.parametrize(
    ('uniform', 'clients_have_momentum'), [(False, True), (True, False)]
)
def test_equals_numpy(toy, uniform, clients_have_momentum):
  """Momentum of the mean gradient, or the mean of the clients' momentums."""
  rates = (0.1, 0.1, 0.05, 0.033)
  momentum, decay, bn_momentum = 0.5, 0.01, 0.75
  model = toy.model()
  process = algorithms.build_dsgd(
      model,
      _SGD(0.1, momentum),
      client_weighting='uniform' if uniform else 'num_examples',
      client_weight_decay=decay,
      client_learning_rate_schedule=lambda n: tf.gather((*rates, 0.0), n),
  )

  weights = model.from_model_weights(model.initial_weights)
  velocities = [[np.zeros_like(w) for w in weights] for _ in _SIZES]
  mean_velocity = [np.zeros_like(w) for w in weights]
  for number, rate in enumerate(rates):
    counts, statistics, gradients = [], [], []
    for i, size in enumerate(_SIZES):
      # Only the first of two batches.
      x, y = (part[:8] for part in toy.arrays(2 * size, 10 * number + i))
      counts.append(1 if uniform else len(x))
      _, grads, mean, variance = reference.gradients(weights, x, y)
      gradients.append(
          [
              np.zeros_like(w) if g is None else g + decay * w
              for g, w in zip(grads, weights)
          ]
      )
      statistics.append((mean, variance))
      velocities[i] = [
          momentum * v + g for v, g in zip(velocities[i], gradients[i])
      ]
    mean_velocity = [
        momentum * v + reference.average(g, counts)
        for v, g in zip(mean_velocity, zip(*gradients))
    ]
    direction = mean_velocity
    if clients_have_momentum and uniform:
      direction = [reference.average(v, counts) for v in zip(*velocities)]
    weights = [w - rate * d for w, d in zip(weights, direction)]
    for i, seen in zip(reference.STATISTICS, zip(*statistics)):
      weights[i] = bn_momentum * weights[i] + (
          1 - bn_momentum
      ) * reference.average(seen, counts)

  found = model.from_model_weights(_found(toy, process, len(rates)))
  for value, truth in zip(found, weights):
    # The rates are float32.
    np.testing.assert_allclose(value, truth, rtol=1e-6, atol=1e-8)


def test_normalization_of_another_algorithm(toy):
  """With SGD, DSGD with FBN is FBN with one local step."""
  model = toy.model()
  dsgd = algorithms.build_dsgd(
      model, _SGD(0.1), build_process=algorithms.build_fbn, pooled=False
  )
  fbn = algorithms.build_fbn(model, _SGD(0.1), local_steps=1, pooled=False)
  for value, truth in zip(
      model.from_model_weights(_found(toy, dsgd, 3)),
      model.from_model_weights(_found(toy, fbn, 3)),
  ):
    np.testing.assert_allclose(value, truth, rtol=1e-12, atol=1e-14)


def test_a_rule_sees_gradients(toy):
  model = toy.model()
  process = algorithms.build_dsgd(
      model,
      _SGD(0.1),
      client_weighting='uniform',
      model_aggregator=aggregators.CoordinateMedian(),
  )
  before = model.from_model_weights(model.initial_weights)
  gradients = []
  for i, size in enumerate(_SIZES):
    x, y = (part[:8] for part in toy.arrays(2 * size, i))
    gradients.append(reference.gradients(before, x, y)[1])
  found = model.from_model_weights(_found(toy, process, 1))
  for i, value in enumerate(found):
    if i not in reference.STATISTICS:
      step = 0.1 * np.median([g[i] for g in gradients], axis=0)
      np.testing.assert_allclose(
          value, before[i] - step, rtol=1e-10, atol=1e-14
      )


@pytest.mark.parametrize(
    'options',
    [
        dict(local_steps=2),
        dict(local_epochs=2),
        dict(server_optimizer=_SGD(1.0)),
    ],
)
def test_options_of_other_algorithms_are_refused(toy, options):
  (name,) = options
  with pytest.raises(ValueError, match=f'{name} must'):
    algorithms.build_dsgd(toy.model(), _SGD(0.1), **options)


def test_other_optimizer_types_are_refused(toy):
  with pytest.raises(TypeError, match='client_optimizer must be'):
    algorithms.build_dsgd(toy.model(), keras.optimizers.SGD(0.1))
