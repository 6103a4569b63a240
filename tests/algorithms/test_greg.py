"""Tests of GReg."""

import functools

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_bn
from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn import models
from tff_bn.layers import StaticBatchNormalization

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)  # Unequal, with short last batches.
_WEIGHT = 0.7
_EPSILON = 2**-10
_assert_close = functools.partial(
    client_rounds.assert_close, rtol=1e-9, atol=1e-11
)


def _probabilities(logits):
  p = np.exp(logits - logits.max(1, keepdims=True))
  return p / p.sum(1, keepdims=True)


class _Pass:
  """A pass through the toy model with statistics of the batch or given ones."""

  def __init__(self, weights, x, statistics=None):
    w1, b1, gamma, beta, _, _, w2, b2 = weights
    z = x @ w1 + b1
    self.is_batch = statistics is None
    self.mean, self.variance = statistics or (z.mean(0), z.var(0))
    self.inv = 1 / np.sqrt(self.variance + _EPSILON)
    self.z_hat = (z - self.mean) * self.inv
    self.a = self.z_hat * gamma + beta
    self.x, self.weights = x, weights
    self.p = _probabilities(np.maximum(self.a, 0) @ w2 + b2)

  def gradients(self, d):
    """Returns the gradients of the weights, given those of the logits."""
    gamma, w2 = self.weights[2], self.weights[6]
    da = d @ w2.T * (self.a > 0)
    dz = d_hat = da * gamma
    if self.is_batch:
      dz = d_hat - d_hat.mean(0) - self.z_hat * (d_hat * self.z_hat).mean(0)
    dz = self.inv * dz
    h = np.maximum(self.a, 0)
    return [
        *(self.x.T @ dz, dz.sum(0)),
        *((da * self.z_hat).sum(0), da.sum(0)),
        *(None, None),
        *(h.T @ d, d.sum(0)),
    ]


def _divergence(weights, x, statistics):
  """Returns the mean KL(p ‖ q) and its gradients by the weights."""
  batch, running = _Pass(weights, x), _Pass(weights, x, statistics)
  logs = np.log(batch.p) - np.log(running.p)
  of_examples = (batch.p * logs).sum(1, keepdims=True)
  parts = zip(
      batch.gradients(batch.p * (logs - of_examples) / len(x)),
      running.gradients((running.p - batch.p) / len(x)),
  )
  return of_examples.mean(), [None if a is None else a + b for a, b in parts]


def _gradients(statistics, weights, x, y, **kwargs):
  """Like `reference.gradients`, with the term of GReg."""
  loss, grads, mean, variance = reference.gradients(weights, x, y, **kwargs)
  _, added = _divergence(weights, x, statistics)
  grads = [None if g is None else g + _WEIGHT * a for g, a in zip(grads, added)]
  return loss, grads, mean, variance


def _round(models, data, sampled, server_rate=1.0, local=(), **kwargs):
  """Runs one round of the sampled clients in NumPy; returns the mean loss.

  `models` has the model of each client, which the round replaces; only the
  variables at the positions `local` differ.
  """
  trained, counts, losses = zip(
      *(
          reference.train(
              models[k],
              data[k],
              0.1,
              gradients_fn=functools.partial(
                  _gradients,
                  tuple(models[k][i] for i in reference.STATISTICS),
              ),
              **kwargs,
          )
          for k in sampled
      )
  )
  mean = reference.average_models(trained, counts)
  before = models[0]
  for k, after in zip(sampled, trained):
    models[k] = list(after)
  for i in set(range(8)) - set(local):
    rate = 1.0 if i in reference.STATISTICS else server_rate
    for model in models:
      model[i] = before[i] + rate * (mean[i] - before[i])
  return sum(losses) / sum(counts)


def _build(model, optimizer=None, **options):
  return algorithms.build_greg(
      model,
      optimizer or _SGD(0.1),
      **{'consistency_weight': _WEIGHT, **options},
  )


