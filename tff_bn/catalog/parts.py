"""The form of parts: what users choose by name, such as a rule or a model."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import Any, Generic, Optional, TypeVar

from tff_bn.catalog import options as options_lib
from tff_bn.common import user_functions

_PartT = TypeVar('_PartT', bound='Part')


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
  """

  name: str
  description: str
  builds: str | Callable[..., Any]
  options: tuple[options_lib.Option, ...] = ()
  needs_seed: bool = False

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
  user's module, or the class or function that builds it.
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
        and itself. It raises a `ValueError` if it is none; the message
        continues a sentence whose subject is the name. None: users can't add
        parts.
    """
    self._kind = type(entries[0])
    self._entries = {entry.name: entry for entry in entries}
    self._of_object = of_object

  def __getitem__(self, name: str) -> _PartT:
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

  def is_users(self, name: str) -> bool:
    """Whether a name is that of a user's part."""
    return self._of_object is not None and ':' in name

  def finds(self, name: str) -> bool:
    """Whether a name is that of a user's part; imports it.

    Args:
      name: The name.

    Returns:
      Whether it has the form of a user's part.

    Raises:
      ValueError: If it has this form, but there is no such part.
    """
    return self.is_users(name) and self[name] is not None


def listing(items: Mapping[str, Any]) -> str:
  """Returns lines that explain the values that an option may have.

  Args:
    items: A description for each value, or an object with a `description`.

  Returns:
    The text.
  """
  return ''.join(
      f'  {name}: {getattr(item, "description", item)}\n'
      for name, item in items.items()
  )
