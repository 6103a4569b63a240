"""Tests that FedTAN's first step equals centralised training, in float64.

The truth is an ordinary Keras model that makes one step of SGD on the union of
the clients' first batches. Rounds without a centralised equivalent (several
local steps, local gradients of the statistics, a single client's update) are
compared with `_reference_round` below: a network with two batch normalization
layers, written in TensorFlow, in which each client has its own weights, so that
automatic differentiation finds each client's gradient.
"""

import contextlib
import functools

import fedtan_models
from fedtan_models import Case
from fedtan_models import Values
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import runtime

layers = keras.layers
Input = keras.Input
Model = keras.Model

pytestmark = pytest.mark.usefixtures('one_client_at_a_time', 'float64')

# A power of 2, so that dividing by it is exact.
_RATE = 0.5
_SGD = tff.learning.optimizers.build_sgdm
_TOLERANCE = 1e-10
_KERAS_MOMENTUM, _EPSILON = 0.75, 2.0**-6


@pytest.fixture(name='context', scope='module')
def fixture_context():
  with contextlib.closing(
      runtime.InProcessContext(max_concurrent_clients=1)
  ) as context:
    yield context


@pytest.fixture(name='one_client_at_a_time')
def fixture_one_client_at_a_time(context):
  """Returns the in-process runtime with one client at a time."""
  before = tff.framework.get_context_stack().current
  tff.framework.set_default_context(context)
  yield
  tff.framework.set_default_context(before)


@pytest.fixture(name='float64')
def fixture_float64():
  """Makes Keras build models in float64."""
  before = keras.config.floatx(), keras.config.dtype_policy()
  keras.config.set_floatx('float64')
  keras.config.set_dtype_policy('float64')
  yield
  keras.config.set_floatx(before[0])
  keras.config.set_dtype_policy(before[1])
  keras.utils.clear_session(free_memory=False)


# A small model, for all that does not depend on the model.


def _two_norms():
  inputs = Input((4,))
  x = inputs
  for units in (6, 5):
    x = layers.Dense(units)(x)
    x = layers.BatchNormalization(momentum=_KERAS_MOMENTUM, epsilon=_EPSILON)(x)
    x = layers.Activation('tanh')(x)
  return Model(inputs, layers.Dense(fedtan_models.NUM_CLASSES)(x))


_TWO_NORMS = Case(_two_norms)


@functools.cache
def _two_norms_model():
  return _TWO_NORMS.model()


# The truth: centralised training.


def _union(batches):
  """Concatenates several batches of `(x, y)`."""
  return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)


def _centralised_step(model, weights, batches, shares=None):
  """One step of SGD of an ordinary Keras model.

  Args:
    model: The `BatchNormModel`.
    weights: Its weights before the step.
    batches: The clients' batches.
    shares: How much the loss of each client counts. Default: the loss is that
      of the union, where every example counts alike.

  Returns:
    The loss, and the weights after the step.
  """
  keras_model = model.to_keras(weights)
  loss_fn = model.loss_fn()
  x, y = _union(batches)
  with tf.GradientTape() as tape:
    outputs = keras_model(x, training=True)
    if shares is None:
      loss = loss_fn(y, outputs)
    else:
      ends = np.cumsum([len(batch[1]) for batch in batches])
      parts = zip(
          np.split(y, ends[:-1]), tf.split(outputs, np.diff([0, *ends]))
      )
      loss = sum(
          share * loss_fn(labels, logits)
          for share, (labels, logits) in zip(shares, parts)
      )
    loss += sum(keras_model.losses)
  variables = keras_model.trainable_weights
  gradients = tape.gradient(
      loss,
      [v.value for v in variables],
      unconnected_gradients=tf.UnconnectedGradients.ZERO,
  )
  for variable, gradient in zip(variables, gradients):
    variable.assign_sub(_RATE * tf.convert_to_tensor(gradient))
  return loss.numpy(), model.from_keras(keras_model)


def _gradients(before, after):
  """Returns the gradients of the SGD step from `before` to `after`."""
  return [
      (np.asarray(b) - np.asarray(a)) / _RATE
      for b, a in zip(before.trainable, after.trainable)
  ]


def _largest_error(found, expected):
  """Returns the largest error, relative to the largest value of its tensor.

  A tensor that is zero except for rounding (the gradient of a bias before a
  batch normalization layer) is compared with the largest of all values.
  """
  found, expected = list(found), list(expected)
  assert len(found) == len(expected)
  if not expected:
    return 0.0
  overall = max(np.max(np.abs(e)) for e in expected)
  for f, e in zip(found, expected):
    assert np.shape(f) == np.shape(e)
  return max(
      np.max(np.abs(f - e)) / (np.max(np.abs(e)) + 1e-3 * overall)
      for f, e in zip(found, expected)
  )


