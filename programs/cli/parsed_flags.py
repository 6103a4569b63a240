"""The values of a program's flags, and where each of them comes from."""

from collections.abc import Collection, Mapping
import enum
import types
from typing import Any, Optional

from absl import flags

from tff_bn.programs.cli import parsers


class Source(enum.IntEnum):
  """Where a flag's value comes from; the greater overrules the smaller."""

  DEFAULT = 0
  FLAGFILE = 1
  COMMAND_LINE = 2


class ParsedFlags:
  """The values of a program's flags, as attributes.

  Attributes:
    refusals: If not None, `refuse_unless_overruled` raises no errors. It adds
      their messages here, by the names of the refused flags.
  """

  def __init__(
      self,
      values: flags.FlagValues,
      sources: Mapping[str, Source],
      replaced: Mapping[str, Any] = types.MappingProxyType({}),
      refusals: Optional[dict[str, str]] = None,
  ):
    """Initializes the flags.

    Args:
      values: The values.
      sources: Where the value of each flag comes from.
      replaced: Values that replace those in `values`, by name.
      refusals: See the class.
    """
    self._values = values
    self._sources = sources
    self._replaced = replaced
    self.refusals = refusals

  def __getattr__(self, name: str) -> Any:
    if name in self._replaced:
      return self._replaced[name]
    return getattr(self._values, name)

  def source(self, name: str) -> Source:
    """Returns where the value of a flag comes from."""
    return self._sources[name]

  def is_given(self, name: str) -> bool:
    """Whether a flag is on the command line or in a flagfile."""
    return self.source(name) != Source.DEFAULT

  def overrules(self, name: str, other: str) -> bool:
    """Whether a flag is given and overrules another one that excludes it."""
    return getattr(self, name) is not None and (
        getattr(self, other) is None or self.source(name) > self.source(other)
    )

  def defines(self, name: str) -> bool:
    """Whether the program has a flag of this name."""
    return name in self._sources

  def without(self, names: Collection[str]) -> 'ParsedFlags':
    """Returns the flags as if these were not given."""
    defaults = {name: self._values[name].default for name in names}
    return ParsedFlags(
        self._values,
        {**self._sources, **dict.fromkeys(names, Source.DEFAULT)},
        {**self._replaced, **defaults},
        self.refusals,
    )

  def replacing(
      self, texts: Mapping[str, str], source: Source = Source.COMMAND_LINE
  ) -> 'ParsedFlags':
    """Returns the flags with other values, given as in a command.

    The new values get this source. The result has its own `refusals`: None.
    """
    values = {name: self.parse(name, text) for name, text in texts.items()}
    return ParsedFlags(
        self._values,
        {**self._sources, **dict.fromkeys(texts, source)},
        {**self._replaced, **values},
    )

  def parse(self, name: str, text: str) -> Any:
    """Parses the text of a flag; a ValueError says what is wrong with it."""
    if not self.defines(name):
      raise ValueError(f'--{name} is not a flag of this program.')
    try:
      return self._values[name].parser.parse(text)
    except ValueError as error:
      raise ValueError(f'--{name}={text}: {error}') from error

  def text(self, name: str) -> str:
    """Returns a flag as one writes it, such as `--rounds=60`."""
    return f'--{name}={parsers.to_text(getattr(self, name))}'

  def refuse_unless_overruled(
      self, name: str, overruling: str, reason: str
  ) -> None:
    """Raises a ValueError if a flag is given without effect beside another one.

    There is no error if the other flag overrules it: the command line overrules
    a flagfile. With `refusals`, the error is collected, see the class.

    Args:
      name: The flag.
      overruling: The other flag, which takes the effect away.
      reason: Why the flag is refused, as the end of a sentence without its
        point.
    """
    if not self.is_given(name) or self.source(name) < self.source(overruling):
      return
    message = f'{self.text(name)} {reason}.'
    if self.refusals is None:
      raise ValueError(message)
    self.refusals.setdefault(name, message)
