"""The values of a program's flags, and where each of them comes from."""

from collections.abc import Collection, Mapping
import enum
from typing import Any

from absl import flags

from tff_bn.programs import parsers


class Source(enum.IntEnum):
  """Where a flag's value comes from; the greater overrules the smaller."""

  DEFAULT = 0
  FLAGFILE = 1
  COMMAND_LINE = 2


class ParsedFlags:
  """The values of a program's flags, as attributes."""

  def __init__(
      self,
      values: flags.FlagValues,
      sources: Mapping[str, Source],
      ignored: Collection[str] = (),
  ):
    """Initializes the flags.

    Args:
      values: The values.
      sources: Where the value of each flag comes from.
      ignored: Flags that have their defaults, whatever was given.
    """
    self._values = values
    self._sources = {**sources, **dict.fromkeys(ignored, Source.DEFAULT)}
    self._ignored = ignored

  def __getattr__(self, name: str) -> Any:
    if name in self._ignored:
      return self._values[name].default
    return getattr(self._values, name)

  def source(self, name: str) -> Source:
    """Returns where the value of a flag comes from."""
    return self._sources[name]

  def is_given(self, name: str) -> bool:
    """Whether a flag is on the command line or in a flagfile."""
    return self.source(name) != Source.DEFAULT

  def defines(self, name: str) -> bool:
    """Whether the program has a flag of this name."""
    return name in self._sources

  def without(self, names: Collection[str]) -> 'ParsedFlags':
    """Returns the flags as if these were not given."""
    return ParsedFlags(self._values, self._sources, (*self._ignored, *names))

  def text(self, name: str) -> str:
    """Returns a flag as one writes it, such as `--rounds=60`."""
    return f'--{name}={parsers.to_text(getattr(self, name))}'

  def refuse_unless_overruled(
      self, name: str, overruling: str, reason: str
  ) -> None:
    """Raises an error if a flag is given but another one makes it meaningless.

    The flag is ignored instead if the other one overrules it: the command line
    overrules a flagfile.

    Args:
      name: The flag.
      overruling: The other flag.
      reason: Why the flag is refused, as the end of a sentence without its
        point.

    Raises:
      ValueError: If the flag is given and not overruled.
    """
    if self.is_given(name) and self.source(name) >= self.source(overruling):
      raise ValueError(f'{self.text(name)} {reason}.')