def _assert_equal_weights(before, found, expected, tolerance=_TOLERANCE):
  """Asserts that two steps from the same weights have the same result."""
  error = _largest_error(
      _gradients(before, found), _gradients(before, expected)
  )
  assert error <= tolerance, f'gradients: {error}'
  for f, e in zip(found.trainable, expected.trainable):
    np.testing.assert_allclose(f, e, rtol=tolerance, atol=tolerance)
  for f, e in zip(found.non_trainable, expected.non_trainable, strict=True):
    scale = np.max(np.abs(e))
    np.testing.assert_allclose(f, e, rtol=0, atol=tolerance * scale)


# The algorithm under test.


def _dataset(*batches):
  """Returns a client's dataset of these batches."""
  return functools.reduce(
      tf.data.Dataset.concatenate,
      [
          tf.data.Dataset.from_tensor_slices(batch).batch(len(batch[1]))
          for batch in batches
      ],
  )


_DEFAULTS = dict(
    moments='fused',
    synchronize='forward_and_backward',
    local_steps=1,
    momentum=None,
)


def _process(model, **options):
  """Builds FedTAN, once for each model and options: it takes a second."""
  options = _DEFAULTS | options
  return _built(model, **dict(sorted(options.items())))


@functools.lru_cache(maxsize=16)
def _built(model, momentum, **options):
  process = algorithms.build_fedtan(model, _SGD(_RATE, momentum), **options)
  assert isinstance(process, tff.learning.templates.LearningProcess)
  return process


def _run(model, weights, datasets, num_rounds=1, **options):
  """Runs FedTAN; returns the last weights and metrics."""
  process = _process(model, **options)
  state = process.set_model_weights(process.initialize(), weights)
  for _ in range(num_rounds):
    output = process.next(state, datasets)
    state = output.state
  return process.get_model_weights(state), output.metrics


def _check_case(case, sizes=(7, 2, 4), shares=None, **options):
  """Checks one step on clients with different data.

  With `moments='two_pass'`, the clients' weights must be proportional to their
  numbers of values.
  """
  model = _two_norms_model() if case is _TWO_NORMS else case.model()
  weights = fedtan_models.shaken_weights(model)
  batches = [case.batch(client, size) for client, size in enumerate(sizes)]
  # One step takes the first of several batches.
  datasets = [
      _dataset(batch, case.batch(client + 3, len(batch[1])))
      for client, batch in enumerate(batches)
  ]
  found, metrics = _run(model, weights, datasets, **options)
  loss, expected = _centralised_step(model, weights, batches, shares)
  _assert_equal_weights(weights, found, expected)
  train = metrics['client_work']['train']
  assert train['num_examples'] == sum(sizes)
  if shares is None:
    np.testing.assert_allclose(train['loss'], loss, rtol=1e-9)
  assert metrics['client_work']['num_clients'] == len(sizes)
  assert metrics['client_work']['num_dropped_clients'] == 0


# A test of the truth itself.


def test_fed_avg_makes_the_centralised_step_of_one_client_only():
  case = fedtan_models.CASES['stateful']
  model = case.model()
  weights = fedtan_models.shaken_weights(model)
  batches = [case.batch(client, 7) for client in range(3)]
  process = algorithms.build_fed_avg(model, _SGD(_RATE), local_steps=1)
  initial = process.set_model_weights(process.initialize(), weights)
  output = process.next(initial, [_dataset(batches[0])])
  loss, expected = _centralised_step(model, weights, batches[:1])
  found = process.get_model_weights(output.state)
  _assert_equal_weights(weights, found, expected)
  train = output.metrics['client_work']['train']
  np.testing.assert_allclose(train['loss'], loss, rtol=1e-9)

  state = process.next(initial, [_dataset(batch) for batch in batches]).state
  _, expected = _centralised_step(model, weights, batches)
  found = process.get_model_weights(state)
  error = _largest_error(
      _gradients(weights, found), _gradients(weights, expected)
  )
  assert error > 0.1


# Any model.


# Their paths through the exchanges differ most.
_QUICK = frozenset(
    [
        'nested',
        'shared_in_parallel',
        'axis_1_images',
        'frozen',
        'masking',
    ]
)


