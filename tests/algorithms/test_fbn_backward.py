"""Tests of FBN with running averages in the backward pass."""

import collections

import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_bn
from tff_bn import BatchNormModel
from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn import analysis

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_BETA = 0.25  # The toy model's.
_GAMMA, _ZETA = reference.AFFINE


class _Truth:
  """FBN with averages on the union of the clients' data, in NumPy."""

  def __init__(self, model, kind, rate=0.1, restart=np.inf):
    self.weights = model.from_model_weights(model.initial_weights)
    self.averages = [np.zeros(5), np.zeros(5)]
    self._used = [1, 1 if kind == 'running' else 0]
    self._rate = rate
    self._restart = restart

  def step(self, x, y):
    _, grads, mean, variance = reference.gradients(
        self.weights,
        x,
        y,
        fixed=True,
        averages=[u * a for u, a in zip(self._used, self.averages)],
    )
    new = [
        w if g is None else w - self._rate * g
        for w, g in zip(self.weights, grads)
    ]
    n = len(x)
    for at, value in (
        (reference.MEAN, mean),
        (reference.VARIANCE, n / (n - 1) * variance),
    ):
      new[at] = (1 - _BETA) * self.weights[at] + _BETA * value
    # The mean of x̂² with the new statistics, but with the unbiased variance.
    square = n / (n - 1) * variance + (mean - new[reference.MEAN]) ** 2
    square /= new[reference.VARIANCE] + 2**-10
    self.described = (square < self._restart) & (square > 1 / self._restart)
    self.weights = new
    for i, at in enumerate((_ZETA, _GAMMA)):
      self.averages[i] = (1 - _BETA) * self.averages[i] + _BETA * grads[at]
      self.averages[i] *= self.described


def _assert_equal(found, expected, rtol=1e-10, atol=1e-12):
  for value, truth in zip(found, expected, strict=True):
    np.testing.assert_allclose(value, truth, rtol=rtol, atol=atol)


def _averages(state):
  ((g0, *g1),) = state.client_work['correction']['averages']
  return [g0, *g1]


def _build(model, kind, **options):
  options = dict(local_steps=1, backward=kind) | options
  optimizer = options.pop('optimizer', _SGD(0.1))
  return algorithms.build_fbn(model, optimizer, **options)


@pytest.mark.parametrize('kind', ['mean', 'running'])
@pytest.mark.parametrize('sends', [False, True])
def test_rounds_equal_the_formula_on_the_union(toy, kind, sends):
  sizes = (8, 3, 7, 1)
  model = toy.model()
  # A momentum of 0 makes the same steps, but the server can't know that.
  options = dict(optimizer=_SGD(0.1, 1e-300)) if sends else {}
  process = _build(model, kind, **options)
  truth = _Truth(model, kind)
  state = process.initialize()
  for round_num in range(20):
    seeds = [len(sizes) * round_num + i for i in range(len(sizes))]
    data = [toy.dataset(n, seed) for n, seed in zip(sizes, seeds)]
    arrays = [toy.arrays(n, seed) for n, seed in zip(sizes, seeds)]
    truth.step(*(np.concatenate(parts) for parts in zip(*arrays)))
    state = process.next(state, data).state
  found = model.from_model_weights(process.get_model_weights(state))
  _assert_equal(found, truth.weights)
  averages = _averages(state)
  assert len(averages) == (2 if kind == 'running' else 1)
  _assert_equal(averages, truth.averages[: len(averages)])


@pytest.mark.parametrize('kind', ['mean', 'running'])
@pytest.mark.parametrize('sends', [False, True])
def test_averages_restart_where_the_statistics_are_late(toy, kind, sends):
  sizes = (8, 3)
  model = toy.model()
  options = dict(optimizer=_SGD(0.5, 1e-300) if sends else _SGD(0.5))
  process = _build(model, kind, backward_restart=1.4, **options)
  truth = _Truth(model, kind, rate=0.5, restart=1.4)
  state = process.initialize()
  described = []
  for round_num in range(12):
    seeds = [2 * round_num, 2 * round_num + 1]
    data = [toy.dataset(n, seed) for n, seed in zip(sizes, seeds)]
    arrays = [toy.arrays(n, seed) for n, seed in zip(sizes, seeds)]
    truth.step(*(np.concatenate(parts) for parts in zip(*arrays)))
    described.append(truth.described)
    state = process.next(state, data).state
    averages = _averages(state)
    _assert_equal(averages, truth.averages[: len(averages)])
  # Some restart, and not all at the same time.
  assert 0 < np.mean(described) < 1
  assert any(0 < np.mean(d) < 1 for d in described)
  _assert_equal(
      model.from_model_weights(process.get_model_weights(state)), truth.weights
  )
  # A round that nobody takes part in says nothing about the values.
  later = process.next(state, [toy.dataset(8, 0).take(0)]).state
  _assert_equal(_averages(later), averages, rtol=0, atol=0)


