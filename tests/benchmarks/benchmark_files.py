"""Imports and runs benchmarks, which are programs; reads their reports."""

import contextlib
import importlib.util
import pathlib
import sys

from absl import flags

FOLDER = pathlib.Path(__file__).parent.parent.parent / 'benchmarks'
# The flags of each benchmark. Programs that never run in one process may have
# flags of the same name, so absl knows them only while `given` needs them.
_FLAGS = {}


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
  _FLAGS[module] = flags.FLAGS.get_key_flags_for_module(module.__name__)
  for flag in _FLAGS[module]:
    delattr(flags.FLAGS, flag.name)
  return module


@contextlib.contextmanager
def given(benchmark, *texts):
  """Gives flags such as `--repeats=2` to a benchmark."""
  values = dict(text.removeprefix('--').split('=', 1) for text in texts)
  own = {flag.name: flag for flag in _FLAGS[benchmark]}
  try:
    for name, flag in own.items():
      flags.FLAGS[name] = flag
      flag.present = 1  # As if it had been parsed.
    for name, value in values.items():
      own[name].parse(value)
    yield
  finally:
    for name, flag in own.items():
      flag.unparse()
      delattr(flags.FLAGS, name)


def run(benchmark, monkeypatch, capsys, tmp_path, *texts):
  """Runs a benchmark in this process: its exit code and report."""
  monkeypatch.setattr(
      benchmark.harness,
      'in_new_process',
      lambda function, *args: function(*args),
  )
  monkeypatch.setattr(
      benchmark.harness, 'output_dir', lambda: tmp_path / 'new' / 'results'
  )
  with given(benchmark, *texts):
    returncode = benchmark.main(['program'])
  (report,) = (tmp_path / 'new' / 'results').glob('[!R]*.md')
  text = report.read_text()
  assert text in capsys.readouterr().out
  return returncode, text


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
