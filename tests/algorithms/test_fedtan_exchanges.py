"""Tests that FedTAN makes as few exchanges as the graph allows."""

import keras
import numpy as np
import pytest
import small_models
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import analysis
from tff_bn.runtime import execution
from tff_bn.runtime import plan_stage

_layers = keras.layers


def _chain(x):
  for _ in range(2):
    x = _layers.BatchNormalization()(_layers.Dense(4)(x))
  return x


def _branches(x):
  x = _layers.Dense(4)(x)
  short = _layers.BatchNormalization()(x)
  return _layers.Add()([_chain(x), short])


def _called_twice(x):
  norm = _layers.BatchNormalization()
  return norm(_layers.Dense(4)(norm(_layers.Dense(4)(x))))


def _first(x):
  """Needs no gradient of the layers before batch normalization."""
  return _layers.BatchNormalization()(x)


# The number of layers in a chain, and of those with a trainable variable
# before them.
_CASES = {
    'chain': (_chain, 2, 2),
    'branches': (_branches, 2, 2),
    'called_twice': (_called_twice, 2, 2),
    'first': (_first, 1, 0),
}


def _model(body):
  def keras_model_fn():
    inputs = keras.Input([3])
    return keras.Model(inputs, _layers.Dense(2)(body(inputs)))

  return small_models.classifier(keras_model_fn, (3,))


@pytest.fixture(name='num_uploads')
def _num_uploads(monkeypatch):
  """Returns the number of exchanges in the last computation."""
  passes = []
  compute_totals = execution.Execution._compute_totals

  def counting(self, number):
    added = []
    fold = self._plan.passes[number].fold
    call = plan_stage.Stage.__call__

    def counting_call(stage, *args, **kwargs):
      if stage is fold and stage.outputs:
        added.append(1)
      return call(stage, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(plan_stage.Stage, '__call__', counting_call)
      totals = compute_totals(self, number)
    passes.append(len(added))
    return totals

  monkeypatch.setattr(execution.Execution, '_compute_totals', counting)
  return passes


@pytest.mark.parametrize(
    ('name', 'moments'),
    [
        ('chain', 'fused'),
        ('chain', 'two_pass'),
        *(
            pytest.param(name, 'two_pass', marks=pytest.mark.slow)
            for name in _CASES
            if name != 'chain'
        ),
    ],
)
def test_exchanges(name, moments, in_process_runtime, num_uploads):
  body, forward, backward = _CASES[name]
  process = algorithms.build_fedtan(
      _model(body),
      tff.learning.optimizers.build_sgdm(0.1),
      moments=moments,
      local_steps=1,
  )
  state = process.initialize()
  rng = np.random.default_rng(0)
  datasets = [
      tf.data.Dataset.from_tensors(
          (rng.normal(size=[5, 3]).astype('f'), rng.integers(0, 2, 5, 'i'))
      )
      for _ in range(3)
  ]
  num_uploads.clear()
  process.next(state, datasets)
  expected = (2 if moments == 'two_pass' else 1) * forward + backward + 1
  # Three clients send in each exchange.
  assert [n for n in num_uploads if n] == [3] * expected
  assert analysis.computation_traffic(process.next).exchanges == expected


def test_forward_only_has_no_backward_exchanges():
  process = algorithms.build_fedtan(
      _model(_branches),
      tff.learning.optimizers.build_sgdm(0.1),
      synchronize='forward',
  )
  assert analysis.computation_traffic(process.next).exchanges == 2 * 2 + 1
