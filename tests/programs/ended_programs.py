"""Runs a program in its own process and ends it with a signal."""

import os
import signal
import subprocess
import sys
import time

import psutil


def obey_ctrl_c():
  """Lets a new process end at Ctrl-C, also one of a background job.

  A shell's background jobs ignore Ctrl-C, and their children too.
  """
  signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt(program, arguments, errors, sent, until, **environment):
  """Starts a program, sends it a signal, and checks that no process is left.

  Args:
    program: Its module.
    arguments: Its arguments.
    errors: The path of the file for its standard error stream.
    sent: The signal.
    until: Whether it is time for the signal, given what the stream has.
    **environment: Further environment variables.

  Returns:
    The exit code, and the command lines of the processes that it had started.
  """
  with open(errors, 'w', encoding='utf-8') as file:
    process = subprocess.Popen(
        [sys.executable, '-m', program.__name__, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=file,
        env={**os.environ, **environment},
        preexec_fn=obey_ctrl_c,
    )
    try:
      deadline = time.monotonic() + 300
      while not until(text := errors.read_text(encoding='utf-8')):
        assert process.poll() is None, text
        assert time.monotonic() < deadline
        time.sleep(0.05)
      children = psutil.Process(process.pid).children(recursive=True)
      commands = [child.cmdline() for child in children]
      process.send_signal(sent)
      code = process.wait(timeout=120)
    finally:
      process.kill()
  _, alive = psutil.wait_procs(children, timeout=60)
  assert not alive
  return code, commands
