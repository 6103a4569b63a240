"""Tests of FixBN."""

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import aggregators
from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)


def _weights(model, process, toy, num_rounds):
  """Returns the initial weights and the weights after each round."""
  training = client_rounds.Training(process, len(_SIZES))
  found = [training.weights(model)]
  for _ in range(num_rounds):
    training.next_round(client_rounds.datasets(toy, _SIZES))
    found.append(training.weights(model))
  return found


def test_first_fedavg_then_training_with_fixed_statistics(toy):
  options = dict(statistics_aggregator=aggregators.PooledMomentsFactory())
  model, fixbn = client_rounds.toy_process(
      'build_fixbn', fixbn_rounds=2, **options
  )
  _, fedavg = client_rounds.toy_process('build_fed_avg', **options)

  found = _weights(model, fixbn, toy, 4)

  client_rounds.assert_same(found[2], _weights(model, fedavg, toy, 2)[2])
  expected = found[2]
  for weights in found[3:]:
    results = [
        reference.train(expected, batches, 0.1, fixed=True)[0]
        for batches in client_rounds.batches(toy, _SIZES)
    ]
    expected = reference.average_models(results, _SIZES)
    for i in reference.STATISTICS:
      np.testing.assert_array_equal(weights[i], found[2][i])
    client_rounds.assert_close(weights, expected)
    assert not np.allclose(weights[0], found[2][0])


def test_a_model_without_batch_normalization_is_refused(toy):
  model = BatchNormModel(
      lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]),
      toy.input_spec,
      toy.loss,
  )
  with pytest.raises(ValueError, match='FixBN .* batch normalization'):
    algorithms.build_fixbn(model, _SGD(0.1), fixbn_rounds=2)
