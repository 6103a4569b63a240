"""Tests of MOON."""

import functools

import client_rounds
import keras
import linear_models
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)  # Unequal, with short last batches.
_WEIGHT = 3.0
_TEMPERATURE = 0.4
_assert_same = client_rounds.assert_same
_assert_close = functools.partial(
    client_rounds.assert_close, rtol=1e-9, atol=1e-11
)
_MODELS = {
    'toy': (reference.gradients, reference.features),
    'bn_dense': (reference.gradients_bn_dense, reference.features_bn_dense),
    'dense_bn': (reference.gradients_dense_bn, reference.features_dense_bn),
}


class _Truth:
  """MOON in NumPy."""

  def __init__(self, problem, model, kind='toy', local=()):
    self.gradients, self.features = _MODELS[kind]
    initial = model.from_model_weights(model.initial_weights)
    self.shared = [i for i in range(len(initial)) if i not in local]
    self.models = [list(initial) for _ in _SIZES]
    self.previous = [list(initial) for _ in _SIZES]
    self.data = client_rounds.batches(problem, _SIZES)

  def round(self, sampled=(0, 1, 2), server_rate=1.0, **kwargs):
    """Runs one round of these clients; returns the mean loss."""
    results = []
    for k in sampled:
      before = self.models[k]
      previous = [
          self.previous[k][i] if i in self.shared else before[i]
          for i in range(len(before))
      ]

      def contrast(x, before=before, previous=previous):
        others = self.features(before, x), self.features(previous, x)
        return (
            lambda z: _WEIGHT * reference.contrast(z, *others, _TEMPERATURE)[1]
        )

      results.append(
          reference.train(
              before,
              self.data[k],
              0.1,
              gradients_fn=self.gradients,
              feature_gradient=contrast,
              **kwargs,
          )
      )
    models, counts, loss_sums = zip(*results)
    mean = reference.average_models(models, counts)
    old = self.models[sampled[0]]
    for i in range(len(mean)):
      # Statistics do not move like the other weights.
      rate = 1.0 if i in reference.STATISTICS else server_rate
      mean[i] = old[i] + rate * (mean[i] - old[i])
    for k, after in zip(sampled, models):
      self.models[k] = list(after)
      self.previous[k] = list(after)
    for weights in self.models:
      for i in self.shared:
        weights[i] = mean[i]
    return sum(loss_sums) / sum(counts)

  def check(self, model, training):
    found = training.client_weights(model)
    for weights, expected in zip(found, self.models, strict=True):
      _assert_close(weights, expected)
    for k, client in enumerate(training.clients):
      _assert_close(
          [client[f'previous_{model.variables[i].name}'] for i in self.shared],
          [self.previous[k][i] for i in self.shared],
      )


def _build(model, weight=_WEIGHT, **options):
  return algorithms.build_moon(
      model,
      options.pop('client_optimizer', _SGD(0.1)),
      contrastive_weight=weight,
      temperature=_TEMPERATURE,
      **options,
  )


def _process(**options):
  """Returns a model and a process, which tests share."""
  return client_rounds.toy_process(
      'build_moon',
      contrastive_weight=_WEIGHT,
      temperature=_TEMPERATURE,
      **options,
  )


def _run(problem, process, num_rounds, sizes=_SIZES):
  """Returns the server's model, the clients' states and all rounds' metrics."""
  training = client_rounds.Training(process, len(sizes))
  data = client_rounds.datasets(problem, sizes)
  metrics = [
      training.next_round(data)['client_work'] for _ in range(num_rounds)
  ]
  return (
      process.get_model_weights(training.state),
      training.clients,
      metrics,
  )


def _check_rounds(problem, model, process, truth, rounds):
  """Runs rounds, each (clients, arguments of `_Truth.round`)."""
  training = client_rounds.Training(process, len(_SIZES))
  data = client_rounds.datasets(problem, _SIZES)
  for sampled, kwargs in rounds:
    loss = truth.round(sampled, **kwargs)
    metrics = training.next_round(data, sampled)['client_work']
    # The loss in the metrics does not include the contrastive loss.
    np.testing.assert_allclose(metrics['train']['loss'], loss, rtol=1e-9)
  truth.check(model, training)


