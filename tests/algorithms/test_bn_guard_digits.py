"""What BNGuard does to attackers, and to honest clients that differ."""

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn import data as tff_bn_data
from tff_bn import models
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.training import evaluation
from tff_bn.training import records

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm(0.5)
_NUM_CLIENTS, _NUM_ATTACKERS = 8, 2


@pytest.fixture(name='digits', scope='module')
def fixture_digits():
  return tff_bn_data.load_dataset('digits')


@pytest.fixture(name='model', scope='module')
def fixture_model(digits):
  keras.utils.set_random_seed(0)
  data = tff_bn_data.split_dataset(digits, 'iid', 2, seed=0)
  return BatchNormModel(
      models.build_model_fn('mlp3', digits.input_shape, digits.num_classes),
      data.element_spec,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [keras.metrics.SparseCategoricalAccuracy('accuracy')],
  )


def _train(process, data, client_ids, num_rounds):
  """Returns the weights, and the numbers of filtered clients."""
  state, numbers = process.initialize(), []
  for round_num in range(1, num_rounds + 1):
    datasets = [
        data.client_dataset(
            [client], seed=0, round_num=round_num, batch_size=32, local_steps=2
        )
        for client in client_ids
    ]
    output = process.next(state, datasets)
    state = output.state
    measured = output.metrics['aggregator']
    numbers.append(measured.get('num_filtered_clients'))
  return process.get_model_weights(state), numbers


@pytest.mark.slow
def test_attackers_with_shifted_inputs_are_left_out(digits, model):
  """The rest trains as if there were no attackers."""
  data = tff_bn_data.split_dataset(digits, 'iid', _NUM_CLIENTS, seed=0)
  data = tff_bn_data.with_shifted_inputs(data, _NUM_ATTACKERS)
  guarded = algorithms.build_fed_avg(model, _SGD, client_filter='bnguard')
  plain = algorithms.build_fed_avg(model, _SGD)
  assert not records._filter_columns(plain)
  ((name, column),) = records._filter_columns(guarded).items()
  assert name == 'num_filtered_clients'
  assert column(0, {}) is None

  weights, numbers = _train(guarded, data, data.client_ids, 12)
  honest, _ = _train(plain, data, data.client_ids[_NUM_ATTACKERS:], 12)

  assert numbers == [_NUM_ATTACKERS] * 12
  metrics = dict(aggregator=dict(num_filtered_clients=np.int32(2)))
  assert repr(column(1, metrics)) == '2'
  for a, b in zip(
      tf.nest.flatten(weights), tf.nest.flatten(honest), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  evaluator = evaluation.Evaluator(model)
  # It was 91 %.
  accuracy = evaluator.evaluate(weights, data.test_dataset(512))['accuracy']
  assert accuracy > 0.85


def test_honest_clients_of_one_class_are_left_out(digits, model):
  """A weakness: clients that differ form clusters without any attacker."""
  data = tff_bn_data.split_dataset(
      digits, 'classes', 10, seed=0, classes_per_client=1
  )
  process = algorithms.build_fbn(
      model, _SGD, local_steps=1, client_filter='bnguard'
  )
  _, numbers = _train(process, data, data.client_ids, 8)
  assert sum(number > 0 for number in numbers) >= 5


def test_algorithms_that_cannot_filter(model):
  for name, reason in (
      ('build_fed_bn', 'but they send none'),
      ('build_single', 'client_filter has no effect in single'),
  ):
    with pytest.raises(ValueError, match=reason):
      getattr(algorithms, name)(model, _SGD, client_filter='bnguard')
  hybrid = client_rounds.toy_model('build_hbn')
  with pytest.raises(ValueError, match="'bnguard' is impossible with HBN"):
    algorithms.build_hbn(hybrid, _SGD, client_filter='bnguard')
  for options in (
      dict(model_aggregator=aggregators.CoordinateMedian(1)),
      dict(statistics_aggregator=aggregators.CoordinateMedian(1)),
      dict(
          statistics_aggregator=aggregators.PooledMomentsFactory(
              aggregators.CoordinateMedian(1)
          )
      ),
      dict(drift_correction=algorithms.FedProx(0.1)),
      dict(sum_aggregator=tff.aggregators.SumFactory()),
  ):
    (name,) = options
    with pytest.raises(ValueError, match=f"'bnguard' is impossible .*{name}="):
      algorithms.build_fed_avg(
          model,
          _SGD,
          client_filter='bnguard',
          client_weighting='uniform',
          **options,
      )
  with pytest.raises(ValueError, match="client_filter='guard' must be one of"):
    algorithms.build_fed_avg(model, _SGD, client_filter='guard')
