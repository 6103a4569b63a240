"""Files of flags, `--flagfile=FILE`: their lines, and presets by name."""

from collections.abc import Iterator, Sequence
import pathlib
from typing import NamedTuple, Optional

from tff_bn.common import spelling
from tff_bn.programs.runs import run_folder

_PRESETS = pathlib.Path(__file__).parents[1] / 'presets'
_SUFFIX = '.flags'


def presets() -> list[str]:
  """Returns the names of the presets, which `--flagfile` accepts."""
  return sorted(path.stem for path in _PRESETS.glob(f'*{_SUFFIX}'))


class Argument(NamedTuple):
  """An argument of a program, and where it comes from.

  Attributes:
    text: The argument.
    path: The file that has it; None if it is in the command itself.
    is_of_run: Whether it comes from the `flags.txt` of a run, or from a file
      that such a file includes.
  """

  text: str
  path: Optional[pathlib.Path] = None
  is_of_run: bool = False


def expand(arguments: Sequence[str]) -> list[Argument]:
  """Replaces each `--flagfile=FILE` by the flags in the file.

  Raises:
    ValueError: If a file does not exist, is not a text file, includes itself,
      or is the `flags.txt` of a run and was changed.
  """
  return _expand(arguments, (), False)


def _expand(
    arguments: Sequence[str],
    including: tuple[pathlib.Path, ...],
    is_of_run: bool,
) -> list[Argument]:
  expanded = []
  for argument, is_file in _parts(arguments):
    if not is_file:
      path = including[-1] if including else None
      expanded.append(Argument(argument, path, is_of_run))
      continue
    path = _find(argument)
    if path in including:
      chain = ' → '.join(map(str, (*including, path)))
      raise ValueError(f'--flagfile={argument} includes itself: {chain}.')
    names = (pathlib.Path(argument).name, path.name)
    if path.name == run_folder.FLAGS_FILE:
      run_folder.check_flags(path.parent)
    expanded += _expand(
        _read(argument, path),
        (*including, path),
        is_of_run or run_folder.FLAGS_FILE in names,
    )
  return expanded


def _parts(arguments: Sequence[str]) -> Iterator[tuple[str, bool]]:
  """Yields each argument, or the name of the file, and whether it is one."""
  remaining = iter(arguments)
  for argument in remaining:
    name, equals, value = argument.partition('=')
    if name in ('--flagfile', '-flagfile'):
      yield (value if equals else next(remaining, '')), True
    else:
      yield argument, False


def _find(name: str) -> pathlib.Path:
  """Returns the path of a file or a preset."""
  path = pathlib.Path(name).expanduser()
  if name and path.exists():
    return path.resolve()
  if name in presets():
    return _PRESETS / f'{name}{_SUFFIX}'
  raise ValueError(
      f'--flagfile={name} is neither a file nor a preset; the presets are'
      f' {", ".join(presets())}.{spelling.suggestion(name, presets())}'
  )


def _read(name: str, path: pathlib.Path) -> list[str]:
  """Returns the lines of a file without comments and empty lines."""
  try:
    # Editors on Windows begin a file with a byte-order mark.
    lines = path.read_text(encoding='utf-8-sig').split('\n')
  except UnicodeDecodeError as error:
    raise ValueError(f'--flagfile={name} is not a text file.') from error
  except OSError as error:
    raise ValueError(
        f'--flagfile={name} cannot be read: {error.strerror}.'
    ) from error
  stripped = map(str.strip, lines)
  return [s for s in stripped if s and not s.startswith(('#', '//'))]
