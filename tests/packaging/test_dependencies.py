"""Tests of the checks before the import of TensorFlow Federated."""

import importlib.machinery
import runpy
import sys
import types

import pytest

import tff_bn
from tff_bn.imports import dependencies


def _module(name: str, version: str) -> types.ModuleType:
  module = types.ModuleType(name)
  module.__version__ = version
  module.__spec__ = importlib.machinery.ModuleSpec(name, None)
  return module


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
  """Installs empty modules with supported versions."""
  modules = {
      'tensorflow': _module('tensorflow', '2.21.0'),
      'keras': _module('keras', '3.15.1'),
      'tensorflow_federated': _module('tensorflow_federated', '0.87.0'),
  }
  modules['keras'].backend = types.SimpleNamespace(backend=lambda: 'tensorflow')
  for name, module in modules.items():
    monkeypatch.setitem(sys.modules, name, module)
  monkeypatch.delenv('KERAS_BACKEND', raising=False)
  monkeypatch.delenv('TF_USE_LEGACY_KERAS', raising=False)
  return modules


def _message() -> str:
  with pytest.raises(ImportError) as raised:
    dependencies.require_tff()
  return str(raised.value)


@pytest.mark.parametrize(
    ('name', 'version'),
    [
        ('tensorflow', '2.19.1'),
        ('tensorflow', '2.21.0'),
        ('keras', '3.10.0'),
        ('tensorflow_federated', '0.87.0'),
    ],
)
def test_supported_versions(
    installed: dict[str, types.ModuleType], name: str, version: str
):
  installed[name].__version__ = version
  dependencies.require_tff()


@pytest.mark.parametrize(
    ('name', 'version', 'needed'),
    [
        ('tensorflow', '2.14.1', 'TensorFlow 2.19 to 2.21'),
        ('tensorflow', '2.22.0', 'TensorFlow 2.19 to 2.21'),
        ('keras', '2.14.0', 'Keras 3.10 or newer'),
        ('keras', '3.9.2', 'Keras 3.10 or newer'),
        ('tensorflow_federated', '0.86.0', 'TensorFlow Federated 0.87'),
        ('tensorflow_federated', '0.89.0', 'TensorFlow Federated 0.87'),
    ],
)
def test_unsupported_version_is_an_error(
    installed: dict[str, types.ModuleType],
    name: str,
    version: str,
    needed: str,
):
  installed[name].__version__ = version
  message = _message()
  assert f'need {needed}, but version {version} is installed' in message
  assert 'tensorflow-federated==0.87.0' in message


def test_version_of_an_unimported_package_is_checked(
    monkeypatch: pytest.MonkeyPatch,
):
  monkeypatch.delitem(sys.modules, 'tensorflow')
  monkeypatch.setattr('importlib.metadata.version', lambda name: '2.14.1')
  assert 'but version 2.14.1 is installed' in _message()


@pytest.mark.parametrize('value', ['1', 'true', 'True'])
def test_keras_2_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str):
  monkeypatch.setenv('TF_USE_LEGACY_KERAS', value)
  message = _message()
  assert f'TF_USE_LEGACY_KERAS={value}' in message
  assert 'Unset this environment variable' in message


@pytest.mark.parametrize('value', ['', '0', 'false'])
def test_keras_2_variable_can_be_false(
    monkeypatch: pytest.MonkeyPatch, value: str
):
  monkeypatch.setenv('TF_USE_LEGACY_KERAS', value)
  dependencies.require_tff()


def test_backend_variable_is_checked_before_keras_is_imported(
    monkeypatch: pytest.MonkeyPatch,
):
  monkeypatch.setenv('KERAS_BACKEND', 'jax')
  # Keras is already imported with TensorFlow's backend.
  dependencies.require_tff()
  monkeypatch.delitem(sys.modules, 'keras')
  message = _message()
  assert 'KERAS_BACKEND=jax' in message
  assert 'to tensorflow' in message


def test_other_backend_of_the_imported_keras_is_an_error(
    installed: dict[str, types.ModuleType],
):
  installed['keras'].backend.backend = lambda: 'jax'
  message = _message()
  assert 'the backend jax' in message
  assert 'KERAS_BACKEND=tensorflow' in message
  assert 'keras.json' in message


def test_old_python_is_an_error(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(sys, 'version_info', (3, 10, 14, 'final', 0))
  with pytest.raises(
      ImportError, match=r'3\.11, 3\.12 or 3\.13.* Python 3\.10'
  ):
    runpy.run_path(tff_bn.__file__)
