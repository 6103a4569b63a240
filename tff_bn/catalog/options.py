"""The form of options: what an argument of the library, or a flag, may be."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
from typing import Any, Optional

from tff_bn.catalog import value_types

# Stands for the option's own name.
OWN_NAME = '<own name>'


@dataclasses.dataclass(frozen=True)
class Condition:
  """A condition under which an option has an effect.

  Attributes:
    option: The other option that decides it.
    holds: Whether the option has an effect, given all options as attributes of
      an object.
    reason: Why it has none, as the end of a sentence without its point; `{}`
      stands for the value of the other option. Or a function that returns it.
  """

  option: str
  holds: Callable[[Any], bool]
  reason: str | Callable[[], str]

  def explain(self, options: Any) -> str:
    """Returns why the option has no effect, given all options."""
    reason = self.reason() if callable(self.reason) else self.reason
    return reason.format(getattr(options, self.option))


def only_for(name: str, value: str) -> Condition:
  """Returns the condition that another option has this value."""
  return Condition(
      name,
      lambda options: getattr(options, name) == value,
      f'is only for --{name}={value}',
  )


@dataclasses.dataclass(frozen=True)
class Option:
  """All that there is to say about an option.

  Attributes:
    name: The name of its flag.
    values: The values that it may have.
    description: What it does: sentences without the last point, in which other
      options are written as flags; or a function that returns them.
    default: Its default.
    default_text: The default in words, if it is no fixed value.
    argument: The name of the library's argument, if it is one; `OWN_NAME` for
      the same name.
    compute: Computes the default from the other options.
    convert: Changes a value that is given in a command.
    conditions: When it has an effect. Where it has none, giving it is an error.
    ignored: Whether it has no effect for another reason.
    excludes: The name of an option that can't be given together with it.
    feature: The feature of algorithms on which it has an effect; None: it has
      an effect on all. `OWN_NAME`, if algorithms list the option itself.
  """

  name: str
  values: value_types.ValueType
  description: str | Callable[[], str]
  default: Any = None
  default_text: Optional[str] = None
  argument: Optional[str] = None
  compute: Optional[Callable[[Any], Any]] = None
  convert: Optional[Callable[[Any], Any]] = None
  conditions: tuple[Condition, ...] = ()
  ignored: Optional[Callable[[Any], bool]] = None
  excludes: Optional[str] = None
  feature: Optional[str] = None

  def __post_init__(self):
    for field in ('argument', 'feature'):
      if getattr(self, field) == OWN_NAME:
        object.__setattr__(self, field, self.name)

  def explain(self) -> str:
    """Returns the description."""
    if callable(self.description):
      return self.description()
    return self.description

  def explain_default(self) -> str:
    """Returns the default in words, or as a number."""
    return self.default_text or f'{self.default:g}'

  def check(self, value: Any, owner: object = None) -> None:
    """Checks the value of the library's argument.

    Args:
      value: The value.
      owner: The object whose argument it is, if the message should name it.

    Raises:
      TypeError: If the value has a wrong type.
      ValueError: If it is not allowed. The message names the argument, its
        value and what is allowed.
    """
    self.values.check(self.argument or self.name, value, owner)


def declared(module: Mapping[str, Any]) -> tuple[Option, ...]:
  """Returns the options among the variables of a module, in their order."""
  return tuple(v for v in module.values() if isinstance(v, Option))


def check_fields(values: Any, options: Iterable[Option]) -> None:
  """Checks the fields of a dataclass that are arguments of options.

  Options without a field are skipped. A field may be None if that is its
  default. For errors, see `Option.check`.
  """
  defaults = {f.name: f.default for f in dataclasses.fields(values)}
  for option in options:
    name = option.argument
    if name not in defaults:
      continue
    value = getattr(values, name)
    if value is not None or defaults[name] is not None:
      option.check(value)


def exclusion(first: str, second: str) -> str:
  """Returns the error for two options that can't be given together."""
  return f'{first} and {second} exclude each other; give one of them.'


def explain(*options: Option) -> str:
  """Returns the options as a text: their names, descriptions and defaults."""
  lines = []
  for option in options:
    default = option.default_text or option.default
    lines.append(f'{option.argument or option.name} (default: {default})')
    lines += [f'  {line}' for line in option.explain().splitlines()]
  return '\n'.join(lines) + '\n'