def test_restarts_depend_on_epsilon():
  """The layer adds it to the variance, so x̂² is smaller than it would be."""
  epsilon, restart = 0.5, 1.4

  def keras_model():
    norm = keras.layers.BatchNormalization(
        momentum=0.5, epsilon=epsilon, dtype='float64'
    )
    dense = keras.layers.Dense(1, dtype='float64')
    return keras.Sequential([keras.Input((3,), dtype='float64'), norm, dense])

  # The mean is 0 and the variance, with Bessel's correction, is the square.
  deviations = np.array([1.6, 1.1, 0.5])
  signs = np.array([[1.0], [-1.0], [1.0], [-1.0]]) * np.sqrt(3 / 4)
  data = tf.data.Dataset.from_tensors((signs * deviations, np.ones((4, 1))))
  model = BatchNormModel(
      keras_model,
      data.element_spec,
      loss_fn=lambda: keras.losses.MeanSquaredError(dtype='float64'),
  )
  process = _build(model, 'running', backward_restart=restart)
  averages = _averages(process.next(process.initialize(), [data]).state)
  square = deviations**2 / (0.5 + 0.5 * deviations**2 + epsilon)
  described = (square < restart) & (square > 1 / restart)
  assert described.tolist() == [True, True, False]
  # Without epsilon, the first channel would restart.
  assert deviations[0] ** 2 / (0.5 + 0.5 * deviations[0] ** 2) > restart
  for average in averages:
    np.testing.assert_array_equal(average != 0, described)


def test_restarting_sends_nothing(toy):
  def megabytes(**options):
    process = _build(toy.model(), 'running', **options)
    traffic = analysis.ProcessTraffic(process)
    return traffic.until(round_num=1, num_clients=3)['megabytes']

  assert megabytes(backward_restart=2.0) == megabytes()


def _with(state, weights, averages):
  correction = collections.OrderedDict(averages=[list(averages)])
  work = collections.OrderedDict(state.client_work, correction=correction)
  return state._replace(global_model_weights=weights, client_work=work)


@pytest.mark.parametrize('sizes', [(6, 6, 6), (8, 3, 1)])
def test_with_the_unions_statistics_it_is_batch_normalization(toy, sizes):
  """With the statistics of this very step, a step is centralized training's."""
  model = toy.model()
  process = _build(model, 'running')
  arrays = [toy.arrays(n, seed) for seed, n in enumerate(sizes)]
  x, y = (np.concatenate(parts) for parts in zip(*arrays))
  weights = model.from_model_weights(model.initial_weights)
  _, grads, mean, variance = reference.gradients(weights, x, y)
  start = list(weights)
  start[reference.MEAN], start[reference.VARIANCE] = mean, variance
  state = _with(
      process.initialize(),
      model.to_model_weights(start),
      [grads[_ZETA], grads[_GAMMA]],
  )
  data = [toy.dataset(n, seed) for seed, n in enumerate(sizes)]
  after = model.from_model_weights(
      process.get_model_weights(process.next(state, data).state)
  )
  for at, gradient in enumerate(grads):
    if gradient is not None:
      np.testing.assert_allclose(
          after[at], weights[at] - 0.1 * gradient, rtol=1e-10, atol=1e-12
      )


def test_the_first_round_is_fbns(toy):
  model = toy.model()
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  results = []
  for kind in ('none', 'running'):
    process = _build(model, kind)
    state = process.next(process.initialize(), data).state
    results.append(model.from_model_weights(process.get_model_weights(state)))
  _assert_equal(*results, rtol=0, atol=0)


def test_only_the_averages_are_sent_in_addition(toy):
  def messages(kind, **options):
    process = _build(toy.model(), kind, **options)
    traffic = analysis.ProcessTraffic(process)
    return traffic.until(round_num=1, num_clients=3)

  none = messages('none')
  vector = 5 * 8 / 2**20
  for kind, number in (('mean', 1), ('running', 2)):
    found = messages(kind)
    assert found['exchanges'] == none['exchanges']
    assert found['megabytes'] == pytest.approx(
        none['megabytes'] + number * vector
    )
    # Several steps: what the update does not say is sent, by three clients.
    found = messages(kind, local_steps=2)
    assert found['megabytes'] == pytest.approx(
        none['megabytes'] + (1 + 3) * number * vector
    )


