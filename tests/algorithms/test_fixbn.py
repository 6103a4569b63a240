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


def _states(process, toy, num_rounds):
  """Returns the initial state and the states after each round."""
  states = [process.initialize()]
  for _ in range(num_rounds):
    data = [toy.dataset(size, seed) for seed, size in enumerate(_SIZES)]
    states.append(process.next(states[-1], data).state)
  return states


def _fixed_local(weights, x, y):
  weights = [w.copy() for w in weights]
  for batch in reference.split(x, y):
    _, grads, _, _ = reference.gradients(weights, *batch, fixed=True)
    weights = [w if g is None else w - 0.1 * g for w, g in zip(weights, grads)]
  return weights


def test_first_fedavg_then_training_with_fixed_statistics(toy):
  options = dict(statistics_aggregator=aggregators.PooledMomentsFactory())
  model, fixbn = client_rounds.toy_process(
      'build_fixbn', fixbn_rounds=2, **options
  )
  _, fedavg = client_rounds.toy_process('build_fed_avg', **options)

  states = _states(fixbn, toy, 4)
  found = [
      model.from_model_weights(fixbn.get_model_weights(state))
      for state in states
  ]

  after_fedavg = fedavg.get_model_weights(_states(fedavg, toy, 2)[-1])
  for value, truth in zip(found[2], model.from_model_weights(after_fedavg)):
    np.testing.assert_array_equal(value, truth)
  expected = found[2]
  for weights in found[3:]:
    results = [
        _fixed_local(expected, *toy.arrays(size, seed))
        for seed, size in enumerate(_SIZES)
    ]
    expected = [reference.average(both, _SIZES) for both in zip(*results)]
    for i in reference.STATISTICS:
      np.testing.assert_array_equal(weights[i], found[2][i])
    for value, truth in zip(weights, expected):
      np.testing.assert_allclose(value, truth, rtol=1e-10, atol=1e-12)
    assert not np.allclose(weights[0], found[2][0])


@pytest.mark.parametrize('fixbn_rounds', [0, -1, 1.5, '2', None])
def test_a_wrong_number_of_rounds_is_refused(fixbn_rounds):
  with pytest.raises(
      (TypeError, ValueError), match='fixbn_rounds.* whole number, at least 1'
  ):
    client_rounds.toy_process('build_fixbn', fixbn_rounds=fixbn_rounds)


def test_a_model_without_batch_normalization_is_refused(toy):
  model = BatchNormModel(
      lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]),
      toy.input_spec,
      toy.loss,
  )
  with pytest.raises(ValueError, match='FixBN .* batch normalization'):
    algorithms.build_fixbn(model, _SGD(0.1), fixbn_rounds=2)
