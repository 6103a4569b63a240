"""The algorithms with alternatives to batch normalization."""

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_bn
from tff_bn import BatchNormModel
from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn import models
from tff_bn.keras_model.partition import Role

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm


def _renorm(toy):
  return toy.model(
      lambda: tff_bn.convert_batch_norm(toy.keras_model(), 'batch_renorm')
  )


def test_roles_of_batch_renormalization(toy):
  renorm, batch = _renorm(toy), toy.model()
  assert [v.role for v in renorm.variables] == [v.role for v in batch.variables]
  assert sum(v.is_statistic for v in renorm.variables) == 2


def test_fixbn_with_one_client_equals_steps_of_keras_and_stops_correcting(toy):
  """Its first phase is FedAvg; in its second one, statistics are constants."""
  model = _renorm(toy)
  process = algorithms.build_fixbn(model, _SGD(0.125), fixbn_rounds=3)
  training = client_rounds.Training(process, 1)
  keras_model = model.to_keras()
  optimizer = keras.optimizers.SGD(0.125)
  for round_num in range(3):
    data = toy.dataset(20, round_num)
    training.next_round([data])
    for x, y in data:
      with tf.GradientTape() as tape:
        loss = toy.loss()(y, keras_model(x, training=True))
      weights = keras_model.trainable_weights
      optimizer.apply(tape.gradient(loss, weights), weights)
  before = training.weights(model)
  client_rounds.assert_close(before, keras_model.get_weights(), 1e-10, 0)
  training.next_round([data])
  for variable, a, b in zip(
      model.variables, before, training.weights(model), strict=True
  ):
    assert np.array_equal(a, b) == variable.is_statistic, variable


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        ('build_fbn', "FBN .* of the layer 'norm' of the model .*fedavg"),
        ('build_fedtan', "'norm' is a BatchRenormalization, .*FedTAN cannot"),
        ('build_hbn', "'norm' .* is a BatchRenormalization"),
    ],
)
def test_algorithms_that_cannot_correct(toy, build, message):
  with pytest.raises(ValueError, match=message):
    getattr(algorithms, build)(_renorm(toy), _SGD(0.1))


def _with_norm(toy, norm_class=keras.layers.BatchNormalization, **arguments):
  """The toy problem with another layer of batch normalization."""

  def keras_model_fn():
    inputs = keras.Input((4,), dtype='float64')
    x = keras.layers.Dense(5, dtype='float64')(inputs)
    x = norm_class(dtype='float64', name='norm', **arguments)(x)
    return keras.Model(inputs, keras.layers.Dense(3, dtype='float64')(x))

  return toy.model(keras_model_fn)


@pytest.mark.parametrize(
    ('build', 'options', 'message'),
    [
        ('build_fbn', {}, 'FBN is .*Use keras.layers.BatchNormalization witho'),
        ('build_fixbn', dict(fixbn_rounds=1), 'FixBN is .*fixes the running m'),
        ('build_fed_bn', {}, 'fedbn is .* would be shared. Use tff_bn.layers'),
        ('build_silo_bn', {}, 'silobn is .* would be shared. Use tff_bn.layer'),
        ('build_fedtan', {}, 'has renorm=True, which FedTAN cannot synchroni'),
        (
            'build_fedtan_ii',
            dict(sync_rounds=1),
            'has renorm=True, which FedTAN cannot synchroni',
        ),
        ('build_hbn', {}, "'norm' .* is a BatchNormalization. .*convert"),
        (
            'build_local_affine',
            dict(statistics_aggregator=aggregators.PooledMomentsFactory()),
            'statistics_aggregator is .* from further running statistics',
        ),
        (
            'build_moon',
            dict(build_process=algorithms.build_fbn, feature_layer='norm'),
            'FBN is impossible',
        ),
    ],
)
def test_algorithms_that_cannot_treat_renorm(toy, build, options, message):
  model = _with_norm(toy, renorm=True)
  with pytest.raises(ValueError, match=message) as caught:
    getattr(algorithms, build)(model, _SGD(0.1), **options)
  assert "'norm'" in str(caught.value)