def test_the_references_gradients_are_those_of_the_divergence(toy):
  rng = np.random.default_rng(0)
  x, _ = toy.arrays(9, 0)
  weights = [
      rng.normal(size=np.shape(v))
      for v in toy.model().from_model_weights(toy.model().initial_weights)
  ]
  statistics = (rng.normal(size=5), rng.uniform(0.5, 2, size=5))
  _, gradients = _divergence(weights, x, statistics)
  for i in set(range(8)) - set(reference.STATISTICS):
    direction = rng.normal(size=weights[i].shape)
    ends = []
    for step in (1e-6, -1e-6):
      moved = list(weights)
      moved[i] = weights[i] + step * direction
      ends.append(_divergence(moved, x, statistics)[0])
    np.testing.assert_allclose(
        (gradients[i] * direction).sum(),
        (ends[0] - ends[1]) / 2e-6,
        rtol=1e-5,
        atol=1e-8,
    )


def test_rounds_equal_numpy(toy):
  """The running statistics are those of the round's start in each step."""
  model = toy.model()
  process = _build(
      model,
      _SGD(0.1, momentum=0.5),
      client_weight_decay=0.01,
      server_optimizer=_SGD(0.5),
  )
  training = client_rounds.Training(process, len(_SIZES))
  assert not training.clients
  models = [
      list(model.from_model_weights(model.initial_weights)) for _ in _SIZES
  ]
  data = client_rounds.datasets(toy, _SIZES)
  batches = client_rounds.batches(toy, _SIZES)
  for sampled in ((0, 1, 2), (0, 2), (0, 1, 2)):
    loss = _round(
        models,
        batches,
        sampled,
        server_rate=0.5,
        momentum=0.5,
        weight_decay=0.01,
    )
    metrics = training.next_round(data, sampled)['client_work']
    # The loss in the metrics does not include the divergence.
    np.testing.assert_allclose(metrics['train']['loss'], loss, rtol=1e-9)
    _assert_close(training.weights(model), models[0])


def test_local_scale_and_shift(toy):
  model = toy.model()
  process = _build(model, build_process=algorithms.build_local_affine)
  training = client_rounds.Training(process, len(_SIZES))
  models = [
      list(model.from_model_weights(model.initial_weights)) for _ in _SIZES
  ]
  for sampled in ((0, 1, 2), (0, 2), (0, 1, 2)):
    _round(
        models,
        client_rounds.batches(toy, _SIZES),
        sampled,
        local=reference.AFFINE,
    )
    training.next_round(client_rounds.datasets(toy, _SIZES), sampled)
  for found, expected in zip(
      training.client_weights(model), models, strict=True
  ):
    _assert_close(found, expected)


def test_weight_0_is_fed_avg(toy):
  model = toy.model()
  data = client_rounds.datasets(toy, _SIZES)
  found, expected = (
      client_rounds.run(process, data, 2).weights(model)
      for process in (
          _build(model, consistency_weight=0.0),
          algorithms.build_fed_avg(model, _SGD(0.1)),
      )
  )
  _assert_close(found, expected)


def _cross_entropy():
  return keras.losses.SparseCategoricalCrossentropy(
      from_logits=True, dtype='float64'
  )


@pytest.mark.parametrize('kind', ['subclass', 'nested'])
def test_one_client_equals_keras_on_images(kind):
  """Two copies of a model, with and without the statistics of the batch."""
  model = BatchNormModel(
      functools.partial(_image_model, kind),
      (
          tf.TensorSpec((None, 6, 6, 2), tf.float64),
          tf.TensorSpec((None,), tf.int32),
      ),
      loss_fn=_cross_entropy,
      metrics_fn=lambda: [],
  )
  rng = np.random.default_rng(1)
  batches = [
      (
          rng.normal(1.0, 2.0, (5, 6, 6, 2)),
          rng.integers(3, size=5).astype(np.int32),
      )
      for _ in range(3)
  ]
  process = _build(model, local_steps=3)
  training = client_rounds.Training(process, 1)
  dataset = tf.data.Dataset.from_generator(
      lambda: iter(batches), output_signature=model.input_spec
  )
  trained, fixed = model.to_keras(), model.to_keras()
  loss = _cross_entropy()
  for _ in range(2):
    training.next_round([dataset])
    start = [np.array(v) for v in trained.weights]
    for x, y in batches:
      for variable, value, first in zip(fixed.weights, trained.weights, start):
        is_statistic = 'moving' in variable.path
        variable.assign(first if is_statistic else value)
      with tf.GradientTape() as tape:
        logits = trained(x, training=True)
        log_p = tf.nn.log_softmax(logits)
        log_q = tf.nn.log_softmax(fixed(x, training=False))
        divergences = tf.reduce_sum(tf.exp(log_p) * (log_p - log_q), axis=1)
        target = loss(y, logits) + _WEIGHT * tf.reduce_mean(divergences)
      gradients = tape.gradient(
          target,
          [v.value for m in (trained, fixed) for v in m.trainable_weights],
      )
      half = len(gradients) // 2
      for variable, *parts in zip(
          trained.trainable_weights, gradients[:half], gradients[half:]
      ):
        variable.assign_sub(0.1 * tf.add_n(parts))
    found = training.weights(model)
    for value, variable in zip(found, trained.weights, strict=True):
      np.testing.assert_allclose(value, variable, rtol=1e-9, atol=1e-11)
  assert np.abs(found[0] - model.initial_weights.trainable[0]).max() > 1e-2


