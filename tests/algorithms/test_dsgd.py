"""Tests of DSGD."""

import functools

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import plain_model
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn.processes.stateful_process import StatefulLearningProcess

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (8, 5, 8)
_dsgd = functools.partial(client_rounds.toy_process, 'build_dsgd')


def _found(toy, process, num_rounds):
  state = process.initialize()
  for number in range(num_rounds):
    data = [
        toy.dataset(2 * size, 10 * number + i) for i, size in enumerate(_SIZES)
    ]
    state = process.next(state, data).state
  return process.get_model_weights(state)


def test_equals_numpy(toy):
  """The optimizer's momentum is of the mean gradient."""
  rates = (0.1, 0.1, 0.05, 0.033)
  momentum, decay, bn_momentum = 0.5, 0.01, 0.75
  model = client_rounds.toy_model()
  process = algorithms.build_dsgd(
      model,
      _SGD(0.1, momentum),
      client_weight_decay=decay,
      client_learning_rate_schedule=lambda n: tf.gather((*rates, 0.0), n),
  )

  weights = model.from_model_weights(model.initial_weights)
  velocity = [np.zeros_like(w) for w in weights]
  for number, rate in enumerate(rates):
    counts, statistics, gradients = [], [], []
    for i, size in enumerate(_SIZES):
      # Only the first of two batches.
      x, y = (part[:8] for part in toy.arrays(2 * size, 10 * number + i))
      counts.append(len(x))
      _, grads, mean, variance = reference.gradients(weights, x, y)
      gradients.append(
          [
              np.zeros_like(w) if g is None else g + decay * w
              for g, w in zip(grads, weights)
          ]
      )
      statistics.append((mean, variance))
    velocity = [
        momentum * v + reference.average(g, counts)
        for v, g in zip(velocity, zip(*gradients))
    ]
    weights = [w - rate * v for w, v in zip(weights, velocity)]
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
  options = dict(pooled=False, backward='running')
  model, dsgd = _dsgd(build_process=algorithms.build_fbn, **options)
  _, fbn = client_rounds.toy_process('build_fbn', local_steps=1, **options)
  for value, truth in zip(
      model.from_model_weights(_found(toy, dsgd, 3)),
      model.from_model_weights(_found(toy, fbn, 3)),
  ):
    np.testing.assert_allclose(value, truth, rtol=1e-12, atol=1e-14)


