"""Tests for evaluation, re-estimation and merging of models."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import small_models
import tensorflow as tf

import tff_bn
from tff_bn.common import batch_arrays
from tff_bn.common import cores
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import Role
from tff_bn.layers import PositionEncoding
from tff_bn.training import evaluation

_FEATURES = 3
_CLASSES = 4


def _build(keras_model_fn, shape=(_FEATURES,)):
  return small_models.classifier(
      keras_model_fn,
      shape,
      lambda: [keras.metrics.SparseCategoricalAccuracy('accuracy')],
  )


def _dense_model():
  return keras.Sequential(
      [
          keras.layers.Input([_FEATURES]),
          keras.layers.Dense(5),
          keras.layers.BatchNormalization(),
          keras.layers.ReLU(),
          keras.layers.Dense(_CLASSES),
      ]
  )


def _build_sequential(layers_fn, shape=(_FEATURES,)):
  """Builds a model of some layers and a dense layer of logits."""
  return _build(
      lambda: keras.Sequential(
          [
              keras.layers.Input(shape),
              *layers_fn(),
              keras.layers.Dense(_CLASSES),
          ]
      ),
      shape,
  )


@pytest.fixture(scope='module')
def model():
  return _build(_dense_model)


@pytest.fixture(scope='module')
def evaluator(model):
  return evaluation.Evaluator(model)


def _random_weights(model, seed):
  rng = np.random.default_rng([seed])
  return model.to_model_weights(
      [
          np.abs(rng.normal(size=v.shape)).astype(v.dtype.as_numpy_dtype)
          for v in model.variables
      ]
  )


def _examples(num_examples, seed=0, shape=(_FEATURES,)):
  rng = np.random.default_rng([seed])
  x = rng.normal(2.0, 3.0, size=[num_examples, *shape]).astype(np.float32)
  y = rng.integers(0, _CLASSES, size=num_examples).astype(np.int32)
  return x, y


def _batches(examples, batch_size):
  return tf.data.Dataset.from_tensor_slices(examples).batch(batch_size)


def _dense_predictions(weights, x):
  """Returns the predictions of `_dense_model` in float64."""
  kernel_1, bias_1, gamma, beta, kernel_2, bias_2 = (
      np.asarray(v, np.float64) for v in weights.trainable
  )
  mean, variance = (np.asarray(v, np.float64) for v in weights.non_trainable)
  hidden = x.astype(np.float64) @ kernel_1 + bias_1
  hidden = gamma * (hidden - mean) / np.sqrt(variance + 1e-3) + beta
  return np.maximum(hidden, 0) @ kernel_2 + bias_2


def _dense_metrics(weights, x, y):
  logits = _dense_predictions(weights, x)
  log_probabilities = logits - np.log(
      np.sum(np.exp(logits), axis=1, keepdims=True)
  )
  losses = -log_probabilities[np.arange(len(y)), y]
  return losses.mean(), np.mean(logits.argmax(axis=1) == y)


class TestEvaluator:

  def test_mean_is_over_examples_not_over_batches(self, model, evaluator):
    weights = _random_weights(model, 0)
    # A mean over batches would weight the last example tenfold.
    x, y = _examples(11)

    result = evaluator.evaluate(weights, _batches((x, y), 10))

    loss, accuracy = _dense_metrics(weights, x, y)
    assert list(result) == ['loss', 'accuracy', 'num_examples']
    np.testing.assert_allclose(result['loss'], loss, rtol=1e-5)
    np.testing.assert_allclose(result['accuracy'], accuracy, rtol=1e-6)
    assert result['num_examples'] == 11

  @pytest.mark.parametrize('num_concurrent', [1, 2])
  def test_labels_and_outputs_of_each_batch(
      self, model, num_concurrent, monkeypatch
  ):
    monkeypatch.setattr(cores, 'num_concurrent', lambda: num_concurrent)
    evaluator = evaluation.Evaluator(model)
    for seed, size in ((0, 11), (1, 35), (2, 11)):
      x, y = _examples(size, seed)
      data = _batches((x, y), 4)
      weights = _random_weights(model, seed)
      parts = []
      result = evaluator.evaluate_and_read(weights, data, parts.extend)
      sizes = [4] * (size // 4) + [3]
      assert [len(labels) for labels, _ in parts] == sizes
      found_y, outputs = map(np.concatenate, zip(*parts))
      np.testing.assert_array_equal(found_y, y)
      expected = _dense_predictions(weights, x)
      np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)
      assert result == evaluator.evaluate(weights, data)
      # Who reads nothing gets the same numbers.
      unread = evaluator.evaluate_and_read(weights, data, lambda batches: None)
      assert unread == result
    parts = []
    empty = _batches(_examples(0), 4)
    result = evaluator.evaluate_and_read(weights, empty, parts.extend)
    assert not parts and result['num_examples'] == 0

  def test_outputs_are_computed_when_they_are_read(self, model, evaluator):
    read = []

    def data():
      for number in range(50):
        read.append(number)
        yield _examples(4, number)

    dataset = tf.data.Dataset.from_generator(
        data, output_signature=model.input_spec
    )

    def check(batches):
      next(iter(batches))
      assert len(read) < 10  # A dataset reads some batches ahead.

    evaluator.evaluate_and_read(model.initial_weights, dataset, check)
    assert len(read) == 50

  def test_batches_of_another_type(self, model, evaluator):
    x, y = _examples(4)
    arguments = _random_weights(model, 0), _batches((x, y.astype(np.int64)), 2)
    for evaluate in (
        evaluator.evaluate,
        functools.partial(evaluator.evaluate_and_read, read=list),
    ):
      with pytest.raises(
          TypeError,
          match=r'^dataset: y has the dtype int64, .*tf\.cast\(y, tf',
      ):
        evaluate(*arguments)

  def test_evaluations_do_not_influence_each_other(self, model, evaluator):
    data = _batches(_examples(20), 8)
    first = evaluator.evaluate(_random_weights(model, 1), data)
    evaluator.evaluate(_random_weights(model, 2), _batches(_examples(9, 5), 4))

    again = evaluator.evaluate(_random_weights(model, 1), data)

    assert again == first

  def test_changed_arrays_are_noticed(self, model, evaluator):
    weights = _random_weights(model, 1)
    data = _batches(_examples(20), 8)
    evaluator.evaluate(weights, data)
    for value in weights.trainable:
      value /= 2
    result = evaluator.evaluate(weights, data)
    loss, _ = _dense_metrics(weights, *_examples(20))
    np.testing.assert_allclose(result['loss'], loss, rtol=1e-5)

  def test_batches_of_known_size(self, model, evaluator):
    weights = _random_weights(model, 1)
    data = tf.data.Dataset.from_tensor_slices(_examples(20)).batch(
        5, drop_remainder=True
    )
    result = evaluator.evaluate(weights, data)
    loss, _ = _dense_metrics(weights, *_examples(20))
    np.testing.assert_allclose(result['loss'], loss, rtol=1e-5)

  def test_concurrent_batches_change_no_bit(self, model, monkeypatch):
    def build(num_concurrent):
      monkeypatch.setattr(cores, 'num_concurrent', lambda: num_concurrent)
      return evaluation.Evaluator(model)

    one, three = build(1), build(3)
    weights, other = (_random_weights(model, seed) for seed in (1, 2))
    with mock.patch.object(
        tf.data.Dataset, 'map', autospec=True, side_effect=tf.data.Dataset.map
    ) as concurrent:
      for num_examples in (31, 32, 57):
        data = _batches(_examples(num_examples), 4)
        expected = one.evaluate(weights, data)
        assert three.evaluate(weights, data) == expected
        loss, accuracy = _dense_metrics(other, *_examples(num_examples))
        result = three.evaluate(other, data)
        np.testing.assert_allclose(result['loss'], loss, rtol=1e-5)
        np.testing.assert_allclose(result['accuracy'], accuracy, rtol=1e-6)
    concurrent.assert_called_once()
    assert concurrent.call_args.kwargs['num_parallel_calls'] == 3

  def test_a_gpu_computes_one_batch_at_a_time(self, model, monkeypatch):
    monkeypatch.setattr(cores, 'num_concurrent', lambda: 3)
    monkeypatch.setattr(tf.config, 'get_visible_devices', lambda _: ['GPU'])
    evaluator = evaluation.Evaluator(model)
    with mock.patch.object(tf.data.Dataset, 'map') as concurrent:
      evaluator.evaluate(model.initial_weights, _batches(_examples(40), 4))
    concurrent.assert_not_called()

  @pytest.mark.parametrize('policy', ['mixed_bfloat16', 'mixed_float16'])
  def test_loss_of_16_bit_logits_is_float32(self, policy):
    def keras_model_fn():
      return keras.Sequential(
          [
              keras.layers.Input([_FEATURES]),
              # Without a bias: graphs round its sum once, eager code twice.
              keras.layers.Dense(_CLASSES, use_bias=False, dtype=policy),
          ]
      )

    model = _build(keras_model_fn)
    weights = _random_weights(model, 0)
    x, y = _examples(50)

    result = evaluation.Evaluator(model).evaluate(weights, _batches((x, y), 50))

    logits = model.to_keras(weights)(x)
    assert logits.dtype.name == policy.removeprefix('mixed_')
    logits = logits.numpy().astype(np.float64)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(50), y]
    assert result['loss'] == pytest.approx(losses.mean(), rel=1e-6)
    assert result['accuracy'] == pytest.approx((logits.argmax(1) == y).mean())

  def test_no_examples(self, model, evaluator):
    data = _batches(_examples(0), 4)
    result = evaluator.evaluate(model.initial_weights, data)

    assert result['num_examples'] == 0
    assert np.isnan(result['loss'])
    assert np.isnan(result['accuracy'])
    clients = {'a': model.initial_weights}
    assert evaluator.evaluate_clients(clients, lambda _: data) is None

  def test_clients_with_data_have_equal_weights(self, model, evaluator):
    weights = {c: _random_weights(model, i) for i, c in enumerate('abc')}
    data = {'a': _examples(2, 1), 'b': _examples(30, 2), 'c': _examples(0)}

    result = evaluator.evaluate_clients(
        weights, lambda client_id: _batches(data[client_id], 8)
    )

    loss_a, accuracy_a = _dense_metrics(weights['a'], *data['a'])
    loss_b, accuracy_b = _dense_metrics(weights['b'], *data['b'])
    np.testing.assert_allclose(result['loss'], (loss_a + loss_b) / 2, rtol=1e-5)
    np.testing.assert_allclose(
        result['accuracy'], (accuracy_a + accuracy_b) / 2, rtol=1e-6
    )
    assert result['num_examples'] == 32

  def test_shared_weights_are_converted_once(self, model, evaluator):
    shared, own = (_random_weights(model, i) for i in range(2))
    data = _batches(_examples(7), 8)
    with mock.patch.object(
        model, 'from_model_weights', wraps=model.from_model_weights
    ) as conversion:
      result = evaluator.evaluate_clients(
          dict(a=shared, b=shared, c=own, d=shared), lambda _: data
      )
    assert conversion.call_count == 3
    losses = [_dense_metrics(w, *_examples(7))[0] for w in (shared, own)]
    np.testing.assert_allclose(
        result['loss'], np.average(losses, weights=[3, 1]), rtol=1e-5
    )

  @pytest.mark.parametrize(
      'are_shared',
      [
          pytest.param(False, id='own', marks=pytest.mark.slow),
          pytest.param(True, id='shared'),
      ],
  )
  def test_several_models_in_one_call_change_no_bit(
      self, are_shared, monkeypatch
  ):
    spec = (
        tf.TensorSpec((None, _FEATURES), tf.float32),
        tf.TensorSpec((None,), tf.int32),
        tf.TensorSpec((None,), tf.float32),
    )
    model = tff_bn.BatchNormModel(
        _dense_model,
        spec,
        loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        ),
        metrics_fn=lambda: [keras.metrics.SparseCategoricalAccuracy('plain')],
        weighted_metrics_fn=lambda: [
            keras.metrics.SparseCategoricalAccuracy('weighted')
        ],
    )
    evaluator = evaluation.Evaluator(model)
    # Client 3 has too many batches, and reading tells what client 5 has.
    sizes = (9, 0, 8, 40, 3, 7, 1)
    data = {}
    for number, size in enumerate(sizes):
      examples = _examples(size, number)
      sample_weights = np.linspace(0, 2, size, dtype=np.float32)
      data[str(number)] = _batches((*examples, sample_weights), 4)
    data['5'] = data['5'].map(lambda *batch: batch)
    weights = {
        name: _random_weights(model, 0 if are_shared else int(name))
        for name in data
    }
    if are_shared:
      weights = dict.fromkeys(data, weights['0'])
    expected = evaluator.evaluate_each_client(weights, data.get)
    # As many were evaluated one by one.
    monkeypatch.setattr(evaluation, '_MIN_EVALUATED', len(data))
    calls = []
    several = evaluator._evaluate_several

    def count(*arguments):
      calls.append((len(arguments[0][0]), len(arguments[-1])))
      return several(*arguments)

    evaluator._evaluate_several = count
    found = evaluator.evaluate_each_client(weights, data.get)
    if are_shared:
      assert calls == [(1, 3), (1, 1), (1, 1)]
    else:
      assert calls == [(3, 3), (1, 1), (1, 1)]
    assert list(found) == list(data)
    for name, result in expected.items():
      assert list(found[name]) == list(result)
      for key, value in result.items():
        assert type(found[name][key]) is type(value)
        np.testing.assert_array_equal(found[name][key], value)
    # The metrics and the outputs are of the same forward pass.
    visited = {}
    evaluator._evaluate_several = None
    results = evaluator.evaluate_each(
        weights.items(),
        data.get,
        lambda name, batches: visited.update({name: list(batches)}),
    )
    for name, result in results:
      assert list(visited)[-1] == name
      assert str(result) == str(expected[name])
    assert list(visited) == list(data)
    for number, (name, batches) in enumerate(visited.items()):
      x, y = _examples(sizes[number], number)
      parts = []
      evaluator.evaluate_and_read(weights[name], data[name], parts.extend)
      if not parts:
        assert not sum(len(labels) for labels, _ in batches)
        continue
      labels, outputs = map(np.concatenate, zip(*batches))
      np.testing.assert_array_equal(labels, y)
      np.testing.assert_array_equal(
          outputs, np.concatenate([outputs for _, outputs in parts])
      )
      np.testing.assert_allclose(
          outputs,
          _dense_predictions(weights[name], x),
          rtol=1e-4,
          atol=1e-4,
      )
    # What one call evaluates is bounded.
    evaluator._evaluate_several = count
    monkeypatch.setattr(evaluation, '_MAX_BYTES', 1)
    calls.clear()
    evaluator.evaluate_each_client(weights, data.get)
    assert [number for _, number in calls] == [1] * 5

  def test_what_few_clients_need_is_in_memory(self, model, monkeypatch):
    """Weights are read, and datasets built, when they are needed."""
    monkeypatch.setattr(evaluation, '_MIN_EVALUATED', 2)
    monkeypatch.setattr(evaluation, '_MAX_BYTES', 500)
    evaluator = evaluation.Evaluator(model)
    sizes = dict(zip('abcdefgh', (4, 5, 6, 40, 7, 4, 3, 2)))
    data = {
        name: _batches(_examples(size, size), 4) for name, size in sizes.items()
    }
    read, built = [], []

    def weights():
      for seed, name in enumerate(data):
        read.append(name)
        yield name, _random_weights(model, seed)

    def lazy(name):
      return batch_arrays.LazyDataset(
          model.input_spec,
          batch_arrays.of_dataset(data[name]),
          lambda: built.append(name) or data[name],
      )

    waiting = []
    for number, (name, result) in enumerate(
        evaluator.evaluate_each(weights(), lazy), start=1
    ):
      assert result['num_examples'] == sizes[name]
      waiting.append(len(read) - number)
      expected = evaluator.evaluate(
          _random_weights(model, number - 1), data[name]
      )
      assert result == expected
    assert built == ['a', 'b', 'd']
    # The weights and the data of a client are about 350 bytes.
    assert 0 < max(waiting) <= 2

  def test_outputs_count_among_what_is_in_memory(self, monkeypatch):
    model = _build_sequential(lambda: [keras.layers.Dense(_CLASSES)])
    evaluator = evaluation.Evaluator(model)
    monkeypatch.setattr(evaluation, '_MIN_EVALUATED', 0)
    weights = model.initial_weights
    num_bytes = sum(np.asarray(v).nbytes for v in weights.trainable)
    # 16 bytes for a sample with its label, and 16 bytes of outputs.
    monkeypatch.setattr(evaluation, '_MAX_BYTES', num_bytes + 4 * 32 - 1)
    pending = 0

    def data(name):
      nonlocal pending
      pending += 1
      return _batches(_examples(2), 4)

    for visit, most in ((None, 5), (lambda name, batches: None, 3)):
      pending, found = 0, []
      for _ in evaluator.evaluate_each(
          [(name, weights) for name in 'abcdefgh'], data, visit
      ):
        found.append(pending)
        pending -= 1
      assert found[0] == most

  @pytest.mark.parametrize('are_series', [False, True])
  def test_outputs_of_several_heads(self, are_series, monkeypatch):
    """Masked outputs, a dictionary of them, and series of several lengths."""
    steps = None if are_series else 3

    def keras_model_fn():
      x = keras.Input([steps, 2])
      masked = keras.layers.Masking()(x)
      each_step = keras.layers.Dense(2, name='steps')(masked)
      last = keras.layers.SimpleRNN(3, name='last')(masked)
      return keras.Model(x, {'steps': each_step, 'last': last})

    spec = (
        tf.TensorSpec((None, steps, 2), tf.float32),
        {
            'last': tf.TensorSpec((None, 3), tf.float32),
            'steps': tf.TensorSpec((None, steps, 2), tf.float32),
        },
    )
    model = tff_bn.BatchNormModel(
        keras_model_fn,
        spec,
        loss_fn=lambda: {
            'last': keras.losses.MeanSquaredError(),
            'steps': keras.losses.MeanSquaredError(),
        },
    )
    rng = np.random.default_rng(0)

    def draw(number):
      length = number + 2 if are_series else 3
      sizes = dict(x=[number, length, 2], last=[number, 3])
      x, last = (rng.normal(size=s).astype(np.float32) for s in sizes.values())
      x[:, 1] = 0.0  # A masked step.
      return x, {'last': last, 'steps': x + 1}

    examples = {str(number): draw(number) for number in range(1, 6)}
    data = {}
    for name, example in examples.items():
      dataset = _batches(example, 2)
      data[name] = batch_arrays.LazyDataset(
          spec,
          batch_arrays.of_dataset(dataset),
          functools.partial(_with_spec, dataset, spec),
      )
    evaluator = evaluation.Evaluator(model)
    weights = model.initial_weights
    every = [(name, weights) for name in data]
    expected = dict(evaluator.evaluate_each(every, data.get))
    monkeypatch.setattr(evaluation, '_MIN_EVALUATED', 2)
    visited = {}
    found = evaluator.evaluate_each(
        every,
        data.get,
        lambda name, batches: visited.update({name: list(batches)}),
    )
    assert dict(found) == expected
    keras_model = model.to_keras(weights)
    for name, (x, y) in examples.items():
      labels = [labels for labels, _ in visited[name]]
      outputs = [outputs for _, outputs in visited[name]]
      number = int(name)
      is_one_by_one = are_series or number <= 2
      assert len(labels) == (-(-number // 2) if is_one_by_one else 1)
      predicted = keras_model(x)
      for key in y:
        np.testing.assert_array_equal(
            np.concatenate([part[key] for part in labels]), y[key]
        )
        np.testing.assert_allclose(
            np.concatenate([part[key] for part in outputs]),
            predicted[key],
            rtol=1e-5,
            atol=1e-6,
        )


def _with_spec(dataset, spec):
  """Returns a dataset with a wider type."""
  return tf.data.experimental.from_variant(
      tf.data.experimental.to_variant(dataset), spec
  )


def _weights_by_name(model, weights):
  return {
      info.name: np.asarray(value)
      for info, value in zip(model.variables, model.from_model_weights(weights))
  }


class TestReestimateBatchNormStatistics:

  def _check_moments(self, model, x, seen, batch_size=50):
    """Checks that a layer's statistics become the moments of what it sees."""
    weights = _random_weights(model, 0)
    y = np.zeros(len(x), np.int32)

    result = evaluation.reestimate_batch_norm_statistics(
        model, weights, _batches((x, y), batch_size)
    )

    mean, variance = result.non_trainable
    assert mean.dtype == variance.dtype == np.float32
    seen = seen.reshape(-1, seen.shape[-1]).astype(np.float64)
    np.testing.assert_allclose(mean, seen.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(variance, seen.var(axis=0), rtol=1e-5)
    for new, old in zip(result.trainable, weights.trainable):
      np.testing.assert_array_equal(new, old)

  def test_first_layer_gets_the_moments_of_the_data(self):
    # 4-D input, so Keras uses its fused kernel, which has another variance.
    model = _build_sequential(
        lambda: [keras.layers.BatchNormalization(), keras.layers.Flatten()],
        (2, 2, 3),
    )
    # Means far from zero, and different in every batch.
    x, _ = _examples(11, shape=(2, 2, 3))
    x += 100 + 10 * np.arange(11, dtype=np.float32).reshape(11, 1, 1, 1)
    self._check_moments(model, x, x, batch_size=4)

  def test_mixed_precision(self):
    model = _build_sequential(
        lambda: [keras.layers.BatchNormalization(dtype='mixed_bfloat16')]
    )
    x, _ = _examples(50)
    self._check_moments(model, x, tf.cast(x, tf.bfloat16).numpy())

  def test_shared_layer_pools_its_calls(self):
    def keras_model_fn():
      shared = keras.layers.BatchNormalization()
      x = keras.Input([_FEATURES])
      added = shared(x) + shared(10.0 * x)
      return keras.Model(x, keras.layers.Dense(_CLASSES)(added))

    x, _ = _examples(6)
    self._check_moments(_build(keras_model_fn), x, np.concatenate([x, 10 * x]))

  def test_masked_inputs_do_not_count(self):
    model = _build_sequential(
        lambda: [
            keras.layers.Masking(0.0),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
        ],
        (4, 2),
    )
    x, _ = _examples(6, shape=(4, 2))
    x[::2, 2:] = 0.0
    self._check_moments(model, x, x[np.any(x != 0.0, axis=-1)])

  @pytest.mark.parametrize('to', ['hybrid', 'batch_renorm'])
  def test_other_layers_normalize_by_the_batches(self, to):
    def layers_fn():
      return [
          keras.layers.BatchNormalization(),
          keras.layers.Dense(5),
          keras.layers.BatchNormalization(),
      ]

    plain = _build_sequential(layers_fn)
    other = _build(
        lambda: tff_bn.convert_batch_norm(plain.keras_model_fn(), to)
    )
    given = _random_weights(other, 0)
    data = _batches(_examples(10), 4)
    found = evaluation.reestimate_batch_norm_statistics(other, given, data)
    expected = evaluation.reestimate_batch_norm_statistics(
        plain,
        plain.from_keras(
            tff_bn.convert_batch_norm(other.to_keras(given), 'batch')
        ),
        data,
    )
    for a, b in zip(found.non_trainable, expected.non_trainable, strict=True):
      np.testing.assert_array_equal(a, b)

  def test_renorm_is_left_out(self):
    def build(**arguments):
      return _build_sequential(
          lambda: [
              keras.layers.BatchNormalization(name='first', **arguments),
              keras.layers.Dense(5),
              keras.layers.BatchNormalization(name='second', **arguments),
          ]
      )

    plain, renorm = build(), build(renorm=True)
    given = renorm.to_keras(_random_weights(renorm, 0))
    same = plain.to_keras()
    for layer, other in zip(given.layers, same.layers, strict=True):
      other.set_weights(layer.get_weights()[: len(other.weights)])
    data = _batches(_examples(10), 4)
    keras_model = renorm.to_keras(
        evaluation.reestimate_batch_norm_statistics(
            renorm, renorm.from_keras(given), data
        )
    )
    expected = plain.to_keras(
        evaluation.reestimate_batch_norm_statistics(
            plain, plain.from_keras(same), data
        )
    )
    for name in ('first', 'second'):
      layer, other = (m.get_layer(name) for m in (keras_model, expected))
      assert layer.renorm
      for part in ('moving_mean', 'moving_variance'):
        np.testing.assert_array_equal(
            getattr(layer, part), getattr(other, part)
        )
      np.testing.assert_allclose(
          np.square(layer.moving_stddev),
          other.moving_variance + layer.epsilon,
          rtol=1e-6,
      )
      np.testing.assert_array_equal(
          layer.renorm_mean, given.get_layer(name).renorm_mean
      )

  def test_later_layers_see_batch_statistics_and_no_dropout(self):
    model = _build_sequential(
        lambda: [
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(5),
            keras.layers.BatchNormalization(),
        ]
    )
    weights = _random_weights(model, 0)
    x, y = _examples(10)

    result = evaluation.reestimate_batch_norm_statistics(
        model, weights, _batches((x, y), 4)
    )

    gamma, beta, kernel, bias = (
        v.astype(np.float64) for v in weights.trainable[:4]
    )
    hidden = []
    for i in (0, 4, 8):
      batch = x[i : i + 4].astype(np.float64)
      batch = (batch - batch.mean(0)) / np.sqrt(batch.var(0) + 1e-3)
      hidden.append((gamma * batch + beta) @ kernel + bias)
    hidden = np.concatenate(hidden)
    np.testing.assert_allclose(
        result.non_trainable[-2], hidden.mean(0), rtol=1e-5
    )
    np.testing.assert_allclose(
        result.non_trainable[-1], hidden.var(0), rtol=1e-5
    )

  def test_one_batch_makes_inference_equal_to_training(self):
    # The layers: nested, shared, and with the channels first.
    def keras_model_fn():
      shared = keras.layers.BatchNormalization(name='shared')
      inner_input = keras.Input([4, 6])
      inner = keras.Model(
          inner_input, keras.layers.BatchNormalization()(inner_input)
      )
      x = keras.Input([4, 6])
      y = inner(x)
      y = keras.layers.BatchNormalization(axis=1)(y)
      y = keras.layers.BatchNormalization(synchronized=True)(y)
      y = keras.layers.Flatten()(shared(y))
      return keras.Model(x, keras.layers.Dense(_CLASSES)(y))

    model = _build(keras_model_fn, (4, 6))
    weights = _random_weights(model, 0)
    x, y = _examples(12, shape=(4, 6))

    result = evaluation.reestimate_batch_norm_statistics(
        model, weights, _batches((x, y), 12)
    )

    np.testing.assert_allclose(
        model.to_keras(result)(x, training=False),
        model.to_keras(weights)(x, training=True),
        rtol=1e-4,
        atol=1e-4,
    )

  def test_frozen_layer_keeps_its_statistics(self):
    model = _build_sequential(
        lambda: [
            keras.layers.BatchNormalization(trainable=False),
            keras.layers.BatchNormalization(),
        ]
    )
    weights = _random_weights(model, 0)
    x, y = _examples(8)

    result = evaluation.reestimate_batch_norm_statistics(
        model, weights, _batches((x, y), 8)
    )

    gamma, beta, mean, variance = (
        v.astype(np.float64) for v in weights.non_trainable[:4]
    )
    for new, old in zip(result.non_trainable[:4], weights.non_trainable[:4]):
      np.testing.assert_array_equal(new, old)
    normalized = (x - mean) / np.sqrt(variance + 1e-3) * gamma + beta
    np.testing.assert_allclose(
        result.non_trainable[4], normalized.mean(0), rtol=1e-5
    )

  def test_empty_dataset(self, model):
    with pytest.raises(ValueError, match='empty'):
      evaluation.reestimate_batch_norm_statistics(
          model, model.initial_weights, _batches(_examples(0), 4)
      )


class TestMergeClientWeights:

  def test_equal_values_stay_equal_to_the_bit(self, model):
    weights = _random_weights(model, 3)

    merged = evaluation.merge_client_weights(model, [weights] * 7)

    for name, value in _weights_by_name(model, merged).items():
      np.testing.assert_array_equal(
          value, _weights_by_name(model, weights)[name]
      )

  @pytest.mark.parametrize('scale', [1e-12, 1.0, 1e12])
  @pytest.mark.parametrize('offset', [0.0, 1e4])
  def test_float64_of_many_clients(self, model, scale, offset):
    rng = np.random.default_rng(0)
    clients = [
        model.to_model_weights(
            [
                np.float32(scale * (offset + rng.random(v.shape)))
                for v in model.variables
            ]
        )
        for _ in range(50)
    ]

    merged = _weights_by_name(
        model, evaluation.merge_client_weights(model, clients)
    )

    by_name = [_weights_by_name(model, client) for client in clients]
    for info in model.variables:
      values = np.array([c[info.name] for c in by_name]).astype(np.float64)
      expected = values.mean(axis=0)
      if info.role is Role.MOVING_VARIANCE:
        (mean,) = [
            v.name for v in model.variables if v.role is Role.MOVING_MEAN
        ]
        means = np.array([c[mean] for c in by_name]).astype(np.float64)
        expected += means.var(axis=0)
      # Half a unit in the last place of a float32.
      np.testing.assert_allclose(merged[info.name], expected, rtol=6e-8)

  def test_same_arrays_are_kept_to_the_bit(self, model):
    shared = model.initial_weights
    shared.trainable[0] = np.full_like(shared.trainable[0], -0.0)
    clients = [
        ModelWeights(shared.trainable, [v + k for v in shared.non_trainable])
        for k in range(3)
    ]

    merged = evaluation.merge_client_weights(model, clients)

    for value, expected in zip(merged.trainable, shared.trainable, strict=True):
      assert value.tobytes() == expected.tobytes()
    mean, variance = merged.non_trainable
    np.testing.assert_allclose(mean, 1)
    np.testing.assert_allclose(variance, 2 + 2 / 3, rtol=1e-6)

  def test_only_the_last_client_differs(self, model):
    shared = _random_weights(model, 0)
    other = _random_weights(model, 1)
    copied = ModelWeights(*([v.copy() for v in part] for part in shared))

    merged = evaluation.merge_client_weights(model, [shared] * 3 + [other])

    expected = evaluation.merge_client_weights(
        model, [shared, copied, shared, other]
    )
    for part, parts in zip(merged, expected):
      for value, expected_value in zip(part, parts, strict=True):
        np.testing.assert_array_equal(value, expected_value)
    np.testing.assert_allclose(
        merged.trainable[0],
        (3 * shared.trainable[0] + other.trainable[0]) / 4,
        rtol=1e-5,
    )

  def test_integers_are_the_first_clients(self):
    class Counter(keras.layers.Layer):

      def build(self, input_shape):
        del input_shape
        self.count = self.add_weight(
            name='count', dtype='int64', initializer='zeros', trainable=False
        )

      def call(self, inputs):
        return inputs

    model = _build(
        lambda: keras.Sequential(
            [
                keras.layers.Input([_FEATURES]),
                Counter(),
                keras.layers.Dense(_CLASSES),
            ]
        )
    )
    clients = []
    for count in (5, 8):
      weights = _random_weights(model, count)
      weights.non_trainable[0] = np.array(count, np.int64)
      clients.append(weights)

    merged = evaluation.merge_client_weights(model, clients)

    assert merged.non_trainable[0] == 5
    assert merged.non_trainable[0].dtype == np.int64

  def test_personal_phases_get_their_initial_values(self):
    model = _build_sequential(
        lambda: [keras.layers.Dense(5), PositionEncoding(personal_share=0.5)]
    )
    clients = []
    for phase in (0.25, 0.5):
      clients.append(_random_weights(model, 0))
      clients[-1].non_trainable[0] = np.array(phase, np.float32)

    merged = evaluation.merge_client_weights(model, clients)

    assert merged.non_trainable[0] == 0
    assert merged.non_trainable[0].dtype == np.float32
    for a, b in zip(merged.trainable, clients[0].trainable, strict=True):
      np.testing.assert_array_equal(a, b)
    keras_model = model.to_keras(clients[1])
    assert keras_model.layers[1].personal_phase.numpy() == 0.5
    own = evaluation.with_phases(model, merged, clients[1])
    assert own.non_trainable[0] == 0.5
    for a, b in zip(own.trainable, merged.trainable, strict=True):
      assert a is b

  def test_means_in_16_bits(self):
    model = _build_sequential(
        lambda: [keras.layers.Dense(3, use_bias=False, dtype='bfloat16')]
    )
    clients = [_random_weights(model, seed) for seed in range(2)]

    merged = evaluation.merge_client_weights(model, clients)

    kernel, *_ = merged.trainable
    kernels = [np.asarray(c.trainable[0], np.float64) for c in clients]
    assert kernel.dtype == clients[0].trainable[0].dtype
    np.testing.assert_allclose(
        kernel.astype(np.float64), np.mean(kernels, axis=0), rtol=2**-7
    )

  def test_no_clients(self, model):
    with pytest.raises(ValueError, match='weights is empty'):
      evaluation.merge_client_weights(model, [])


def test_undefined_metrics_do_not_count_in_a_mean_over_clients():
  clients = {
      name: {'loss': loss, 'auc': auc, 'vector': vector, 'num_examples': 2}
      for name, loss, auc, vector in (
          ('a', 1.0, 0.5, np.array([np.nan, np.nan])),
          ('b', 3.0, np.nan, np.array([0.25, np.nan])),
      )
  }
  means = evaluation.mean_over_clients(clients)
  assert (means['loss'], means['auc']) == (2.0, 0.5)
  np.testing.assert_array_equal(means['vector'], [0.25, np.nan])
  clients['a']['loss'] = np.nan
  assert np.isnan(evaluation.mean_over_clients(clients)['loss'])
