"""Tables of TOML files, whose mistakes are reported with file and key."""

from collections.abc import Collection
import pathlib
import tomllib
from typing import Any

from tff_bn.common import spelling


class Table:
  """A table of a TOML file whose mistakes are reported with file and key."""

  def __init__(self, path: pathlib.Path, key: str, values: Any):
    self.path = path
    self.key = key
    if not isinstance(values, dict):
      raise ValueError(f'{self._place()} must be a table of keys and values.')
    self.values = values

  def _place(self, name: str = '') -> str:
    key = '.'.join(part for part in (self.key, name) if part)
    return f'{self.path}: {key}' if key else f'{self.path}:'

  def error(self, name: str, problem: str) -> ValueError:
    """Returns an error about one key."""
    return ValueError(f'{self._place(name)} {problem}')

  def table(self, name: str) -> 'Table':
    """Returns a table in this table; empty if it is missing."""
    key = f'{self.key}.{name}' if self.key else name
    return Table(self.path, key, self.values.get(name, {}))

  def check_keys(self, known: Collection[str]) -> None:
    """Checks that all keys are known."""
    for name in self.values:
      if name not in known:
        raise self.error(
            name,
            f'is not understood; there is {", ".join(known)}.'
            + spelling.suggestion(name, known),
        )

  def text(self, name: str) -> str:
    """Returns a text that must be given."""
    value = self.values.get(name)
    if not isinstance(value, str) or not value.strip():
      raise self.error(name, 'must be given, as a text.')
    return value

  def texts(self, name: str) -> tuple[str, ...]:
    """Returns a list of texts; a single text is a list of one."""
    value = self.values.get(name, [])
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(
        isinstance(element, str) for element in values
    ):
      raise self.error(name, 'must be a text or a list of texts.')
    return tuple(values)

  def tables(self, name: str) -> list['Table']:
    """Returns the tables that are written as [[name]]."""
    values = self.values.get(name, [])
    if not isinstance(values, list):
      raise self.error(name, f'must be written as [[{name}]].')
    key = f'{self.key}.{name}' if self.key else name
    return [
        Table(self.path, f'{key}[{number}]', value)
        for number, value in enumerate(values)
    ]


def read(path: pathlib.Path) -> Table:
  """Reads a file.

  Args:
    path: The file.

  Returns:
    Its table.

  Raises:
    ValueError: If it is no TOML file.
  """
  try:
    values = tomllib.loads(path.read_text(encoding='utf-8'))
  except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
    raise ValueError(f'{path}: is no TOML file: {error}') from error
  return Table(path, '', values)