def test_several_steps_count_as_the_steps_of_several_clients(toy):
  model = toy.model()
  process = _build(model, 'running', local_steps=None)
  data = [toy.dataset(16, 0), toy.dataset(13, 1)]
  state = process.next(process.initialize(), data).state
  sums, weights = [], []
  start = model.from_model_weights(model.initial_weights)
  for seed, n in enumerate((16, 13)):
    steps, counts = [], []

    def gradients(w, x, y, steps=steps, counts=counts, **kwargs):
      result = reference.gradients(w, x, y, **kwargs)
      steps.append([result[1][_ZETA], result[1][_GAMMA]])
      counts.append(len(x))
      return result

    reference.train(
        start,
        reference.split(*toy.arrays(n, seed)),
        0.1,
        fixed=True,
        gradients_fn=gradients,
    )
    sums.append(np.average(steps, axis=0, weights=counts))
    weights.append(n)
  expected = _BETA * np.average(sums, axis=0, weights=weights)
  _assert_equal(_averages(state), expected)


@pytest.mark.parametrize('sends', [False, True])
def test_clients_without_data_and_dropped_ones_do_not_count(toy, sends):
  model = toy.model()
  options = dict(optimizer=_SGD(0.1, 0.9)) if sends else {}
  process = _build(model, 'running', **options)
  good = [toy.dataset(8, 0), toy.dataset(5, 1)]
  empty = toy.dataset(8, 2).take(0)
  poisoned = toy.dataset(8, 3).map(lambda x, y: (x * np.nan, y))
  state = process.next(process.initialize(), good).state
  data = [empty, good[0], poisoned, good[1]]
  output = process.next(process.initialize(), data)
  _assert_equal(_averages(output.state), _averages(state), rtol=1e-13)
  assert output.metrics['client_work']['num_dropped_clients'] == 1
  # With no usable client, the averages stay.
  later = process.next(output.state, [empty, poisoned]).state
  _assert_equal(_averages(later), _averages(output.state), rtol=0, atol=0)


@pytest.mark.parametrize('sends', [False, True])
def test_a_rule_aggregates_the_averages(toy, sends):
  model = toy.model()
  options = dict(
      model_aggregator=aggregators.CoordinateMedian(),
      client_weighting='uniform',
  )
  if sends:
    options['optimizer'] = _SGD(0.1, 0.9)
  process = _build(model, 'running', **options)
  data = [toy.dataset(8, seed) for seed in range(5)]
  state = process.next(process.initialize(), data).state
  weights = model.from_model_weights(model.initial_weights)
  grads = [
      reference.gradients(weights, *toy.arrays(8, seed), fixed=True)[1]
      for seed in range(5)
  ]
  expected = [
      _BETA * np.median([g[at] for g in grads], axis=0)
      for at in (_ZETA, _GAMMA)
  ]
  _assert_equal(_averages(state), expected)


def test_the_learning_rate_of_the_round_counts(toy):
  """A schedule and a warm-up change the update, but not the averages."""
  model = toy.model()
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  found = []
  for options in (
      {},
      dict(
          client_learning_rate_schedule=lambda r: 0.3
          * tf.cast(r + 1, tf.float64)
      ),
      dict(client_warmup_steps=4),
  ):
    process = _build(model, 'running', **options)
    found.append(_averages(process.next(process.initialize(), data).state))
  _assert_equal(found[1], found[0])
  _assert_equal(found[2], found[0])


@pytest.mark.parametrize(
    'options',
    [
        dict(scale=False),
        dict(center=False),
        dict(scale=False, center=False),
        dict(frozen=['gamma']),
        dict(frozen=['gamma', 'beta']),
    ],
)
def test_layers_without_trained_scale_or_shift(toy, options):
  """They have the averages of a layer with γ = 1 and ζ = 0."""

  def build(frozen=(), **options):
    def keras_model():
      model = keras.Sequential(
          [
              keras.Input((4,), dtype='float64'),
              keras.layers.Dense(5, dtype='float64'),
              keras.layers.BatchNormalization(
                  momentum=0.75, dtype='float64', **options
              ),
              keras.layers.ReLU(dtype='float64'),
              keras.layers.Dense(3, dtype='float64'),
          ]
      )
      for name in frozen:
        getattr(model.layers[1], name).trainable = False
      return model

    return toy.model(keras_model)

  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  found = []
  for model in (build(), build(**options)):
    process = _build(model, 'running')
    found.append(_averages(process.next(process.initialize(), data).state))
  _assert_equal(*found)


