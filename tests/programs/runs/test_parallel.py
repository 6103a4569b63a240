"""Tests of runs in child processes; most tests use a fake process."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest

from tff_bn.common import cores
from tff_bn.programs.runs import jobs
from tff_bn.programs.runs import parallel
from tff_bn.programs.runs import run_process
from tff_bn.training import folder_lock

# Runs the file `script` in the folder of each run.
_FAKE = """
import os, pathlib, signal, sys, time
from tff_bn.programs.runs import run_process

def stop(*_):
  print('terminated', file=sys.stderr)
  sys.exit(143)

signal.signal(signal.SIGTERM, stop)
arguments = dict(a.lstrip('-').split('=', 1) for a in sys.argv[1:])
if 'started_in' in arguments:
  pathlib.Path(arguments['started_in'], str(os.getpid())).touch()
for order in run_process.orders(sys.stdin):
  folder = pathlib.Path(order.folder)
  result = run_process.HAS_MODEL
  exec((folder / 'script').read_text())
  run_process.mark_end(result)
"""
_WAIT = """
(folder / 'started').write_text('')
time.sleep(60)
"""


def _shows_all(line):
  del line
  return True


def _train(tasks, num_jobs, arguments, shows):
  with parallel.started(tasks, num_jobs, arguments, shows) as train:
    return train()


@pytest.fixture
def fake(tmp_path, monkeypatch):
  """Makes tasks whose processes run scripts, in claimed folders."""
  module = tmp_path / 'modules' / 'fake_run_process.py'
  module.parent.mkdir()
  module.write_text(_FAKE)
  monkeypatch.setenv('PYTHONPATH', str(module.parent))
  monkeypatch.setattr(
      parallel,
      'run_process',
      types.SimpleNamespace(
          **{**vars(run_process), '__name__': 'fake_run_process'}
      ),
  )
  with contextlib.ExitStack() as stack:

    def make(*scripts, finished=()):
      tasks = []
      for number, script in enumerate(scripts, start=1):
        folder = tmp_path / f'run{number}'
        folder.mkdir()
        (folder / 'script').write_text(textwrap.dedent(script))
        stack.enter_context(folder_lock.claim(folder))
        tasks.append(
            jobs.Task(None, folder, f'task {number}', number in finished)
        )
      return tasks

    yield make


def test_output_and_arguments(fake, capfd, monkeypatch):
  monkeypatch.setattr(cores, 'per_operation', lambda: 3)
  tasks = fake(
      """
      print('hello')
      print('wörld', file=sys.stderr)
      print('no', file=sys.stderr)
      print(arguments['x'], os.environ['TF_NUM_INTRAOP_THREADS'])
      from tff_bn.training import folder_lock
      with folder_lock.inherit(folder, order.lock):
        with folder_lock.hold(folder):
          print('held')
      """,
      'raise RuntimeError',
      'print("no line end", end="")',
      finished=[2],
  )
  assert _train(tasks, 1, ['--x=7'], lambda line: line != 'no\n') == []
  out, err = capfd.readouterr()
  assert out.splitlines() == [
      '[1/3] hello',
      '[1/3] 7 3',
      '[1/3] held',
      '[3/3] no line end',
  ]
  assert err.splitlines() == [
      '[2/3] task 2: finished',
      '[1/3] task 1',
      '[1/3] wörld',
      '[3/3] task 3',
  ]


def test_ctrl_c_reaches_this_process_only(fake, capfd):
  # A terminal sends the signal to all processes of its group.
  tasks = fake('print(os.getpgrp() == os.getpid())')
  assert _train(tasks, 1, [], _shows_all) == []
  assert capfd.readouterr().out == '[1/1] True\n'


def test_finished_runs_can_be_read(fake):
  tasks = fake('pass', 'pass', finished=[2])
  _train(tasks, 2, [], _shows_all)
  for task in tasks:
    # Another process reads the folder.
    code = f"""
