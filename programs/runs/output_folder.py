"""Chooses the folder of a program's files if `--output_dir` is not given."""

from collections.abc import Mapping
import itertools
import os
import pathlib
import re

from tff_bn.common import progress
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.runs import run_folder


def choose(
    flags: ParsedFlags,
    texts: Mapping[str, str],
    grown: run_folder.Grown = run_folder.grown_rounds,
) -> pathlib.Path:
  """Returns the folder for a program's files, and creates nothing.

  This is `--output_dir` if it is given. Otherwise, of the default folder and
  the folders `DEFAULT-2`, `DEFAULT-3`, …, it is the first one with a run that
  flags with these texts continue, or else the first one that is free.
  """
  first = pathlib.Path(flags.output_dir).expanduser()
  if flags.is_given('output_dir'):
    return first
  existing = _existing(first)
  differences = {}
  for number, folder in existing.items():
    differences[number] = _differences(folder, texts, grown)
    if not differences[number]:
      return folder
  if 1 not in existing:
    return first
  number = next(n for n in itertools.count(2) if n not in existing)
  folder = first.with_name(f'{first.name}-{number}')
  progress.say(
      f'{first} holds {differences[1]}. The files of this run go to {folder}.'
  )
  return folder


def _existing(first: pathlib.Path) -> dict[int, pathlib.Path]:
  """Returns the default folders that are not empty, by their numbers."""
  pattern = re.compile(rf'{re.escape(first.name)}(?:-([1-9][0-9]*))?')
  found = {}
  for path in first.parent.iterdir() if first.parent.is_dir() else ():
    match = pattern.fullmatch(path.name)
    # A program that has just started has temporary files in its folder.
    if match and not (path.is_dir() and not os.listdir(path)):
      found[int(match[1] or 1)] = path
  return dict(sorted(found.items()))


def _differences(
    folder: pathlib.Path, texts: Mapping[str, str], grown: run_folder.Grown
) -> str:
  """Returns why a folder can't be used; '' if these flags continue its run."""
  try:
    previous = run_folder.read_flags(folder)
  except OSError:
    return 'other files'
  except ValueError as error:
    if not (folder / run_folder.FLAGS_FILE).exists():
      return 'other files'
    return f'a run that cannot be continued ({error})'
  differences = run_folder.describe_differences(previous, texts, grown)
  return differences and f'a run with other flags: {differences}'
