"""Imports and runs benchmarks, which are programs; reads their reports."""

import importlib.util
import pathlib
import subprocess
import sys

from absl import flags

FOLDER = pathlib.Path(__file__).parent.parent.parent / 'benchmarks'


def import_benchmark(name):
  """The module benchmarks/NAME.py."""
  if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))  # As for a program: for what it imports.
  spec = importlib.util.spec_from_file_location(
      f'{name}_benchmark', FOLDER / f'{name}.py'
  )
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # Dataclasses look it up.
  spec.loader.exec_module(module)
  # Programs that never run in one process may have flags of the same name.
  for flag in flags.FLAGS.get_key_flags_for_module(module.__name__):
    delattr(flags.FLAGS, flag.name)
  return module


def command(name, output_dir, *given):
  """The command that runs a benchmark with these flags."""
  path = FOLDER / f'{name}.py'
  return [sys.executable, str(path), *given, f'--output_dir={output_dir}']


def run(name, tmp_path, *given):
  """Runs a benchmark with these flags: its exit code, output and report."""
  log = tmp_path / 'log.txt'
  output_dir = tmp_path / 'new' / 'results'
  with log.open('w') as file:
    result = subprocess.run(
        command(name, output_dir, *given),
        stdout=file,
        stderr=subprocess.STDOUT,
        check=False,
    )
  printed = log.read_text()
  report = output_dir / f'{name}.md'
  assert report.exists(), printed
  text = report.read_text()
  assert text in printed
  return result.returncode, printed, text


def tables(text):
  """The cells of each table of a report; each has a header and a rule."""
  found, previous = [], ''
  for line in text.splitlines():
    if line.startswith('|'):
      if not previous.startswith('|'):
        found.append([])
      found[-1].append([cell.strip() for cell in line.strip('|').split('|')])
    previous = line
  for table in found:
    assert len({len(row) for row in table}) == 1
    assert set(table[1]) == {'---'}
  return [[table[0], *table[2:]] for table in found]
