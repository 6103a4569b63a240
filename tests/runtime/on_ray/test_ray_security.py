"""Tests that a Ray cluster accepts only programs with the credentials."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import portpicker
import psutil
import pytest

_SCRIPT = pathlib.Path(__file__).parents[3] / 'scripts' / 'ray_certificates.sh'
_RAY = str(pathlib.Path(sys.executable).with_name('ray'))
_TOKEN = 'a' * 64
_START_SECONDS = 120
_PROGRAM = """
import sys
import numpy as np
import tensorflow_federated as tff
from tff_bn import runtime

@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def add(x):
  return tff.federated_sum(x)

try:
  with runtime.ray_runtime(sys.argv[1], num_workers=1, worker_timeout=60):
    print('total', add([1, 2, 3]))
except ValueError as error:
  print('refused:', error)
"""


def _environment(folder, name, token):
  """Returns the environment of a process of the cluster or of a program."""
  environment = {
      key: value
      for key, value in os.environ.items()
      if not key.startswith('RAY_')
  }
  environment['HOME'] = str(folder)  # The home folder may contain a token.
  environment['TF_CPP_MIN_LOG_LEVEL'] = '3'
  environment['RAY_USAGE_STATS_ENABLED'] = '0'
  if token is not None:
    environment |= {'RAY_AUTH_MODE': 'token', 'RAY_AUTH_TOKEN': token}
  if name is not None:
    environment |= {
        'RAY_USE_TLS': '1',
        'RAY_TLS_CA_CERT': str(folder / 'ca.crt'),
        'RAY_TLS_SERVER_CERT': str(folder / f'{name}.crt'),
        'RAY_TLS_SERVER_KEY': str(folder / f'{name}.key'),
    }
  return environment


def _certificates(folder, name):
  folder.mkdir()
  subprocess.run(['sh', str(_SCRIPT), str(folder), name], check=True)
  return folder


@pytest.fixture(scope='module')
def address():
  from ray import util

  return util.get_node_ip_address()


@pytest.fixture(scope='module')
def folders(address, tmp_path_factory):
  """The certificates of the cluster and of another authority."""
  folder = tmp_path_factory.mktemp('certificates')
  return [_certificates(folder / name, address) for name in ('ours', 'other')]


@pytest.fixture(scope='module')
def cluster(address, folders):
  """The address of a cluster with TLS and a token."""
  temporary = tempfile.mkdtemp(prefix='ray_', dir='/tmp')
  port = portpicker.pick_unused_port()
  process = subprocess.Popen(
      [
          *(_RAY, 'start', '--head', '--block', '--num-cpus=1'),
          f'--node-ip-address={address}',
          f'--port={port}',
          f'--temp-dir={temporary}',
          '--include-dashboard=false',
      ],
      env=_environment(folders[0], address, _TOKEN),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
  )
  output = []
  for line in process.stdout:
    output.append(line)
    if 'Ray runtime started' in line:
      break
  else:
    raise AssertionError(''.join(output))
  yield f'{address}:{port}'
  processes = psutil.Process(process.pid).children(recursive=True)
  os.killpg(process.pid, signal.SIGKILL)
  process.communicate()
  for child in processes:
    if child.is_running():
      child.kill()
  shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.slow
def test_only_the_right_credentials_are_accepted(cluster, address, folders):
  ours, other = folders
  environments = {
      'right': _environment(ours, address, _TOKEN),
      'without token': _environment(ours, address, None),
      'without certificate': _environment(ours, None, _TOKEN),
      'certificate of another authority': _environment(other, address, _TOKEN),
  }
  programs = {
      name: subprocess.Popen(
          [sys.executable, '-c', _PROGRAM, cluster],
          env=environment,
          stdout=subprocess.PIPE,
          stderr=subprocess.DEVNULL,
          text=True,
      )
      for name, environment in environments.items()
  }
  try:
    found = {
        name: program.communicate(timeout=_START_SECONDS)[0]
        for name, program in programs.items()
    }
  finally:
    for program in programs.values():
      program.kill()
  assert found.pop('right') == 'total 6\n'
  for name, output in found.items():
    assert output.startswith('refused: No Ray cluster can be used at'), name
    assert cluster in output and 'RAY_USE_TLS' in output
