"""Tests of runs whose files were changed: flags, results, checkpoints."""

import csv
import shutil
import types

import printed
import pytest
import tiny_runs

from tff_bn import training
from tff_bn.imports import dependencies
from tff_bn.papers import analyze
from tff_bn.papers.run_analyses import comparison_runs
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.results import html_report
from tff_bn.programs.runs import finished_run
from tff_bn.programs.runs import jobs
from tff_bn.programs.runs import run_folder
from tff_bn.programs.runs import run_timing
from tff_bn.programs.testing import held_out
from tff_bn.training import manifests
from tff_bn.training import saved_models

# A run with every file that a run can have.
_FLAGS = (
    *tiny_runs.FLAGS,
    '--algorithm=fedbn',
    '--held_out_clients=client_3',
    '--evaluate_every=1',
    '--checkpoint_every=1',
)
_RESULTS = (
    *('metrics.csv', 'client_metrics.csv', 'held_out.csv'),
    *('class_metrics.csv', 'confusion.csv', 'calibration.csv'),
)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """The folder of a finished run, which tests must leave as it is."""
  folder = tmp_path_factory.mktemp('runs') / 'fedbn'
  assert train.run([*_FLAGS, f'--output_dir={folder}']) == 0
  return folder


@pytest.fixture
def run(finished, tmp_path):
  """A copy of the finished run, which a test may change."""
  return shutil.copytree(finished, tmp_path / 'run')


def _files(folder):
  return {
      path.relative_to(folder).as_posix(): path.read_bytes()
      for path in folder.rglob('*')
      if path.is_file()
  }


def _fails(program, arguments, capsys, *words):
  """Checks that a program finds a mistake without TensorFlow."""
  capsys.readouterr()
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(dependencies, 'require_tff', None)
    assert program.run(arguments) == 2
  error = printed.error(capsys.readouterr().err)
  for word in words:
    assert word in error
  return error


