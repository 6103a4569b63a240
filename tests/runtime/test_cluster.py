"""Tests that clients can be computed on other machines, and machines be lost.

The machines are processes on this one.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import numpy as np
import portpicker
import psutil
import pytest

_COORDINATOR = pathlib.Path(__file__).with_name('cluster_coordinator.py')
_WORKER = [sys.executable, '-m', 'tff_bn.programs.worker']
_START_SECONDS = 120
_RUN_SECONDS = 300


def _start(*flags):
  """Starts a worker; returns its address and process when it serves."""
  port = portpicker.pick_unused_port()
  process = subprocess.Popen(
      [*_WORKER, f'--port={port}', *flags],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
  )
  return f'127.0.0.1:{port}', process


@contextlib.contextmanager
def _workers(number, *flags):
  started = [_start(*flags) for _ in range(number)]
  try:
    for _, process in started:
      output = []
      for line in process.stdout:
        output.append(line)
        if line.startswith('Serving CPU:0 at port'):
          break
      else:
        raise AssertionError(''.join(output))
    yield started
  finally:
    for _, process in started:
      process.kill()
      process.wait()
      process.stdout.close()


def _run(scenario, workers):
  result = subprocess.run(
      [
          *(sys.executable, '-X', 'faulthandler', str(_COORDINATOR)),
          scenario,
          *(f'{address},{process.pid}' for address, process in workers),
      ],
      capture_output=True,
      text=True,
      timeout=_RUN_SECONDS,
      check=False,
  )
  lines = [
      line.removeprefix('OUTCOME ')
      for line in result.stdout.splitlines()
      if line.startswith('OUTCOME ')
  ]
  assert (
      lines and not result.returncode
  ), f'{result.returncode}\n{result.stdout}\n{result.stderr}'
  return json.loads(lines[0]), result.stderr


@pytest.fixture(scope='module')
def living_workers():
  """Two workers for tests that let them live."""
  with _workers(2) as workers:
    yield workers


@pytest.fixture(scope='module')
def comparison(living_workers):
  """What comes of the same computations on them and in one process."""
  outcome, _ = _run('same_as_one_process', living_workers)
  return outcome


def test_results_are_those_of_one_process(comparison):
  assert comparison['is_same']
  assert comparison['is_same_afterwards']
  assert comparison['is_same_as_plain_datasets']
  assert len(comparison['tasks']) == 2
  assert comparison['datasets'] == [[2, 4, 14], [14], [6, 14]]


def test_data_in_memory_is_sent_once_for_each_client(comparison):
  # Five clients, three rounds.
  assert comparison['num_sent_datasets'] == 5
  assert comparison['num_uses_of_samples'] == 15
  assert comparison['num_sent_samples'] == 5


def test_failure_of_a_computation_is_no_lost_worker(living_workers):
  outcome, errors = _run('fail', living_workers)

  assert outcome['error'] == 'InvalidArgumentError'
  assert outcome['afterwards'] == 3.0
  assert outcome['left'] == [address for address, _ in living_workers]
  assert 'Lost' not in errors


def test_workers_that_do_not_fit_are_refused(living_workers):
  outcome, _ = _run('refuse', living_workers)

  first = living_workers[0][0]
  assert outcome['no_device'] == (
      f'The worker {first} has no device GPU:7; it has CPU:0.'
  )
  assert f'The worker {first} has tff_bn ' in outcome['other_version']
  assert 'this program has tff_bn 0.0.0' in outcome['other_version']
  assert "'hope' must be one of 'continue', 'stop'" in outcome['no_choice']
  assert outcome['accepted'] is None


def test_lost_worker_loses_nothing():
  with _workers(2) as workers:
    outcome, errors = _run('lose_one', workers)

  assert outcome['is_same']
  assert outcome['is_same_two']
  assert outcome['left'] == [workers[0][0]]
  assert f'Lost the worker {workers[1][0]}' in errors
  assert f'computed again on {workers[0][0]}' in errors


def test_worker_lost_between_two_passes_loses_nothing():
  with _workers(3) as workers:
    outcome, errors = _run('lose_between_passes', workers)

  assert outcome['is_same']
  (killed,) = outcome['killed']
  assert outcome['left'] == [a for a, _ in workers if a != killed]
  assert f'Lost the worker {killed}' in errors


def test_worker_that_hangs_is_lost():
  with _workers(2) as workers:
    outcome, _ = _run('hang', workers)

  assert outcome['message'] == f'Lost the worker {workers[1][0]}.'
  # README: within a minute.
  assert outcome['seconds'] < 60


def test_all_workers_lost():
  with _workers(2) as workers:
    outcome, _ = _run('lose_all', workers)

  assert outcome['message'].endswith('no worker is left.')
  assert all(address in outcome['message'] for address, _ in workers)


def _is_open(host, port):
  try:
    socket.create_connection((host, port), 2).close()
    return True
  except OSError:
    return False


def _own_addresses():
  return [
      address.address
      for addresses in psutil.net_if_addrs().values()
      for address in addresses
      if address.family == socket.AF_INET
      and not address.address.startswith('127.')
  ]


def test_worker_serves_this_machine_alone(living_workers):
  port = int(living_workers[0][0].rpartition(':')[2])

  assert _is_open('127.0.0.1', port)
  for address in _own_addresses():
    assert not _is_open(address, port)


def test_worker_serves_others_if_allowed():
  if not _own_addresses():
    pytest.skip('This machine has no network interface.')
  with _workers(1, '--allow_remote') as workers:
    port = int(workers[0][0].rpartition(':')[2])
    assert all(_is_open(address, port) for address in _own_addresses())


@pytest.mark.parametrize('sent', [signal.SIGINT, signal.SIGTERM])
def test_worker_ends_when_it_is_told_to(sent):
  with _workers(1) as [(address, process)]:
    process.send_signal(sent)
    code = process.wait(_START_SECONDS)

  assert code == (130 if sent == signal.SIGINT else 143)
  assert not _is_open('127.0.0.1', int(address.rpartition(':')[2]))


def test_port_in_use(living_workers):
  port = living_workers[0][0].rpartition(':')[2]

  result = subprocess.run(
      [*_WORKER, f'--port={port}'],
      capture_output=True,
      text=True,
      timeout=_START_SECONDS,
      check=False,
  )

  assert result.returncode == 2
  assert f'--port={port} can not be used' in result.stderr
  assert not result.stdout


# The program, with the two workers.


def _train(folder, *flags):
  return [
      *(sys.executable, '-m', 'tff_bn.programs.train'),
      *('--algorithm=fedbn', '--model=mlp3', '--num_clients=4'),
      *('--rounds=6', '--evaluate_every=1', '--checkpoint_every=1'),
      *(f'--output_dir={folder}', *flags),
  ]


def _train_to_end(folder, *flags):
  return subprocess.run(
      _train(folder, *flags),
      capture_output=True,
      text=True,
      timeout=_RUN_SECONDS,
      check=False,
  )


def _cluster(workers):
  return '--cluster=' + ','.join(address for address, _ in workers)


@pytest.fixture(scope='module')
def metrics_of_one_process(tmp_path_factory):
  folder = tmp_path_factory.mktemp('one') / 'run'
  result = _train_to_end(folder)
  assert not result.returncode, result.stderr
  return (folder / 'metrics.csv').read_text()


def _train_and_kill(folder, workers, *flags):
  """Kills the second worker after the second round."""
  output = []
  with subprocess.Popen(
      _train(folder, _cluster(workers), *flags),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
  ) as program:
    for line in program.stdout:
      output.append(line)
      if line.startswith('round 2/'):
        workers[1][1].kill()
  return program.returncode, ''.join(output)


def _assert_close_metrics(folder, expected):
  """Asserts that metrics differ by rounding only."""
  found = (folder / 'metrics.csv').read_text()
  assert found.splitlines()[0] == expected.splitlines()[0]
  np.testing.assert_allclose(
      *(
          np.genfromtxt(text.splitlines(), delimiter=',', skip_header=1)
          for text in (found, expected)
      ),
      rtol=1e-4,
  )


def test_program_loses_nothing_with_a_worker(tmp_path, metrics_of_one_process):
  with _workers(2) as workers:
    code, output = _train_and_kill(tmp_path / 'run', workers)

  assert not code, output
  assert f'Lost the worker {workers[1][0]};' in output
  _assert_close_metrics(tmp_path / 'run', metrics_of_one_process)


def test_program_stops_with_a_worker_and_continues(
    tmp_path, metrics_of_one_process
):
  folder = tmp_path / 'run'
  with _workers(2) as workers:
    code, output = _train_and_kill(folder, workers, '--on_worker_loss=stop')
    assert code == 1
    assert f'Lost the worker {workers[1][0]}.' in output
    assert 'continues from the last checkpoint' in output
    assert list((folder / 'checkpoints').iterdir())

    result = _train_to_end(folder, _cluster(workers[:1]))

  assert not result.returncode, result.stderr
  _assert_close_metrics(folder, metrics_of_one_process)


def test_worker_that_can_not_be_reached(tmp_path):
  port = portpicker.pick_unused_port()

  result = _train_to_end(tmp_path / 'run', f'--cluster=127.0.0.1:{port}')

  assert result.returncode == 2
  assert f'--cluster=127.0.0.1:{port} is impossible' in result.stderr
  assert f'127.0.0.1:{port} can not be reached' in result.stderr
  assert f'tff-bn-worker --port={port}' in result.stderr
  assert not (tmp_path / 'run').exists()


def test_worker_that_lacks_the_data(tmp_path, living_workers):
  """The data is read there, not sent."""
  # A relative path would be another one for the workers, too, but all paths
  # that are sent are absolute; so the file goes after the program has read it.
  path = tmp_path / 'data.npz'
  code = f"""
