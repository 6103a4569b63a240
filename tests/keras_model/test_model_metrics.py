"""Tests that metrics of any kind can be traced, and added up over clients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn.keras_model import batch
from tff_bn.keras_model import model_metrics
from tff_bn.keras_model import outputs
from tff_bn.training import evaluation

metrics = keras.metrics
ops = keras.ops

_CLASSES = 3
_SPEC = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, _CLASSES)))


class Counts(metrics.Metric):
  """Has a dictionary of results, and variables that appear late."""

  def __init__(self, name='counts'):
    super().__init__(name=name)
    self.labels = self.batches = None

  def update_state(self, y_true, y_pred, sample_weight=None):
    del y_pred, sample_weight
    if self.labels is None:
      self.labels = self.add_variable((_CLASSES,), 'zeros', name='labels')
      self.batches = self.add_variable((), 'zeros', 'int32', name='batches')
    self.labels.assign_add(ops.sum(y_true, axis=0))
    self.batches.assign_add(1)

  def result(self):
    return {'num_labels': self.labels.value, 'num_batches': self.batches.value}


class _Custom(metrics.Metric):
  """A metric of one variable."""

  def __init__(self, dtype='float32'):
    super().__init__(name='custom')
    self.state = self.add_variable((), 'zeros', dtype, name='state')

  def result(self):
    return self.state.value


class Largest(_Custom):

  def update_state(self, y_true, y_pred, sample_weight=None):
    del y_true, sample_weight
    self.state.assign(ops.maximum(self.state, ops.max(y_pred)))


class MovingAverage(_Custom):

  def update_state(self, y_true, y_pred, sample_weight=None):
    del y_true, sample_weight
    self.state.assign(0.9 * self.state + 0.1 * ops.mean(y_pred))


class Count(_Custom):

  def __init__(self, first=0):
    super().__init__()
    self.first = first

  def reset_state(self):
    self.state.assign(self.first)

  def update_state(self, y_true, y_pred, sample_weight=None):
    del y_true, sample_weight
    self.state.assign(self.state + ops.cast(ops.size(y_pred), 'float32'))


class Flag(_Custom):

  def __init__(self):
    super().__init__(dtype='bool')

  def update_state(self, y_true, y_pred, sample_weight=None):
    del y_true, y_pred, sample_weight
    self.state.assign(True)


class PositiveLabels(Count):
  """Does not take the labels 0 of a test of additivity."""

  def update_state(self, y_true, y_pred, sample_weight=None):
    if not tf.inside_function() and np.any(np.asarray(y_true) <= 0):
      raise ValueError('labels must be positive')
    super().update_state(y_true, y_pred, sample_weight)


class AnyLength(Count):
  """Has a vector of unknown length as its result."""

  def result(self):
    return ops.arange(ops.cast(self.state, 'int32'))


def _all_metrics():
  return [
      metrics.F1Score(average=None),
      metrics.R2Score(name='adjusted_r2', num_regressors=2),
      metrics.AUC(multi_label=True, num_thresholds=20),
      metrics.OneHotMeanIoU(_CLASSES),
      metrics.OneHotMeanIoU(_CLASSES, sparse_y_pred=False),
      metrics.MeanMetricWrapper(
          lambda y, output: ops.sum(ops.abs(y - output), -1), name='wrapped'
      ),
      Counts(),
  ]


# Keras numbers the unnamed ones for the whole process.
_NAMES = [
    'f1_score',
    'adjusted_r2',
    'auc',
    'one_hot_mean_io_u',
    'one_hot_mean_io_u_1',
    'wrapped',
    'counts',
]


def _keras_model():
  keras.utils.set_random_seed(1)
  return keras.Sequential(
      [
          keras.Input((4,)),
          keras.layers.Dense(_CLASSES),
          keras.layers.BatchNormalization(),
          keras.layers.Activation('sigmoid'),
      ]
  )


def _model(metrics_fn, keras_model_fn=_keras_model, spec=_SPEC):
  return BatchNormModel(
      keras_model_fn, spec, keras.losses.MeanSquaredError, metrics_fn
  )


@pytest.fixture(scope='module', name='model')
def fixture_model():
  return _model(_all_metrics)


@pytest.fixture(scope='module', name='evaluator')
def fixture_evaluator(model):
  return evaluation.Evaluator(model)


def _batches(seed, num_batches=2, size=6):
  rng = np.random.default_rng(seed)
  return [
      (
          rng.normal(seed, 1, (size, 4)).astype(np.float32),
          np.eye(_CLASSES, dtype=np.float32)[rng.integers(0, _CLASSES, size)],
      )
      for _ in range(num_batches)
  ]


def _dataset(batches):
  return tf.data.Dataset.from_generator(lambda: batches, output_signature=_SPEC)


def _keras_results(labels_and_outputs):
  """The results of Keras's metrics, eagerly, by their names."""
  labels_and_outputs = list(labels_and_outputs)
  expected = {}
  for name, metric in zip(_NAMES, _all_metrics(), strict=True):
    for y, output in labels_and_outputs:
      metric.update_state(y, output)
    result = metric.result()
    expected.update(result if isinstance(result, dict) else {name: result})
  return {name: np.asarray(value) for name, value in expected.items()}


