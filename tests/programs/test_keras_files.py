"""Tests that the printed code loads models."""

import sys
import types

import keras
import numpy as np
import pytest

from tff_bn import layers
from tff_bn.programs import keras_files

# A user's module with layers and a function that Keras does not know.
_MODULE = types.ModuleType('users_module')
exec(
    """
import keras

class Doubling(keras.layers.Layer):
  def call(self, x):
    return 2 * x

class Tripling(Doubling):
  def call(self, x):
    return 3 * x

def squared(x):
  return x * x
""",
    _MODULE.__dict__,
)


@pytest.fixture(autouse=True)
def users_module(monkeypatch):
  monkeypatch.setitem(sys.modules, 'users_module', _MODULE)


def _model(*hidden):
  inputs = x = keras.layers.Input((4,))
  for layer in (*hidden, keras.layers.Dense(2)):
    x = layer(x)
  return keras.Model(inputs, x)


@pytest.mark.parametrize(
    ('hidden', 'imports', 'arguments'),
    [
        ([keras.layers.BatchNormalization], [], ''),
        (
            [layers.BatchRenormalization],
            ['import tff_bn.layers.batch_renormalization'],
            '',
        ),
        (
            [_MODULE.Doubling, _MODULE.Doubling],
            ['import users_module'],
            ", custom_objects={'Doubling': users_module.Doubling}",
        ),
        (
            [lambda: keras.layers.Activation(_MODULE.squared)],
            [],  # Keras does not save where a function is from.
            ", custom_objects={'squared': squared}",
        ),
        (
            [
                _MODULE.Tripling,
                layers.BatchRenormalization,
                lambda: keras.layers.Activation(_MODULE.squared),
                _MODULE.Doubling,
            ],
            [
                'import tff_bn.layers.batch_renormalization',
                'import users_module',
            ],
            ", custom_objects={'squared': squared,"
            " 'Doubling': users_module.Doubling,"
            " 'Tripling': users_module.Tripling}",
        ),
        (
            [lambda: keras.layers.Lambda(lambda x: 3 * x)],
            [],
            ', safe_mode=False',
        ),
    ],
)
def test_the_code_loads_the_model(hidden, imports, arguments, tmp_path):
  model = _model(*(build() for build in hidden))
  path = tmp_path / 'model.keras'
  model.save(path)

  code = keras_files.loading_code(path)

  assert code == [*imports, f"keras.models.load_model('{path}'{arguments})"]
  names = {'keras': keras, 'squared': _MODULE.squared}
  exec('\n'.join([*code[:-1], f'loaded = {code[-1]}']), names)
  x = np.ones((3, 4), np.float32)
  np.testing.assert_array_equal(names['loaded'](x).numpy(), model(x).numpy())
  if arguments:  # Without them, Keras refuses the file.
    with pytest.raises((TypeError, ValueError)):
      keras.models.load_model(path)