def _slow(name):
  return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    'name',
    [n if n in _QUICK else _slow(n) for n in fedtan_models.CASES],
)
def test_a_step_is_the_centralised_step(name):
  _check_case(fedtan_models.CASES[name])


# Without masks, numbers of values are proportional to numbers of examples.
@pytest.mark.parametrize(
    'name',
    ['small_cnn', *map(_slow, ('options', 'both_modes', 'conv3d'))],
)
def test_a_step_in_two_passes_is_the_centralised_step(name):
  _check_case(fedtan_models.CASES[name], moments='two_pass')


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'moments'), [('resnet20', 'two_pass'), ('mobile_net_v2', 'fused')]
)
def test_a_step_of_a_deep_model(name, moments):
  _check_case(fedtan_models.LARGE_CASES[name], (4, 4), moments=moments)


@pytest.mark.slow
def test_in_the_native_runtime(native_runtime):
  del native_runtime
  _check_case(_TWO_NORMS, (6, 3, 5))


def test_a_batch_of_one_example():
  _check_case(_TWO_NORMS, (1, 5))
  _check_case(_TWO_NORMS, (1, 1, 1), moments='two_pass')


@pytest.mark.slow
def test_clients_weighted_uniformly():
  options = dict(client_weighting='uniform')
  _check_case(_TWO_NORMS, (6, 6, 6), moments='two_pass', **options)
  # The statistics of the union, and equal weights of the clients' losses.
  _check_case(_TWO_NORMS, shares=[1 / 3] * 3, **options)


# Clients that are left out.

_NAN = np.float64('nan')


def _with_nan(batch):
  x, y = batch
  x = x.copy()
  x[0, 1] = _NAN
  return x, y


@pytest.mark.parametrize(
    'options',
    [{}, dict(moments='two_pass', client_weighting='uniform')],
    ids=['fused', 'two_pass'],
)
def test_clients_without_data_or_with_nan_are_left_out(options):
  case, model = _TWO_NORMS, _two_norms_model()
  weights = fedtan_models.shaken_weights(model)
  batches = [case.batch(client, 6) for client in range(3)]
  datasets = [_dataset(batch) for batch in batches]
  empty = datasets[0].take(0)
  infinite = case.batch(3, 6)
  infinite[0][2, 2] = np.inf
  found, metrics = _run(
      model,
      weights,
      [
          empty,
          datasets[0],
          _dataset(_with_nan(case.batch(3, 6))),
          datasets[1],
          _dataset(infinite),
          empty,
          datasets[2],
      ],
      **options,
  )
  loss, expected = _centralised_step(model, weights, batches)
  _assert_equal_weights(weights, found, expected)
  work = metrics['client_work']
  assert work['num_clients'] == 7
  assert work['num_dropped_clients'] == 2
  assert work['train']['num_examples'] == 18
  np.testing.assert_allclose(work['train']['loss'], loss, rtol=1e-9)


@pytest.mark.parametrize('moments', ['two_pass', 'fused'])
@pytest.mark.parametrize('kind', ['empty', 'nan'])
def test_without_any_client_nothing_changes(moments, kind):
  case, model = _TWO_NORMS, _two_norms_model()
  weights = fedtan_models.shaken_weights(model)
  if kind == 'empty':
    dataset = _dataset(case.batch(0, 6)).take(0)
  else:
    dataset = _dataset(_with_nan(case.batch(0, 6)))
  found, metrics = _run(model, weights, [dataset] * 2, moments=moments)
  for f, e in zip(tf.nest.flatten(found), tf.nest.flatten(weights)):
    np.testing.assert_array_equal(f, e)
  assert metrics['client_work']['num_dropped_clients'] == 2 * (kind == 'nan')


def test_nan_after_the_last_layer_does_not_reach_the_others():
  case = fedtan_models.CASES['list_inputs']
  model = case.model()
  weights = fedtan_models.shaken_weights(model)
  batches = [case.batch(client, 6) for client in range(3)]
  (a, b, c), y = batches[1]
  bad = ((a, b, np.full_like(c, _NAN)), y)
  found, metrics = _run(
      model,
      weights,
      [_dataset(batches[0]), _dataset(bad), _dataset(batches[2])],
  )
  for value in tf.nest.flatten(found):
    assert np.all(np.isfinite(value))
  assert metrics['client_work']['num_dropped_clients'] == 1
  for f, e in zip(found.trainable[:2], weights.trainable[:2]):
    assert np.any(f != e)