def test_the_references_gradient_is_that_of_the_loss():
  rng = np.random.default_rng(0)
  z, z_global, z_previous = rng.normal(size=(3, 4, 5))
  _, gradient = reference.contrast(z, z_global, z_previous, 0.5)
  for i in np.ndindex(z.shape):
    delta = np.zeros_like(z)
    delta[i] = 1e-6
    high, low = (
        reference.contrast(z + d, z_global, z_previous, 0.5)[0]
        for d in (delta, -delta)
    )
    np.testing.assert_allclose(gradient[i], (high - low) / 2e-6, atol=1e-8)


@pytest.mark.slow
def test_weight_0_is_fed_avg_to_the_bit(toy):
  toy.dtype = 'float32'
  model = toy.model()
  options = {'client_weight_decay': 0.01}
  optimizer = _SGD(0.1, momentum=0.5)
  process = _build(model, 0.0, client_optimizer=optimizer, **options)
  assert not process.has_client_models
  weights, _, metrics = _run(toy, process, 3)
  fed_avg = algorithms.build_fed_avg(model, optimizer, **options)
  expected, _, expected_metrics = _run(toy, fed_avg, 3)
  _assert_same(weights, expected)
  _assert_same(metrics, expected_metrics)


@pytest.mark.parametrize(
    'kind',
    [
        kind if kind == 'toy' else pytest.param(kind, marks=pytest.mark.slow)
        for kind in _MODELS
    ],
)
def test_rounds_equal_numpy(toy, kind):
  """The second client misses a round, so its previous model is older.

  A client's state is the model that it trained, neither the server's mean nor
  the result of the server's optimizer.
  """
  kwargs = {'momentum': 0.5, 'weight_decay': 0.01}
  options = {}
  if kind == 'toy':
    problem = toy
    kwargs['server_rate'] = 0.5
    options['server_optimizer'] = _SGD(0.5)
  else:
    problem = linear_models.Linear(kind)
  model = problem.model()
  process = _build(
      model,
      client_optimizer=_SGD(0.1, momentum=0.5),
      client_weight_decay=0.01,
      **options,
  )
  _check_rounds(
      problem,
      model,
      process,
      _Truth(problem, model, kind),
      [
          ((0, 1, 2), kwargs),
          ((0, 2), kwargs),
          ((0, 1, 2), kwargs),
          ((0, 1, 2), kwargs),
      ],
  )


def test_a_new_client_starts_from_the_servers_model(toy):
  model, process = _process()
  state = process.initialize()
  client = process.initialize_client(state)
  state = process.next(state, [client], [toy.dataset(16, 1)]).state
  new = process.initialize_client(state)
  weights = model.from_model_weights(process.get_model_weights(state))
  assert len(new) == len(weights)
  for variable, value in zip(model.variables, weights):
    np.testing.assert_array_equal(new[f'previous_{variable.name}'], value)


def test_local_variables_are_the_clients_own_in_all_models(toy):
  local = reference.AFFINE + reference.STATISTICS
  model, process = _process(build_process=algorithms.build_fed_bn)
  assert process.has_client_models
  truth = _Truth(toy, model, local=local)
  _check_rounds(
      toy,
      model,
      process,
      truth,
      [((0, 1, 2), {}), ((0, 2), {}), ((0, 1, 2), {}), ((0, 1, 2), {})],
  )
  names = [v.name for v in model.variables]
  client_type = process.initialize_client.type_signature.result
  assert {name for name, _ in tff.structure.iter_elements(client_type)} == {
      *(names[i] for i in local),
      *(f'previous_{names[i]}' for i in truth.shared),
  }
  state_type = process.initialize.type_signature.result.member
  assert not len(state_type.client_work['correction'])


