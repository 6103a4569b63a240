"""Tests for the folder of a run."""

import concurrent.futures
import fcntl
import os
import pathlib
import resource
import tempfile

import pytest

from tff_bn.programs.runs import run_folder
from tff_bn.training import folder_lock

_FLAGS = {'algorithm': 'fedavg', 'rounds': '3'}


def _begin(folder, flags=None, overwrite=False):
  flags = flags or _FLAGS
  with run_folder.claim(folder):
    run_folder.check(folder, flags, overwrite=overwrite)
    run_folder.begin(folder, 'tff-bn-train', flags, overwrite=overwrite)


def test_flags_are_read_as_they_were_written(tmp_path):
  folder = tmp_path / 'a' / 'b'
  flags = {'algorithm': 'fedavg', 'dataset': 'tfds:a=b', 'data_dir': '/x y'}
  _begin(folder, flags)
  assert run_folder.read_flags(folder) == flags
  assert os.listdir(folder) == ['flags.txt']


def test_check_writes_nothing(tmp_path):
  run_folder.check(tmp_path / 'a' / 'b', _FLAGS, overwrite=True)
  assert not os.listdir(tmp_path)


def test_same_flags_continue(tmp_path):
  _begin(tmp_path)
  (tmp_path / 'metrics.csv').write_text('kept')
  _begin(tmp_path)
  assert (tmp_path / 'metrics.csv').read_text() == 'kept'


def test_flag_that_is_given_several_times(tmp_path):
  flags = {'sweep': 'gamma=0,1\nrounds=3', 'seeds': '0'}
  _begin(tmp_path, flags)
  assert (
      '--sweep=gamma=0,1\n--sweep=rounds=3\n'
      in (tmp_path / 'flags.txt').read_text()
  )
  assert run_folder.read_flags(tmp_path) == flags
  with pytest.raises(
      ValueError, match=r"--sweep \('gamma=0,1' 'rounds=3', now x\)"
  ):
    _begin(tmp_path, {**flags, 'sweep': 'x'})


@pytest.mark.parametrize(
    ('before', 'after', 'grown'),
    [
        ('3', '4', True),
        ('9', '10', True),
        ('4', '3', False),
        (None, '3', False),
    ],
)
def test_rounds_may_grow(tmp_path, before, after, grown):
  flags = {'algorithm': 'fbn'}
  old, new = (
      flags if rounds is None else {**flags, 'rounds': rounds}
      for rounds in (before, after)
  )
  _begin(tmp_path, old)
  (tmp_path / 'metrics.csv').write_text('kept')
  (tmp_path / 'model').mkdir()
  if not grown:
    with pytest.raises(ValueError, match='--rounds'):
      _begin(tmp_path, new)
    assert run_folder.read_flags(tmp_path) == old
    assert (tmp_path / 'model').exists()
    return
  _begin(tmp_path, new)
  assert run_folder.read_flags(tmp_path) == new
  assert (tmp_path / 'metrics.csv').read_text() == 'kept'
  # The run is not finished any more.
  assert not (tmp_path / 'model').exists()
  with pytest.raises(ValueError, match='--algorithm .fbn, now fedbn.'):
    _begin(tmp_path, {**new, 'algorithm': 'fedbn'})


def test_differences_that_are_allowed(tmp_path):
  _begin(tmp_path, {'seeds': '0', 'gamma': '0'})
  new = {'seeds': '0,1', 'gamma': '1'}

  def grown(previous, flags):
    assert previous == {'seeds': '0', 'gamma': '0'}
    assert flags == new
    return ['seeds']

  with pytest.raises(ValueError, match='other flags: --gamma .0, now 1.. C'):
    run_folder.check(tmp_path, new, overwrite=False, grown=grown)


def test_many_folders_can_be_claimed():
  before = resource.getrlimit(resource.RLIMIT_NOFILE)
  try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    run_folder.allow_claims(200)
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limit >= 1200
    assert highest == before[1]
    run_folder.allow_claims(1)  # Never less than before.
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_other_flags_are_named(tmp_path):
  _begin(
      tmp_path, {'algorithm': 'fedavg', 'rounds': '3', 'statistics': 'naive'}
  )
  before = (tmp_path / 'flags.txt').read_text()
  with pytest.raises(ValueError, match='holds a run with other') as error:
    _begin(tmp_path, {'algorithm': 'fedavg', 'rounds': '2', 'gamma': '0.5'})
  message = str(error.value)
  assert '--rounds (3, now 2)' in message
  assert '--gamma (not set, now 0.5)' in message
  assert '--statistics (naive, now not set)' in message
  assert '--algorithm' not in message
  assert '--overwrite' in message
  assert (tmp_path / 'flags.txt').read_text() == before