def test_partial_participation():
  case, model = _TWO_NORMS, _two_norms_model()
  weights = fedtan_models.shaken_weights(model)
  process = _process(model, moments='two_pass')
  state = process.set_model_weights(process.initialize(), weights)
  for cohort in ([0, 2, 1], [3], [4, 1]):
    batches = [case.batch(client, 4 + client) for client in cohort]
    state = process.next(state, [_dataset(batch) for batch in batches]).state
    found = process.get_model_weights(state)
    _, expected = _centralised_step(model, weights, batches)
    _assert_equal_weights(weights, found, expected)
    weights = found


# The optimizer of the server.


def _server_adam(weights, gradients, state):
  zeros = [0] * len(weights)
  t = state['t'] = state.get('t', 0) + 1
  state['m'] = [
      0.9 * m + 0.1 * g for m, g in zip(state.get('m', zeros), gradients)
  ]
  state['v'] = [
      0.999 * v + 0.001 * g**2 for v, g in zip(state.get('v', zeros), gradients)
  ]
  rate = 0.125 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
  return [
      w - rate * m / (np.sqrt(v) + 1e-3)
      for w, m, v in zip(weights, state['m'], state['v'])
  ]


def test_server_optimizer():
  case, model = _TWO_NORMS, _two_norms_model()
  expected = weights = fedtan_models.shaken_weights(model)
  batches = [case.batch(client, 6) for client in range(3)]
  found, _ = _run(
      model,
      weights,
      [_dataset(batch) for batch in batches],
      num_rounds=3,
      server_optimizer=tff.learning.optimizers.build_adam(0.125, epsilon=1e-3),
  )
  state = {}
  for _ in range(3):
    _, stepped = _centralised_step(model, expected, batches)
    # The server's gradient is the change by the step.
    differences = [b - a for b, a in zip(expected.trainable, stepped.trainable)]
    expected = tff.learning.models.ModelWeights(
        _server_adam(expected.trainable, differences, state),
        stepped.non_trainable,
    )
  # Adam's hyperparameters are float32 if TFF cannot make them float64.
  for f, e in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
    np.testing.assert_allclose(f, e, rtol=1e-6, atol=1e-6)


# A reference with two batch normalization layers.

# Positions in Keras's order of the weights: kernel, bias, γ, β, mean, variance;
# the same for the second layer; kernel, bias.
_STATISTICS = ((4, 5), (10, 11))
_TRAINABLE = (0, 1, 2, 3, 6, 7, 8, 9, 12, 13)


def _normalize(xs, shares, forward_only):
  """Normalizes each client's values with the moments of all clients.

  Args:
    xs: Each client's values.
    shares: The clients' weights, with sum 1.
    forward_only: Whether the gradient with respect to the moments stays local.
      Then the moments have the global values, but the derivatives of the
      client's mean, and of its variance about the constant global mean.

  Returns:
    The normalized values, and the global mean and variance.
  """
  mean = sum(a * tf.reduce_mean(x, 0) for a, x in zip(shares, xs))
  variance = sum(
      a * tf.reduce_mean((x - mean) ** 2, 0) for a, x in zip(shares, xs)
  )
  normalized = []
  for x in xs:
    own_mean, own_variance = mean, variance
    if forward_only:
      m = tf.reduce_mean(x, 0)
      v = tf.reduce_mean((x - tf.stop_gradient(mean)) ** 2, 0)
      own_mean = m + tf.stop_gradient(mean - m)
      own_variance = v + tf.stop_gradient(variance - v)
    normalized.append((x - own_mean) / tf.sqrt(own_variance + _EPSILON))
  return normalized, mean.numpy(), variance.numpy()


def _synchronized_gradients(
    values, batches, loss_shares, value_shares, forward_only=False
):
  """Returns the clients' gradients of the joint loss, and the layers' moments.

  The joint loss is Σ share_i F_i. Each client has its own copy of the weights.
  The derivative with respect to the copy, divided by share_i, is the client's
  part of the gradient: the weighted mean of the parts is the gradient.

  Args:
    values: The weights, in Keras's order.
    batches: The clients' batches.
    loss_shares: The weights of the clients' losses, with sum 1.
    value_shares: The weights of the clients' values in the moments.
    forward_only: See `_normalize`.

  Returns:
    For each client the gradients in the order of `_TRAINABLE`; for each layer
    its mean and variance.
  """
  clients = [[tf.Variable(value) for value in values] for _ in batches]
  moments = []
  with tf.GradientTape() as tape:
    xs = [tf.constant(x) for x, _ in batches]
    for first in (0, 6):
      xs = [x @ w[first] + w[first + 1] for x, w in zip(xs, clients)]
      xs, *moment = _normalize(xs, value_shares, forward_only)
      moments.append(moment)
      xs = [
          tf.tanh(x * w[first + 2] + w[first + 3]) for x, w in zip(xs, clients)
      ]
    loss = 0.0
    for x, w, (_, y), share in zip(xs, clients, batches, loss_shares):
      logits = x @ w[12] + w[13]
      loss += share * tf.reduce_mean(
          tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
      )
  variables = [[w[i] for i in _TRAINABLE] for w in clients]
  gradients = tape.gradient(loss, variables)
  return [
      [g.numpy() / share for g in client]
      for client, share in zip(gradients, loss_shares)
  ], moments


