"""Runs a task many times, each time with another disk fault.

A task is a function of a folder, named `MODULE:FUNCTION`, which writes files
there. If the module has `prepare_FUNCTION`, it is called first, without faults.

As a program, under LD_PRELOAD=file_faults.so, it gets a task, a folder and a
JSON list of `[kind, count, step]`. It calls the task without faults, then with
`count` successive faults from each `step`th file operation on, and each time
again without faults. file_faults.c lists the kinds. Every call is in a child
process, so that TensorFlow is imported once. The program prints JSON objects
with the exit status, the error message and the number of operations.
"""

import ctypes
import errno
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import traceback

HERE = pathlib.Path(__file__).parent
KILL = 1
# More than a task needs, so the fault lasts to its end.
ALWAYS = 10**6
IS_POSSIBLE = bool(shutil.which('gcc')) and sys.platform == 'linux'
EVERY_KIND = (
    (KILL, 1),
    (errno.ENOSPC, 1),
    (errno.ENOSPC, ALWAYS),
    (errno.EIO, 1),
)


def build_library(folder):
  """Compiles the library; returns its path."""
  path = folder / 'file_faults.so'
  subprocess.run(
      ['gcc', '-shared', '-fPIC', '-O1', '-o', path]
      + [HERE / 'file_faults.c', '-ldl'],
      check=True,
  )
  return path


def run(library, task, folder, faults):
  """Calls a task with each fault; returns what came of it."""
  result = subprocess.run(
      [sys.executable, __file__, task, folder, json.dumps(faults)],
      env={
          **os.environ,
          'LD_PRELOAD': os.fspath(library),
          'PYTHONPATH': os.pathsep.join(sys.path),
          'TF_CPP_MIN_LOG_LEVEL': '3',
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      check=True,
  )
  return [json.loads(line) for line in result.stdout.splitlines()]


def check(library, task, folder, faults, snapshot, *, check_after=None):
  """After each fault, the same call ends as an undisturbed one does.

  `snapshot` returns what must not depend on faults, given the folder of a call.
  `check_after`, if given, gets the folder as it was right after a fault, and
  whether the process was killed.
  """
  whole, *runs = run(library, task, folder, faults)
  assert whole['status'] == 0, whole
  assert len(runs) > len(faults)
  expected = snapshot(folder / 'whole')
  for found in runs:
    if found['kind'] == KILL:
      assert found['first']['status'] == -9, found
    elif found['first']['status']:
      # Each message says which file it is.
      assert found['run_dir'] in found['first']['text'], found
    assert found['second']['status'] == 0, found
    run_dir = pathlib.Path(found['run_dir'])
    assert not [p for p in run_dir.rglob('*') if '.part' in p.name], found
    assert snapshot(run_dir) == expected, found
    if check_after is not None:
      check_after(
          run_dir.with_name(f'{run_dir.name} first'), found['kind'] == KILL
      )
  return whole


def _in_child(task, prepare, run_dir, kind, number, count):
  """Calls a task in a child process with a fault."""
  reading, writing = os.pipe()
  child = os.fork()
  if not child:
    os.close(reading)
    text, faults = '', ctypes.CDLL(None)
    if prepare is not None:
      prepare(run_dir)
    faults.file_faults_arm(os.fsencode(run_dir), kind, number, count)
    try:
      task(run_dir)
    except Exception as error:
      text = f'{type(error).__name__}: {error}'
      traceback.print_exc()
    made = faults.file_faults_count()
    with os.fdopen(writing, 'w') as pipe:
      json.dump(dict(text=text, operations=made), pipe)
    os._exit(bool(text))
  os.close(writing)
  with os.fdopen(reading) as pipe:
    said = pipe.read()
  _, status = os.waitpid(child, 0)
  result = json.loads(said) if said else dict(text='', operations=None)
  return dict(result, status=os.waitstatus_to_exitcode(status))


def main(name, folder, faults):
  """Prints what came of each call."""
  module_name, _, function = name.partition(':')
  module = importlib.import_module(module_name)
  task = getattr(module, function)
  prepare = getattr(module, f'prepare_{function}', None)
  whole = os.path.join(folder, 'whole')
  whole = _in_child(task, prepare, whole, 0, 1, 1)
  print(json.dumps(whole), flush=True)
  for kind, count, step in json.loads(faults):
    for number in range(1 + step // 2, whole['operations'], step):
      run_dir = os.path.join(folder, f'{kind} {count} {number}')
      first = _in_child(task, prepare, run_dir, kind, number, count)
      if os.path.exists(run_dir):
        shutil.copytree(run_dir, f'{run_dir} first', symlinks=True)
      second = _in_child(task, None, run_dir, 0, 1, 1)
      found = dict(run_dir=run_dir, kind=kind, first=first, second=second)
      print(json.dumps(found), flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