def test_few_of_many_differences_are_named(tmp_path):
  _begin(tmp_path, {'model': 'mlp3', **{f'f{i}': '1' for i in range(20)}})
  new = {**{f'g{i}': '1' for i in range(20)}, 'model': 'm' * 200}
  with pytest.raises(ValueError, match='holds a run with other') as error:
    _begin(tmp_path, new)
  message = str(error.value).removeprefix(f'--output_dir={tmp_path}')
  # A changed value comes first.
  assert '--model (mlp3, now mmm' in message.split(', --')[0]
  assert 'and 37 more. Choose another --output_dir, or' in message
  assert len(message) < 300


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
  _begin(tmp_path)
  (tmp_path / 'notes.txt').write_text('mine')
  (tmp_path / 'metrics.csv').write_text('old')
  (tmp_path / 'client_states.sqlite-wal').write_text('old')
  (tmp_path / '.results.md.part').write_text('old')
  for name in ('checkpoints', 'model', '.model.part', 'plots', 'logdir'):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'file').write_text('old')
  _begin(tmp_path / 'runs' / 'fedavg-seed0')
  _begin(tmp_path / 'runs' / 'fedbn-seed0')
  (tmp_path / 'runs' / 'fedbn-seed0' / 'notes.txt').write_text('mine')
  (tmp_path / 'runs' / 'other').mkdir()
  (tmp_path / 'runs' / 'other' / 'metrics.csv').write_text('not a run')

  _begin(tmp_path, {'algorithm': 'fedbn'}, overwrite=True)

  left = sorted(
      str(path.relative_to(tmp_path))
      for path in tmp_path.rglob('*')
      if path.is_file()
  )
  assert left == [
      'flags.txt',
      'notes.txt',
      'runs/fedbn-seed0/notes.txt',
      'runs/other/metrics.csv',
  ]
  assert not (tmp_path / 'model').exists()
  assert not (tmp_path / 'runs' / 'fedavg-seed0').exists()
  assert run_folder.read_flags(tmp_path) == {'algorithm': 'fedbn'}


def test_overwrite_does_not_follow_links(tmp_path):
  run, elsewhere = tmp_path / 'run', tmp_path / 'elsewhere'
  elsewhere.mkdir()
  (elsewhere / 'file').write_text('mine')
  _begin(run)
  (run / 'model').symlink_to(elsewhere)
  _begin(run, overwrite=True)
  assert (elsewhere / 'file').exists()
  assert not (run / 'model').exists()


@pytest.mark.parametrize('overwrite', [False, True])
def test_somebody_elses_folder_is_refused(tmp_path, overwrite):
  (tmp_path / 'model').mkdir()
  with pytest.raises(ValueError, match='holds model but no flags.txt'):
    _begin(tmp_path, overwrite=overwrite)
  assert os.listdir(tmp_path) == ['model']


def test_folder_with_other_files_is_used(tmp_path):
  (tmp_path / 'notes.txt').write_text('mine')
  _begin(tmp_path)
  assert sorted(os.listdir(tmp_path)) == ['flags.txt', 'notes.txt']


def test_file_in_the_way(tmp_path):
  (tmp_path / 'file').write_text('')
  for folder in (tmp_path / 'file', tmp_path / 'file' / 'sub'):
    with pytest.raises(ValueError, match='file is not a folder'):
      _begin(folder)