def _assert_equal(found, expected):
  assert found.keys() - {'loss', 'num_examples'} == expected.keys()
  for name, value in expected.items():
    assert np.shape(found[name]) == value.shape, name
    np.testing.assert_allclose(
        found[name], value, rtol=1e-4, atol=1e-6, err_msg=name
    )


def test_shapes_of_results(model):
  assert model.metric_shapes['f1_score'] == (_CLASSES,)
  assert model.metric_shapes['auc'] == ()
  assert model.metric_shapes['num_labels'] == (_CLASSES,)
  assert 'one_hot_mean_io_u_1' in model.metric_shapes
  assert 'counts' not in model.metric_shapes


@pytest.mark.usefixtures('in_process_runtime')
class TestClients:
  """Clients of different sizes, whose weights a learning rate of 0 keeps."""

  _CLIENTS = [_batches(0, 2), _batches(1, 1), _batches(2, 2, size=4)]
  _SGD = tff.learning.optimizers.build_sgdm(0.0)

  def test_training_equals_keras_on_the_union(self, model):
    process = algorithms.build_fed_avg(model, self._SGD)
    output = process.next(
        process.initialize(), [_dataset(batches) for batches in self._CLIENTS]
    )
    keras_model = model.to_keras()
    _assert_equal(
        output.metrics['client_work']['train'],
        _keras_results(
            (y, keras_model(x, training=True))
            for batches in self._CLIENTS
            for x, y in batches
        ),
    )

  def test_first_step_of_fedtan_equals_keras_on_the_union(self, model):
    process = algorithms.build_fedtan(
        model, self._SGD, local_steps=1, moments='fused'
    )
    clients = [batches[:1] for batches in self._CLIENTS]
    output = process.next(
        process.initialize(), [_dataset(batches) for batches in clients]
    )
    x, y = (
        np.concatenate([batch[part] for (batch,) in clients]) for part in (0, 1)
    )
    found = output.metrics['client_work']['train']
    assert found.pop('num_batches') == len(clients)
    expected = _keras_results([(y, model.to_keras()(x, training=True))])
    del expected['num_batches']
    _assert_equal(found, expected)


class TestEvaluation:

  def test_equals_keras(self, model, evaluator):
    batches = _batches(3)
    found = evaluator.evaluate(model.initial_weights, _dataset(batches))
    keras_model = model.to_keras()
    _assert_equal(
        found,
        _keras_results((y, keras_model(x, training=False)) for x, y in batches),
    )

  def test_no_data_and_means_over_clients(self, model, evaluator):
    clients = {'a': _batches(4), 'b': [], 'c': _batches(5, 1)}

    results = evaluator.evaluate_each_client(
        dict.fromkeys(clients, model.initial_weights),
        lambda client_id: _dataset(clients[client_id]),
    )

    np.testing.assert_array_equal(results['b']['f1_score'], [np.nan] * 3)
    mean = evaluation.mean_over_clients(results)
    for name in ('f1_score', 'auc'):
      np.testing.assert_allclose(
          mean[name], (results['a'][name] + results['c'][name]) / 2
      )
    numbers = evaluation.numbers(mean)
    assert tuple(numbers) == ('loss', *evaluator.metric_names, 'num_examples')
    assert numbers['f1_score_2'] == mean['f1_score'][2]


