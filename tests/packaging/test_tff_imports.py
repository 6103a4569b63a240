"""Tests of the import of TensorFlow Federated."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from tff_bn.imports import tff_stand_ins

_PACKAGE = 'tensorflow_federated'
# Uses TFF's default context.
_COMPUTE = """
import numpy as np
import psutil
@tff.tensorflow.computation(np.int32)
def add_one(x):
  return x + 1
assert add_one(1) == 2
(worker,) = [
    p for p in psutil.Process().children() if p.name() == 'worker_binary'
]
print(worker.pid)
"""


def _run(code: str, *, path: str = '') -> subprocess.CompletedProcess[str]:
  return subprocess.run(
      [sys.executable, '-c', textwrap.dedent(code)],
      env={**os.environ, 'PYTHONPATH': path, 'TF_CPP_MIN_LOG_LEVEL': '3'},
      capture_output=True,
      text=True,
      check=False,
      timeout=120,
  )


def _write(folder: pathlib.Path, name: str, source: str = '') -> None:
  """Writes a module; `a/b` is a package with a module in it."""
  path = folder / f'{name}.py'
  path.parent.mkdir(parents=True, exist_ok=True)
  (path.parent / '__init__.py').touch()
  path.write_text(source)


def _output_of_quiet_run(code: str) -> str:
  result = _run(code)
  assert result.returncode == 0, result.stderr
  for line in ('Exception', 'Error', 'Traceback'):
    assert line not in result.stderr
  return result.stdout


@pytest.mark.slow
def test_used_context_ends_quietly_in_the_background():
  # A shell lets those that it starts with `&` in a script ignore Ctrl-C.
  output = _output_of_quiet_run(f"""
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
import tensorflow_federated as tff
import tff_bn
{_COMPUTE}""")
  # The worker has ended with the program.
  assert not pathlib.Path(f'/proc/{int(output)}').exists()


@pytest.mark.slow
def test_unused_context_ends_quietly_and_stand_ins_are_gone():
  # As if setuptools, which provides distutils since Python 3.12, was installed
  # after Python had started.
  output = _output_of_quiet_run("""
      import sys
      sys.meta_path[:] = [
          finder for finder in sys.meta_path
          if type(finder).__name__ != 'DistutilsMetaFinder'
      ]
      import tff_bn
      import tensorflow_federated as tff
      for name in list(sys.modules):
        module = sys.modules[name]
        if type(module).__name__ == '_StandIn':
          print(name)
      from tff_bn.imports import tff_stand_ins
      from tensorflow_federated.python.learning.programs import (
          vizier_program_logic,
      )
      import importlib.util
      print(importlib.util.find_spec('tensorflow_estimator'))
  """)
  *stand_ins, found = output.split()
  assert found == 'None'
  # Its imported parts are real modules.
  assert set(stand_ins) <= {'tensorflow_model_optimization'}


@pytest.fixture
def fake_tff(tmp_path: pathlib.Path) -> pathlib.Path:
  """A fake TensorFlow Federated that imports the same modules."""
  _write(
      tmp_path,
      f'{_PACKAGE}/__init__',
      'import vizier.service.clients\n'
      'from jax.lib import xla_client\n'
      'import tensorflow_estimator as estimator\n'
      'clients = vizier.service.clients\n',
  )
  _write(tmp_path, 'jax/lib/__init__')
  _write(tmp_path, 'jax/__init__')
  # The atexit function uses these modules.
  context = f'{_PACKAGE}/python/core/impl/context_stack'
  stack = 'class context_stack:\n  set_default_context = print\n'
  _write(tmp_path, f'{context}/context_stack_impl', stack)
  _write(
      tmp_path,
      f'{context}/runtime_error_context',
      "create_runtime_error_context = lambda: 'no context'",
  )
  _write(
      tmp_path,
      f'{_PACKAGE}/python/core/impl/executors/remote_executor_grpc_stub',
      'class RemoteExecutorGrpcStub: pass',
  )
  return tmp_path


_FAKE = 'import tff_bn\nimport tensorflow_federated as tff\nimport sys\n'


def _output(code: str, folder: pathlib.Path) -> list[str]:
  result = _run(_FAKE + textwrap.dedent(code), path=str(folder))
  assert (result.returncode, result.stderr) == (0, '')
  *lines, last = result.stdout.splitlines()
  assert last == 'no context'
  return lines


def test_use_of_a_stand_in_is_an_error(fake_tff: pathlib.Path):
  # The test needs an environment without vizier.
  assert importlib.util.find_spec('vizier') is None
  code = """
      import typing
      typing.Optional[tff.clients.Study]  # Annotations are allowed.
      for name in ('clients', 'estimator', 'xla_client'):
        try:
          getattr(tff, name).Study.from_id(1)
        except ImportError as error:
          print(error)
  """
  clients, estimator, xla_client = _output(code, fake_tff)
  assert 'vizier.service.clients.Study.from_id is missing' in clients
  assert 'pip install google-vizier' in clients
  assert 'no estimators since 2.16' in estimator
  assert 'older versions of JAX' in xla_client


def test_stand_ins_are_not_imported_afterwards(fake_tff: pathlib.Path):
  code = """
      print({'vizier', 'vizier.service', 'tensorflow_estimator',
             'jax.lib.xla_client'} & set(sys.modules))
      import jax.lib
      print(hasattr(jax.lib, 'xla_client'))
      try:
        import vizier
      except ModuleNotFoundError as error:
        print(error.name)
  """
  assert _output(code, fake_tff) == ['set()', 'False', 'vizier']


def test_stand_ins_do_not_exist_before(fake_tff: pathlib.Path):
  code = """
      import tff_bn
      import importlib.util
      for name in ('vizier', 'tensorflow_estimator'):
        assert importlib.util.find_spec(name) is None
      import vizier
  """
  result = _run(code, path=str(fake_tff))
  assert "No module named 'vizier'" in result.stderr


def test_installed_module_is_preferred(fake_tff: pathlib.Path):
  _write(fake_tff, 'vizier/service/clients', "Study = 'real'")
  _write(fake_tff, 'vizier/__init__')
  code = """
      print(tff.clients.Study)
      print(sys.modules['vizier'].__file__)
  """
  study, file = _output(code, fake_tff)
  assert study == 'real'
  assert file == str(fake_tff / 'vizier' / '__init__.py')


def test_garbage_is_collected_rarely_meanwhile(fake_tff: pathlib.Path):
  file = fake_tff / _PACKAGE / '__init__.py'
  file.write_text(file.read_text() + 'import gc\npace = gc.get_threshold()\n')
  code = """
      import gc
      print(tff.pace[0] > 100 * gc.get_threshold()[0])
  """
  assert _output(code, fake_tff) == ['True']


def test_failed_import_leaves_nothing_behind(fake_tff: pathlib.Path):
  _write(fake_tff, f'{_PACKAGE}/__init__', 'import vizier\nimport no_such_one')
  code = """
      import sys
      import tff_bn
      try:
        import tensorflow_federated
      except ModuleNotFoundError as error:
        print(error.name)
      print({'vizier', 'tensorflow_federated'} & set(sys.modules))
      print([type(finder).__name__ for finder in sys.meta_path[:2]])
  """
  result = _run(code, path=str(fake_tff))
  assert result.returncode == 0, result.stderr
  name, modules, finders = result.stdout.splitlines()
  assert (name, modules) == ('no_such_one', 'set()')
  assert '_StandInFinder' not in finders


def test_hook_is_installed_once():
  code = """
      import sys
      import tff_bn
      from tff_bn.imports import tff_imports
      tff_imports.install()
      print([type(f).__name__ for f in sys.meta_path].count('TffFinder'))
  """
  assert _run(code).stdout == '1\n'


def test_hook_finds_nothing_else():
  assert tff_stand_ins.find_spec('no_such_module') is None


def test_start_up_survives_a_deleted_package(fake_tff: pathlib.Path):
  """The hook finds nothing, and Python's own finders continue."""
  _write(fake_tff, f'{_PACKAGE}/__init__', "print('imported')")
  source = pathlib.Path(tff_stand_ins.__file__).with_name('tff_imports.py')
  code = f"""
      import sys
      sys.modules['tff_bn'] = None
      exec({source.read_text()!r}, {{'__name__': 'tff_bn.pth'}})
      import tensorflow_federated
  """
  result = _run(code, path=str(fake_tff))
  assert (result.returncode, result.stdout, result.stderr) == (
      0,
      'imported\n',
      '',
  )