class TestFlags:

  @pytest.mark.parametrize(
      ('old', 'new', 'words'),
      [
          ('--num_clients=4', '--num_clients=5', '--num_clients (4, now 5)'),
          ('=float32', '=mixed_bfloat16', '--precision (float32, now mixed_'),
          ('--checkpoint_every=1', '--checkpoint_every=3', '--checkpoint_ev'),
          ('--batch_size=8', '--batch_sizf=8', '--batch_sizf (not set, now 8)'),
          ('--batch_size=8\n', '', '--batch_size (8, now not set)'),
          ('--rounds=1\n', '--rounds=0\n', '--rounds (1, now 0)'),
          ('--rounds=1\n', '--rounds=1\n--rounds=1\n', '--rounds (1, now 1 1'),
      ],
  )
  def test_a_changed_flag_is_named(self, old, new, words, run, capsys):
    path = run / 'flags.txt'
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    before = _files(run)
    words = f'{path} was changed after the run:', words
    _fails(evaluate, [f'--run={run}'], capsys, *words)
    if new == '--num_clients=5':
      _fails(analyze, ['permutation', f'--run={run}'], capsys, *words)
    assert _files(run) == before

  def test_every_byte(self, run):
    """A changed bit is an error that names the file."""
    path = run / 'flags.txt'
    content = path.read_bytes()
    rounds = content.index(b'--rounds=') + len(b'--rounds=')
    # The first line is a comment.
    for position in (0, *range(content.index(b'\n'), len(content))):
      if position == rounds:
        continue  # A run may get more rounds.
      changed = bytearray(content)
      # Only one bit of each byte, to save time.
      changed[position] ^= 1 << position % 8
      path.write_bytes(changed)
      with pytest.raises(
          (ValueError, command_line.UsageError), match='flags.txt'
      ):
        finished_run.read_settings(run, is_trusted=False)

  def test_flags_of_another_run(self, run, capsys):
    path = run / 'flags.txt'
    other = path.read_text().replace('--seed=0', '--seed=2')
    path.write_text(other.replace('--num_clients=4', '--num_clients=6'))
    words = ['flags.txt was changed', '--num_clients (4, now 6)', '--seed']
    _fails(evaluate, [f'--run={run}'], capsys, *words)
    # The command of the run refuses the folder, too.
    _fails(train, [*_FLAGS, f'--output_dir={run}'], capsys, *words)

  def test_more_rounds_than_the_models_have(self, run, capsys):
    path = run / 'flags.txt'
    path.write_text(path.read_text().replace('--rounds=1', '--rounds=3'))
    words = ['is not finished', 'rounds that its flags.txt asks for']
    _fails(evaluate, [f'--run={run}'], capsys, *words)
    assert not run_folder.is_complete(run, run_folder.read_flags(run))

  def test_changed_flags_are_not_repeated(self, run, capsys):
    path = run / 'flags.txt'
    path.write_text(path.read_text().replace('--seed=0', '--seed=2'))
    arguments = [f'--flagfile={path}', f'--output_dir={run}-2']
    _fails(train, arguments, capsys, f'{path} was changed after the run')
    assert not run.with_name('run-2').exists()
    # A copy is a file of the user.
    copy = shutil.copy(path, run.with_name('flags.txt'))
    flags = command_line.parse(train.define_flags, [f'--flagfile={copy}'])
    assert flags.seed == 2

  def test_errors_of_flags_name_the_file(self, run, capsys):
    # As if the run were of a version with other flags.
    for change, words in (
        (dict(sounds=3), '--sounds is not a flag of a run. Did you mean roun'),
        (dict(model='mlp'), '--model=mlp: must be one of'),
        (dict(flagfile='x'), '--flagfile is not a flag of a run'),
        (dict(rounds='x'), '--rounds=x: must be a whole number'),
        (dict(gamma='0.5'), '--gamma=0.5 is only for --split=gamma'),
    ):
      copy = tiny_runs.with_flags(run, run.with_name('copy'), **change)
      arguments = [f'--run={copy}']
      _fails(evaluate, arguments, capsys, f'{copy}/flags.txt: ', words)
      shutil.rmtree(copy)
    # The same as --flagfile of another program.
    path = run.with_name('x.flags')
    path.write_text('--rounds=x\n')
    arguments = [f'--flagfile={path}', '--model=mlp3']
    _fails(train, arguments, capsys, f'{path}: --rounds=x: must be')
    path.write_text('--sounds=3\n')
    words = f'{path}: --sounds is not a flag of this program. Did you mean roun'
    _fails(train, arguments, capsys, words)
    path.write_text('--rounds=x\n')
    error = _fails(train, ['--rounds=y', f'--flagfile={path}'], capsys)
    assert 'x.flags' not in error and '--rounds=y' in error

  def test_flags_of_the_command_may_differ(self, run):
    flags = command_line.parse(
        evaluate.define_flags, [f'--run={run}', '--num_clients=2']
    )
    assert evaluate.read_request(flags).settings.num_clients == 2


class TestComparisons:

  def _write(self, folder, algorithms, seeds):
    flags = f'--algorithms={algorithms}\n--seeds={seeds}\n'
    (folder / 'flags.txt').write_text(flags)

  @pytest.fixture
  def folder(self, tmp_path):
    for name in ('fedavg-seed0', 'fedavg-seed1', 'fbn-seed0', 'fbn-seed1'):
      run = tmp_path / 'runs' / name
      (run / 'model').mkdir(parents=True)
      (run / 'metrics.csv').write_text('')
      (run / 'flags.txt').write_text('--seed=0\n')
    self._write(tmp_path, 'fedavg,fbn', '0,1')
    return tmp_path

  @pytest.mark.parametrize(
      ('text', 'words'),
      [
          ('--algorithms=fedavg,fbn\n--seeds=0\n', 'fbn-seed1; the command'),
          ('--algorithms=fbn\n--seeds=0,1\n', 'does not name the run'),
          ('--algorithms=fbn,fedavg\n--seeds=0,3\n', 'flags.txt asks for thi'),
          ('--algorithmt=fbn\n--seeds=0,1\n', 'centralized-seed0 holds no run'),
          ('--experiment=a/b\n--seeds=0\n', 'is an experiment, whose runs'),
          ('--algorithms=fbn\n--sfeds=0,1\n', 'flags.txt is damaged: it has'),
      ],
  )
  def test_changed_flags(self, folder, text, words, capsys):
    (folder / 'flags.txt').write_text(text)
    _fails(analyze, ['matching', f'--run={folder}'], capsys, words)

  def test_all_runs(self, folder):
    texts = finished_run.check(folder)
    assert {
        run.name: algorithm
        for run, algorithm in comparison_runs.runs_of(folder, texts).items()
    } == {
        'fedavg-seed0': 'fedavg',
        'fedavg-seed1': 'fedavg',
        'fbn-seed0': 'fbn',
        'fbn-seed1': 'fbn',
    }


