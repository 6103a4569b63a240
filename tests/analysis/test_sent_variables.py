"""The variables that messages are about, against Keras's own list."""

import keras
import pytest
import small_models
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import analysis
from tff_bn.analysis import sent_variables


def _keras_model():
  layers = keras.layers
  return keras.Sequential(
      [
          keras.Input((6,)),
          layers.Normalization(mean=1.0, variance=4.0),
          layers.Dense(4, name='first', trainable=False),
          layers.BatchNormalization(name='frozen_bn', trainable=False),
          layers.Dense(4, name='second'),
          layers.BatchNormalization(name='bn_1'),
          layers.BatchNormalization(name='bn_2', scale=False),
          layers.Dense(3, name='logits'),
      ],
      name='net',
  )


@pytest.fixture(scope='module')
def model():
  return small_models.classifier(_keras_model, (6,))


_LAYERS = {
    'net/second': ('kernel', 'bias'),
    'net/bn_1': ('gamma', 'beta', 'moving_mean', 'moving_variance'),
    'net/bn_2': ('beta', 'moving_mean', 'moving_variance'),
    'net/logits': ('kernel', 'bias'),
}


def _named(model, builder, direction):
  """Returns the shapes of the messages about variables, by the variable."""
  process = builder(model, tff.learning.optimizers.build_sgdm(0.1))
  messages = analysis.messages(process.next)
  names = sent_variables.sent_variables(model, messages)
  named = [
      (name, message.shape)
      for name, message in zip(names, messages, strict=True)
      if name and message.direction is direction
  ]
  assert len(dict(named)) == len(named)
  return dict(named)


def _shapes(model):
  return {v.path: tuple(v.shape) for v in model.keras_model.weights}


def test_server_sends_what_training_changes(model):
  found = _named(model, algorithms.build_fed_avg, analysis.Direction.DOWN)
  expected = {f'{layer}/{v}' for layer, vs in _LAYERS.items() for v in vs}
  assert found == {path: _shapes(model)[path] for path in expected}


def test_clients_send_updates_and_moments(model):
  found = _named(model, algorithms.build_fed_avg, analysis.Direction.UP)
  assert found == {
      **{
          f'{layer}/{variable}': _shapes(model)[f'{layer}/{variable}']
          for layer, variables in _LAYERS.items()
          for variable in variables
          if not variable.startswith('moving')
      },
      **{
          f'{layer}/{moment}': () if moment == 'count' else (4,)
          for layer in ('net/bn_1', 'net/bn_2')
          for moment in ('count', 'mean', 'variance')
      },
  }


def test_local_variables_are_not_sent(model):
  for direction in analysis.Direction:
    found = _named(model, algorithms.build_fed_bn, direction)
    assert set(found) == {
        f'{layer}/{variable}'
        for layer in ('net/second', 'net/logits')
        for variable in ('kernel', 'bias')
    }