def _reference_round(
    model,
    weights,
    clients,
    rate=_RATE,
    momentum=0.0,
    client_weight_decay=0.0,
    client_weighting='num_examples',
    moments='fused',
    synchronize='forward_and_backward',
):
  """Runs one round of FedTAN.

  Args:
    model: The model, for the local steps.
    weights: The weights before the round.
    clients: For each client a list of batches, of the same size.
    rate: The learning rate of the clients.
    momentum: The client optimizer's momentum.
    client_weight_decay: λ of the L2 decay.
    client_weighting: The clients' weights.
    moments: Whether the statistics are weighted as the clients (`two_pass`) or
      by the number of values (`fused`).
    synchronize: `'forward'`: see `forward_only` of `_normalize`.

  Returns:
    The weights after it.
  """
  sizes = np.array([len(batches[0][1]) for batches in clients], np.float64)
  counts = np.ones_like(sizes) if client_weighting == 'uniform' else sizes
  loss_shares = counts / counts.sum()
  value_shares = sizes / sizes.sum() if moments == 'fused' else loss_shares
  before = model.from_model_weights(weights)
  gradients, layer_moments = _synchronized_gradients(
      before,
      [batches[0] for batches in clients],
      loss_shares,
      value_shares,
      synchronize == 'forward',
  )
  results = []
  for first_gradients, batches in zip(gradients, clients):
    values = [np.array(value) for value in before]
    velocity = [np.zeros_like(values[i]) for i in _TRAINABLE]

    def step(gradients, values=values, velocity=velocity):
      for j, (i, gradient) in enumerate(zip(_TRAINABLE, gradients)):
        velocity[j] = (
            momentum * velocity[j] + gradient + client_weight_decay * values[i]
        )
        values[i] = values[i] - rate * velocity[j]

    step(first_gradients)
    for positions, moment in zip(_STATISTICS, layer_moments):
      for i, value in zip(positions, moment):
        values[i] = _KERAS_MOMENTUM * values[i] + (1 - _KERAS_MOMENTUM) * value
    # The further steps are local.
    for x, y in batches[1:]:
      keras_model = model.to_keras(model.to_model_weights(values))
      with tf.GradientTape() as tape:
        loss = model.loss_fn()(y, keras_model(x, training=True))
      gradients = tape.gradient(loss, keras_model.trainable_weights)
      step([gradient.numpy() for gradient in gradients])
      after = keras_model.get_weights()
      for i in sum(_STATISTICS, ()):
        values[i] = after[i]
    results.append(values)
  return model.to_model_weights(
      [
          sum(share * values[i] for share, values in zip(loss_shares, results))
          for i in range(len(before))
      ]
  )


def _clients(sizes, num_batches):
  return [
      [_TWO_NORMS.batch(client + 3 * step, size) for step in range(num_batches)]
      for client, size in enumerate(sizes)
  ]


def _check_reference(sizes, num_batches, rates=(_RATE,), **options):
  """Compares FedTAN with a `_reference_round` for each learning rate."""
  model = _two_norms_model()
  expected = weights = fedtan_models.shaken_weights(model)
  clients = _clients(sizes, num_batches)
  for rate in rates:
    expected = _reference_round(model, expected, clients, rate, **options)
  if len(rates) > 1:
    options['client_learning_rate_schedule'] = lambda r: tf.gather(rates, r)
  found, metrics = _run(
      model,
      weights,
      [_dataset(*batches) for batches in clients],
      num_rounds=len(rates),
      local_steps=num_batches,
      **options,
  )
  _assert_equal_weights(weights, found, expected)
  assert metrics['client_work']['train']['num_examples'] == (
      num_batches * sum(sizes)
  )


