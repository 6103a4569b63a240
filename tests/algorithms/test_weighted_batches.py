"""Tests of batches with weights and nested tensors: Keras's `fit` is right."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn.training import evaluation

layers = keras.layers
losses = keras.losses
_RATE = 0.1
_SGD = tff.learning.optimizers.build_sgdm(_RATE)


def _heads():
  """Two inputs, two outputs and batch normalization."""
  inputs = {'p': keras.Input((4,), name='p'), 'q': keras.Input((3,), name='q')}
  x = layers.Concatenate()([inputs['p'], inputs['q']])
  x = layers.ReLU()(layers.BatchNormalization()(layers.Dense(5)(x)))
  outputs = [layers.Dense(1, name='value')(x), layers.Dense(3, name='kind')(x)]
  return keras.Model(inputs, outputs)


def _classifier():
  x = inputs = keras.Input((4,))
  x = layers.ReLU()(layers.BatchNormalization()(layers.Dense(5)(x)))
  return keras.Model(inputs, layers.Dense(3, name='kind')(x))


def _cross_entropy(**options):
  return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def _compiled(build, **arguments):
  keras.utils.set_random_seed(0)
  keras_model = build()
  keras_model.compile(optimizer=keras.optimizers.SGD(_RATE), **arguments)
  return keras_model


def _compiled_heads():
  return _compiled(
      _heads,
      loss={'value': 'mse', 'kind': _cross_entropy()},
      loss_weights={'value': 0.3, 'kind': 2.0},
      metrics={'kind': ['accuracy'], 'value': [keras.metrics.R2Score()]},
      weighted_metrics={'kind': ['accuracy']},
  )


def _heads_data(size, seed, weighted=True):
  rng = np.random.default_rng(seed)
  x = {
      'p': rng.normal(seed, 1, (size, 4)).astype(np.float32),
      'q': rng.normal(size=(size, 3)).astype(np.float32),
  }
  y = {
      'kind': rng.integers(0, 3, size).astype(np.int32),
      'value': rng.normal(size=size).astype(np.float32),
  }
  weights = rng.uniform(0, 2, size).astype(np.float32)
  return tf.data.Dataset.from_tensor_slices(
      (x, y, weights) if weighted else (x, y)
  )


def _classes_data(size, seed, weights=None):
  rng = np.random.default_rng(seed)
  x = rng.normal(seed, 1, (size, 4)).astype(np.float32)
  y = rng.integers(0, 3, size).astype(np.int32)
  parts = (x, y) if weights is None else (x, y, np.float32(weights))
  return tf.data.Dataset.from_tensor_slices(parts)


def _assert_equal_weights(model, process, state, keras_model):
  found = model.to_keras(process.get_model_weights(state)).get_weights()
  for value, expected in zip(found, keras_model.get_weights(), strict=True):
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def _assert_equal_metrics(found, expected):
  assert found.keys() - {'num_examples'} == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], np.squeeze(value), rtol=1e-5)


class TestSeveralOutputs:

  @pytest.mark.slow
  def test_one_client_of_fed_avg_equals_fit(self):
    keras_model = _compiled_heads()
    data = _heads_data(10, 0).batch(4)
    model = BatchNormModel.from_compiled(keras_model, data.element_spec)
    process = algorithms.build_fed_avg(model, _SGD)

    output = process.next(process.initialize(), [data])
    history = keras_model.fit(data, verbose=0, shuffle=False).history

    _assert_equal_weights(model, process, output.state, keras_model)
    train = dict(output.metrics['client_work']['train'])
    # Keras's mean over the batches ignores their sizes.
    for name in ('value_loss', 'kind_loss'):
      del train[name], history[name]
    _assert_equal_metrics(train, history)

  @pytest.mark.slow
  @pytest.mark.parametrize(
      'moments', ['two_pass', pytest.param('fused', marks=pytest.mark.slow)]
  )
  def test_fedtan_equals_the_step_on_the_union(self, moments):
    keras_model = _compiled_heads()
    clients = [_heads_data(size, seed) for seed, size in enumerate((5, 9))]
    spec = clients[0].batch(20).element_spec
    model = BatchNormModel.from_compiled(keras_model, spec)
    process = algorithms.build_fedtan(
        model, _SGD, local_steps=1, moments=moments
    )
    # An empty client changes nothing.
    data = [*clients, clients[0].take(0)]
    output = process.next(process.initialize(), [d.batch(20) for d in data])
    union = clients[0].concatenate(clients[1]).batch(20)
    history = keras_model.fit(union, verbose=0, shuffle=False).history
    _assert_equal_weights(model, process, output.state, keras_model)
    _assert_equal_metrics(output.metrics['client_work']['train'], history)

  def test_evaluation_equals_keras(self):
    keras_model = _compiled_heads()
    # Many batches are computed concurrently.
    data = _heads_data(40, 1).batch(4)
    model = BatchNormModel.from_compiled(keras_model, data.element_spec)
    found = evaluation.Evaluator(model).evaluate(model.initial_weights, data)
    _assert_equal_metrics(
        found, keras_model.evaluate(data, verbose=0, return_dict=True)
    )

  @pytest.mark.parametrize('num_batches', [2, 10])
  def test_evaluation_with_masked_outputs_equals_keras(self, num_batches):
    def build():
      tokens = keras.Input((3,), dtype='int32')
      x = layers.Embedding(5, 4, mask_zero=True)(tokens)
      return keras.Model(tokens, layers.Dense(2)(x))

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5, (4 * num_batches, 3))
    tokens[:, 0] = 1
    y = rng.integers(0, 2, tokens.shape)
    data = tf.data.Dataset.from_tensor_slices((tokens, y)).batch(4)
    keras_model = _compiled(build, loss=_cross_entropy())
    model = BatchNormModel.from_compiled(keras_model, data.element_spec)
    found = evaluation.Evaluator(model).evaluate(model.initial_weights, data)
    expected = keras_model.evaluate(data, verbose=0)
    np.testing.assert_allclose(found['loss'], expected, rtol=1e-5)

  def test_statistics_are_estimated_without_labels(self):
    data = _heads_data(12, 0).batch(12)
    model = BatchNormModel.from_compiled(_compiled_heads(), data.element_spec)
    weights = evaluation.reestimate_batch_norm_statistics(
        model, model.initial_weights, data
    )
    keras_model = model.to_keras(weights)
    ((x, *_),) = data
    dense, norm = (
        next(layer for layer in keras_model.layers if isinstance(layer, kind))
        for kind in (layers.Dense, layers.BatchNormalization)
    )
    hidden = dense(tf.concat([x['p'], x['q']], -1))
    np.testing.assert_allclose(
        norm.moving_mean, np.mean(hidden, 0), rtol=1e-5, atol=1e-6
    )

  @pytest.mark.slow
  @pytest.mark.usefixtures('native_runtime')
  def test_on_tffs_own_runtime(self):
    data = _heads_data(6, 0).batch(3)
    keras_model = _compiled_heads()
    model = BatchNormModel.from_compiled(keras_model, data.element_spec)
    process = algorithms.build_fed_avg(model, _SGD)
    output = process.next(process.initialize(), [data])
    keras_model.fit(data, verbose=0, shuffle=False)
    _assert_equal_weights(model, process, output.state, keras_model)


class TestWeightsOfClasses:

  _WEIGHTS = {0: 1.0, 1: 0.25, 2: 3.0}

  def _model(self, data):
    keras.utils.set_random_seed(0)
    return BatchNormModel(
        _classifier,
        data.element_spec,
        _cross_entropy,
        lambda: [keras.metrics.SparseCategoricalAccuracy('accuracy')],
        weighted_metrics_fn=lambda: [
            keras.metrics.SparseCategoricalAccuracy('accuracy')
        ],
        class_weight=self._WEIGHTS,
    )

  def test_one_client_equals_fit(self):
    data = _classes_data(12, 0).batch(4)
    model = self._model(data)
    keras_model = _compiled(
        _classifier,
        loss=_cross_entropy(),
        metrics=['accuracy'],
        weighted_metrics=['accuracy'],
    )
    process = algorithms.build_fed_avg(model, _SGD)
    output = process.next(process.initialize(), [data])
    history = keras_model.fit(
        data, verbose=0, shuffle=False, class_weight=self._WEIGHTS
    ).history
    _assert_equal_weights(model, process, output.state, keras_model)
    _assert_equal_metrics(output.metrics['client_work']['train'], history)

  def test_evaluation_ignores_them(self):
    data = _classes_data(12, 0).batch(12)
    model = self._model(data)
    found = evaluation.Evaluator(model).evaluate(model.initial_weights, data)
    ((x, y),) = data
    expected = _cross_entropy()(y, model.to_keras()(x))
    np.testing.assert_allclose(found['loss'], expected, rtol=1e-5)
    assert found['accuracy'] == found['weighted_accuracy']


class TestWeightsOfClients:
  """Each client makes one step, whose mean the server takes."""

  _SIZES = (4, 8)
  _SUMS = (6.0, 2.0)

  def _clients(self, sums=_SUMS):
    return [
        _classes_data(size, seed, np.full(size, total / size)).batch(size)
        for seed, (size, total) in enumerate(zip(self._SIZES, sums))
    ]

  def _model(self, spec):
    keras.utils.set_random_seed(0)
    return BatchNormModel(
        _classifier,
        spec,
        functools.partial(_cross_entropy, reduction='mean_with_sample_weight'),
    )

  @pytest.mark.parametrize(
      ('weighting', 'weights'),
      [
          ('num_examples', _SIZES),
          ('sample_weights', _SUMS),
          pytest.param('uniform', (1, 1), marks=pytest.mark.slow),
      ],
  )
  def test_mean_of_the_clients(self, weighting, weights):
    clients = self._clients()
    model = self._model(clients[0].element_spec)
    process = algorithms.build_fed_avg(model, _SGD, client_weighting=weighting)

    def kernels(data):
      state = process.next(process.initialize(), data).state
      return process.get_model_weights(state).trainable

    own = [kernels([data]) for data in clients]
    # A client without data, too, changes nothing.
    found = kernels([*clients, clients[0].take(0)])
    for value, first, second in zip(found, *own, strict=True):
      expected = np.average([first, second], axis=0, weights=weights)
      np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)

  def test_fedtan_counts_an_example_of_weight_2_twice(self):
    sums = (4.0, 16.0)
    clients = self._clients(sums)
    model = self._model(clients[0].element_spec)
    process = algorithms.build_fedtan(
        model, _SGD, local_steps=1, client_weighting='sample_weights'
    )
    output = process.next(process.initialize(), clients)
    ((x, y, _),), ((x2, y2, _),) = clients
    keras_model = _compiled(_classifier, loss=_cross_entropy())
    keras_model.train_on_batch(
        np.concatenate([x, x2, x2]), np.concatenate([y, y2, y2])
    )
    found = process.get_model_weights(output.state)
    for value, expected in zip(
        found.trainable, keras_model.trainable_weights, strict=True
    ):
      np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)

  @pytest.mark.slow
  def test_fedtan_gives_a_client_without_data_no_weight(self):
    """Its step is on an example of class 0, whose weight is not 0."""
    keras.utils.set_random_seed(0)
    clients = [_classes_data(4, seed).batch(4) for seed in range(2)]
    model = BatchNormModel(
        _classifier,
        clients[0].element_spec,
        _cross_entropy,
        class_weight={0: 5.0, 1: 1.0, 2: 2.0},
    )
    process = algorithms.build_fedtan(
        model, _SGD, local_steps=1, client_weighting='sample_weights'
    )
    expected, found = (
        model.from_model_weights(
            process.get_model_weights(
                process.next(process.initialize(), data).state
            )
        )
        for data in (clients, [*clients, clients[0].take(0)])
    )
    for value, truth in zip(found, expected, strict=True):
      np.testing.assert_allclose(value, truth, rtol=1e-6, atol=1e-7)

  def test_negative_sum_drops_a_client(self):
    clients = self._clients((6.0, -2.0))
    model = self._model(clients[0].element_spec)
    process = algorithms.build_fed_avg(
        model, _SGD, client_weighting='sample_weights'
    )
    output = process.next(process.initialize(), clients)
    assert output.metrics['client_work']['num_dropped_clients'] == 1

  @pytest.mark.parametrize('build', ['build_fed_avg', 'build_fedtan'])
  def test_needs_weights(self, build):
    keras.utils.set_random_seed(0)
    data = _classes_data(4, 0).batch(4)
    model = BatchNormModel(_classifier, data.element_spec, _cross_entropy)
    with pytest.raises(ValueError, match='client_weighting=sample_weights nee'):
      getattr(algorithms, build)(
          model, _SGD, local_steps=1, client_weighting='sample_weights'
      )


class TestFromCompiled:

  def test_weights_and_metrics_are_copies(self):
    metric = keras.metrics.SparseCategoricalAccuracy('accuracy')
    keras_model = _compiled(
        _classifier, loss=_cross_entropy(), metrics=[metric]
    )
    data = _classes_data(4, 0).batch(4)
    model = BatchNormModel.from_compiled(keras_model, data.element_spec)
    for value, variable in zip(
        model.to_keras().get_weights(), keras_model.weights, strict=True
    ):
      np.testing.assert_array_equal(value, variable)
    assert list(model.metric_shapes) == ['accuracy']
    first, second = (model.new_metrics()['accuracy'].metric for _ in range(2))
    assert len({id(m) for m in (metric, first, second)}) == 3
    assert not {id(v) for v in keras_model.weights} & {
        id(v) for v in model.keras_model.weights
    }

  def test_no_warning_about_what_it_takes(self, caplog):
    keras_model = _compiled(_classifier, loss=_cross_entropy())
    data = _classes_data(4, 0).batch(4)
    BatchNormModel.from_compiled(keras_model, data.element_spec)
    assert not caplog.records

  def test_errors(self):
    spec = _classes_data(4, 0).batch(4).element_spec
    with pytest.raises(TypeError, match='keras_model must be a compiled keras'):
      BatchNormModel.from_compiled(_classifier, spec)
    for keras_model in (_classifier(), _compiled(_classifier)):
      with pytest.raises(ValueError, match='not compiled with a loss'):
        BatchNormModel.from_compiled(keras_model, spec)

    class Shifted(keras.metrics.SparseCategoricalAccuracy):

      def __init__(self, shift):
        super().__init__(name='shifted')
        self.shift = shift

    keras_model = _compiled(
        _classifier, loss=_cross_entropy(), metrics=[Shifted(1)]
    )
    with pytest.raises(ValueError, match="'shifted' .* cannot be copied"):
      BatchNormModel.from_compiled(keras_model, spec)
