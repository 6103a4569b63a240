"""Tests the metrics hooks of docs/logging.md with the real clients, offline."""

import csv
import importlib.util
import json
import pathlib
import re
import socket
import struct
import sys

import pytest
import tiny_runs

from tff_bn.programs import train

_PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'logging.md'


@pytest.fixture
def modules(tmp_path, monkeypatch):
  """Writes the modules of the page, and lets programs import them."""
  text = _PAGE.read_text(encoding='utf-8')
  found = re.findall(
      r'^`(\w+)\.py`:\n\n```python\n(.*?)^```', text, re.M | re.S
  )
  assert [name for name, _ in found] == [
      'metrics_to_mlflow',
      'metrics_to_wandb',
  ]
  for name, code in found:
    (tmp_path / f'{name}.py').write_text(code, encoding='utf-8')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  yield
  for name, _ in found:
    sys.modules.pop(name, None)


@pytest.fixture
def no_network(monkeypatch):
  """Fails if this process connects to another machine."""
  connect = socket.socket.connect

  def checked(self, address):
    assert self.family == socket.AF_UNIX or address[0] in (
        '127.0.0.1',
        '::1',
        'localhost',
    ), address
    return connect(self, address)

  monkeypatch.setattr(socket.socket, 'connect', checked)


def _train(hook, rounds):
  """Trains, then continues the same run."""
  for number in rounds:
    assert not train.run(
        [
            *tiny_runs.FLAGS,
            '--evaluate_every=1',
            f'--rounds={number}',
            '--output_dir=run',
            f'--metrics_hook={hook}',
        ]
    )
  with open('run/metrics.csv', encoding='utf-8', newline='') as file:
    rows = list(csv.DictReader(file))
  assert [row['round'] for row in rows] == ['0', '1', '2']
  return [float(row['test_accuracy']) for row in rows]


def _skip_without(name):
  if importlib.util.find_spec(name) is None:
    pytest.skip(f'requirements-logging.txt is not installed ({name})')


@pytest.mark.slow
@pytest.mark.usefixtures('modules', 'no_network')
def test_mlflow(tmp_path, monkeypatch):
  _skip_without('mlflow')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', str(tmp_path / 'mlruns'))
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  monkeypatch.setenv('DO_NOT_TRACK', 'true')

  accuracies = _train('metrics_to_mlflow:log', rounds=(1, 2))

  import mlflow

  (run,) = mlflow.search_runs(experiment_names=['tff_bn'], output_format='list')
  assert run.info.run_name == 'run'
  assert run.info.status == 'FINISHED'
  assert run.data.params['num_clients'] == '4'
  history = mlflow.MlflowClient().get_metric_history(
      run.info.run_id, 'test_accuracy'
  )
  assert [metric.step for metric in history] == [0, 1, 2]
  assert [metric.value for metric in history] == accuracies


@pytest.mark.slow
@pytest.mark.usefixtures('modules', 'no_network')
def test_wandb(tmp_path, monkeypatch):
  _skip_without('wandb')
  for name, value in (
      ('WANDB_MODE', 'offline'),
      ('WANDB_ERROR_REPORTING', 'false'),
      ('WANDB_SILENT', 'true'),
      ('WANDB_DIR', str(tmp_path)),
      ('WANDB_DATA_DIR', str(tmp_path)),
      ('WANDB_CACHE_DIR', str(tmp_path / 'cache')),
      ('WANDB_CONFIG_DIR', str(tmp_path / 'config')),
  ):
    monkeypatch.setenv(name, value)

  accuracies = _train('metrics_to_wandb:log', rounds=(1, 2))

  # Offline, each part of the run has its own file, and the same id.
  paths = sorted(tmp_path.glob('wandb/offline-run-*/*.wandb'))
  assert len({path.name for path in paths}) == 1
  parts = [_history(path) for path in paths]
  assert [[row['round'] for row in rows] for rows in parts] == [[0, 1], [2]]
  found = [row['test_accuracy'] for rows in parts for row in rows]
  assert found == accuracies


def _history(path):
  """Reads the logged rows of an offline run, in the LevelDB log format."""
  from wandb.proto import wandb_internal_pb2

  content, rows, position, record = path.read_bytes(), [], 7, b''
  while position + 7 <= len(content):
    if 32768 - position % 32768 < 7:  # The rest of a block is empty.
      position += 32768 - position % 32768
      continue
    _, length, kind = struct.unpack('<IHB', content[position : position + 7])
    record += content[position + 7 : position + 7 + length]
    position += 7 + length
    if kind in (2, 3):  # The record goes on.
      continue
    message = wandb_internal_pb2.Record.FromString(record)
    record = b''
    items = message.history.item
    if items:
      rows.append(
          {
              item.key or '.'.join(item.nested_key): json.loads(item.value_json)
              for item in items
          }
      )
  return rows