from tff_bn.training import folder_lock
with folder_lock.hold({str(task.folder)!r}, shared=True): pass
"""
    subprocess.run([sys.executable, '-c', code], check=True)


@pytest.mark.parametrize(
    'num_jobs', [pytest.param(1, marks=pytest.mark.slow), 3]
)
def test_number_of_processes_at_a_time(fake, tmp_path, num_jobs):
  script = f"""
      log = open({str(tmp_path / 'log')!r}, 'a')
      print('+', end='', file=log, flush=True)
      time.sleep(0.4)
      print('-', end='', file=log, flush=True)
      """
  _train(fake(*[script] * 5), num_jobs, [], _shows_all)
  running, most = 0, 0
  for sign in (tmp_path / 'log').read_text():
    running += 1 if sign == '+' else -1
    most = max(most, running)
  assert (running, most) == (0, num_jobs)


def test_processes_train_several_runs(fake, tmp_path):
  script = f"""
      with open({str(tmp_path / 'pids')!r}, 'a') as pids:
        print(os.getpid(), file=pids)
      while len(set(open({str(tmp_path / 'pids')!r}))) < 2:
        time.sleep(0.02)
      """
  _train(fake(*[script] * 6), 2, [], _shows_all)
  pids = (tmp_path / 'pids').read_text().split()
  assert len(pids) == 6
  assert len(set(pids)) == 2


def test_lines_have_the_number_of_their_run(fake, capfd):
  script = """
      number = folder.name.removeprefix('run')
      for stream in (sys.stdout, sys.stderr):
        print(*[number] * 2000, sep=chr(10), file=stream)
      """
  _train(fake(*[script] * 5), 2, [], _shows_all)
  for text in capfd.readouterr():
    lines = [line for line in text.splitlines() if 'task' not in line]
    assert len(lines) == 5 * 2000
    for line in lines:
      number = line[-1]
      assert line == f'[{number}/5] {number}'


def test_run_without_a_usable_model_does_not_stop_the_others(fake, tmp_path):
  tasks = fake(
      'print("bad", file=sys.stderr); result = run_process.NO_MODEL',
      '(folder / "done").write_text("")',
  )
  assert _train(tasks, 1, [], _shows_all) == [tasks[0]]
  assert (tmp_path / 'run2' / 'done').exists()


def _wait_until_started(folder, number):
  deadline = time.monotonic() + 20
  while not (folder / f'run{number}' / 'started').exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)


@pytest.mark.parametrize(
    ('end', 'message'),
    [
        (
            'sys.exit(1)',
            '^task 2 failed, see the error above. The same command',
        ),
        ('sys.exit(0)', '^task 2 failed, see the error above. The same'),
        ('os.kill(os.getpid(), signal.SIGKILL)', 'SIGKILL, perhaps .* memory'),
        (
            'os.kill(os.getpid(), signal.SIGSEGV)',
            'its process got SIGSEGV. The',
        ),
    ],
)
def test_other_errors_end_all_processes(fake, tmp_path, end, message):
  tasks = fake(
      f"""
      def stop(*_):
        (folder / 'stopped').write_text('')
        sys.exit(143)
      signal.signal(signal.SIGTERM, stop)
      {_WAIT.replace(chr(10), chr(10) + 6 * ' ')}
      """,
      f"""
      while not (folder.parent / 'run1' / 'started').exists():
        time.sleep(0.02)
      {end}
      """,
      _WAIT,
  )
  with pytest.raises(RuntimeError, match=message):
    _train(tasks, 2, [], _shows_all)
  assert (tmp_path / 'run1' / 'stopped').exists()
  assert not (tmp_path / 'run3' / 'started').exists()


@pytest.fixture
def ctrl_c():
  """Ctrl-C raises KeyboardInterrupt; a shell's background jobs ignore it."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_and_twice_does_not(fake, tmp_path, ctrl_c):
  def ignoring(number):
    return f"""
      def ignore(*_):
        (folder / 'asked').write_text('')
      signal.signal(signal.SIGTERM, ignore)
      (folder / 'pid').write_text(str(os.getpid()))
      {_WAIT.replace(chr(10), chr(10) + 6 * ' ')}
      """ + f'# {number}'

  tasks = fake(ignoring(1), ignoring(2))

  def interrupt():
    for number in (1, 2):
      _wait_until_started(tmp_path, number)
    os.kill(os.getpid(), signal.SIGINT)
    while not all((tmp_path / f'run{n}' / 'asked').exists() for n in (1, 2)):
      time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=interrupt)
  thread.start()
  with pytest.raises(KeyboardInterrupt):
    _train(tasks, 2, [], _shows_all)
  thread.join()
  for number in (1, 2):
    pid = int((tmp_path / f'run{number}' / 'pid').read_text())
    deadline = time.monotonic() + 10
    while _is_alive(pid):
      assert time.monotonic() < deadline
      time.sleep(0.02)


