"""The algorithms with alternatives to batch normalization."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_bn
from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn import models
from tff_bn.keras_model.partition import Role

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm


def _renorm(toy, seed=0):
  return toy.model(
      lambda: tff_bn.convert_batch_norm(toy.keras_model(), 'batch_renorm'),
      seed,
  )


def test_roles_of_batch_renormalization(toy):
  renorm, batch = _renorm(toy), toy.model()
  assert [v.role for v in renorm.variables] == [v.role for v in batch.variables]
  assert sum(v.is_statistic for v in renorm.variables) == 2


def test_fed_avg_with_one_client_equals_steps_of_keras(toy):
  model = _renorm(toy)
  process = algorithms.build_fed_avg(model, _SGD(0.125))
  state = process.initialize()
  keras_model = model.to_keras()
  optimizer = keras.optimizers.SGD(0.125)
  for round_num in range(3):
    data = toy.dataset(20, round_num)
    state = process.next(state, [data]).state
    for x, y in data:
      with tf.GradientTape() as tape:
        loss = toy.loss()(y, keras_model(x, training=True))
      weights = keras_model.trainable_weights
      optimizer.apply(tape.gradient(loss, weights), weights)
  found = model.from_model_weights(process.get_model_weights(state))
  for a, b in zip(found, keras_model.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10)


@pytest.mark.parametrize(
    ('build', 'local'),
    [
        ('build_fed_avg', ''),
        ('build_fed_bn', 'scale shift moving_mean moving_variance'),
        ('build_silo_bn', 'moving_mean moving_variance'),
        ('build_local_affine', 'scale shift'),
    ],
)
def test_partitions_keep_variables_of_batch_renormalization(toy, build, local):
  model = _renorm(toy)
  process = getattr(algorithms, build)(model, _SGD(0.1))
  data = [toy.dataset(16, seed) for seed in (0, 1)]
  state = process.initialize()
  if not local:
    state = process.next(state, data).state
    clients = [process.get_model_weights(state)] * 2
  else:
    started = [process.initialize_client(state) for _ in data]
    output = process.next(state, started, data)
    clients = [
        process.get_client_model_weights(output.state, client)
        for client in output.client_states
    ]
  for variable, a, b in zip(
      model.variables, *map(model.from_model_weights, clients), strict=True
  ):
    is_local = variable.role.value in local.split()
    assert np.array_equal(a, b) != is_local, variable


def test_fixbn_stops_correcting(toy):
  """In its second phase, the statistics are constants."""
  model = _renorm(toy)
  process = algorithms.build_fixbn(model, _SGD(0.1), fixbn_rounds=1)
  state, statistics = process.initialize(), []
  for round_num in range(3):
    state = process.next(state, [toy.dataset(16, round_num)]).state
    weights = model.from_model_weights(process.get_model_weights(state))
    statistics.append(
        [
            value
            for value, v in zip(weights, model.variables, strict=True)
            if v.is_statistic
        ]
    )
  assert np.all(statistics[0][0] != 0)
  np.testing.assert_array_equal(statistics[1], statistics[0])
  np.testing.assert_array_equal(statistics[2], statistics[0])


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


@pytest.mark.parametrize('normalization', models.NORMALIZATION_NAMES)
def test_fed_avg_trains_with_every_normalization(normalization):
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
