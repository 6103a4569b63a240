"""Tests of losses of several outputs, with Keras's `compile` as the truth."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn import BatchNormModel
from tff_bn.keras_model import objective
from tff_bn.keras_model.batch import Batch

losses = keras.losses
layers = keras.layers
_LABELS = {
    'value': tf.TensorSpec((None,)),
    'kind': tf.TensorSpec((None,), tf.int32),
}
_X = tf.TensorSpec((None, 4))
_WEIGHT = tf.TensorSpec((None,))


def _dictionary():
  x = keras.Input((4,))
  return keras.Model(
      x,
      {
          'value': layers.Dense(1, name='first')(x),
          'kind': layers.Dense(3, activation='softmax', name='second')(x),
      },
  )


def _list():
  x = keras.Input((4,))
  outputs = [
      layers.Dense(1, name='value')(x),
      layers.Dense(3, activation='softmax', name='kind')(x),
  ]
  return keras.Model(x, outputs)


def _single():
  x = keras.Input((4,))
  return keras.Model(x, layers.Dense(3, name='logits')(x))


def _nested():
  x = keras.Input((4,))
  return keras.Model(
      x, {'deep': {'a': layers.Dense(1)(x), 'b': layers.Dense(1)(x)}}
  )


def _dictionary_of_one():
  x = keras.Input((4,))
  return keras.Model(x, {'kind': layers.Dense(3, name='second')(x)})


class _Unnamed(keras.Model):

  def __init__(self):
    super().__init__()
    self.dense = layers.Dense(1)

  def call(self, x):
    y = self.dense(x)
    return y, 2.0 * y


def _batch(seed=0, size=6):
  rng = np.random.default_rng(seed)
  return Batch(
      tf.constant(rng.normal(size=(size, 4)), tf.float32),
      {
          'value': tf.constant(rng.normal(size=size), tf.float32),
          'kind': tf.constant(rng.integers(0, 3, size), tf.int32),
      },
      tf.constant(rng.uniform(size=size), tf.float32),
  )


def _model(build, spec, loss, **arguments):
  keras.utils.set_random_seed(0)
  return BatchNormModel(build, spec, lambda: loss, **arguments)


_CROSS_ENTROPY = losses.SparseCategoricalCrossentropy()


@pytest.mark.parametrize('build', [_dictionary, _list])
@pytest.mark.parametrize(
    ('loss', 'loss_weights'),
    [
        ({'value': 'mse', 'kind': _CROSS_ENTROPY}, None),
        (
            {'value': losses.Huber(), 'kind': 'crossentropy'},
            {'kind': 0.25, 'value': 3.0},
        ),
        ({'value': losses.mean_absolute_error, 'kind': None}, None),
    ],
    ids=['plain', 'weighted', 'one_without'],
)
@pytest.mark.parametrize('weights', ['none', 'common', 'own'])
def test_several_outputs_equal_compile(build, loss, loss_weights, weights):
  batch = _batch()
  sample_weight = {
      'none': None,
      'common': batch.sample_weight,
      'own': {'value': batch.sample_weight, 'kind': 1 - batch.sample_weight},
  }[weights]
  spec = (_X, _LABELS)
  if sample_weight is not None:
    spec += (tf.nest.map_structure(lambda _: _WEIGHT, sample_weight),)
  model = _model(build, spec, loss, loss_weights=loss_weights)
  keras_model = model.to_keras()
  keras_model.compile(loss=loss, loss_weights=loss_weights)
  names = [name for name, value in loss.items() if value is not None]
  y = {name: batch.y[name] for name in names}

  found = model.batch_loss(batch.y, keras_model(batch.x), sample_weight)

  as_fit_takes_it = sample_weight
  if build is _list and len(names) == 2:
    # Keras takes weights in the form of the outputs.
    if weights == 'own':
      as_fit_takes_it = [sample_weight[name] for name in names]
    y = [y[name] for name in names]
  elif len(names) == 1:
    (name,) = names
    keras_model = keras.Model(
        keras_model.inputs,
        keras_model.get_layer(
            {'value': 'first'}.get(name, name) if build is _dictionary else name
        ).output,
    )
    keras_model.compile(loss=loss[name])
    y = y[name]
    if weights == 'own':
      as_fit_takes_it = sample_weight[name]
  expected = keras_model.compute_loss(
      batch.x, y, keras_model(batch.x), as_fit_takes_it
  )
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_lists_are_in_the_order_of_the_outputs():
  batch = _batch()
  y = [batch.y['value'], batch.y['kind']]
  spec = (_X, tuple(_LABELS.values()))
  outputs = _list()(batch.x)
  expected = 2.0 * losses.MeanSquaredError()(y[0], outputs[0]) + 0.5 * (
      _CROSS_ENTROPY(y[1], outputs[1])
  )
  model = _model(_list, spec, ['mse', _CROSS_ENTROPY], loss_weights=(2.0, 0.5))
  np.testing.assert_allclose(model.batch_loss(y, outputs), expected, rtol=1e-6)


def test_a_single_loss_is_the_loss_of_each_output():
  spec = (_X, (_WEIGHT, _WEIGHT))
  model = _model(_Unnamed, spec, losses.MeanSquaredError())
  y = tf.constant([1.0, 2.0]), tf.constant([0.0, 4.0])
  outputs = tf.constant([[0.0], [2.0]]), tf.constant([[2.0], [2.0]])
  # Means of (1, 0) and of (4, 4).
  assert float(model.batch_loss(y, outputs)) == 0.5 + 4.0
  assert list(model.metric_shapes) == ['output_1_loss', 'output_2_loss']


class _NoWeights(losses.Loss):
  """A loss that takes no weights of examples."""

  def __call__(self, y_true, y_pred):
    return keras.ops.mean(y_pred)


class _Difference(losses.Loss):
  """A loss of two outputs together."""

  def call(self, y_true, y_pred):
    first, second = y_pred
    return keras.ops.square(first[:, 0] - second[:, 0] - y_true)


def test_one_tensor_of_labels_for_all_outputs():
  model = _model(
      _Unnamed,
      (_X, _WEIGHT),
      _Difference(),
      metrics_fn=lambda: [
          keras.metrics.MeanMetricWrapper(_Difference().call, 'difference')
      ],
  )
  outputs = tf.constant([[1.0], [2.0]]), tf.constant([[2.0], [5.0]])
  # Differences −1 and −3 from 0 and −1.
  assert float(model.batch_loss(tf.constant([0.0, -1.0]), outputs)) == 2.5
  assert list(model.metric_shapes) == ['difference']


def test_nested_outputs():
  labels = {'deep': {'a': _WEIGHT, 'b': _WEIGHT}}
  model = _model(
      _nested,
      (_X, labels),
      {'deep': {'a': 'mse', 'b': 'mae'}},
      loss_weights={'deep': {'a': 1.0, 'b': 10.0}},
  )
  y = {'deep': {'a': tf.constant([3.0]), 'b': tf.constant([2.0])}}
  outputs = tf.nest.map_structure(lambda _: tf.constant([[0.0]]), y)
  assert float(model.batch_loss(y, outputs)) == 9.0 + 20.0
  assert list(model.metric_shapes) == ['deep_a_loss', 'deep_b_loss']


@pytest.mark.parametrize('as_list', [False, True])
def test_labels_in_a_list_or_dictionary_of_one(as_list):
  spec = tf.TensorSpec((None,), tf.int32)
  loss = losses.SparseCategoricalCrossentropy(True)
  model = _model(
      _single,
      (_X, [spec] if as_list else {'logits': spec}),
      [loss] if as_list else {'logits': loss},
  )
  y = tf.constant([0])
  outputs = tf.constant([[1.0, 2.0, 3.0]])
  found = model.batch_loss([y] if as_list else {'logits': y}, outputs)
  np.testing.assert_allclose(found, loss(y, outputs))


@pytest.mark.parametrize('nested', [False, True])
def test_the_only_output_of_a_dictionary_has_its_key_as_name(nested):
  """As in `compile`, which does not know it by the name of its layer."""
  y = {'kind': tf.constant([2])} if nested else tf.constant([2])
  spec = tf.TensorSpec((None,), tf.int32)
  loss = {'kind': losses.SparseCategoricalCrossentropy(True)}
  weights = {'kind': 0.5}
  model = _model(
      _dictionary_of_one,
      (_X, {'kind': spec} if nested else spec),
      loss,
      loss_weights=weights,
  )
  keras_model = model.to_keras()
  keras_model.compile(loss=loss, loss_weights=weights)
  outputs = {'kind': tf.constant([[1.0, 2.0, 5.0]])}
  np.testing.assert_allclose(
      model.batch_loss(y, outputs), keras_model.compute_loss(None, y, outputs)
  )


@pytest.mark.parametrize(
    'labels',
    [
        tf.constant([2, 0, 1, 1]),
        tf.constant([[1.9999], [0.0], [1.0], [0.9999]]),  # As in Keras.
        tf.one_hot([2, 0, 1, 1], 3),
    ],
    ids=['vector', 'column', 'one_hot'],
)
def test_weights_of_classes(labels):
  found = objective.class_weights(labels, [1.0, 0.5, 4.0])
  np.testing.assert_array_equal(found, [4.0, 1.0, 0.5, 0.5])


def test_checked_weights_of_classes():
  specs = Batch(_X, _LABELS['kind'])
  assert objective.check_class_weight({1: 2, 0: 0}, specs) == [0.0, 2.0]
  with pytest.raises(ValueError, match='has the weight True'):
    objective.check_class_weight({0: True}, specs)


def _both(**losses_of):
  return dict(loss=losses_of or {'value': 'mse', 'kind': _CROSS_ENTROPY})


@pytest.mark.parametrize(
    ('build', 'spec', 'arguments', 'message'),
    [
        (
            _dictionary,
            (_X, _LABELS),
            _both(value='mse', other='mse'),
            "loss_fn has the entry 'other', but .* are 'kind', 'value'",
        ),
        (
            _list,
            (_X, _LABELS),
            dict(loss=['mse'] * 3),
            "loss_fn has 3 entries, but .* 2 outputs 'value', 'kind'",
        ),
        (
            _list,
            (_X, _LABELS),
            dict(loss=[None, None]),
            'loss_fn returns no loss for any output',
        ),
        (
            _dictionary,
            (_X, _LABELS),
            _both(value='mse', kind='categorical_crossentropy'),
            r"loss of the output 'kind' \(cat\w+\) cannot .* int32 and outp",
        ),
        (
            _dictionary,
            (_X, _LABELS),
            _both(
                value=losses.MeanSquaredError(reduction='none'),
                kind=_CROSS_ENTROPY,
            ),
            r"output 'value' has the shape \(None,\) .* average over the batch",
        ),
        (
            _dictionary,
            (_X, _LABELS),
            _both(
                value=losses.MeanSquaredError(reduction='sum'),
                kind=_CROSS_ENTROPY,
            ),
            r"output 'value' has the reduction 'sum'; .* average over",
        ),
        (
            _dictionary,
            (_X, {'value': _LABELS['value']}),
            _both(),
            "loss of the output 'kind' needs labels",
        ),
        (
            _dictionary,
            (_X, _LABELS, {'value': _WEIGHT}),
            _both(),
            "loss of the output 'kind' needs labels, and weights",
        ),
        (
            _dictionary,
            (_X, _LABELS),
            _both(value='nothing'),
            r"loss of the output 'value' \(nothing\) cannot be computed",
        ),
        (
            _dictionary,
            (_X, _LABELS),
            dict(_both(value='mse'), loss_weights={'kind': 2.0}),
            "loss_weights has a weight for the output 'kind', which has no",
        ),
        (
            _dictionary,
            (_X, _LABELS),
            dict(_both(), loss_weights={'kind': np.nan}),
            "loss_weights has nan for the output 'kind'; it must be a finite",
        ),
        (
            _single,
            (_X, _LABELS['kind']),
            dict(loss=[_CROSS_ENTROPY, 'mse']),
            'loss_fn has 2 entries, but the model has one output',
        ),
        (
            _single,
            (_X, _LABELS['kind']),
            dict(loss={'other': _CROSS_ENTROPY}),
            "loss_fn has the entry 'other', but the output .* is 'logits'",
        ),
        (
            _single,
            (_X, _LABELS['kind'], _WEIGHT),
            dict(loss=_NoWeights()),
            'cannot be computed .*unexpected keyword argument .sample_weight',
        ),
        (
            _dictionary_of_one,
            (_X, _LABELS['kind']),
            dict(loss={'second': _CROSS_ENTROPY}),
            "loss_fn has the entry 'second', but the output .* is 'kind'",
        ),
        (
            _dictionary,
            (_X, _LABELS),
            _both(first='mse', kind=_CROSS_ENTROPY),
            "loss_fn has the entry 'first', but .* are 'kind', 'value'",
        ),
        (
            _list,
            (_X, [_LABELS['value']]),
            _both(),
            "loss of the output 'kind' needs labels",
        ),
        (
            _dictionary,
            (_X, _LABELS),
            dict(_both(), metrics_fn=lambda: ['mae']),
            "metrics_fn has 1 entries, but .* 2 outputs 'kind', 'value'",
        ),
        (
            _dictionary,
            (_X, _LABELS),
            dict(_both(), metrics_fn=lambda: {'kind': ['nothing']}),
            "metrics_fn has an unknown metric of the output 'kind'",
        ),
        (
            _dictionary,
            (_X, _LABELS),
            dict(
                _both(),
                weighted_metrics_fn=lambda: {'kind': [keras.metrics.F1Score()]},
            ),
            "weighted_metrics_fn: the metric .* of the output 'kind' cannot",
        ),
        (
            _dictionary,
            (_X, _LABELS),
            dict(_both(), class_weight={0: 1.0, 1: 2.0}),
            'class_weight needs one class for each example',
        ),
        (
            _single,
            (_X, _LABELS['kind'], _WEIGHT),
            dict(loss=_CROSS_ENTROPY, class_weight={0: 1.0, 1: 2.0}),
            'class_weight is impossible for batches .* multiply sample_weight',
        ),
        (
            _single,
            (_X, _LABELS['kind']),
            dict(loss=_CROSS_ENTROPY, class_weight={1: 1.0, 2: 2.0}),
            r'a weight for each class from 0 on, but has weights for \[1, 2\]',
        ),
        (
            _single,
            (_X, _LABELS['kind']),
            dict(loss=_CROSS_ENTROPY, class_weight={0: 1.0, 1: -2.0}),
            'class_weight has the weight -2.0; weights must be finite',
        ),
    ],
)
def test_errors_name_the_output(build, spec, arguments, message):
  with pytest.raises(ValueError, match=message):
    _model(build, spec, **arguments)


def test_weights_of_classes_are_a_mapping():
  with pytest.raises(TypeError, match='must map each class to its weight'):
    _model(
        _single, (_X, _LABELS['kind']), _CROSS_ENTROPY, class_weight=[1.0, 2.0]
    )