class _Subclassed(keras.Model):
  """Two convolutions as a subclass."""

  def __init__(self):
    super().__init__(dtype='float64')
    keras.utils.set_random_seed(2)
    layers, dtype = keras.layers, 'float64'
    self.convolutions = [
        layers.Conv2D(4, 3, dtype=dtype, name=f'conv_{i}') for i in range(2)
    ]
    self.norms = [
        layers.BatchNormalization(momentum=0.5, dtype=dtype, name=f'norm_{i}')
        for i in range(2)
    ]
    self.pool = layers.GlobalAveragePooling2D(dtype=dtype)
    self.logits = layers.Dense(3, dtype=dtype)

  def call(self, inputs, training=None):
    x = inputs
    for convolution, norm in zip(self.convolutions, self.norms):
      x = keras.ops.relu(norm(convolution(x), training=training))
    return self.logits(self.pool(x))


def _image_model(kind):
  if kind == 'subclass':
    return _Subclassed()
  keras.utils.set_random_seed(2)
  layers, dtype = keras.layers, 'float64'
  body = keras.Sequential(
      [
          layers.Conv2D(4, 3, dtype=dtype),
          keras.Sequential(
              [layers.BatchNormalization(momentum=0.5, dtype=dtype)]
          ),
          layers.ReLU(dtype=dtype),
          layers.GlobalAveragePooling2D(dtype=dtype),
      ]
  )
  inputs = keras.Input((6, 6, 2), dtype=dtype)
  return keras.Model(inputs, layers.Dense(3, dtype=dtype)(body(inputs)))


@pytest.mark.slow
def test_dropout_and_statistics_stay_out_of_the_second_pass(toy):
  """With equal statistics and dropout in training only, q is deterministic."""

  def keras_model_fn():
    layers, dtype = keras.layers, 'float64'
    return keras.Sequential(
        [
            keras.Input((4,), dtype=dtype),
            layers.Dense(5, dtype=dtype),
            layers.BatchNormalization(momentum=0.75, dtype=dtype),
            layers.Dropout(0.5, dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )

  model = toy.model(keras_model_fn)
  data = client_rounds.datasets(toy, _SIZES)
  runs = [
      client_rounds.run(_build(model, consistency_weight=w), data, 1)
      for w in (1.0, 1.0, 0.0)
  ]
  first, again, fed_avg = (run.weights(model) for run in runs)
  client_rounds.assert_same(again, first)
  # In the first step, the statistics do not depend on λ: a second pass that
  # moved them would move them twice.
  one_step = [
      client_rounds.run(
          _build(model, consistency_weight=w, local_steps=1), data, 1
      ).weights(model)
      for w in (1.0, 0.0)
  ]
  positions = [i for i, v in enumerate(model.variables) if v.is_statistic]
  assert len(positions) == 2
  for i in positions:
    np.testing.assert_array_equal(one_step[0][i], one_step[1][i])
  assert np.abs(first[0] - fed_avg[0]).max() > 1e-4


def _dense(norm=None):
  """Returns a model of a dense layer, a normalization and a dense layer."""

  def keras_model_fn():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5),
            *([] if norm is None else [norm]),
            layers.Dense(3),
        ]
    )

  return BatchNormModel(
      keras_model_fn,
      (tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int32)),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [],
  )


