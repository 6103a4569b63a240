"""Each client's model on the test data of each source, against plain Keras."""

import csv_rows
import keras
import numpy as np
import pytest
import tiny_runs

from tff_bn import data as tff_bn_data
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.runs import run_folder
from tff_bn.programs.testing import source_evaluation
from tff_bn.training import measures

_FLAGS = ('--model=mlp3', '--rounds=2', '--local_steps=2', '--batch_size=8')
_CLIENTS = ('--dataset=digits', '--split=iid', '--num_clients=3')
_DOMAINS = ('--dataset=digits_domains', '--split=domains')


def _run(folder, *arguments):
  assert train.run([*_FLAGS, *arguments, f'--output_dir={folder}']) == 0
  return folder


def _evaluate(run, *arguments):
  assert evaluate.run([f'--run={run}', '--each_source', *arguments]) == 0
  return {
      (row['client'], row['source']): row
      for row in csv_rows.read(run / 'evaluation_sources.csv')
  }


@pytest.fixture(scope='module')
def fedbn(tmp_path_factory):
  return _run(
      tmp_path_factory.mktemp('runs') / 'fedbn', '--algorithm=fedbn', *_DOMAINS
  )


@pytest.fixture(scope='module')
def fedavg(tmp_path_factory):
  return _run(
      tmp_path_factory.mktemp('runs') / 'fedavg',
      *('--algorithm=fedavg', *_CLIENTS),
  )


def _in_keras(model, x, y):
  model.compile(
      loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=['accuracy'],
  )
  return model.evaluate(x, y, verbose=0)


@pytest.mark.slow
def test_own_models_on_domains(fedbn):
  found = _evaluate(fedbn)
  dataset = tff_bn_data.load_dataset('digits_domains')
  clients = ['', *dataset.domain_names]
  assert list(found) == [
      (client, source)
      for client in clients
      for source in (*dataset.domain_names, '')
  ]
  for client in clients:
    model = tiny_runs.load(fedbn, client or None)
    for number, source in enumerate((*dataset.domain_names, '')):
      chosen = dataset.domain_test == number
      if not source:
        chosen = np.ones_like(chosen)
      row = found[client, source]
      loss, accuracy = _in_keras(
          model, dataset.x_test[chosen], dataset.y_test[chosen]
      )
      assert float(row['accuracy']) == pytest.approx(accuracy, rel=1e-5)
      assert float(row['loss']) == pytest.approx(loss, rel=1e-4)
      assert int(row['num_examples']) == chosen.sum()
      assert row['model'] == ('own' if client else 'global')
  # On its own domain, it is what the evaluation measures without the flag.
  for row in csv_rows.read(fedbn / 'evaluation.csv'):
    assert found[row['client'], row['client']]['accuracy'] == row['accuracy']


def test_files_with_the_matrix(fedbn):
  found = _evaluate(fedbn)
  text = (fedbn / 'evaluation_sources.md').read_text()
  assert text.startswith('fedbn after 2 rounds, on --dataset=digits_domains')
  lines = [line for line in text.splitlines() if line.startswith('|')]
  cells = [[c.strip() for c in line.split('|')[1:-1]] for line in lines]
  titles, _, *rows = cells
  assert titles[0] == 'Model' and titles[-1] == measures.WHOLE_TEST_SET
  assert [row[0] for row in rows] == ['global model', *titles[1:-1]]
  for row in rows:
    for title, cell in zip(titles[1:], row[1:], strict=True):
      client = '' if row[0] == 'global model' else row[0]
      source = '' if title == measures.WHOLE_TEST_SET else title
      accuracy = float(found[client, source]['accuracy'])
      assert cell == f'{100 * accuracy:.1f}'
  page = (fedbn / 'report.html').read_text()
  assert 'Each client&#39;s model on each source' in page
  assert page.count('alt="evaluation_sources"') == 1
  assert './evaluation_sources.csv' in page


def test_a_shared_model_has_one_row(fedavg):
  found = _evaluate(fedavg)
  sources = ['client_0', 'client_1', 'client_2', '']
  assert list(found) == [('', source) for source in sources]
  by_client = {
      row['client']: row['accuracy']
      for row in csv_rows.read(fedavg / 'evaluation.csv')
  }
  assert {s: row['accuracy'] for (_, s), row in found.items()} == by_client


@pytest.mark.slow
def test_each_client_has_other_reestimated_statistics(fedavg):
  found = _evaluate(fedavg, '--reestimate_statistics')
  clients = ['', 'client_0', 'client_1', 'client_2']
  assert list(dict.fromkeys(client for client, _ in found)) == clients
  rows = csv_rows.read(fedavg / 'evaluation.csv')
  for row in rows:
    if row['statistics'] == 'reestimated':
      own = found[row['client'], row['client']]
      assert (own['loss'], own['model']) == (row['loss'], 'global')
  losses = {found[client, '']['loss'] for client in clients}
  assert len(losses) == len(clients)
  # The file is of the last evaluation.
  assert list(_evaluate(fedavg))[-1] == ('', '')


def test_overwriting_removes_the_files(fedavg):
  _evaluate(fedavg)
  names = ['evaluation_sources.csv', 'evaluation_sources.md']
  assert all((fedavg / name).exists() for name in names)
  run_folder.remove(fedavg)
  assert not fedavg.exists() or not list(fedavg.iterdir())


@pytest.mark.parametrize('num_clients', [50, 51])
def test_tables_are_for_few_clients(num_clients, tmp_path):
  """More results than a table can show are not kept in memory."""
  for name in ('evaluation_sources.md', 'plots/evaluation_sources.png'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('of an earlier evaluation')
  results = [
      source_evaluation.Result('own', client, source, 3, {'accuracy': 0.5})
      for client in ('', *(f'client_{n}' for n in range(num_clients)))
      for source in ('a', 'b')
  ]
  written = source_evaluation.write(tmp_path, ['accuracy'], results, 'Title')
  names = sorted(
      path.relative_to(tmp_path).as_posix()
      for path in tmp_path.rglob('*.*')
      if path.is_file()
  )
  assert names == sorted(p.relative_to(tmp_path).as_posix() for p in written)
  assert len(names) == (3 if num_clients == 50 else 1)
  assert len(csv_rows.read(tmp_path / 'evaluation_sources.csv')) == len(results)


@pytest.mark.parametrize(
    'flag',
    ['--adapt=statistics', '--export_client=client_0', '--predict=a.npy'],
)
def test_flags_without_effect(flag, fedbn, capsys):
  assert evaluate.run([f'--run={fedbn}', '--each_source', flag]) == 2
  error = ' '.join(capsys.readouterr().err.split())
  name = flag.partition('=')[0]
  assert f'--each_source=true has no effect with {name}' in error
