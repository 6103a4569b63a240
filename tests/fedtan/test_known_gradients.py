"""Tests that FedTAN's clients leave out what the server knows already."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn import analysis
from tff_bn import models

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_OPTIMIZERS = tff.learning.optimizers
_SGD = _OPTIMIZERS.build_sgdm
_NORM = dict(dtype='float64', momentum=0.75, epsilon=1e-3)
_SIZES = (5, 6, 7)
# Dense layers with 4 units and 4 inputs, or 3 before the first.
_FLOAT64 = 8
_AFFINE = 2 * 4 * _FLOAT64


def _dense(units):
  return keras.layers.Dense(units, dtype='float64')


def _chain(x):
  for _ in range(2):
    x = keras.layers.BatchNormalization(**_NORM)(_dense(4)(x))
    x = keras.layers.ReLU(dtype='float64')(x)
  return x


def _model(body=_chain):
  def keras_model_fn():
    inputs = keras.Input([3], dtype='float64')
    return keras.Model(inputs, _dense(2)(body(inputs)))

  keras.utils.set_random_seed(0)
  return BatchNormModel(
      keras_model_fn,
      (tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec([None], tf.int32)),
      lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True, dtype='float64'
      ),
  )


def _datasets(round_num):
  rng = np.random.default_rng(round_num)
  return [
      tf.data.Dataset.from_tensors(
          (rng.normal(k, 1, [n, 3]), rng.integers(0, 2, n).astype(np.int32))
      )
      for k, n in enumerate(_SIZES)
  ]


def _run(process, model, data=_datasets, num_rounds=3):
  state = process.initialize()
  for number in range(num_rounds):
    output = process.next(state, data(number))
    state = output.state
  weights = process.get_model_weights(state)
  return model.from_model_weights(weights), output.metrics


def _build(model, local_steps=1, optimizer=None, **options):
  """The datasets have one batch, so `None` local steps are one step, too."""
  arguments = dict(moments='fused', local_steps=local_steps, **options)
  return algorithms.build_fedtan(model, optimizer or _SGD(0.25), **arguments)


def _upload(process):
  return analysis.computation_traffic(process.next).upload_bytes


@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(client_weighting='uniform', optimizer=_SGD(0.25, 0.9)),
        dict(
            client_weight_decay=0.125,
            client_warmup_rounds=8,
            client_warmup_steps=2,
            client_learning_rate_schedule=lambda n: tf.gather(
                tf.constant([0.5, 0.25, 0.125, 0.0]), n
            ),
        ),
        dict(
            server_optimizer=_OPTIMIZERS.build_adam(0.01),
            drift_correction=algorithms.FedProx(0.1),
            server_clip_norm=0.5,
            model_aggregator=aggregators.WeightedMeanFactory(),
        ),
    ],
    ids=['default', 'momentum', 'decay_and_rates', 'server'],
)
def test_equals_the_version_that_sends(options):
  model = _model()
  short, full = (_build(model, steps, **options) for steps in (1, None))
  # The scales and shifts of two layers.
  assert _upload(short) == _upload(full) - 2 * _AFFINE
  traffic = [analysis.computation_traffic(p.next) for p in (short, full)]
  assert traffic[0].download_bytes == traffic[1].download_bytes
  assert traffic[0].exchanges == traffic[1].exchanges
  found, metrics = _run(short, model)
  expected, expected_metrics = _run(full, model)
  for value, truth in zip(found, expected, strict=True):
    np.testing.assert_allclose(value, truth, rtol=1e-12, atol=1e-14)
  initial = model.from_model_weights(model.initial_weights)
  assert all(
      np.abs(a - b).max() > 1e-6 for a, b in zip(found[2:4], initial[2:4])
  )
  # The clients' reports include what they leave out.
  name = 'max_update_norm_ratio'
  assert metrics['client_work'][name] == pytest.approx(
      expected_metrics['client_work'][name], rel=1e-6
  )


def _first(x):
  """Nothing is trained before the first layer, which asks for no sums."""
  return _chain(keras.layers.BatchNormalization(**_NORM)(x))


def _called_twice(x):
  norm = keras.layers.BatchNormalization(**_NORM)
  return norm(_dense(4)(norm(_dense(4)(x))))


def _regularized(x):
  x = keras.layers.BatchNormalization(
      **_NORM, gamma_regularizer=keras.regularizers.L2(0.1)
  )(_dense(4)(x))
  return x


class _Scaled(keras.layers.Layer):
  """Multiplies by the scale of another layer."""

  def __init__(self, norm):
    super().__init__(dtype='float64')
    self._norm = norm

  def call(self, x):
    return x * self._norm.gamma


def _used_elsewhere(x):
  norm = keras.layers.BatchNormalization(**_NORM)
  return _Scaled(norm)(norm(_dense(4)(x)))


def _without_shift(x):
  return keras.layers.BatchNormalization(center=False, **_NORM)(_dense(4)(x))


def _frozen(x):
  norm = keras.layers.BatchNormalization(**_NORM)
  more = keras.layers.BatchNormalization(**_NORM)
  more.trainable = False
  return more(norm(_dense(4)(x)))


@pytest.mark.parametrize(
    ('body', 'num_left_out'),
    [
        (_first, 4),
        (_called_twice, 0),
        (_regularized, 1),
        (_used_elsewhere, 1),
        (_without_shift, 1),
        (_frozen, 2),
    ],
)
def test_variables_that_have_other_gradients_are_sent(body, num_left_out):
  model = _model(body)
  short, full = (_build(model, steps) for steps in (1, None))
  assert _upload(full) - _upload(short) == num_left_out * 4 * _FLOAT64
  for value, truth in zip(
      _run(short, model)[0], _run(full, model)[0], strict=True
  ):
    np.testing.assert_allclose(value, truth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    'options',
    [
        dict(local_steps=2),
        dict(optimizer=_OPTIMIZERS.build_adam(0.01)),
        dict(client_gradient_clip_norm=0.5),
        dict(moments='two_pass'),
        dict(synchronize='forward'),
        dict(
            client_weighting='uniform',
            model_aggregator=aggregators.CoordinateMedian(),
        ),
    ],
)
def test_everything_is_sent_where_the_server_does_not_know_the_change(options):
  model = _model()
  arguments = dict(moments='fused', local_steps=1, optimizer=_SGD(0.25))
  arguments.update(options)
  optimizer = arguments.pop('optimizer')
  short = algorithms.build_fedtan(model, optimizer, **arguments)
  if arguments['local_steps'] == 1:
    arguments['local_steps'] = None
  full = algorithms.build_fedtan(model, optimizer, **arguments)
  assert _upload(short) == _upload(full)


def _with_left_out(round_num):
  data = _datasets(round_num)
  x, y = next(iter(data[1]))
  data[1] = tf.data.Dataset.from_tensors((x * np.nan, y))
  data.append(tf.data.Dataset.from_tensors((x[:0], y[:0])))
  return data


def test_clients_without_data_or_with_nan_are_left_out():
  model = _model()
  values, metrics = [], []
  for steps in (1, None):
    value, metric = _run(_build(model, steps), model, _with_left_out)
    values.append(value)
    metrics.append(metric['client_work'])
  for value, truth in zip(*values, strict=True):
    np.testing.assert_allclose(value, truth, rtol=1e-12, atol=1e-14)
  assert metrics[0]['num_dropped_clients'] == 1
  assert metrics[0]['num_participants'] == 2


def test_without_clients_nothing_changes():
  model = _model()

  def nothing(round_num):
    return [data.take(0) for data in _datasets(round_num)]

  found, _ = _run(_build(model, client_weight_decay=0.5), model, nothing)
  before = model.from_model_weights(model.initial_weights)
  for value, truth in zip(found, before, strict=True):
    np.testing.assert_array_equal(value, truth)


def test_the_learning_rate_can_be_set():
  model = _model()
  process = _build(model)
  state = process.initialize()
  hparams = process.get_hparams(state)
  hparams['client_work']['learning_rate'] = np.zeros_like(
      hparams['client_work']['learning_rate']
  )
  state = process.set_hparams(state, hparams)
  found = process.get_model_weights(process.next(state, _datasets(0)).state)
  for value, truth in zip(
      found.trainable, model.initial_weights.trainable, strict=True
  ):
    np.testing.assert_array_equal(value, truth)


def test_fedtan_ii_goes_on_with_what_it_had():
  model = _model()
  results = []
  for steps in (1, None):
    process = algorithms.build_fedtan_ii(
        model, _SGD(0.25), sync_rounds=2, moments='fused', local_steps=steps
    )
    results.append(_run(process, model)[0])
  for value, truth in zip(*results, strict=True):
    np.testing.assert_allclose(value, truth, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_megabytes_of_resnet20_by_hand():
  """FedTAN, section 5.3: five clients, 4-byte floats, MB of 2^20 bytes."""
  model = BatchNormModel(
      models.build_model_fn('resnet20', (32, 32, 3), 10),
      (tf.TensorSpec([None, 32, 32, 3]), tf.TensorSpec([None], tf.int32)),
      lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )
  num_values, num_statistics = 271_098, 1_376
  traffic = analysis.computation_traffic(
      algorithms.build_fedtan(
          model, _SGD(0.1), moments='fused', local_steps=1
      ).next
  )
  assert traffic == analysis.Traffic(
      exchanges=2 * 19 + 1,
      # The model, statistics, and sums of gradients.
      download_bytes=4 * (num_values + 2 * num_statistics),
      # Statistics, gradients, and the model without scales and shifts.
      upload_bytes=4 * (num_values + num_statistics),
  )
  assert f'{traffic.megabytes(5):.4f}' == '6.2417'