def test_masked_values_get_no_share(toy):
  """The mask excludes padding from the statistics, and so from the means."""
  del toy
  keras.utils.set_random_seed(0)

  def keras_model():
    return keras.Sequential(
        [
            keras.Input((3, 2), dtype='float64'),
            keras.layers.Masking(-1.0, dtype='float64'),
            keras.layers.Dense(4, dtype='float64'),
            keras.layers.BatchNormalization(momentum=0.75, dtype='float64'),
            keras.layers.Flatten(dtype='float64'),
            keras.layers.Dense(3, dtype='float64'),
        ]
    )

  model = BatchNormModel(
      keras_model,
      (
          tf.TensorSpec([None, 3, 2], tf.float64),
          tf.TensorSpec([None], tf.int32),
      ),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True, dtype='float64'
      ),
  )
  rng = np.random.default_rng(0)
  x = rng.normal(size=(6, 3, 2))
  x[:2, 1:] = -1.0
  y = rng.integers(0, 3, 6).astype(np.int32)
  (dataset,) = [tf.data.Dataset.from_tensor_slices((x, y)).batch(6)]
  process = _build(model, 'running')
  averages = rng.normal(size=(2, 4))
  start = model.from_model_weights(model.initial_weights)
  state = _with(process.initialize(), model.initial_weights, averages)
  after = model.from_model_weights(
      process.get_model_weights(process.next(state, [dataset]).state)
  )
  # One step of Keras, with the share of each value subtracted by hand.
  truth = model.to_keras()
  mask, dense, norm, flat, head = truth.layers
  included = (x != -1).any(-1)
  with tf.GradientTape() as tape:
    z = dense(mask(x))
    normalized = (z - norm.moving_mean) / tf.sqrt(norm.moving_variance + 1e-3)
    logits = head(flat(normalized * norm.gamma + norm.beta))
    loss = model.loss_fn()(y, logits)
    share = (averages[0] + normalized.numpy() * averages[1]) / included.sum()
    share *= included[..., None] / np.sqrt(1 + 1e-3)
    loss -= tf.reduce_sum(share * z)
  gradients = tape.gradient(loss, [v.value for v in truth.trainable_weights])
  expected = [
      v.numpy() - 0.1 * g.numpy()
      for v, g in zip(truth.trainable_weights, gradients)
  ]
  trainable = model.to_model_weights(after).trainable
  assert len(start) == len(after)
  _assert_equal(trainable, expected)


