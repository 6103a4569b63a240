"""Tests of FBN with running averages in the backward pass."""

import collections
import functools

import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import toy_problem

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


def _build(model, kind='running', rate=0.1, sends=False, **options):
  """Builds FBN with averages, which a client's update holds if not `sends`."""
  options = dict(local_steps=1, backward=kind) | options
  # A momentum of 0 makes the same steps, but the server can't know that.
  optimizer = _SGD(rate, 1e-300) if sends else _SGD(rate)
  return algorithms.build_fbn(model, optimizer, **options)


@functools.cache
def _model():
  return toy_problem.Toy().model()


@functools.cache
def _process(**options):
  """Builds a process of `_model` once; callers pass no default values."""
  return _build(_model(), **options)


def _after_a_round(process, data):
  """Returns the averages."""
  return _averages(process.next(process.initialize(), data).state)


def _check_truth(toy, process, truth, sizes, num_rounds):
  """Compares rounds with the truth; yields its `described` of each round."""
  state = process.initialize()
  for round_num in range(num_rounds):
    seeds = [len(sizes) * round_num + i for i in range(len(sizes))]
    data = [toy.dataset(n, seed) for n, seed in zip(sizes, seeds)]
    arrays = [toy.arrays(n, seed) for n, seed in zip(sizes, seeds)]
    truth.step(*(np.concatenate(parts) for parts in zip(*arrays)))
    yield truth.described
    state = process.next(state, data).state
    averages = _averages(state)
    _assert_equal(averages, truth.averages[: len(averages)])
  _assert_equal(
      _model().from_model_weights(process.get_model_weights(state)),
      truth.weights,
  )
  # A round that nobody takes part in says nothing about the values.
  later = process.next(state, [toy.dataset(8, 0).take(0)]).state
  _assert_equal(_averages(later), averages, rtol=0, atol=0)


# As keyword arguments of `_process`.
_KINDS = [
    dict(kind='mean'),
    dict(),
    dict(kind='mean', sends=True),
    dict(sends=True),
]


@pytest.mark.parametrize(
    'options',
    [dict(sends=True)]
    + [pytest.param(k, marks=pytest.mark.slow) for k in _KINDS[:-1]],
)
def test_rounds_equal_the_formula_on_the_union(toy, options):
  process = _process(**options)
  truth = _Truth(_model(), options.get('kind', 'running'))
  described = list(_check_truth(toy, process, truth, (8, 3, 7, 1), 10))
  assert np.all(described)
  num_averages = len(_averages(process.initialize()))
  assert num_averages == (1 if 'kind' in options else 2)


@pytest.mark.parametrize(
    'options', [_KINDS[1], pytest.param(_KINDS[2], marks=pytest.mark.slow)]
)
def test_averages_restart_where_the_statistics_are_late(toy, options):
  process = _build(_model(), rate=0.5, backward_restart=1.4, **options)
  kind = options.get('kind', 'running')
  truth = _Truth(_model(), kind, rate=0.5, restart=1.4)
  described = list(_check_truth(toy, process, truth, (8, 3), 12))
  # Some restart, and not all at the same time.
  assert 0 < np.mean(described) < 1
  assert any(0 < np.mean(d) < 1 for d in described)


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
  averages = _after_a_round(_build(model, backward_restart=restart), [data])
  square = deviations**2 / (0.5 + 0.5 * deviations**2 + epsilon)
  described = (square < restart) & (square > 1 / restart)
  assert described.tolist() == [True, True, False]
  # Without epsilon, the first channel would restart.
  assert deviations[0] ** 2 / (0.5 + 0.5 * deviations[0] ** 2) > restart
  for average in averages:
    np.testing.assert_array_equal(average != 0, described)


def _with(state, weights, averages):
  correction = collections.OrderedDict(averages=[list(averages)])
  work = collections.OrderedDict(state.client_work, correction=correction)
  return state._replace(global_model_weights=weights, client_work=work)


