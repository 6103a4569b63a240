"""Tests of clients' models on demand: `tff-bn-evaluate --export_client`."""

import os
import shutil

import csv_rows
import flag_cases
import keras
import numpy as np
import pytest
from sklearn import datasets
import tiny_runs

from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.runs import run_folder
from tff_bn.training import manifests
from tff_bn.training import saved_models

# More clients than training samples; a single client takes part.
_FLAGS = (
    '--algorithm=fedbn',
    '--model=mlp3',
    '--split=iid',
    '--samples_per_client=12',
    '--num_clients=2000',
    '--clients_per_round=1',
    '--rounds=1',
    '--local_steps=1',
    '--batch_size=4',
)


def _train(folder, *arguments):
  assert train.run([*_FLAGS, *arguments, f'--output_dir={folder}']) == 0
  return folder


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return _train(tmp_path_factory.mktemp('runs') / 'fedbn')


@pytest.fixture
def sampled(run):
  """The client that took part in the run."""
  (client,) = saved_models.SavedModels(run / 'model').client_ids
  return client


def _exported(folder, client):
  stem = saved_models.client_file_stem(client)
  path = folder / 'exported_clients' / f'{stem}.keras'
  return tiny_runs.alone(keras.models.load_model(path, compile=False))


def _assert_same(model, expected):
  for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_exported_models(run, sampled, tmp_path, capsys):
  assert not (run / 'model/clients').exists()
  assert 'save_client_models' not in (run / 'flags.txt').read_text()
  before = csv_rows.contents(run)
  new = 'client_0000' if sampled != 'client_0000' else 'client_0001'
  capsys.readouterr()
  arguments = [f'--run={run}', f'--export_client={sampled},{new}']
  arguments += [f'--output_dir={tmp_path}']

  assert evaluate.run(arguments) == 0

  output = capsys.readouterr().out.splitlines()
  assert [line.split()[0].rstrip(':') for line in output[:2]] == [sampled, new]
  assert 'took no part' not in output[0]
  assert 'took no part' in output[1]
  own, other = (_exported(tmp_path, client) for client in (sampled, new))
  _assert_same(own, tiny_runs.load(run, sampled))
  _assert_same(other, tiny_runs.load(run))
  for client, line in zip((sampled, new), output):
    assert f'{saved_models.client_file_stem(client)}.keras' in line
  # One explanation for all models.
  assert output[2] == 'To predict the classes of samples x with such a model:'
  x = datasets.load_digits().images[:5]
  found = {'x': x, 'model': own}
  exec('\n'.join(line[2:] for line in output[3:]), found)
  expected = own(x[..., np.newaxis] / 16).numpy().argmax(axis=-1)
  np.testing.assert_array_equal(found['predicted'], expected)
  assert len(os.listdir(tmp_path / 'exported_clients')) == 2
  assert not (tmp_path / 'evaluation.csv').exists()
  assert csv_rows.contents(run) == before


def test_models_of_sampled_clients_need_no_data(run, sampled, tmp_path):
  copy = tiny_runs.with_flags(
      run, tmp_path / 'run', dataset=f'npz:{tmp_path}/gone.npz'
  )
  assert evaluate.run([f'--run={copy}', f'--export_client={sampled}']) == 0
  _assert_same(_exported(copy, sampled), tiny_runs.load(run, sampled))


def test_export_is_removed_with_the_run(run, sampled, tmp_path):
  copy = shutil.copytree(run, tmp_path / 'run')
  assert evaluate.run([f'--run={copy}', f'--export_client={sampled}']) == 0
  run_folder.remove(copy)
  assert not copy.exists() or not os.listdir(copy)


_REFUSED = """
--export_client=client_7
    --export_client=client_7: the run has no such client;
    2000: client_0000, client_0001, ; , client_1999.; Did you mean client_
--export_client=client_0000,x
    --export_client=x: the run has no such client
--export_client=client_0001,client_0001
    --export_client; client_0001 is in the list twice
--export_client=client_0001 --reestimate_statistics
    --reestimate_statistics=true has no effect with --export_client, which
    evaluates nothing
--export_client=client_0001 --split=iid
    --split=iid has no effect with --export_client
"""


@flag_cases.parametrize(_REFUSED)
def test_what_is_refused(run, arguments, expected, capsys):
  before = csv_rows.contents(run)
  assert evaluate.run([f'--run={run}', *arguments]) == 2
  error = ' '.join(capsys.readouterr().err.split())
  for words in expected.split(';'):
    assert words.strip() in error
  assert csv_rows.contents(run) == before


def test_models_of_an_earlier_version(run, sampled, tmp_path, capsys):
  copy = shutil.copytree(run, tmp_path / 'run')
  manifest = manifests.read(copy / 'model', saved_models.FORMAT)
  manifests.write(copy / 'model', {**manifest, 'format': 1})
  arguments = [f'--run={copy}', f'--export_client={sampled}']
  assert evaluate.run(arguments) == 2
  error = ' '.join(capsys.readouterr().err.split())
  assert 'has the format 1' in error
  assert 'command of the run writes its models again' in error

  _train(copy)
  assert evaluate.run(arguments) == 0
  _assert_same(_exported(copy, sampled), tiny_runs.load(run, sampled))


@pytest.mark.slow
def test_evaluation_of_many_clients(run, sampled, tmp_path, capsys):
  capsys.readouterr()
  assert evaluate.run([f'--run={run}', f'--output_dir={tmp_path}']) == 0
  rows = csv_rows.read(tmp_path / 'evaluation.csv')
  assert [row['client'] for row in rows[1:]] == [
      f'client_{n:04}' for n in range(2000)
  ]
  assert {row['client'] for row in rows if row['model'] == 'own'} == {sampled}
  assert {row['num_examples'] for row in rows[1:]} == {'3'}
  # The terminal gets the first rows.
  output = capsys.readouterr().out
  assert output.count('\n| client_') == 99
  assert '… and 1901 more rows in the table.' in output


@pytest.mark.slow
def test_personal_phases(tmp_path):
  """Each client has own phases, even if it took no part in a round."""
  flags = ('--pan=add', '--pan_personal_share=0.5', '--num_clients=3')
  folder = _train(
      tmp_path / 'run', *flags, '--algorithm=fedavg', '--save_client_models=all'
  )
  clients = [f'client_{n}' for n in range(3)]
  arguments = [f'--run={folder}', f'--export_client={",".join(clients)}']
  assert evaluate.run(arguments) == 0
  phases = []
  for number, client in enumerate(clients):
    model = _exported(folder, client)
    stem = saved_models.client_file_stem(client)
    _assert_same(
        model,
        tiny_runs.alone(
            keras.models.load_model(
                folder / f'model/clients/{stem}.keras', compile=False
            )
        ),
    )
    phases.append(
        [
            float(layer.personal_phase.numpy())
            for layer in model.layers
            if hasattr(layer, 'personal_phase')
        ]
    )
    drawn = np.random.default_rng([0, number, 0x70686173])
    expected = drawn.random(len(phases[-1]), np.float32)
    np.testing.assert_array_equal(phases[-1], expected)
  assert len(phases[0]) >= 1
  assert phases[0] != phases[1] != phases[2]