def test_second_ctrl_c_may_come_at_once():
  def interrupted():
    raise KeyboardInterrupt

  killed = []
  processes = [
      types.SimpleNamespace(
          end=interrupted,
          popen=types.SimpleNamespace(kill=lambda n=number: killed.append(n)),
      )
      for number in (1, 2)
  ]
  with pytest.raises(KeyboardInterrupt):
    parallel._end(processes)
  assert killed == [1, 2]


def _is_alive(pid):
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except FileNotFoundError:
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


@pytest.mark.parametrize('is_busy', [True, False])
def test_process_ends_when_its_input_is_closed(is_busy):
  code = f"""
import sys, time
from tff_bn.programs.runs import run_process

waiting = run_process.orders(sys.stdin)
print('ready', flush=True)
if {is_busy}:
  time.sleep(60)
next(waiting)
"""
  process = subprocess.Popen(
      [sys.executable, '-c', code],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
  )
  assert process.stdout.readline() == 'ready\n'
  assert process.poll() is None
  process.stdin.close()
  assert process.wait(timeout=20) == -signal.SIGTERM


def test_process_that_does_not_end_is_killed():
  code = """
import signal, sys, time
from tff_bn.programs.runs import run_process

signal.signal(signal.SIGTERM, signal.SIG_IGN)
run_process._PATIENCE_SECONDS = 0.1
run_process.orders(sys.stdin)
time.sleep(60)
"""
  process = subprocess.run(
      [sys.executable, '-c', code], stdin=subprocess.DEVNULL, check=False
  )
  assert process.returncode == -signal.SIGKILL


def test_process_may_end_after_its_last_order():
  code = """
import sys, time
from tff_bn.programs.runs import run_process

print(list(run_process.orders(sys.stdin)))
time.sleep(0.5)
"""
  order = run_process.Order('a\nb', 7)
  process = subprocess.run(
      [sys.executable, '-c', code],
      input=f'{order.line()}{run_process.END}',
      stdout=subprocess.PIPE,
      text=True,
      check=True,
  )
  assert process.stdout == f'{[order]}\n'


def test_processes_without_a_run_end_silently(fake, capfd, tmp_path):
  folder = tmp_path / 'started'
  folder.mkdir()
  tasks = fake('pass', 'pass')
  with parallel.started(tasks, 2, [f'--started_in={folder}'], _shows_all):
    while len(list(folder.iterdir())) < 2:
      time.sleep(0.02)
  assert not any(_is_alive(int(path.name)) for path in folder.iterdir())
  time.sleep(0.2)  # The threads would write the lines now.
  assert capfd.readouterr() == ('', '')


def test_lock_is_only_for_claimed_folders(tmp_path):
  with pytest.raises(ValueError, match='is not claimed'):
    folder_lock.descriptor(tmp_path)