def test_with_the_unions_statistics_it_is_batch_normalization(toy):
  """With the statistics of this very step, a step is centralized training's."""
  sizes = (8, 3, 1)
  model, process = _model(), _process()
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
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  results = []
  for process in (_process(kind='none'), _process()):
    state = process.next(process.initialize(), data).state
    results.append(
        _model().from_model_weights(process.get_model_weights(state))
    )
  _assert_equal(*results, rtol=0, atol=0)


def test_only_the_averages_are_sent_in_addition():
  def messages(**options):
    traffic = analysis.ProcessTraffic(_process(**options))
    return traffic.until(round_num=1, num_clients=3)

  none = messages(kind='none')
  vector = 5 * 8 / 2**20
  for options, downloads, uploads in (
      (dict(kind='mean'), 1, 0),
      (dict(), 2, 0),
      # A server that knows only the update cannot compute the averages, so the
      # three clients send them.
      (dict(kind='mean', sends=True), 1, 1),
      (dict(local_steps=2), 2, 2),
      (dict(backward_restart=2.0), 2, 0),
  ):
    found = messages(**options)
    assert found['exchanges'] == none['exchanges']
    assert found['megabytes'] == pytest.approx(
        none['megabytes'] + (downloads + 3 * uploads) * vector
    )


def test_several_steps_count_as_the_steps_of_several_clients(toy):
  sizes = (16, 13)
  data = [toy.dataset(n, seed) for seed, n in enumerate(sizes)]
  start = _model().from_model_weights(_model().initial_weights)
  means = []
  for seed, n in enumerate(sizes):
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
    means.append(np.average(steps, axis=0, weights=counts))
  expected = _BETA * np.average(means, axis=0, weights=sizes)
  _assert_equal(_after_a_round(_process(local_steps=2), data), expected)


