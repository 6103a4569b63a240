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

# Runs the file `script` in the run's folder.
_FAKE = """
import os, pathlib, signal, sys, time

arguments = dict(a.lstrip('-').split('=', 1) for a in sys.argv[1:])
folder = pathlib.Path(arguments['output_dir'])
exec((folder / 'script').read_text())
"""
_WAIT = """
(folder / 'started').write_text('')
time.sleep(60)
"""


def _shows_all(line):
  del line
  return True


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
          __name__='fake_run_process',
          TRAINING_FAILED=run_process.TRAINING_FAILED,
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
      with folder_lock.inherit(folder, int(arguments['lock'])):
        with folder_lock.hold(folder):
          print('held')
      """,
      'raise RuntimeError',
      'print("no end", end="")',
      finished=[2],
  )
  assert parallel.train(tasks, 1, ['--x=7'], lambda line: line != 'no\n') == []
  out, err = capfd.readouterr()
  assert out.splitlines() == [
      '[1/3] hello',
      '[1/3] 7 3',
      '[1/3] held',
      '[3/3] no end',
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
  assert parallel.train(tasks, 1, [], _shows_all) == []
  assert capfd.readouterr().out == '[1/1] True\n'


def test_finished_runs_can_be_read(fake):
  tasks = fake('pass', 'pass', finished=[2])
  parallel.train(tasks, 2, [], _shows_all)
  for task in tasks:
    # Another process reads the folder.
    code = f"""
from tff_bn.training import folder_lock
with folder_lock.hold({str(task.folder)!r}, shared=True): pass
"""
    subprocess.run([sys.executable, '-c', code], check=True)


@pytest.mark.parametrize('num_jobs', [1, 3])
def test_number_of_processes_at_a_time(fake, tmp_path, num_jobs):
  script = f"""
      log = open({str(tmp_path / 'log')!r}, 'a')
      print('+', end='', file=log, flush=True)
      time.sleep(0.4)
      print('-', end='', file=log, flush=True)
      """
  parallel.train(fake(*[script] * 5), num_jobs, [], _shows_all)
  running, most = 0, 0
  for sign in (tmp_path / 'log').read_text():
    running += 1 if sign == '+' else -1
    most = max(most, running)
  assert (running, most) == (0, num_jobs)


def test_run_without_a_usable_model_does_not_stop_the_others(fake, tmp_path):
  tasks = fake(
      'print("bad", file=sys.stderr); sys.exit(3)',
      '(folder / "done").write_text("")',
  )
  assert parallel.train(tasks, 1, [], _shows_all) == [tasks[0]]
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
    parallel.train(tasks, 2, [], _shows_all)
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
    parallel.train(tasks, 2, [], _shows_all)
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
  children = [
      types.SimpleNamespace(
          process=types.SimpleNamespace(
              terminate=interrupted, kill=lambda n=number: killed.append(n)
          )
      )
      for number in (1, 2)
  ]
  with pytest.raises(KeyboardInterrupt):
    parallel._end(children)
  assert killed == [1, 2]


def _is_alive(pid):
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except FileNotFoundError:
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


def test_process_ends_when_its_input_is_closed():
  code = """
import time
from tff_bn.programs.runs import run_process

run_process.end_with_parent()
print('ready', flush=True)
time.sleep(60)
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
import signal, time
from tff_bn.programs.runs import run_process

signal.signal(signal.SIGTERM, signal.SIG_IGN)
run_process._PATIENCE_SECONDS = 0.1
run_process.end_with_parent()
time.sleep(60)
"""
  process = subprocess.run(
      [sys.executable, '-c', code], stdin=subprocess.DEVNULL, check=False
  )
  assert process.returncode == -signal.SIGKILL


def test_lock_is_only_for_claimed_folders(tmp_path):
  with pytest.raises(ValueError, match='is not claimed'):
    folder_lock.descriptor(tmp_path)
