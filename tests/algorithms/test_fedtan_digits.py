"""Tests that FedTAN trains on handwritten digits like centralized training.

Each of five clients has two of the ten classes, so the statistics of their
batches differ from each other and from the global statistics.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import data as tff_bn_data
from tff_bn import models
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.training import evaluation

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_NUM_CLIENTS = 5
_BATCH_SIZE = 32
_RATE = 0.5
_SGD = tff.learning.optimizers.build_sgdm(_RATE)


@pytest.fixture(name='data', scope='module')
def fixture_data():
  return tff_bn_data.split_dataset(
      tff_bn_data.load_dataset('digits'),
      'classes',
      _NUM_CLIENTS,
      seed=0,
      classes_per_client=2,
  )


def _model(data, name, dtype='float32'):
  """Returns a model of `tff_bn.models` with all layers in the given dtype."""
  build = models.build_model_fn(
      name, data.dataset.input_shape, data.num_classes
  )

  def clone(layer):
    config = dict(layer.get_config(), dtype=dtype)
    return type(layer).from_config(config)

  def keras_model_fn():
    return keras.models.clone_model(
        build(), keras.Input(data.dataset.input_shape, dtype=dtype), clone
    )

  keras.utils.set_random_seed(0)
  x_spec, y_spec = data.element_spec
  return BatchNormModel(
      keras_model_fn,
      input_spec=(tf.TensorSpec(x_spec.shape, dtype), y_spec),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True, dtype=dtype
      ),
      metrics_fn=lambda: [
          keras.metrics.SparseCategoricalAccuracy(name='accuracy')
      ],
  )


def _client_batches(data, round_num, local_steps=1, dtype=np.float32):
  """Returns each client's batches of a round, as arrays."""
  return [
      [
          (x.astype(dtype), y)
          for x, y in data.client_dataset(
              [client_id],
              seed=0,
              round_num=round_num,
              batch_size=_BATCH_SIZE,
              local_steps=local_steps,
          ).as_numpy_iterator()
      ]
      for client_id in data.client_ids
  ]


def _dataset(batches):
  x, y = (np.stack(arrays) for arrays in zip(*batches, strict=True))
  return tf.data.Dataset.from_tensor_slices((x, y))


def _union(client_batches):
  """Returns one client with the unions of the clients' n-th batches."""
  return [
      tuple(np.concatenate(arrays) for arrays in zip(*batches, strict=True))
      for batches in zip(*client_batches, strict=True)
  ]


def _train(process, rounds, *, union=False):
  """Trains; yields the model's weights after each round."""
  state = process.initialize()
  for client_batches in rounds:
    if union:
      client_batches = [_union(client_batches)]
    datasets = [_dataset(batches) for batches in client_batches]
    state = process.next(state, datasets).state
    yield process.get_model_weights(state)


@pytest.mark.slow
def test_whole_trajectory_is_that_of_centralized_training(data):
  model = _model(data, 'small_cnn', 'float64')
  rounds = [_client_batches(data, r, dtype=np.float64) for r in range(1, 6)]
  fedtan = algorithms.build_fedtan(model, _SGD, local_steps=1, moments='fused')
  centralized = algorithms.build_centralized(model, _SGD)
  for actual, expected in zip(
      _train(fedtan, rounds), _train(centralized, rounds, union=True)
  ):
    # Running statistics, too.
    for a, b in zip(tf.nest.flatten(actual), tf.nest.flatten(expected)):
      np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_order_of_the_algorithms_with_five_steps(data):
  model = _model(data, 'mlp3')

  def schedule(num_finished_rounds):
    # Smaller steps when the statistics are fixed, as in the paper.
    return tf.where(num_finished_rounds < 8, _RATE, 0.1 * _RATE)

  processes = dict(
      centralized=algorithms.build_centralized(model, _SGD),
      fedtan=algorithms.build_fedtan(model, _SGD, local_steps=5),
      fedtan_forward_only=algorithms.build_fedtan(
          model, _SGD, synchronize='forward', local_steps=5
      ),
      fedtan_ii=algorithms.build_fedtan_ii(
          model,
          _SGD,
          sync_rounds=8,
          local_steps=5,
          client_learning_rate_schedule=schedule,
      ),
      fed_avg=algorithms.build_fed_avg(model, _SGD),
  )
  rounds = [_client_batches(data, number, 5) for number in range(1, 41)]
  evaluator = evaluation.Evaluator(model)
  test = data.test_dataset(512)
  # The mean accuracy in % after rounds 30 and 40. With five seeds FedTAN was 2
  # points below centralized training and 16 to 20 above FedAvg; with the
  # statistics alone synchronized, 6 to 7 below and 8 to 13 above these;
  # FedTAN-II at most 3 below FedTAN.
  mean = {}
  for name, process in processes.items():
    weights = list(_train(process, rounds, union=name == 'centralized'))
    mean[name] = np.mean(
        [
            100 * evaluator.evaluate(weights[number - 1], test)['accuracy']
            for number in (30, 40)
        ]
    )
  fedtan = mean['fedtan']
  assert mean['centralized'] - 4 < fedtan
  assert mean['fed_avg'] < fedtan - 10
  assert mean['fed_avg'] + 4 < mean['fedtan_forward_only'] < fedtan - 3
  assert fedtan - 5 < mean['fedtan_ii']