@pytest.mark.parametrize('options', [dict(), dict(sends=True)])
def test_clients_without_data_and_dropped_ones_do_not_count(toy, options):
  process = _process(**options)
  good = [toy.dataset(8, 0), toy.dataset(5, 1)]
  empty = toy.dataset(8, 2).take(0)
  poisoned = toy.dataset(8, 3).map(lambda x, y: (x * np.nan, y))
  expected = _after_a_round(process, good)
  data = [empty, good[0], poisoned, good[1]]
  output = process.next(process.initialize(), data)
  _assert_equal(_averages(output.state), expected, rtol=1e-13)
  assert output.metrics['client_work']['num_dropped_clients'] == 1
  # With no usable client, the averages stay.
  later = process.next(output.state, [empty, poisoned]).state
  _assert_equal(_averages(later), _averages(output.state), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize('sends', [False, True])
def test_a_rule_aggregates_the_averages(toy, sends):
  process = _build(
      _model(),
      sends=sends,
      model_aggregator=aggregators.CoordinateMedian(),
      client_weighting='uniform',
  )
  weights = _model().from_model_weights(_model().initial_weights)
  grads = [
      reference.gradients(weights, *toy.arrays(8, seed), fixed=True)[1]
      for seed in range(5)
  ]
  expected = [
      _BETA * np.median([g[at] for g in grads], axis=0)
      for at in (_ZETA, _GAMMA)
  ]
  data = [toy.dataset(8, seed) for seed in range(5)]
  _assert_equal(_after_a_round(process, data), expected)


def test_the_learning_rate_of_the_round_counts(toy):
  """A schedule and a warm-up change the update, but not the averages."""
  process = _build(
      _model(),
      client_learning_rate_schedule=lambda r: 0.3 * tf.cast(r + 1, tf.float64),
      client_warmup_steps=4,
  )
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  _assert_equal(_after_a_round(process, data), _after_a_round(_process(), data))


@pytest.mark.parametrize(
    'options',
    [
        dict(scale=False, center=False),
        pytest.param(dict(frozen=['gamma']), marks=pytest.mark.slow),
    ],
)
def test_layers_without_trained_scale_or_shift(toy, options):
  """They have the averages of a layer with γ = 1 and ζ = 0."""

  def keras_model(frozen=(), **options):
    model = toy.keras_model()

    def clone(layer):
      if layer.name != 'norm':
        return layer
      return type(layer).from_config({**layer.get_config(), **options})

    model = keras.models.clone_model(model, clone_function=clone)
    for name in frozen:
      getattr(model.get_layer('norm'), name).trainable = False
    return model

  model = toy.model(lambda: keras_model(**options))
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  found = _after_a_round(_build(model), data)
  _assert_equal(found, _after_a_round(_process(), data))


def _sequences(keras_model, shape):
  """Returns a model of sequences for the classes 0, 1, 2."""
  keras.utils.set_random_seed(0)
  return BatchNormModel(
      keras_model,
      (
          tf.TensorSpec([None, *shape], tf.float64),
          tf.TensorSpec([None], tf.int32),
      ),
      loss_fn=toy_problem.Toy().loss,
  )


def test_masked_values_get_no_share():
  """The mask excludes padding from the statistics, and so from the means."""

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

  model = _sequences(keras_model, (3, 2))
  rng = np.random.default_rng(0)
  x = rng.normal(size=(6, 3, 2))
  x[:2, 1:] = -1.0
  y = rng.integers(0, 3, 6).astype(np.int32)
  dataset = tf.data.Dataset.from_tensors((x, y))
  process = _build(model)
  averages = rng.normal(size=(2, 4))
  state = _with(process.initialize(), model.initial_weights, averages)
  after = process.get_model_weights(process.next(state, [dataset]).state)
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
  _assert_equal(after.trainable, expected)


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

  model = _sequences(keras_model, (2, 3))
  averages = rng.normal(size=(2, 4))
  dataset = tf.data.Dataset.from_tensors((x, y))
  found = []
  for sends in (False, True):
    process = _build(model, sends=sends)
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
  model = _model()
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  plain, process = _process(kind='none'), _process()
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
  process = algorithms.build_dsgd(
      _model(),
      _SGD(0.1, 0.9),
      build_process=algorithms.build_fbn,
      backward='running',
      server_clip_norm=0.01,
  )
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  _assert_equal(_after_a_round(process, data), _after_a_round(_process(), data))


def test_personal_encodings(toy):
  """Clients then keep a state. These encodings have almost no effect."""
  encoded = toy.model(
      lambda: tff_bn.add_position_encodings(
          toy.keras_model(), 'add', 1e-13, personal_share=0.5
      )
  )
  data = [toy.dataset(8, 0), toy.dataset(5, 1)]
  options = dict(backward_restart=2.0)
  process = _process(**options)
  expected = process.initialize()
  stateful = _build(encoded, **options)
  state = stateful.initialize()
  clients = [stateful.initialize_client(state) for _ in data]
  for _ in range(3):
    expected = process.next(expected, data).state
    output = stateful.next(state, clients, data)
    state, clients = output.state, output.client_states
    _assert_equal(_averages(state), _averages(expected))


@pytest.mark.slow
def test_compiled_steps_of_images(toy_images):
  """Fused operations in float32, alone and compiled by XLA."""
  model = toy_images.model()
  data = [toy_images.dataset(n, n) for n in (9, 16, 1)]
  data.append(toy_images.dataset(4, 0).take(0))
  found = []
  for jit_compile in (False, True):
    process = _build(model, local_steps=2, jit_compile=jit_compile)
    state = process.initialize()
    for _ in range(2):
      state = process.next(state, data).state
    found.append(_averages(state))
  assert all(np.any(average) for average in found[0])
  _assert_equal(*found, rtol=1e-4, atol=1e-5)


def test_wrong_arguments():
  model = _model()
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
