"""How many values of a channel batch normalization gets from an example."""

import keras
import pytest

from tff_bn.keras_model import batch_norm_positions


def _model(shape, *layers):
  return keras.Sequential([keras.Input(shape), *layers])


class _Subclass(keras.Model):

  def __init__(self):
    super().__init__()
    self.norm = keras.layers.BatchNormalization()

  def call(self, x):
    return self.norm(x)


def _called_twice():
  inputs = keras.Input((4, 3))
  norm = keras.layers.BatchNormalization()
  return keras.Model(inputs, norm(norm(inputs)))


def _subclass():
  model = _Subclass()
  model(keras.ops.zeros((1, 4, 3)))
  return model


def _norm(**options):
  return keras.layers.BatchNormalization(**options)


@pytest.mark.parametrize(
    ('build', 'expected'),
    [
        (lambda: _model((5,), _norm()), 1),
        (lambda: _model((5, 4, 3), _norm()), 20),
        (lambda: _model((5, 4, 3), _norm(axis=1)), 12),
        (
            lambda: _model((8, 8, 1), _norm(), keras.layers.Flatten(), _norm()),
            64,
        ),
        (_called_twice, 8),
        (lambda: _model((None, 3), _norm()), None),
        (lambda: _model((6, 3), _norm(trainable=False)), 1),
        (lambda: _model((4,), keras.layers.Dense(2)), 1),
        (_subclass, None),
    ],
)
def test_positions(build, expected):
  assert batch_norm_positions.most_values_per_example(build()) == expected