def test_folder_that_is_not_writable(tmp_path, monkeypatch):
  # Not by its mode: root may write everywhere.
  refused = []
  monkeypatch.setattr(
      os, 'access', lambda path, mode: refused.append((path, mode))
  )
  with pytest.raises(ValueError, match='is not writable'):
    _begin(tmp_path / 'run')
  assert refused == [(tmp_path, os.W_OK | os.X_OK)]
  assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    'name',
    [
        # Even root can create nothing in /proc.
        '/proc/nope',
        # Names have at most 255 bytes.
        300 * 'x',
    ],
)
def test_folder_that_cannot_be_created(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with (
      pytest.raises(ValueError, match=f'--output_dir={name} cannot be created'),
      run_folder.claim(pathlib.Path(name)),
  ):
    pass


def test_relative_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  _begin(pathlib.Path('a/b'))
  assert (tmp_path / 'a' / 'b' / 'flags.txt').exists()


def test_no_run(tmp_path):
  with pytest.raises(ValueError, match='holds no run'):
    run_folder.read_flags(tmp_path / 'missing')


@pytest.mark.parametrize(
    'content',
    [b'\xff\xfe\x00', b'hello\n', b'--a\n', b'', b'--a=1\n--rounds=1'],
)
def test_damaged_flags(tmp_path, content):
  (tmp_path / 'flags.txt').write_bytes(content)
  with pytest.raises(ValueError, match='is damaged'):
    run_folder.read_flags(tmp_path)


def test_run_in_progress_is_not_touched(tmp_path):
  _begin(tmp_path)
  descriptor = os.open(tmp_path, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # As the training loop does.
    for overwrite in (False, True):
      with pytest.raises(ValueError, match='in progress'):
        _begin(tmp_path, overwrite=overwrite)
  finally:
    os.close(descriptor)
  _begin(tmp_path, overwrite=True)


def test_run_of_a_comparison_in_progress_is_not_removed(tmp_path):
  _begin(tmp_path)
  finished, running = tmp_path / 'runs' / 'a', tmp_path / 'runs' / 'b'
  _begin(finished)
  _begin(running)
  with (
      folder_lock.hold(running),
      pytest.raises(ValueError, match='b is the folder of a run that is in'),
  ):
    _begin(tmp_path, overwrite=True)
  assert (finished / 'flags.txt').exists()
  assert (tmp_path / 'flags.txt').exists()


def test_folder_in_which_nothing_was_written_is_removed(tmp_path):
  with run_folder.claim(tmp_path / 'a' / 'b'):
    assert os.listdir(tmp_path / 'a') == ['b']
  assert not os.listdir(tmp_path)
  with run_folder.claim(tmp_path / 'a' / 'b'):
    (tmp_path / 'a' / 'b' / 'file').write_text('')
  assert (tmp_path / 'a' / 'b' / 'file').exists()


def test_claimed_folder_is_refused_to_others(tmp_path):
  with run_folder.claim(tmp_path):
    # The training loop of the same program.
    with (
        folder_lock.hold(tmp_path),
        pytest.raises(ValueError, match='in progress'),
        folder_lock.hold(tmp_path),
    ):
      pass
    # Another thread is as another program.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      error = pool.submit(_begin, tmp_path).exception()
    assert 'in progress' in str(error)
  _begin(tmp_path)


def test_readers_share_a_folder(tmp_path):
  with (
      folder_lock.hold(tmp_path, shared=True),
      folder_lock.hold(tmp_path, shared=True),
      pytest.raises(ValueError, match='is being read'),
  ):
    _begin(tmp_path)
  _begin(tmp_path)


def test_claimed_folder_may_be_opened_for_readers(tmp_path):
  def read():
    with folder_lock.hold(tmp_path, shared=True):
      pass

  # Other threads are as other programs.
  with (
      run_folder.claim(tmp_path),
      concurrent.futures.ThreadPoolExecutor(1) as pool,
  ):
    assert 'in progress' in str(pool.submit(read).exception())
    folder_lock.let_others_read(tmp_path)
    assert pool.submit(read).exception() is None
    assert 'in progress' in str(pool.submit(_begin, tmp_path).exception())


def test_folder_that_is_replaced_while_it_is_locked(tmp_path, monkeypatch):
  folder = tmp_path / 'run'
  folder.mkdir()
  flock = fcntl.flock
  replaced = []

  def replace_first(descriptor, operation):
    if not replaced:
      replaced.append(descriptor)
      folder.rename(tmp_path / 'gone')
      folder.mkdir()
    flock(descriptor, operation)

  monkeypatch.setattr(fcntl, 'flock', replace_first)
  with folder_lock.hold(folder):
    monkeypatch.undo()
    with pytest.raises(ValueError, match='in progress'):
      _begin(folder)


def test_temporary_files_are_kept_in_the_folder(tmp_path):
  before = tempfile.gettempdir(), os.environ.get('TMPDIR')
  leftover = tmp_path / '.temporary' / 'of a program that was killed'
  leftover.mkdir(parents=True)
  with run_folder.temporary_files_in(tmp_path):
    with tempfile.NamedTemporaryFile(delete=False) as file:
      assert tmp_path in pathlib.Path(file.name).parents
    assert tmp_path in pathlib.Path(os.environ['TMPDIR']).parents
    assert not leftover.exists()
  assert not os.listdir(tmp_path)
  assert (tempfile.gettempdir(), os.environ.get('TMPDIR')) == before


def test_how_far_a_run_is(tmp_path, monkeypatch):
  def state(flags, overwrite=False):
    return run_folder.check(tmp_path, flags, overwrite=overwrite)

  assert state(_FLAGS) == 'new'
  _begin(tmp_path)
  assert state(_FLAGS) == 'begun'
  monkeypatch.setattr(run_folder.finished, 'saved_settings', lambda _: _FLAGS)
  assert state(_FLAGS) == 'begun'
  monkeypatch.setattr(run_folder.finished, 'is_finished', lambda _: True)
  assert state(_FLAGS) == 'begun'
  monkeypatch.setattr(
      run_folder.finished,
      'has_result',
      lambda folder, name: name == 'target_metrics.csv',
  )
  assert state(_FLAGS) == 'finished'
  assert state(_FLAGS, overwrite=True) == 'new'
  assert state({**_FLAGS, 'rounds': '4'}) == 'begun'
