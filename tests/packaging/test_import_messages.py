"""Tests that the programs hide only TensorFlow's start-up messages."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from tff_bn.programs.cli import import_messages

_INFORMATION = """\
WARNING: All log messages before absl::InitializeLog() is called are written
I0000 00:00:1795335782.672929   28127 port.cc:153] oneDNN is on.
To enable the following instructions: AVX2, rebuild TensorFlow.
"""
_PROBLEM = 'E0000 00:00:1795335782.6 28127 a.cc:1] I0000 is a problem.\n'
_SPEAK = f"""
import os, sys
os.write(2, {(_INFORMATION + _PROBLEM).encode()!r})
print('said by Python', file=sys.stderr, end='')
"""


def _import_tensorflow(
    folder: pathlib.Path, source: str, after: str = '', before: str = ''
) -> subprocess.CompletedProcess[str]:
  """Imports a fake `tensorflow` in a process that hides its messages."""
  package = folder / 'tensorflow'
  package.mkdir()
  (package / '__init__.py').write_text(textwrap.dedent(source))
  code = f"""
      import sys
      from tff_bn.programs import import_messages
      {before}
      import_messages.hide()
      import tensorflow
      assert type(tensorflow.__loader__).__name__ == 'SourceFileLoader'
  """
  return subprocess.run(
      [sys.executable, '-c', textwrap.dedent(code) + textwrap.dedent(after)],
      env={**os.environ, 'PYTHONPATH': str(folder)},
      capture_output=True,
      text=True,
      check=False,
  )


def test_only_information_is_hidden(tmp_path: pathlib.Path):
  result = _import_tensorflow(tmp_path, _SPEAK)
  assert result.returncode == 0, result.stderr
  assert result.stderr == _PROBLEM + 'said by Python\n'


_REGISTERED = (
    'E0000 00:00:1795335782.6 28127 cuda_dnn.cc:8310] Unable to register cuDNN'
    ' factory: it is registered already\n'
    'W0000 00:00:1795335782.6 28127 computation_placer.cc:177] computation'
    ' placer already registered.\n'
    'W0000 00:00:1795335782.6   281 py_utils.cc:38] TF-TRT Warning: Could not'
    ' find TensorRT\n'
)
_NO_GPU = (
    'E0000 00:00:1795335782.6   28127 cuda_platform.cc:52] failed call to'
    ' cuInit: INTERNAL: CUDA error: UNKNOWN ERROR (303)\n'
)


@pytest.mark.parametrize('has_gpu', [False, True])
def test_missing_gpus_are_no_errors(tmp_path: pathlib.Path, has_gpu: bool):
  """TensorFlow looks for GPUs later, unless it is asked at once."""
  source = f"""
      import os
      os.write(2, {_REGISTERED.encode()!r})

      class config:
        looked = False

        def list_physical_devices(kind):
          if kind == 'GPU' and not config.looked:
            config.looked = True
            os.write(2, {(_NO_GPU + _PROBLEM).encode()!r})
  """
  after = """
      print(tensorflow.config.looked)
      tensorflow.config.list_physical_devices('GPU')
  """
  before = f'import_messages._has_gpu = lambda: {has_gpu}'
  result = _import_tensorflow(tmp_path, source, after, before)
  assert result.returncode == 0, result.stderr
  assert result.stdout == f'{not has_gpu}\n'
  # With a GPU it is an error.
  assert result.stderr == (_NO_GPU if has_gpu else '') + _PROBLEM


def test_gpus_are_found_without_tensorflow(monkeypatch, tmp_path):
  monkeypatch.setattr(
      import_messages, '_GPU_DEVICES', f'{tmp_path}/nvidia[0-9]*'
  )
  # The driver has other devices, too.
  (tmp_path / 'nvidiactl').touch()
  assert not import_messages._has_gpu()
  (tmp_path / 'nvidia0').touch()
  assert import_messages._has_gpu()


def test_later_messages_are_shown(tmp_path: pathlib.Path):
  result = _import_tensorflow(
      tmp_path, '', f'sys.stderr.write({_INFORMATION!r})'
  )
  assert result.stderr == _INFORMATION


@pytest.mark.parametrize(
    ('end', 'code', 'message'),
    [
        ("raise ImportError('no AVX')", 1, 'ImportError: no AVX'),
        ('os.abort()', -signal.SIGABRT, _PROBLEM),
        ('os.kill(os.getpid(), signal.SIGKILL)', -signal.SIGKILL, _PROBLEM),
    ],
)
def test_problems_survive_a_failure(
    tmp_path: pathlib.Path, end: str, code: int, message: str
):
  result = _import_tensorflow(tmp_path, f'{_SPEAK}\nimport signal\n{end}')
  assert result.returncode == code
  assert _PROBLEM in result.stderr
  assert message in result.stderr
  assert _INFORMATION not in result.stderr


def test_works_without_an_error_stream(tmp_path: pathlib.Path):
  (tmp_path / 'sitecustomize.py').write_text('import os\nos.close(2)')
  result = _import_tensorflow(tmp_path, '', "print('imported')")
  assert (result.returncode, result.stdout) == (0, 'imported\n')


def test_works_without_grep(tmp_path: pathlib.Path):
  (tmp_path / 'sitecustomize.py').write_text(
      "import os\nos.environ['PATH'] = ''"
  )
  result = _import_tensorflow(tmp_path, _SPEAK)
  assert result.returncode == 0
  assert _PROBLEM in result.stderr