def test_a_rule_sees_gradients(toy):
  model, process = _dsgd(
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
def test_options_of_other_algorithms_are_refused(options):
  (name,) = options
  with pytest.raises(ValueError, match=f'{name}.* must'):
    algorithms.build_dsgd(client_rounds.toy_model(), _SGD(0.1), **options)


def test_other_optimizer_types_are_refused():
  with pytest.raises(TypeError, match='client_optimizer must be'):
    algorithms.build_dsgd(client_rounds.toy_model(), keras.optimizers.SGD(0.1))


_MOMENTUM = 0.75
_TRAINABLE = (0, 1, 2, 3, 6, 7)


def _momentums(model, client):
  return [client[f'momentum_{model.variables[i].name}'] for i in _TRAINABLE]


class _Truth:
  """DSGD whose clients keep momentums, in NumPy."""

  def __init__(self, model, num_clients):
    self.weights = model.from_model_weights(model.initial_weights)
    self.momentums = [
        [np.zeros_like(self.weights[i]) for i in _TRAINABLE]
        for _ in range(num_clients)
    ]

  def round(
      self,
      batches,
      *,
      rate=0.1,
      decay=0.0,
      uniform=True,
      rule=reference.average,
      fbn=False,
      fixed=False,
  ):
    """Makes a step with the batches, by client; `None` changes nothing."""
    found, counts, seen = [], [], []
    for k, batch in batches.items():
      if batch is None:
        continue
      _, grads, mean, variance = reference.gradients(
          self.weights, *batch, fixed=fbn or fixed
      )
      self.momentums[k] = [
          _MOMENTUM * m + (1 - _MOMENTUM) * (grads[i] + decay * self.weights[i])
          for i, m in zip(_TRAINABLE, self.momentums[k])
      ]
      found.append(self.momentums[k])
      counts.append(1 if uniform else len(batch[0]))
      seen.append((len(batch[0]), mean, variance))
    before, self.weights = self.weights, list(self.weights)
    for i, values in zip(_TRAINABLE, zip(*found)):
      self.weights[i] = before[i] - rate * rule(values, counts)
    if fbn:
      statistics = reference.fbn_statistics(before, seen)
    else:
      statistics = [
          0.75 * before[i] + 0.25 * reference.average(values, counts)
          for i, values in zip(
              reference.STATISTICS, zip(*(s[1:] for s in seen))
          )
      ]
    if not fixed:
      for i, value in zip(reference.STATISTICS, statistics):
        self.weights[i] = value

  def check(self, model, training, rtol=1e-10):
    client_rounds.assert_close(training.weights(model), self.weights, rtol)
    for client, expected in zip(training.clients, self.momentums, strict=True):
      client_rounds.assert_close(_momentums(model, client), expected, rtol)


def _batch(toy, size, seed):
  return tuple(part[:8] for part in toy.arrays(size, seed))


def _robust(model, **options):
  process = algorithms.build_dsgd(
      model, _SGD(0.1), momentum=_MOMENTUM, **options
  )
  assert isinstance(process, StatefulLearningProcess)
  assert not process.has_client_models
  return process


def test_clients_momentums_equal_numpy(toy):
  """Clients that miss a round, have one example, no data, or NaN."""
  model = client_rounds.toy_model()
  process = _robust(
      model,
      client_weight_decay=0.01,
      # The last rate is for a fourth round, which nobody starts.
      client_learning_rate_schedule=lambda n: tf.gather(
          (0.5, 0.25, 0.125, 0.0), n
      ),
  )
  sizes = (16, 5, 1, 8)
  truth, training = _Truth(model, 4), client_rounds.Training(process, 4)
  x, y = toy.arrays(8, 3)
  empty = tf.data.Dataset.from_tensors((x[:0], y[:0]))
  x[2] = np.nan
  with_nan = tf.data.Dataset.from_tensors((x, y))
  for number, (rate, sampled, left_out) in enumerate(
      [
          (0.5, (0, 1, 2, 3), {}),
          (0.25, (0, 2, 3), {3: with_nan}),
          (0.125, (1, 2, 3), {1: empty}),
      ]
  ):
    seeds = [10 * number + k for k in range(4)]
    data = client_rounds.datasets(toy, sizes, seeds)
    for k, dataset in left_out.items():
      data[k] = dataset
    before = training.clients
    metrics = training.next_round(data, sampled)
    truth.round(
        {
            k: None if k in left_out else _batch(toy, sizes[k], seeds[k])
            for k in sampled
        },
        rate=rate,
        decay=0.01,
        uniform=False,
    )
    truth.check(model, training)
    assert metrics['client_work']['num_dropped_clients'] == (3 in left_out)
    for k in {*range(4)} - {*sampled} | {*left_out}:
      client_rounds.assert_same(training.clients[k], before[k])


@pytest.mark.parametrize(
    'options',
    [
        {},
        pytest.param(
            dict(build_process=algorithms.build_fixbn, fixbn_rounds=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=['fed_avg', 'fixbn'],
)
def test_mean_of_momentums_is_the_servers_momentum(toy, options):
  model = client_rounds.toy_model()
  options = dict(client_weighting='uniform', **options)
  at_clients = _robust(model, **options)
  at_server = algorithms.build_dsgd(
      model, _SGD(0.1 * (1 - _MOMENTUM), _MOMENTUM), **options
  )
  trainings = [
      client_rounds.Training(process, 3) for process in (at_clients, at_server)
  ]
  for number in range(4):
    data = client_rounds.datasets(
        toy, _SIZES, [10 * number + k for k in range(3)]
    )
    for training in trainings:
      training.next_round(data)
    # TFF's SGD has rates in float32.
    client_rounds.assert_close(
        *(training.weights(model) for training in trainings), rtol=1e-6
    )


def test_equals_centralized_training_with_the_same_momentum(toy):
  """With the mean, clients of equal size, and no batch normalization."""
  model = toy.model(plain_model.keras_model)
  rates = (0.5, 0.25, 0.125, 0.5)
  options = dict(
      momentum=_MOMENTUM,
      client_weight_decay=0.01,
      client_learning_rate_schedule=lambda n: tf.gather((*rates, 0.0), n),
  )
  dsgd = client_rounds.Training(
      algorithms.build_dsgd(
          model, _SGD(0.1), client_weighting='uniform', **options
      ),
      3,
  )
  centralized = client_rounds.Training(
      algorithms.build_centralized(model, _SGD(0.1), local_steps=1, **options),
      1,
  )
  truth = model.from_model_weights(model.initial_weights)
  velocity = [np.zeros_like(w) for w in truth]
  for number, rate in enumerate(rates):
    batches = [_batch(toy, 8, 10 * number + k) for k in range(3)]
    x, y = (np.concatenate(parts) for parts in zip(*batches))
    # The learning rate is outside of the momentum: a drop acts at once.
    gradients = plain_model.gradients(truth, x, y)
    velocity = [
        _MOMENTUM * v + (1 - _MOMENTUM) * (g + 0.01 * w)
        for v, g, w in zip(velocity, gradients, truth)
    ]
    truth = [w - rate * v for w, v in zip(truth, velocity)]
    dsgd.next_round([tf.data.Dataset.from_tensors(batch) for batch in batches])
    centralized.next_round([tf.data.Dataset.from_tensors((x, y))])
    client_rounds.assert_close(centralized.weights(model), truth)
    client_rounds.assert_close(dsgd.weights(model), truth)


def test_a_rule_sees_momentums_and_attackers(toy):
  """The first of five clients sends minus the others' mean momentum.

  FBN corrects the statistics as without momentum.
  """
  model = client_rounds.toy_model()
  process = _robust(
      model,
      client_weighting='uniform',
      model_aggregator=aggregators.Attacked(
          aggregators.CoordinateMedian(), aggregators.SignFlipping(), 1
      ),
      build_process=algorithms.build_fbn,
  )

  def attacked_median(values, _):
    honest = values[1:]
    return np.median([-np.mean(honest, axis=0), *honest], axis=0)

  sizes = (8, 5, 8, 7, 6)
  truth, training = _Truth(model, 5), client_rounds.Training(process, 5)
  for number in range(3):
    seeds = [10 * number + k for k in range(5)]
    training.next_round(client_rounds.datasets(toy, sizes, seeds))
    batches = {k: _batch(toy, sizes[k], seeds[k]) for k in range(5)}
    truth.round(batches, rule=attacked_median, fbn=True)
    truth.check(model, training)


def test_momentums_of_clipped_gradients_stay_with_the_clients(toy):
  model = client_rounds.toy_model()
  process = _robust(model, client_gradient_clip_norm=0.05)
  training = client_rounds.Training(process, 2)
  names = {f'momentum_{model.variables[i].name}' for i in _TRAINABLE}
  state_type, client_type, _ = process.next.type_signature.parameter
  assert {n for n, _ in tff.structure.iter_elements(client_type.member)} == (
      names
  )
  assert 'momentum_' not in str(state_type)
  data = client_rounds.datasets(toy, (8, 8))
  for number in range(1, 4):
    training.next_round(data)
    for client in training.clients:
      norm = np.sqrt(sum((m**2).sum() for m in _momentums(model, client)))
      assert 0 < norm <= 0.05 * (1 - _MOMENTUM**number) * (1 + 1e-12)


@pytest.mark.slow
def test_momentum_in_float32_compiled(toy_images):
  model = toy_images.model()
  results = []
  for jit_compile in (False, True):
    training = client_rounds.Training(
        _robust(model, jit_compile=jit_compile), 2
    )
    for _ in range(2):
      training.next_round(client_rounds.datasets(toy_images, (12, 12)))
    results.append(training.clients)
  plain, compiled = results
  assert all(m.dtype == np.float32 for m in plain[0].values())
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
      compiled,
      plain,
  )


def test_momentum_is_refused_with_backward_statistics():
  with pytest.raises(ValueError, match="backward='mean' and .*Momentum both"):
    algorithms.build_dsgd(
        client_rounds.toy_model(),
        _SGD(0.1),
        momentum=0.9,
        build_process=algorithms.build_fbn,
        backward='mean',
    )