@pytest.mark.slow
def test_fbn_equals_numpy(toy):
  """The frozen models normalize with their own running statistics."""
  model = toy.model()
  process = _build(model, build_process=algorithms.build_fbn)
  truth = _Truth(toy, model)
  training = client_rounds.Training(process, len(_SIZES))
  data = client_rounds.datasets(toy, _SIZES)
  for _ in range(3):
    reference.fbn_round(truth)
    training.next_round(data)
  truth.check(model, training)


def test_clients_without_an_update_keep_their_model(toy):
  _, process = _process()
  training = client_rounds.Training(process, 4)
  data = client_rounds.datasets(toy, (16,) * 4)
  training.next_round(data)
  state, clients = training.state, training.clients

  metrics = training.next_round(
      data[:2] + client_rounds.datasets_without_update(toy)
  )

  alone = process.next(state, clients[:2], data[:2])
  _assert_same(
      training.state.global_model_weights, alone.state.global_model_weights
  )
  for k in (2, 3):
    _assert_same(training.clients[k], clients[k])
  assert metrics['client_work']['num_dropped_clients'] == 1


def _nested_model():
  """Returns the toy model with hidden layers and head as nested models."""
  layers, dtype = keras.layers, 'float64'
  body = keras.Sequential(
      [
          layers.Dense(5, dtype=dtype),
          keras.Sequential(
              [
                  layers.BatchNormalization(
                      momentum=0.75, epsilon=2**-10, dtype=dtype
                  ),
                  layers.ReLU(dtype=dtype, name='nested_relu'),
              ]
          ),
      ]
  )
  head = keras.Sequential([layers.Dense(3, dtype=dtype)])
  inputs = keras.Input((4,), dtype=dtype)
  return keras.Model(inputs, head(body(inputs)))


class _Subclassed(keras.Model):
  """The toy model as a subclass."""

  def __init__(self):
    super().__init__(dtype='float64')
    layers, dtype = keras.layers, 'float64'
    self.hidden = layers.Dense(5, dtype=dtype)
    self.norm = layers.BatchNormalization(
        momentum=0.75, epsilon=2**-10, dtype=dtype
    )
    self.relu = layers.ReLU(dtype=dtype, name='own_relu')
    self.logits = layers.Dense(3, dtype=dtype)

  def call(self, inputs, training=None):
    x = self.relu(self.norm(self.hidden(inputs), training=training))
    return self.logits(x)


@pytest.mark.parametrize(
    ('keras_model_fn', 'feature_layer'),
    [
        pytest.param(_nested_model, 'nested_relu', marks=pytest.mark.slow),
        (_Subclassed, 'own_relu'),
    ],
)
def test_other_kinds_of_models(toy, keras_model_fn, feature_layer):
  model = toy.model(keras_model_fn)
  process = _build(model, feature_layer=feature_layer)
  _check_rounds(toy, model, process, _Truth(toy, model), [((0, 1, 2), {})] * 3)


@pytest.mark.slow
def test_feature_layer_by_name():
  """It may be the last layer, too."""
  problem = linear_models.Linear('bn_dense')
  model = problem.model()
  default, _, _ = _run(problem, _build(model), 2)
  named, _, _ = _run(problem, _build(model, feature_layer='norm'), 2)
  other, _, _ = _run(problem, _build(model, feature_layer='dense'), 2)
  _assert_same(named, default)
  assert np.abs(other.trainable[0] - default.trainable[0]).max() > 1e-3