@pytest.mark.parametrize(('length', 'num_updates'), [(2**10, 4), (2**23, 0)])
def test_large_examples_are_not_computed(length, num_updates):
  sizes = []

  class Recording(Count):

    def update_state(self, y_true, y_pred, sample_weight=None):
      super().update_state(y_true, y_pred)
      if not tf.inside_function():
        sizes.append(len(y_pred))

  specs = batch.Batch(tf.TensorSpec((None,)), tf.TensorSpec((None,)))
  output = outputs.Output('', (), '', tf.TensorSpec((None, length)))
  metric = model_metrics.OutputMetric(Recording(), output, False, 'metrics_fn')
  model_metrics.check({'count': metric}, specs)
  assert sizes == [2, 3, 2, 3][:num_updates]


def test_states_start_as_after_a_reset():
  class FromOne(Count):

    def __init__(self):
      super().__init__()
      self.state.assign(1.0)

    reset_state = keras.metrics.Metric.reset_state

  (metric,) = _model(lambda: [FromOne()]).new_metrics().values()
  assert metric.metric.state == 0


def test_names_do_not_depend_on_other_metrics_of_the_process():
  def metrics_fn():
    return [metrics.MeanIoU(2), metrics.MeanIoU(2), metrics.MeanIoU(2, 'mean')]

  for _ in range(2):
    metrics.MeanIoU(2)
    model = _model(lambda: [*metrics_fn()[:2], metrics.MeanIoU(2, name='mean')])
    assert list(model.new_metrics()) == ['mean_io_u', 'mean_io_u_1', 'mean']


def test_entries():
  results = {'a': np.float32(1), 'b': np.array([2, 3]), 'c': np.eye(2)}
  assert model_metrics.entries(results) == {
      'a': 1,
      'b_0': 2,
      'b_1': 3,
      'c_0_0': 1,
      'c_0_1': 0,
      'c_1_0': 0,
      'c_1_1': 1,
  }


class _Subclassed(keras.Model):

  def __init__(self):
    super().__init__()
    self.dense = keras.layers.Dense(_CLASSES, activation='sigmoid')

  def call(self, x):
    return self.dense(x)


def _of_any_length():
  return keras.Sequential(
      [keras.Input((None, 4)), keras.layers.Dense(_CLASSES, dtype='bfloat16')]
  )


@pytest.mark.parametrize('keras_model_fn', [_Subclassed, _of_any_length])
def test_output_of_other_models(keras_model_fn):
  x_shape = (None, 4) if keras_model_fn is _Subclassed else (None, 7, 4)
  model = _model(
      list, keras_model_fn, (tf.TensorSpec(x_shape), tf.TensorSpec((None, 3)))
  )
  spec = model_metrics.output_spec(model.keras_model, model.input_spec[0])
  assert spec.shape.as_list() == [*x_shape[:-1], _CLASSES]
  assert spec.dtype == tf.float32


@pytest.mark.parametrize(
    ('metric_fn', 'message'),
    [
        (Largest, "'custom' .Largest. has variables that are not sums"),
        (MovingAverage, "'custom' .MovingAverage. has variables that are not"),
        (lambda: Count(first=1), "'custom' .Count. has variables that are not"),
        (Flag, "'custom' .Flag. has variables that are not sums"),
        (AnyLength, r"has the result 'custom' of shape \(None,\)"),
        (
            lambda: metrics.F1Score(name='loss'),
            r"named \['loss'\]; the names must .* 'loss' and 'num_examples'",
        ),
    ],
)
def test_metrics_that_are_refused(metric_fn, message):
  with pytest.raises(ValueError, match=message):
    _model(lambda: [metric_fn()])


def test_metric_that_does_not_fit_the_labels():
  spec = _SPEC[0], tf.TensorSpec((None,), tf.int32)
  with pytest.raises(
      ValueError,
      match=(
          r"the metric 'f1_score' \(F1Score\) cannot be computed from"
          r' labels of shape \(None,\) and dtype int32 and outputs of shape'
          r' \(None, 3\) and dtype float32: .*expects 2D'
      ),
  ):
    _model(lambda: [metrics.F1Score()], spec=spec)


def test_two_results_with_one_name():
  with pytest.raises(ValueError, match='f1_score_1.*names must be unique'):
    _model(
        lambda: [metrics.F1Score(), metrics.AUC(name='f1_score_1')],
    )


def test_metric_that_does_not_take_random_data():
  assert list(_model(lambda: [PositiveLabels()]).metric_shapes) == ['custom']