@pytest.mark.parametrize('shares', [None, [0.5, 0.3, 0.2]])
def test_the_reference_is_the_centralised_step(shares):
  model = _two_norms_model()
  weights = fedtan_models.shaken_weights(model)
  sizes = np.array([7, 2, 4])
  batches = [_TWO_NORMS.batch(client, n) for client, n in enumerate(sizes)]
  gradients, moments = _synchronized_gradients(
      model.from_model_weights(weights),
      batches,
      shares or sizes / sizes.sum(),
      sizes / sizes.sum(),
  )
  _, expected = _centralised_step(model, weights, batches, shares)
  found = [
      sum(a * g for a, g in zip(shares or sizes / sizes.sum(), parts))
      for parts in zip(*gradients)
  ]
  assert _largest_error(found, _gradients(weights, expected)) <= _TOLERANCE
  old = model.from_model_weights(weights)
  new = model.from_model_weights(expected)
  for positions, moment in zip(_STATISTICS, moments):
    for i, value in zip(positions, moment):
      np.testing.assert_allclose(
          new[i],
          _KERAS_MOMENTUM * old[i] + (1 - _KERAS_MOMENTUM) * value,
          rtol=_TOLERANCE,
      )


def test_the_reference_is_fed_avg_of_one_client():
  model = _two_norms_model()
  weights = fedtan_models.shaken_weights(model)
  clients = _clients((6,), 3)
  process = algorithms.build_fed_avg(
      model, _SGD(_RATE, momentum=0.9), client_weight_decay=0.125
  )
  state = process.set_model_weights(process.initialize(), weights)
  state = process.next(state, [_dataset(*clients[0])]).state
  for synchronize in ('forward', 'forward_and_backward'):
    expected = _reference_round(
        model,
        weights,
        clients,
        momentum=0.9,
        client_weight_decay=0.125,
        synchronize=synchronize,
    )
    _assert_equal_weights(weights, process.get_model_weights(state), expected)


def test_the_references_local_gradient_is_the_papers():
  # dx_i = dy γ/√(v+ε) + ∂F_i/∂v 2(x_i - m)/K_i + ∂F_i/∂m /K_i
  rng = np.random.default_rng(0)
  xs = [tf.Variable(rng.normal(i, 1 + i, (5, 2))) for i in range(3)]
  dys = [rng.normal(size=(5, 2)) for _ in range(3)]
  with tf.GradientTape() as tape:
    normalized, mean, variance = _normalize(xs, [0.2, 0.3, 0.5], True)
    loss = sum(tf.reduce_sum(dy * x_hat) for dy, x_hat in zip(dys, normalized))
  for x, dy, dx in zip(xs, dys, tape.gradient(loss, xs)):
    std = np.sqrt(variance + _EPSILON)
    centred = x.numpy() - mean
    dmean = -np.sum(dy, 0) / std
    dvariance = -np.sum(dy * centred, 0) / (2 * std**3)
    expected = dy / std + dvariance * 2 * centred / 5 + dmean / 5
    np.testing.assert_allclose(dx, expected, rtol=_TOLERANCE)


def test_several_local_steps_with_everything():
  _check_reference(
      (7, 3, 5),
      3,
      rates=(_RATE, 0.0, 0.125),
      momentum=0.5,
      client_weight_decay=0.125,
      moments='two_pass',
  )


@pytest.mark.parametrize(
    'options',
    [
        dict(client_weighting='uniform'),
        dict(moments='two_pass', synchronize='forward'),
    ],
    ids=['uniform', 'forward_only'],
)
def test_unequal_clients(options):
  # Each client's gradient affects the result after its second step.
  _check_reference((7, 2, 4), 2, **options)


def test_forward_only_is_not_the_centralised_step():
  model = _two_norms_model()
  weights = fedtan_models.shaken_weights(model)
  clients = _clients((6, 6, 6), 1)
  found = _reference_round(model, weights, clients, synchronize='forward')
  _, expected = _centralised_step(model, weights, [c[0] for c in clients])
  error = _largest_error(
      _gradients(weights, found), _gradients(weights, expected)
  )
  assert error > 0.01
  for f, e in zip(found.non_trainable, expected.non_trainable):
    np.testing.assert_allclose(f, e, rtol=_TOLERANCE)


def test_forward_only_is_exact_where_all_have_the_same_batch():
  case = fedtan_models.CASES['shared_in_parallel']
  model = case.model()
  weights = fedtan_models.shaken_weights(model)
  batch = case.batch(1, 6)
  found, _ = _run(model, weights, [_dataset(batch)] * 3, synchronize='forward')
  _, expected = _centralised_step(model, weights, [batch] * 3)
  _assert_equal_weights(weights, found, expected)


