"""Tests that parts of the package load only what they need."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import tff_bn

# Hides the packages named on the command line from imports.
_HIDE = """
import importlib.abc
import sys

class Hider(importlib.abc.MetaPathFinder):
  def find_spec(self, fullname, path, target=None):
    if fullname.split('.')[0] in sys.argv[1:]:
      raise ModuleNotFoundError(f'No module named {fullname!r}', name=fullname)

sys.meta_path.insert(0, Hider())
"""


def _run(code: str, *hidden: str, path: str = '', **variables: str) -> str:
  """Runs `code` in a new interpreter and returns its output."""
  result = subprocess.run(
      [sys.executable, '-c', _HIDE + textwrap.dedent(code), *hidden],
      env={**os.environ, 'PYTHONPATH': path, **variables},
      capture_output=True,
      text=True,
      check=False,
  )
  assert result.returncode == 0, result.stderr
  return result.stdout


def test_package_imports_nothing_heavy():
  code = """
      import tff_bn
      import tff_bn.programs
      heavy = {'tensorflow', 'tensorflow_federated', 'numpy', 'pandas'}
      print(sorted(heavy & set(sys.modules)))
  """
  assert _run(code) == '[]\n'


def test_layers_need_only_keras():
  code = """
      from tff_bn import layers
      import keras
      # To load models with converted layers, no other import is needed.
      assert keras.saving.get_registered_object('tff_bn>ConvertedLayer')
      from tff_bn import add_position_encodings
      from tff_bn import convert_batch_norm
      import tff_bn.layers
      assert layers is tff_bn.layers
      print([name for name in sys.modules if name.startswith('tensorflow')])
  """
  # Keras imports some of these if they are there.
  hidden = ('sklearn', 'matplotlib', 'tqdm')
  assert _run(code, *hidden, KERAS_BACKEND='jax') == '[]\n'


# All kinds of imports that need TensorFlow Federated.
_NEEDS_TFF = """
    def attempt(statement):
      try:
        exec(statement)
      except ImportError as error:
        return str(error), type(error.__cause__).__name__
      return 'no error', ''

    statements = [
        'import tff_bn.algorithms',
        'import tff_bn.aggregators',
        'from tff_bn import algorithms',
        'import tff_bn; tff_bn.algorithms',
        'from tff_bn import BatchNormModel',
        'import tff_bn; tff_bn.StatefulLearningProcess',
    ]
    for message, cause in sorted({attempt(each) for each in statements}):
      print(message, cause, sep='|')
"""


def test_missing_tff_says_what_to_run():
  output = _run(_NEEDS_TFF, 'tensorflow_federated')
  message, _ = output.rstrip('\n').split('|')
  assert 'TensorFlow Federated, which is not installed' in message
  assert "`pip install '.[federated]'` in a clone" in message
  assert '`pip install --no-deps --ignore-requires-python tensor' in message
  assert '\n' not in message


@pytest.mark.parametrize(
    ('source', 'cause', 'reason'),
    [
        # NumPy 2, a newer protobuf, a missing dependency.
        (
            'import numpy as np\nnp.no_such_name',
            'AttributeError',
            'no_such_name',
        ),
        ('raise TypeError("two\\n lines")', 'TypeError', 'two lines'),
        ('import no_such_module', 'ModuleNotFoundError', 'no_such_module'),
    ],
)
def test_broken_tff_says_why_and_what_to_run(
    tmp_path: pathlib.Path, source: str, cause: str, reason: str
):
  package = tmp_path / 'tensorflow_federated'
  package.mkdir()
  (package / '__init__.py').write_text(source)
  message, found = _run(_NEEDS_TFF, path=str(tmp_path)).strip().split('|')
  assert 'installed but cannot be imported' in message
  assert f'({cause}: ' in message
  assert reason in message
  assert '`pip install --no-deps --ignore-requires-python tensor' in message
  assert '\n' not in message
  assert found == cause


def test_public_names_exist():
  for name in tff_bn.__all__:
    assert name in dir(tff_bn)
    value = getattr(tff_bn, name)
    assert value.__name__.rpartition('.')[2] == name


def test_every_public_part_is_listed():
  root = pathlib.Path(tff_bn.__file__).parent
  packages = {path.parent.name for path in root.glob('*/__init__.py')}
  # Internal packages.
  packages -= {'clients', 'common', 'fedtan', 'imports', 'keras_model'}
  packages -= {'processes'}
  assert packages | {'layers', 'papers', 'programs'} <= set(tff_bn.__all__)


def test_unknown_name_is_an_attribute_error():
  with pytest.raises(AttributeError, match="'tff_bn'.*'no_such_part'"):
    _ = tff_bn.no_such_part