def test_calls_of_one_layer_share_its_averages():
  """Their values count together, as in the running statistics."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(6, 2, 3))
  y = rng.integers(0, 3, 6).astype(np.int32)

  def keras_model():
    inputs = keras.Input((2, 3), dtype='float64')
    dense = keras.layers.Dense(4, dtype='float64')
    norm = keras.layers.BatchNormalization(momentum=0.75, dtype='float64')
    parts = [norm(dense(inputs[:, i])) for i in range(2)]
    features = keras.layers.Concatenate(dtype='float64')(parts)
    outputs = keras.layers.Dense(3, dtype='float64')(features)
    return keras.Model(inputs, outputs)

  keras.utils.set_random_seed(0)
  model = BatchNormModel(
      keras_model,
      (
          tf.TensorSpec([None, 2, 3], tf.float64),
          tf.TensorSpec([None], tf.int32),
      ),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True, dtype='float64'
      ),
  )
  averages = rng.normal(size=(2, 4))
  dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
  found = []
  for options in ({}, dict(optimizer=_SGD(0.1, 1e-300))):
    process = _build(model, 'running', **options)
    state = _with(process.initialize(), model.initial_weights, averages)
    state = process.next(state, [dataset]).state
    found.append(_averages(state))
  # One step of Keras, with the share of each value subtracted by hand.
  truth = model.to_keras()
  dense, norm, head = (layer for layer in truth.layers if layer.weights)
  with tf.GradientTape() as tape:
    z = [dense(x[:, i]) for i in range(2)]
    normalized = [
        (part - norm.moving_mean) / tf.sqrt(norm.moving_variance + 1e-3)
        for part in z
    ]
    logits = head(
        tf.concat([n * norm.gamma + norm.beta for n in normalized], -1)
    )
    loss = model.loss_fn()(y, logits)
    for part, n in zip(z, normalized, strict=True):
      share = (averages[0] + n.numpy() * averages[1]) / 12
      loss -= tf.reduce_sum(share / np.sqrt(1 + 1e-3) * part)
  variables = truth.trainable_weights
  gradients = tape.gradient(loss, [v.value for v in variables])
  _assert_equal(
      process.get_model_weights(state).trainable,
      [v.numpy() - 0.1 * g for v, g in zip(variables, gradients)],
  )
  by_path = {v.path: g for v, g in zip(variables, gradients)}
  expected = [
      (1 - _BETA) * average + _BETA * by_path[variable.path]
      for average, variable in zip(averages, (norm.beta, norm.gamma))
  ]
  for each in found:
    _assert_equal(each, expected)


def test_hyperparameters_can_be_set(toy):
  model = toy.model()
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  plain, process = (_build(model, kind) for kind in ('none', 'running'))
  hparams = process.get_hparams(process.initialize())
  assert hparams == plain.get_hparams(plain.initialize())
  hparams['client_work']['learning_rate'] = np.float64(0.3)
  hparams['finalizer']['learning_rate'] = np.float64(0.5)
  state = process.set_hparams(process.initialize(), hparams)
  assert process.get_hparams(state) == hparams
  truth = _Truth(model, 'running', rate=0.15)
  arrays = [toy.arrays(8, 0), toy.arrays(5, 1)]
  for _ in range(3):
    truth.step(*(np.concatenate(parts) for parts in zip(*arrays)))
    state = process.next(state, data).state
  _assert_equal(
      model.from_model_weights(process.get_model_weights(state)), truth.weights
  )
  _assert_equal(_averages(state), truth.averages)


def test_dsgd_has_the_averages_of_the_gradients(toy):
  """Momentum and clipping at the server don't change them."""
  model = toy.model()
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  found = []
  for process in (
      _build(model, 'running'),
      algorithms.build_dsgd(
          model,
          _SGD(0.1, 0.9),
          build_process=algorithms.build_fbn,
          backward='running',
          server_clip_norm=0.01,
      ),
  ):
    found.append(_averages(process.next(process.initialize(), data).state))
  _assert_equal(*found)


def test_personal_encodings(toy):
  """Clients then keep a state. These encodings have almost no effect."""
  model = toy.model()
  encoded = toy.model(
      lambda: tff_bn.add_position_encodings(
          toy.keras_model(), 'add', 1e-13, personal_share=0.5
      )
  )
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  options = dict(backward_restart=1.4)
  process = _build(model, 'running', **options)
  expected = process.initialize()
  stateful = _build(encoded, 'running', **options)
  state = stateful.initialize()
  clients = [stateful.initialize_client(state) for _ in data]
  for _ in range(3):
    expected = process.next(expected, data).state
    output = stateful.next(state, clients, data)
    state, clients = output.state, output.client_states
    _assert_equal(_averages(state), _averages(expected))


@pytest.mark.parametrize('local_steps', [1, 2])
def test_compiled_steps(toy_images, local_steps):
  model = toy_images.model()
  data = [toy_images.dataset(n, n) for n in (9, 16)]
  found = []
  for jit_compile in (False, True):
    process = _build(
        model, 'running', local_steps=local_steps, jit_compile=jit_compile
    )
    state = process.initialize()
    for _ in range(2):
      state = process.next(state, data).state
    found.append(_averages(state))
  _assert_equal(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('local_steps', [1, 2])
def test_images_in_float32(toy_images, local_steps):
  """Fused operations have the numbers of float64."""
  model = toy_images.model()
  process = _build(model, 'running', local_steps=local_steps)
  state = process.initialize()
  data = [toy_images.dataset(n, n) for n in (9, 16, 1)]
  data.append(toy_images.dataset(4, 0).take(0))
  for _ in range(3):
    output = process.next(state, data)
    state = output.state
  weights = model.from_model_weights(process.get_model_weights(state))
  assert all(np.isfinite(w).all() for w in weights)
  assert all(np.any(average) for average in _averages(state))


def test_wrong_arguments(toy):
  model = toy.model()
  with pytest.raises(
      ValueError, match="backward='both' must be one of none, mean"
  ):
    _build(model, 'both')
  with pytest.raises(ValueError, match="backward='mean' and FedProx both"):
    _build(model, 'mean', drift_correction=algorithms.FedProx(0.1))
  for value in (1, 0.5, -2, np.nan):
    with pytest.raises(ValueError, match='backward_restart=.* greater than 1'):
      _build(model, 'mean', backward_restart=value)
  with pytest.raises(ValueError, match="no effect with backward='none'"):
    _build(model, 'none', backward_restart=2.0)
