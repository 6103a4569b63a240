"""Tests of replacing the `call` method of one layer."""

import keras
import numpy as np
import pytest

from tff_bn.keras_model import layer_calls

_X = np.ones([2, 3], np.float32)


def test_nested_contexts_restore_the_call_before():
  layer = keras.layers.ReLU()
  with layer_calls.replaced_call(layer, lambda x: 2 * x):
    doubling = layer.call
    with layer_calls.replaced_call(layer, lambda x: doubling(x) + 1):
      np.testing.assert_array_equal(layer(_X), 2 * _X + 1)
    np.testing.assert_array_equal(layer(_X), 2 * _X)
  np.testing.assert_array_equal(layer(_X), _X)
  assert 'call' not in vars(layer)


def test_an_error_restores_the_call():
  layer = keras.layers.ReLU()
  with (
      pytest.raises(ZeroDivisionError),
      layer_calls.replaced_call(layer, lambda x: 2 * x),
  ):
    raise ZeroDivisionError
  assert 'call' not in vars(layer)