def _replace_a_digit(content):
  """Changes the last digit of a file, as in a number."""
  position = max(content.rfind(digit) for digit in b'12345678')
  return content[:position] + b'9' + content[position + 1 :]


_DAMAGES = {
    'changed': _replace_a_digit,
    'cut': lambda content: content[: len(content) // 2],
    'cut after a line': lambda content: content[
        : content.rstrip(b'\n').rfind(b'\n') + 1
    ],
    'longer': lambda content: content + content.splitlines(True)[-1],
    'replaced': lambda content: b'round,client,loss,accuracy\n1,a,2,0.5\n',
    'text': lambda content: content.replace(b'0.', b'zero.', 1),
    'removed': lambda content: None,
}


class TestResults:

  @pytest.mark.parametrize(
      ('name', 'damage'),
      [
          *((name, 'changed') for name in _RESULTS),
          *((name, 'removed') for name in _RESULTS),
          *(('metrics.csv', damage) for damage in ('cut after a line', 'text')),
      ],
  )
  def test_the_run_is_not_complete(self, name, damage, run, capsys):
    texts = run_folder.read_flags(run)
    assert run_folder.is_complete(run, texts)
    path = run / name
    content = _DAMAGES[damage](path.read_bytes())
    assert content != path.read_bytes()
    path.unlink()
    if content is not None:
      path.write_bytes(content)
    assert not run_folder.is_complete(run, texts)
    assert not training.is_finished(run)
    capsys.readouterr()
    if name == 'metrics.csv' and content is None:
      return  # The run is not even finished.
    assert evaluate.run([f'--run={run}']) == 2
    error = printed.error(capsys.readouterr().err)
    how = 'is missing' if content is None else 'was changed after the run'
    assert f'{path} {how}' in error

  def test_the_command_writes_them_again(self, finished, run, capsys):
    """The repaired files have the same bits."""
    for name, damage in zip(_RESULTS, ('longer', 'text', 'changed')):
      path = run / name
      path.write_bytes(_DAMAGES[damage](path.read_bytes()))
    (run / 'report.html').unlink()
    assert train.run([*_FLAGS, f'--output_dir={run}']) == 0
    capsys.readouterr()
    for name in (*_RESULTS, 'model/weights.npz', 'model/clients.npy'):
      assert (run / name).read_bytes() == (finished / name).read_bytes()
    assert run_folder.is_complete(run, run_folder.read_flags(run))
    # The page has their numbers.
    (client, accuracy), *_ = html_report.client_numbers(run, 'accuracy')
    with (finished / 'client_metrics.csv').open() as file:
      row = next(csv.DictReader(file))
    assert (client, accuracy) == (row['client'], float(row['accuracy']))

  @pytest.mark.parametrize('damage', ['cut', 'text'])
  def test_clients_results_of_a_failed_run(self, damage, tmp_path):
    """The file of a failed run has no checksum."""
    path = tmp_path / 'client_metrics.csv'
    content = b'round,client,loss,accuracy\n1,a,0.25,0.5\n'
    path.write_bytes(content)
    assert html_report.client_numbers(tmp_path, 'accuracy') == [('a', 0.5)]
    path.write_bytes(content[:-4] if damage == 'cut' else content + b'1,b,2,x')
    with pytest.raises(ValueError, match=f'{path} is damaged'):
      html_report.client_numbers(tmp_path, 'accuracy')

  @pytest.mark.parametrize('damage', ['changed', 'cut', 'replaced'])
  def test_the_time(self, damage, run, caplog):
    path = run / 'timing.json'
    content = path.read_bytes()
    assert run_timing.read(run).rounds == 1
    if damage == 'changed':
      damaged = content.replace(b'"rounds": 1', b'"rounds": 2')
    else:
      damaged = _DAMAGES[damage](content)
    assert damaged != content
    path.write_bytes(damaged)
    assert run_timing.read(run) is None
    assert html_report.seconds_per_round([run]) is None
    assert str(path) in caplog.text

  def test_the_time_of_another_run(self, run, tmp_path, caplog):
    other = tiny_runs.with_flags(run, tmp_path / 'other', seed=1)
    assert run_timing.read(other) is None
    assert 'timing.json belongs to another run' in caplog.text
    # A run with more rounds is the same run.
    longer = tiny_runs.with_flags(run, tmp_path / 'longer', rounds=7)
    assert run_timing.read(longer) == run_timing.read(run)


class TestContinuing:
  """A finished run with damages, which gets another round."""

  @pytest.fixture
  def damaged(self, run):
    # Without clients' states, no checkpoint can be continued.
    (run / 'client_states.sqlite').unlink()
    return run

  def test_a_failure_leaves_the_run_finished(self, damaged, capsys):
    before = _files(damaged)
    arguments = [*_FLAGS, '--rounds=2', f'--output_dir={damaged}']
    assert train.run(arguments) == 1
    error = printed.error(capsys.readouterr().err)
    assert 'No checkpoint' in error
    assert "the clients' states do not belong to its round: some in" in error
    assert f'{damaged}/client_states.sqlite' in error
    after = _files(damaged)
    # SQLite creates an empty store.
    assert after.pop('client_states.sqlite')
    assert {
        name for name, content in after.items() if content != before.get(name)
    } == set()
    texts = run_folder.read_flags(damaged)
    assert texts['rounds'] == '1'
    assert run_folder.is_complete(damaged, texts)

  def test_a_failed_run_has_no_held_out_results(self, run, monkeypatch):
    """They would describe the previous model."""
    job = types.SimpleNamespace(
        settings=finished_run.read_settings(run),
        folder=run,
        data=types.SimpleNamespace(train_indices={'client_0': range(99)}),
    )
    for error, exists in (
        (OSError('disk is full'), True),
        (training.UnusableModelError('It is not finite.'), False),
    ):

      def fail(job, hook, error=error):
        del job, hook
        raise error

      monkeypatch.setattr(jobs, 'warn_of_kept_statistics', lambda job: None)
      monkeypatch.setattr(jobs, '_train', fail)
      with pytest.raises(type(error)):
        jobs.train_one(job)
      for name in ('held_out.csv', 'class_metrics.csv', 'confusion.csv'):
        assert (run / name).exists() == exists

  def test_a_run_that_was_to_grow(self, run, capsys):
    """As a killed program leaves it before the first new round."""
    old = run_folder.read_flags(run)
    with run_folder.claim(run):
      run_folder.begin(run, 'x', {**old, 'rounds': '2'}, overwrite=False)
    assert not run_folder.is_complete(run, {**old, 'rounds': '2'})
    assert not run_folder.is_complete(run, old)
    _fails(evaluate, [f'--run={run}'], capsys, 'is not finished')
    # The same command goes on from here.
    for rounds in ('2', '3'):
      run_folder.check(run, {**old, 'rounds': rounds}, overwrite=False)
    with pytest.raises(ValueError, match=r'--rounds \(2, now 1\)'):
      run_folder.check(run, old, overwrite=False)
    run_folder.undo_growth(run)
    assert run_folder.is_complete(run, old)


def test_a_manifest_without_the_flags(run):
  """A manifest by other software may lack the flags; that is no error."""
  manifest = manifests.read(run / 'model', saved_models.FORMAT)
  del manifest['settings'], manifest['results']
  manifests.write(run / 'model', manifest)
  texts = run_folder.read_flags(run)
  assert not run_folder.is_complete(run, texts)
  run_folder.undo_growth(run)
  assert run_folder.read_flags(run) == texts


@pytest.mark.parametrize('name', ['held_out.csv', 'class_metrics.csv'])
def test_later_results_belong_to_the_models(run, name):
  assert set(held_out.read(run)['client']) == {'client_3'}
  manifest = manifests.read(run / 'model', saved_models.FORMAT)
  assert set(manifest['results']) == set(_RESULTS)
  # The program was killed before it recorded them.
  del manifest['results'][name]
  manifests.write(run / 'model', manifest)
  assert training.is_finished(run)
  assert not run_folder.is_complete(run, run_folder.read_flags(run))
