"""Tests that the Dockerfile installs what scripts/setup.sh installs."""

import pathlib
import re
import shutil
import subprocess

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


def _setup_steps() -> list[str]:
  """Returns the arguments of pip in scripts/setup.sh, without venv's folder."""
  text = (_ROOT / 'scripts' / 'setup.sh').read_text()
  options = re.search(r'pip install (.*?)"\$@"', text, re.S).group(1)
  options = options.replace('\\\n', ' ').split()
  assert options.pop(0) == '--quiet'
  steps = re.findall(r'^install (--no-build-isolation .*|-r .*)$', text, re.M)
  return [
      ' '.join([*options, *re.sub(r'"(\$venv/|\${locked})?', '', step).split()])
      for step in steps
  ]


def _docker_steps(tmp_path, device: str):
  """Runs the Dockerfile's commands with a pip that only prints."""
  text = (_ROOT / 'Dockerfile').read_text().replace('\\\n', ' ')
  (tmp_path / 'pip').write_text('#!/bin/sh\necho "$*" >>"$CALLS"\n')
  (tmp_path / 'pip').chmod(0o755)
  shutil.copy(_ROOT / 'requirements.txt', tmp_path)
  for command in re.findall('^RUN (.*)$', text, re.M):
    result = subprocess.run(
        ['sh', '-c', command],
        cwd=tmp_path,
        env={
            'PATH': f'{tmp_path}:/usr/bin:/bin',
            'DEVICE': device,
            'CALLS': str(tmp_path / 'calls'),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
      return result.stderr
  calls = (tmp_path / 'calls').read_text().splitlines()
  return [re.sub('^install --no-cache-dir ', '', call) for call in calls]


def test_cpu_has_the_steps_of_the_setup(tmp_path):
  steps = _setup_steps()
  assert len(steps) == 3
  assert _docker_steps(tmp_path, 'cpu') == steps
  names = (tmp_path / 'build-requirements.txt').read_text().splitlines()
  assert [name.partition('==')[0] for name in names] == ['setuptools', 'wheel']


def test_cuda_adds_its_libraries(tmp_path):
  first, second, last = _setup_steps()
  cuda = '--no-deps --ignore-requires-python -r requirements-cuda.txt'
  assert _docker_steps(tmp_path, 'cuda') == [first, second, cuda, last]


def test_other_device_is_an_error(tmp_path):
  assert _docker_steps(tmp_path, 'tpu') == 'DEVICE=tpu must be cpu or cuda.\n'


def test_image_has_the_newest_python_that_is_supported():
  text = (_ROOT / 'Dockerfile').read_text()
  setup = (_ROOT / 'scripts' / 'setup.sh').read_text()
  newest = re.search(r'python(3\.\d+) python3', setup).group(1)
  assert f'\nFROM python:{newest}-slim\n' in text


@pytest.mark.parametrize('folder', ['.venv', 'runs', 'build', '.git'])
def test_image_leaves_out(folder: str):
  assert folder in (_ROOT / '.dockerignore').read_text().splitlines()
