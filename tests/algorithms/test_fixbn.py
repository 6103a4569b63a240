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


def test_first_fedavg_then_training_with_fixed_statistics(toy):
  model, process = client_rounds.toy_process(
      'build_fixbn',
      fixbn_rounds=2,
      statistics_aggregator=aggregators.PooledMomentsFactory(),
  )
  training = client_rounds.Training(process, len(_SIZES))
  expected = training.weights(model)
  for fixed in (False, False, True, True):
    results = [
        reference.train(expected, batches, 0.1, fixed=fixed)[0]
        for batches in client_rounds.batches(toy, _SIZES)
    ]
    before, expected = expected, reference.average_models(results, _SIZES)
    if not fixed:
      moments = ([w[i] for w in results] for i in reference.STATISTICS)
      expected[reference.MEAN], expected[reference.VARIANCE] = reference.pool(
          *moments, _SIZES
      )
    training.next_round(client_rounds.datasets(toy, _SIZES))
    client_rounds.assert_close(training.weights(model), expected)
    assert not np.allclose(before[0], expected[0])


def test_a_model_without_batch_normalization_is_refused(toy):
  model = BatchNormModel(
      lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]),
      toy.input_spec,
      toy.loss,
  )
  with pytest.raises(ValueError, match='FixBN .* batch normalization'):
    algorithms.build_fixbn(model, _SGD(0.1), fixbn_rounds=2)