def test_features_of_images_are_flattened(toy_images):
  """Otherwise each pixel would have its own direction."""
  features = []

  def keras_model_fn():
    return toy_images.keras_model()

  model = toy_images.model(keras_model_fn)
  process = _build(model, feature_layer='norm')
  _, clients, _ = _run(toy_images, process, 1, sizes=(6, 6))
  state = process.initialize()
  # One step from a server's model other than the client's previous model.
  output = process.next(
      state, clients[:1], [toy_images.dataset(6, 0, batch_size=6)]
  )
  x, y = toy_images.arrays(6, 0)
  keras_models = [
      model.to_keras(),
      model.to_keras(),
      model.to_keras(
          model.to_model_weights(
              [clients[0][f'previous_{v.name}'] for v in model.variables]
          )
      ),
  ]
  with tf.GradientTape() as tape:
    for keras_model, training in zip(keras_models, (True, False, False)):
      z = keras_model.get_layer('hidden')(x)
      z = keras_model.get_layer('norm')(z, training=training)
      features.append(tf.reshape(z, [6, -1]))
    a, b = (
        -keras.losses.cosine_similarity(features[0], z) / _TEMPERATURE
        for z in features[1:]
    )
    contrast = -tf.math.log(tf.exp(a) / (tf.exp(a) + tf.exp(b)))
    logits = keras_models[0](x, training=True)
    loss = toy_images.loss()(y, logits) + _WEIGHT * tf.reduce_mean(contrast)
  variables = keras_models[0].trainable_weights
  gradients = tape.gradient(loss, variables)
  found = process.get_model_weights(output.state).trainable
  for value, variable, gradient in zip(found, variables, gradients):
    np.testing.assert_allclose(
        value, variable - 0.1 * gradient, rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_float16(toy):
  """16-bit features are compared in float32."""
  toy.dtype = 'float32'

  def keras_model_fn(policy):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,), dtype='float32'),
            layers.Dense(5, dtype=policy),
            layers.BatchNormalization(dtype=policy),
            layers.ReLU(dtype=policy),
            layers.Dense(3, dtype=policy),
        ]
    )

  results = []
  for policy in ('mixed_float16', 'float32'):
    model = toy.model(lambda policy=policy: keras_model_fn(policy))
    # A batch of one example would have normalized features close to 0.
    weights, clients, metrics = _run(toy, _build(model), 3, sizes=(16, 24, 8))
    tf.nest.map_structure(
        lambda value: np.testing.assert_array_equal(np.isfinite(value), True),
        (clients, metrics),
    )
    assert [m['train']['num_examples'] for m in metrics] == [48] * 3
    results.append(weights.trainable)
  _assert_close(*results, rtol=0, atol=0.05)


@pytest.mark.slow
def test_dropout_is_in_the_trained_model_only(toy):
  """It depends only on the seed."""

  def keras_model_fn():
    layers, dtype = keras.layers, 'float64'
    return keras.Sequential(
        [
            keras.Input((4,), dtype=dtype),
            layers.Dense(5, dtype=dtype),
            layers.Dropout(0.5, dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )

  model = toy.model(keras_model_fn)
  process = _build(model)
  first, _, _ = _run(toy, process, 2)
  again, _, _ = _run(toy, process, 2)
  _assert_same(again, first)
  other, _, _ = _run(toy, _build(model, seed=1), 2)
  assert np.any(other.trainable[0] != first.trainable[0])
  # Equal frozen models have equal features.
  found, _, _ = _run(toy, process, 1)
  expected, _, _ = _run(toy, algorithms.build_fed_avg(model, _SGD(0.1)), 1)
  _assert_close(found.trainable, expected.trainable)


def test_an_unknown_layer():
  with pytest.raises(
      ValueError, match="feature_layer='nowhere' is the name of 0 layers"
  ) as error:
    _build(client_rounds.toy_model(), feature_layer='nowhere')
  for name in ('hidden', 'norm', 'logits'):
    assert name in str(error.value)


def test_a_model_without_a_hidden_layer(toy):
  def keras_model_fn():
    inputs = keras.Input((4,), dtype='float64')
    x = keras.layers.Dense(3, dtype='float64', name='only')(inputs)
    return keras.Model(inputs, keras.layers.Softmax(dtype='float64')(x))

  with pytest.raises(ValueError, match="no hidden layer, only 'only' has"):
    _build(toy.model(keras_model_fn))


def test_a_subclassed_model_needs_a_name(toy):
  with pytest.raises(
      ValueError, match='neither functional nor .* Set feature_layer'
  ):
    _build(toy.model(_Subclassed))