def test_client_that_is_nan_in_a_later_step():
  # It took part in the first step, but its result is not averaged.
  model = _two_norms_model()
  weights = fedtan_models.shaken_weights(model)
  clients = _clients((6, 6, 6), 2)
  clients[1][1] = _with_nan(clients[1][1])
  found, metrics = _run(
      model,
      weights,
      [_dataset(*batches) for batches in clients],
      local_steps=2,
      client_weighting='uniform',
  )
  for value in tf.nest.flatten(found):
    assert np.all(np.isfinite(value))
  assert metrics['client_work']['num_dropped_clients'] == 1


def test_clients_with_fewer_batches_than_steps():
  model = _two_norms_model()
  weights = fedtan_models.shaken_weights(model)
  batches = [_TWO_NORMS.batch(client, 6) for client in range(2)]
  found, metrics = _run(
      model,
      weights,
      [_dataset(batch) for batch in batches],
      local_steps=2,
      client_weighting='uniform',
  )
  _, expected = _centralised_step(model, weights, batches)
  _assert_equal_weights(weights, found, expected)
  assert metrics['client_work']['train']['num_examples'] == 12


# Dropout.


def _dropout_first():
  inputs = Input((4,))
  x = layers.Dropout(0.5)(inputs)
  x = layers.BatchNormalization(momentum=0.0)(x)
  return Model(inputs, layers.Dense(fedtan_models.NUM_CLASSES)(x))


def _dropout_everywhere():
  inputs = Input((4,))
  x = layers.Dropout(0.3)(inputs)
  for _ in range(2):
    x = layers.Dense(6)(layers.GaussianNoise(0.1)(x))
    x = layers.Dropout(0.3)(layers.BatchNormalization()(x))
    x = layers.Activation('tanh')(x)
  return Model(inputs, layers.Dense(fedtan_models.NUM_CLASSES)(x))


def test_dropout_of_each_client_and_round():
  case = Case(_dropout_first)
  model = case.model()
  weights = model.initial_weights
  rng = np.random.default_rng(0)
  y = np.zeros(16, np.int32)
  # Except for the last digits, the samples are ones, so the mean after
  # dropout is the mean of the mask.
  datasets = [
      _dataset((1 + 1e-9 * rng.normal(size=(16, 4)), y)) for _ in range(2)
  ]

  def means(clients, num_rounds=1):
    found, _ = _run(model, weights, clients, num_rounds)
    return found.non_trainable[0]

  first, second = means(datasets[:1]), means(datasets[1:])
  assert np.max(np.abs(first - second)) > 0.01
  np.testing.assert_allclose(means(datasets), (first + second) / 2, rtol=1e-12)
  np.testing.assert_array_equal(means(datasets[:1]), first)
  # The momentum is 0, so these are the means of the second round.
  next_round = means(datasets[:1], num_rounds=2)
  assert np.max(np.abs(next_round - first)) > 0.01


def test_dropout_has_the_same_mask_in_forward_and_backward_pass():
  # The gradient is that of the reported loss, by differences of the loss.
  case = Case(_dropout_everywhere)
  model = case.model()
  weights = fedtan_models.shaken_weights(model)
  datasets = [_dataset(case.batch(client, 12)) for client in range(3)]
  process = _process(model, moments='two_pass', seed=5)
  initial = process.initialize()

  def run(trainable):
    state = process.set_model_weights(
        initial,
        tff.learning.models.ModelWeights(trainable, weights.non_trainable),
    )
    output = process.next(state, datasets)
    loss = output.metrics['client_work']['train']['loss']
    return loss, process.get_model_weights(output.state)

  _, after = run(weights.trainable)
  gradients = _gradients(weights, after)
  rng = np.random.default_rng(0)
  for _ in range(2):
    direction = [rng.normal(size=g.shape) for g in gradients]
    step = 1e-5
    losses = [
        run([w + sign * d for w, d in zip(weights.trainable, direction)])[0]
        for sign in (step, -step)
    ]
    slope = sum(np.sum(g * d) for g, d in zip(gradients, direction))
    np.testing.assert_allclose(
        (losses[0] - losses[1]) / (2 * step), slope, rtol=1e-6, atol=1e-7
    )


# Fused operations.