@pytest.mark.parametrize(
    ('norm', 'message'),
    [
        (None, 'has no trainable layer of batch normalization'),
        (keras.layers.GroupNormalization(1), 'has no trainable layer of batch'),
        (StaticBatchNormalization(), 'has no trainable layer of batch'),
        (
            keras.layers.BatchNormalization(trainable=False),
            'has no trainable layer of batch',
        ),
        (
            tff_bn.layers.FederatedBatchNormalization(name='norm'),
            "'norm' .* is a FederatedBatchNormalization, which uses running",
        ),
    ],
)
def test_models_without_batch_statistics(norm, message):
  with pytest.raises(ValueError, match=message):
    _build(_dense(norm))


@pytest.mark.parametrize(
    ('loss', 'name'),
    [
        (
            keras.losses.SparseCategoricalCrossentropy(from_logits=False),
            'SparseCategoricalCrossentropy',
        ),
        (
            keras.losses.BinaryCrossentropy(from_logits=True),
            'BinaryCrossentropy',
        ),
        (keras.losses.MeanSquaredError(), 'MeanSquaredError'),
    ],
)
def test_losses_without_a_softmax_of_logits(loss, name):
  model = BatchNormModel(
      lambda: keras.Sequential(
          [
              keras.Input((4,)),
              keras.layers.BatchNormalization(),
              keras.layers.Dense(3),
          ]
      ),
      (
          tf.TensorSpec((None, 4)),
          tf.TensorSpec((None,), tf.int32)
          if name.startswith('Sparse')
          else tf.TensorSpec((None, 3)),
      ),
      loss_fn=lambda: loss,
      metrics_fn=lambda: [],
  )
  with pytest.raises(ValueError, match=f'from_logits=True, but is {name}'):
    _build(model)


@pytest.mark.parametrize(
    ('build', 'options', 'message'),
    [
        ('build_fbn', {}, "GReg can't be combined with FBN: its clients norm"),
        ('build_fed_bn', {}, "of the layer 'norm' .* stay with the client"),
        ('build_silo_bn', {}, "of the layer 'norm' .* stay with the client"),
        (
            'build_fed_avg',
            dict(local_layers='norm'),
            "of the layer 'norm' .* stay with the client",
        ),
        (
            'build_hbn',
            {},
            "'norm' .* is a HybridBatchNormalization, which uses running",
        ),
        ('build_fedtan', {}, "drift_correction=GReg can't be combined with"),
        (
            'build_fed_prox',
            {},
            'GReg and FedProx are both|FedProx and GReg are both',
        ),
    ],
)
def test_algorithms_that_cannot_be_corrected(build, options, message):
  with pytest.raises(ValueError, match=message):
    _build(
        client_rounds.toy_model(build),
        build_process=getattr(algorithms, build),
        **options,
    )


def _small_cnn(precision='float32'):
  keras.utils.set_random_seed(3)
  return BatchNormModel(
      models.build_model_fn('small_cnn', (8, 8, 1), 3, precision=precision),
      (tf.TensorSpec((None, 8, 8, 1)), tf.TensorSpec((None,), tf.int32)),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [],
  )


def _weights_of_images(model, **options):
  rng = np.random.default_rng(4)
  data = [
      tf.data.Dataset.from_tensor_slices(
          (
              rng.normal(size=(12, 8, 8, 1)).astype(np.float32),
              rng.integers(3, size=12).astype(np.int32),
          )
      ).batch(6)
      for _ in range(2)
  ]
  process = _build(model, _SGD(0.02), **options)
  return client_rounds.run(process, data, 2).weights(model)


@pytest.mark.slow
def test_compiled_by_xla():
  model = _small_cnn()
  found = _weights_of_images(model, jit_compile=True)
  _assert_close(found, _weights_of_images(model), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_float16():
  """16-bit logits are compared in float32."""
  found, expected = (
      _weights_of_images(_small_cnn(precision))
      for precision in ('mixed_float16', 'float32')
  )
  _assert_close(found, expected, rtol=0, atol=0.02)
