"""Tests for evaluation.csv, which says what each row is about."""

import csv_rows
import pytest

from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.results import report
from tff_bn.programs.testing import evaluation_file


def _subject(tmp_path, *arguments, again=False):
  flags = command_line.parse(train.define_flags, arguments)
  settings = settings_lib.resolve(flags, flags.algorithm, flags.seed)
  return evaluation_file.Subject.of(
      settings,
      tmp_path / 'run',
      settings.rounds,
      reestimates_statistics=again,
  )


def test_rows_say_what_they_are_about(tmp_path):
  path = tmp_path / 'evaluation.csv'
  subject = _subject(
      tmp_path,
      '--rounds=7',
      '--dataset=digits_domains',
      '--split=dirichlet',
      '--pixel_scaling=symmetric',
  )
  rows = [
      report.Evaluation('global', '', 360, {'accuracy': 0.1, 'loss': 1 / 3}),
      report.Evaluation('own', 'client_0', 0, {'accuracy': None, 'loss': None}),
  ]

  assert evaluation_file.add(path, subject, rows) == 0

  written = csv_rows.read(path)
  for row in written:
    assert row['run'] == str(tmp_path / 'run')
    assert row['rounds'] == '7'
    assert row['dataset'] == 'digits_domains'
    # The scaling is always that of the run.
    assert row['data_flags'] == (
        '--domain_strength=1.0 --split=dirichlet --num_clients=10'
        ' --dirichlet_alpha=0.5'
    )
    assert row['statistics'] == 'saved'
  assert [row['client'] for row in written] == ['', 'client_0']
  assert float(written[0]['loss']) == 1 / 3
  assert evaluation_file.read(path) == {subject: rows}


def test_the_folder_may_be_written_in_any_way(tmp_path):
  (tmp_path / 'a').mkdir()
  assert _subject(tmp_path / 'a' / '..') == _subject(tmp_path)


def test_title_says_which_statistics_are_used(tmp_path):
  saved = _subject(tmp_path, '--rounds=7', '--split=iid').describe()
  assert saved == (
      f'{tmp_path}/run after 7 rounds, on --dataset=digits --split=iid'
      ' --num_clients=10:'
  )
  again = _subject(tmp_path, '--rounds=7', '--split=iid', again=True).describe()
  assert again == f'{saved[:-1]}, with BN statistics that are computed again:'


@pytest.mark.parametrize(
    'other',
    [
        dict(arguments=['--split=iid']),
        dict(arguments=['--dataset=digits_domains']),
        dict(arguments=['--rounds=9']),
        dict(arguments=[], again=True),
    ],
)
def test_other_evaluations_are_kept(other, tmp_path):
  path = tmp_path / 'evaluation.csv'
  first = _subject(tmp_path)
  second = _subject(tmp_path, *other.pop('arguments'), **other)
  old, new, newest = (
      [report.Evaluation('global', '', 4, {'accuracy': accuracy, 'loss': 1.0})]
      for accuracy in (0.25, 0.5, 0.75)
  )
  evaluation_file.add(path, first, old)
  assert evaluation_file.add(path, second, new) == 1
  # The same evaluation again replaces its rows.
  assert evaluation_file.add(path, first, newest) == 1
  assert evaluation_file.read(path) == {first: newest, second: new}


@pytest.mark.parametrize('damage', [b'\xff\xfe', b'a,b,c', b'a,b\x00\n'])
def test_damaged_file(damage, tmp_path):
  path = tmp_path / 'evaluation.csv'
  subject = _subject(tmp_path)
  rows = [report.Evaluation('global', '', 360, {'accuracy': 0.1, 'loss': 0.3})]
  evaluation_file.add(path, subject, rows)
  content = path.read_bytes() + damage
  path.write_bytes(content)
  with pytest.raises(ValueError, match='evaluation.csv is damaged'):
    evaluation_file.read(path)
  with pytest.raises(ValueError, match='evaluation.csv is damaged'):
    evaluation_file.add(path, subject, rows)
  assert path.read_bytes() == content


@pytest.fixture
def written(tmp_path):
  """A file with two evaluations."""
  path = tmp_path / 'evaluation.csv'
  for arguments in (['--split=iid'], ['--split=iid', '--num_clients=2']):
    evaluation_file.add(
        path,
        _subject(tmp_path, *arguments),
        [
            report.Evaluation(
                'global', '', 72, {'accuracy': 0.0625, 'loss': 1.5}
            ),
            report.Evaluation(
                'own', 'client\r\n0', 36, {'accuracy': 0.056, 'loss': 0.1}
            ),
            report.Evaluation(
                'own', 'client_1', 0, {'accuracy': None, 'loss': None}
            ),
        ],
    )
  return path


def test_unusual_names(written):
  first, _ = evaluation_file.read(written).values()
  assert first[1].client == 'client\r\n0'


@pytest.mark.parametrize(
    'change',
    [
        lambda text: text.replace('0.056', '0.956', 1),
        lambda text: text.replace('0.056', '', 1),
        lambda text: text.replace('0.056', 'good', 1),
        lambda text: text.replace(',36,', ',37,', 1),
        lambda text: text.replace('saved', 'reestimated', 3),
        lambda text: text.replace('client_1', 'client_2', 1),
        lambda text: text.replace('accuracy', 'occuracy'),
        lambda text: text.replace('own', 'global', 1),
        # The same numbers, written otherwise.
        lambda text: text.replace('0.0625', '0.06250', 1),
        # The last row is cut, or missing.
        lambda text: text[:-1],
        lambda text: text[: text.rindex('client_1') + 12],
        lambda text: text[: text.rindex('client_1')],
        lambda text: ''.join(text.splitlines(True)[:-1]),
        lambda text: text.splitlines(True)[0],
        lambda text: '',
        # Of an earlier version.
        lambda text: 'model,client,num_examples,accuracy,loss\nglobal,,4,0,1\n',
    ],
)
def test_changed_file(change, written, tmp_path):
  text = change(written.read_bytes().decode())
  assert text != written.read_bytes().decode()
  written.write_bytes(text.encode())
  rows = [report.Evaluation('global', '', 4, {'accuracy': 0.25, 'loss': 1.0})]
  with pytest.raises(ValueError, match=f'{written} is damaged.*earlier vers'):
    evaluation_file.add(written, _subject(tmp_path), rows)
  assert written.read_bytes() == text.encode()


def test_other_metrics_need_another_file(tmp_path):
  path = tmp_path / 'evaluation.csv'
  evaluation_file.check(path, ['mae', 'loss'])
  rows = [report.Evaluation('global', '', 4, {'mae': 0.25, 'loss': 1.0})]
  evaluation_file.add(path, _subject(tmp_path), rows)
  assert evaluation_file.read(path) == {_subject(tmp_path): rows}
  evaluation_file.check(path, ['mae', 'loss'])
  with pytest.raises(
      ValueError,
      match='numbers mae, loss, but this run has accuracy, loss; use another',
  ):
    evaluation_file.check(path, ['accuracy', 'loss'])
