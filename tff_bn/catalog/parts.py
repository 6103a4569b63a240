"""The form of parts: what users choose by name, such as a rule or a model."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import inspect
from typing import Any, Generic, Optional, TypeVar

from tff_bn.catalog import options as options_lib
from tff_bn.catalog import value_types
from tff_bn.common import user_functions

_PartT = TypeVar('_PartT', bound='Part')
# The names of users' parts, in words.
YOURS = 'a function or an entry of yours as package.module:NAME'


@dataclasses.dataclass(frozen=True)
class Part:
  """A part of the library.

  Attributes:
    name: The name in flags.
    description: What it is or does, in a few words.
    builds: The class or function that builds it: the object itself, or
      `module:NAME`.
    options: The options that it gets as arguments.
    needs_seed: Whether it gets the run's `seed`, too.
    aliases: Other names of it.
  """

  name: str
  description: str
  builds: str | Callable[..., Any]
  options: tuple[options_lib.Option, ...] = ()
  needs_seed: bool = False
  aliases: tuple[str, ...] = ()

  def load(self) -> Callable[..., Any]:
    """Returns the class or function that builds the part."""
    if callable(self.builds):
      return self.builds
    return user_functions.import_object(self.builds)

  def has(self, option: str) -> bool:
    """Whether it gets the option of this name."""
    return any(own.name == option for own in self.options)


class Parts(Mapping[str, _PartT], Generic[_PartT]):
  """The parts of one kind, by name.

  `parts['module:NAME']` is a user's part: an entry of the same form in the
  user's module, or the class or function that builds it. `parts[alias]` is the
  part with this alias; iteration has the names only.
  """

  def __init__(
      self,
      *entries: _PartT,
      of_object: Optional[Callable[[str, Any], _PartT]] = None,
  ):
    """Initializes the parts.

    Args:
      *entries: The entries.
      of_object: Makes the entry of a user's class or function, given its name
        and itself; raises a `ValueError` if it does not fit. None: users can't
        add parts.
    """
    self._kind = type(entries[0])
    self._entries = {entry.name: entry for entry in entries}
    self._of_object = of_object
    self._aliases = {
        alias: entry.name for entry in entries for alias in entry.aliases
    }

  def __getitem__(self, name: str) -> _PartT:
    name = self.name_of(name)
    if name in self._entries:
      return self._entries[name]
    if not self.is_users(name):
      raise KeyError(name)
    assert self._of_object is not None
    found = user_functions.import_object(name)
    if isinstance(found, self._kind):
      return dataclasses.replace(found, name=name)
    return self._of_object(name, found)

  def __iter__(self) -> Iterator[str]:
    return iter(self._entries)

  def __len__(self) -> int:
    return len(self._entries)

  def __contains__(self, name: object) -> bool:
    return name in self._entries

  def name_of(self, name: str) -> str:
    """Returns the name that an alias stands for; other names stay."""
    return self._aliases.get(name, name)

  def is_users(self, name: str) -> bool:
    """Whether a name has the form of a user's part."""
    return self._of_object is not None and ':' in name


class PartName(value_types.Choice):
  """The name of a part, or `module:NAME` of a user's part."""

  def __init__(self, known: Parts[Any], other: Optional[str] = None):
    """Initializes the choice.

    Args:
      known: The parts.
      other: Users' parts, in words for the error message, or None.
    """
    super().__init__(known, other, known.is_users)
    self.parts = known

  def parse(self, text):
    """See the base class. An alias becomes the name."""
    return super().parse(self.parts.name_of(text))

  def names_code(self, value):
    """See the base class."""
    return self.parts.is_users(value)

  def load(self, value):
    """See the base class."""
    if self.names_code(value):
      self.parts[value].load()


def require_function(found: Any, needed: str) -> None:
  """Raises a `ValueError` unless a user's object is callable, as `needed`."""
  if not callable(found):
    raise ValueError(f'must be {needed}; it is of type {type(found).__name__}.')


def require_class(name: str, found: Any, base: str, needed: str) -> None:
  """Raises a `ValueError` unless a user's object is a complete class of a kind.

  Args:
    name: Its name, `module:NAME`.
    found: The object.
    base: The base class that it must have, `module:NAME`.
    needed: What it must be, for the message.
  """
  if not isinstance(found, type) or not issubclass(
      found, user_functions.import_object(base)
  ):
    kind = f'of type {type(found).__name__}'
    if isinstance(found, type):
      kind = f'the class {found.__name__}'
    raise ValueError(f'{name} must be {needed}; it is {kind}.')
  if inspect.isabstract(found):
    missing = [
        method
        for method in dir(found)
        if getattr(getattr(found, method), '__isabstractmethod__', False)
    ]
    raise ValueError(f'{name} must define the methods {", ".join(missing)}.')


def require_arguments(
    name: str, found: Callable[..., Any], *values: Any, **named: Any
) -> None:
  """Raises a `ValueError` unless a user's class or function takes arguments.

  `name` is its name, `module:NAME`; the other arguments are those that it gets.
  """
  try:
    inspect.signature(found).bind(*values, **named)
  except TypeError as error:
    called = ', '.join([*('...' for _ in values), *named])
    raise ValueError(
        f'{name} must be callable as {found.__name__}({called}): {error}. Give'
        ' the argument a default, or name an entry of the catalog instead.'
    ) from error


def listing(items: Mapping[str, Any]) -> str:
  """Returns lines that explain the values that an option may have.

  Each value has a description, or an object with a `description`.
  """
  return ''.join(
      f'  {name}: {getattr(item, "description", item)}\n'
      for name, item in items.items()
  )