@pytest.mark.parametrize(
    ('build', 'options'),
    [
        (
            'build_fed_avg',
            dict(statistics_aggregator=aggregators.NaiveMomentsFactory()),
        ),
        pytest.param('build_centralized', {}, marks=pytest.mark.slow),
    ],
)
def test_algorithms_that_train_renorm_as_keras(toy, build, options):
  model = _with_norm(toy, renorm=True, momentum=0.75, renorm_momentum=0.5)
  process = getattr(algorithms, build)(model, _SGD(0.1), **options)
  data = toy.dataset(16, 1)
  found = client_rounds.run(process, [data], 1).weights(model)
  keras_model = model.to_keras()
  keras_model.compile(keras.optimizers.SGD(0.1), toy.loss())
  keras_model.fit(data, verbose=0)
  for a, b in zip(found, keras_model.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ('build', 'options'),
    [
        ('build_fed_bn', dict(local_layers='norm')),
        pytest.param(
            'build_fed_avg',
            dict(
                local_layers='norm',
                statistics_aggregator=aggregators.PooledMomentsFactory(),
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_local_layers_with_renorm_are_trained_as_keras(toy, build, options):
  """The truth is `fit` on each client, and the means of the dense layers."""
  model = _with_norm(toy, renorm=True, momentum=0.75, renorm_momentum=0.5)
  process = getattr(algorithms, build)(model, _SGD(0.1), **options)
  sizes = (16, 8)
  data = [toy.dataset(size, seed) for seed, size in enumerate(sizes)]
  found = client_rounds.run(process, data, 2)
  clients = [model.to_keras() for _ in sizes]
  for client in clients:
    client.compile(keras.optimizers.SGD(0.1), toy.loss())
  for _ in range(2):
    for client, batches in zip(clients, data, strict=True):
      client.fit(batches, verbose=0)
    for variables in zip(*(client.weights for client in clients), strict=True):
      if 'norm/' not in variables[0].path:
        mean = np.average(variables, axis=0, weights=sizes)
        for variable in variables:
          variable.assign(mean)
  for weights, client in zip(found.client_weights(model), clients, strict=True):
    for a, b in zip(weights, client.get_weights(), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_frozen_layers_with_renorm_are_constants(toy):
  def keras_model_fn():
    inputs = keras.Input((4,), dtype='float64')
    x = keras.layers.BatchNormalization(
        renorm=True, trainable=False, dtype='float64'
    )(inputs)
    x = keras.layers.BatchNormalization(dtype='float64')(x)
    return keras.Model(inputs, keras.layers.Dense(3, dtype='float64')(x))

  algorithms.build_fed_bn(toy.model(keras_model_fn), _SGD(0.1))


class OwnNorm(keras.layers.BatchNormalization):
  """Normalizes in its own way."""

  def call(self, inputs, training=None, mask=None):
    return 2 * super().call(inputs, training=training, mask=mask)


class OwnFederatedNorm(tff_bn.layers.FederatedBatchNormalization):
  """Normalizes in its own way."""

  def call(self, inputs, training=None, mask=None):
    return 2 * super().call(inputs, training=training, mask=mask)


class RenamedNorm(tff_bn.layers.FederatedBatchNormalization):
  """Normalizes as its parent."""


@pytest.mark.parametrize('norm_class', [OwnNorm, OwnFederatedNorm])
def test_fbn_replaces_no_computation_of_a_users_class(toy, norm_class):
  with pytest.raises(
      ValueError, match=f"'norm' is a {norm_class.__name__}, whose method call"
  ):
    algorithms.build_fbn(_with_norm(toy, norm_class), _SGD(0.1))


def test_fbn_takes_subclasses_without_a_computation(toy):
  algorithms.build_fbn(_with_norm(toy, RenamedNorm), _SGD(0.1))


@pytest.mark.parametrize(
    'build', ['build_fbn', 'build_fedtan', 'build_fed_bn', 'build_silo_bn']
)
def test_static_batch_normalization_is_no_batch_normalization(build):
  model = _small('static_batch')
  assert {v.role for v in model.variables} == {Role.KERNEL}
  with pytest.raises(ValueError, match='batch normalization'):
    getattr(algorithms, build)(model, _SGD(0.1))


def _small(normalization):
  name = 'resnet20' if normalization == 'fixup' else 'mlp3'
  return BatchNormModel(
      models.build_model_fn(name, (4, 4, 1), 3, normalization),
      input_spec=(
          tf.TensorSpec((None, 4, 4, 1), tf.float32),
          tf.TensorSpec((None,), tf.int32),
      ),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
  )


@pytest.mark.parametrize(
    'normalization',
    [
        # Fixup needs a residual network, which is deep.
        pytest.param(n, marks=pytest.mark.slow) if n == 'fixup' else n
        for n in models.NORMALIZATIONS
        if n != 'batch'
    ],
)
def test_fed_avg_trains_with_every_other_normalization(normalization):
  model = _small(normalization)
  process = algorithms.build_fed_avg(model, _SGD(0.1), local_epochs=3)
  y = np.arange(12) % 3
  x = (
      np.random.default_rng(0).normal(size=(12, 4, 4, 1))
      + y[:, None, None, None]
  )
  data = tf.data.Dataset.from_tensor_slices(
      (x.astype('f'), y.astype('i'))
  ).batch(6)
  state, losses = process.initialize(), []
  for _ in range(4):
    output = process.next(state, [data, data])
    state = output.state
    losses.append(output.metrics['client_work']['train']['loss'])
  assert losses[-1] < losses[0]


@pytest.mark.slow
def test_kernel_normalization_with_clients_that_are_left_out():
  """Draws depend on a client's data, so the others' models stay the same."""
  keras.utils.set_random_seed(3)
  model = BatchNormModel(
      models.build_model_fn('small_cnn', (8, 8, 1), 3, 'kernel'),
      input_spec=(
          tf.TensorSpec((None, 8, 8, 1), tf.float32),
          tf.TensorSpec((None,), tf.int32),
      ),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
  )
  process = algorithms.build_fed_avg(model, _SGD(0.1))
  x = np.random.default_rng(0).normal(size=(9, 8, 8, 1)).astype(np.float32)
  y = np.arange(9, dtype=np.int32) % 3

  def data(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)

  good = [data(x[:8], y[:8]), data(x[8:], y[8:])]  # The second has one example.
  bad = [data(np.full_like(x, np.nan), y), data(x[:0], y[:0])]
  results = [
      client_rounds.run(process, clients, 2).weights(model)
      for clients in (good, good, good + bad)
  ]
  first, *others = results
  assert all(np.isfinite(weights).all() for weights in first)
  for other in others:
    for a, b in zip(first, other, strict=True):
      np.testing.assert_array_equal(a, b)
  # Values are dropped: without dropout, the model is another one.
  plain = model.to_keras()
  for layer in plain.layers:
    if isinstance(layer, tff_bn.layers.KernelNormalization):
      layer.dropout_rate = 0
  fixed = BatchNormModel(
      lambda: tff_bn.copy_model(plain), model.input_spec, model.loss_fn
  )
  process = algorithms.build_fed_avg(fixed, _SGD(0.1))
  without = client_rounds.run(process, good, 2).weights(fixed)
  assert any((a != b).any() for a, b in zip(first, without, strict=True))