import numpy as np, sys
rng = np.random.default_rng(0)
np.savez({str(path)!r}, **{{
    f'{{kind}}_{{part}}': values
    for part in ('train', 'test')
    for kind, values in (
        ('x', rng.random((40, 4, 4, 1), np.float32)),
        ('y', np.arange(40) % 4),
    )
}})
from tff_bn.programs import experiment, train
load = experiment.load_dataset
def load_and_remove(settings):
  dataset = load(settings)
  __import__('os').remove({str(path)!r})
  return dataset
experiment.load_dataset = load_and_remove
sys.exit(train.run(sys.argv[1:]))
"""
  result = subprocess.run(
      [
          *(sys.executable, '-X', 'faulthandler', '-c', code),
          _cluster(living_workers),
          f'--dataset=npz:{path}',
          f'--output_dir={tmp_path / "run"}',
      ],
      capture_output=True,
      text=True,
      timeout=_RUN_SECONDS,
      check=False,
  )

  assert result.returncode == 2, result.stderr
  assert f'The worker {living_workers[0][0]} failed' in result.stderr
  assert str(path) in result.stderr
  assert not (tmp_path / 'run').exists()


def test_something_else_at_the_port(tmp_path):
  """A server of TensorFlow that is no worker of this package."""
  port = portpicker.pick_unused_port()
  code = f"""
import tensorflow as tf, time
server = tf.distribute.Server(
    tf.train.ClusterSpec({{'worker': ['127.0.0.1:{port}']}}),
    job_name='worker', task_index=0)
print('ready', flush=True)
time.sleep(600)
"""
  with subprocess.Popen(
      [sys.executable, '-c', code],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3'},
      text=True,
  ) as server:
    assert server.stdout.readline().strip() == 'ready'
    result = _train_to_end(tmp_path / 'run', f'--cluster=127.0.0.1:{port}')
    server.kill()

  assert result.returncode == 2
  assert f'127.0.0.1:{port}' in result.stderr
  assert 'tff-bn-worker' in result.stderr
  assert not (tmp_path / 'run').exists()