def test_image_statistics_in_float32(toy_images):
  keras.config.set_floatx('float32')
  keras.config.set_dtype_policy('float32')
  model = toy_images.model()
  weights = fedtan_models.shaken_weights(model)
  batches = [toy_images.arrays(2, seed) for seed in range(3)]
  found, _ = _run(model, weights, [_dataset(batch) for batch in batches])
  _, expected = _centralised_step(model, weights, batches)
  # 54 values of each channel: with Bessel's correction 2 % more.
  for f, e in zip(found.non_trainable, expected.non_trainable):
    np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-6)
  error = _largest_error(
      _gradients(weights, found), _gradients(weights, expected)
  )
  assert error < 1e-3


# Models that cannot be split.


class _NormInControlFlow(layers.Layer):
  """Calls batch normalization inside a condition or a loop."""

  def __init__(self, kind, **kwargs):
    super().__init__(**kwargs)
    self.kind = kind
    self.norm = layers.BatchNormalization(name='inner_culprit')

  def call(self, inputs, training=None):
    def normalize(x):
      return self.norm(x, training=training)

    if self.kind == 'cond':
      return tf.cond(
          tf.reduce_sum(inputs) > 0,
          lambda: normalize(inputs),
          lambda: inputs,
      )
    return tf.map_fn(normalize, inputs[:, tf.newaxis])[:, 0]


class _NormCell(layers.Layer):
  """A recurrent cell with batch normalization."""

  state_size = output_size = 3

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.dense = layers.Dense(3)
    self.norm = layers.BatchNormalization(name='inner_culprit')

  def call(self, inputs, states, training=None):
    x = self.norm(self.dense(inputs) + states[0], training=training)
    return x, [x]


class _OwnNorm(layers.BatchNormalization):
  """Batch normalization with another computation."""

  def call(self, inputs, training=None, mask=None):
    return 2 * super().call(inputs, training=training, mask=mask)


class _Subclassed(keras.Model):
  """A model without a graph."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.norm = layers.BatchNormalization(name='inner_culprit')
    self.dense = layers.Dense(fedtan_models.NUM_CLASSES)

  def call(self, inputs, training=None):
    return self.dense(self.norm(inputs, training=training))


def _around(layer_fn, shape=(4,)):
  """Returns a function that builds a model with the layer."""

  def build():
    inputs = Input(shape)
    x = layers.Dense(4)(inputs)
    x = layer_fn()(layers.BatchNormalization()(x))
    x = layers.Dense(fedtan_models.NUM_CLASSES)(layers.Flatten()(x))
    return Model(inputs, x)

  return Case(build, Values(shape))


_CANNOT_BE_SPLIT = {
    'subclassed': Case(lambda: _Subclassed(name='culprit')),
    'nested_subclassed': _around(lambda: _Subclassed(name='culprit')),
    'time_distributed': _around(
        lambda: layers.TimeDistributed(
            layers.BatchNormalization(name='inner_culprit'), name='culprit'
        ),
        (3, 4),
    ),
    'recurrent_cell': _around(
        lambda: layers.RNN(_NormCell(), name='culprit'), (3, 4)
    ),
    **{
        kind: _around(
            lambda kind=kind: _NormInControlFlow(kind, name='culprit')
        )
        for kind in ('cond', 'map_fn')
    },
    'renorm': _around(
        lambda: layers.BatchNormalization(renorm=True, name='culprit')
    ),
    'own_call': _around(lambda: _OwnNorm(name='culprit')),
}


@pytest.mark.parametrize('name', list(_CANNOT_BE_SPLIT))
def test_errors_name_the_layer_that_cannot_be_split(name):
  model = _CANNOT_BE_SPLIT[name].model()
  with pytest.raises(ValueError, match='culprit'):
    algorithms.build_fedtan(model, _SGD(_RATE))


def test_models_without_live_batch_norm_are_refused():
  def build(trainable):
    inputs = Input((4,))
    x = layers.Dense(4)(inputs)
    if trainable is not None:
      x = layers.BatchNormalization(trainable=trainable)(x)
    return Model(inputs, layers.Dense(fedtan_models.NUM_CLASSES)(x))

  for trainable in (None, False):
    model = Case(functools.partial(build, trainable)).model()
    with pytest.raises(ValueError, match='batch normalization'):
      algorithms.build_fedtan(model, _SGD(_RATE))


@pytest.mark.parametrize('name', ['synchronize', 'moments'])
def test_arguments_are_checked(name):
  model = _two_norms_model()
  with pytest.raises(ValueError, match=f'{name}='):
    algorithms.build_fedtan(model, _SGD(_RATE), **{name: 'backward'})
