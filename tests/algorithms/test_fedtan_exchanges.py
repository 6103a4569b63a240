"""Tests that FedTAN makes as few exchanges as the graph allows."""

import keras
import pytest
import small_models
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import analysis

_layers = keras.layers


def _chain(x):
  for _ in range(2):
    x = _layers.BatchNormalization()(_layers.Dense(4)(x))
  return x


def _branches(x):
  x = _layers.Dense(4)(x)
  short = _layers.BatchNormalization()(x)
  return _layers.Add()([_chain(x), short])


def _first(x):
  """Needs no gradient of the layers before batch normalization."""
  return _layers.BatchNormalization()(x)


@pytest.mark.parametrize(
    ('body', 'options', 'expected'),
    [
        (_chain, {}, 2 * 2 + 2 + 1),
        (_chain, dict(moments='fused'), 2 + 2 + 1),
        (_branches, dict(synchronize='forward'), 2 * 2 + 1),
        (_first, {}, 2 + 1),
    ],
    ids=['two_pass', 'fused', 'forward_only_in_branches', 'nothing_before'],
)
def test_exchanges(body, options, expected):
  def keras_model_fn():
    inputs = keras.Input([3])
    return keras.Model(inputs, _layers.Dense(2)(body(inputs)))

  process = algorithms.build_fedtan(
      small_models.classifier(keras_model_fn, (3,)),
      tff.learning.optimizers.build_sgdm(0.1),
      **options,
  )
  assert analysis.computation_traffic(process.next).exchanges == expected
