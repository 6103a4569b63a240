"""Groups of flags: a dataclass declares its flags, checks them and reads them.

A group is a frozen dataclass that is derived from `base_class(...)` of some
options. Each option is a field and a flag: it says how the flag is parsed, its
default, its help and when it has an effect. An instance has the values that a
run uses: a flag without effect is None.
"""

from collections.abc import Container
import dataclasses
import re
from typing import Any, ClassVar, Optional, Self

from absl import flags

from tff_bn.catalog import options
from tff_bn.catalog import value_types
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.parsed_flags import ParsedFlags

# The key of a field's metadata.
_OPTION = 'option'


@dataclasses.dataclass(frozen=True)
class FlagGroup:
  """Flags that `--help` prints together, in this order."""

  title: str
  names: tuple[str, ...]


class Definer:
  """Defines flags one by one and remembers their names.

  Attributes:
    values: Where the flags are defined.
    inherited: If not None, flags have no default, and this text says where
      values that are not given come from.
  """

  def __init__(self, values: flags.FlagValues, inherited: Optional[str] = None):
    self.values = values
    self.inherited = inherited
    self._names: list[str] = []

  def __call__(
      self,
      name: str,
      values: value_types.ValueType,
      explanation: str,
      default: Any = None,
      default_text: Optional[str] = None,
  ) -> None:
    """Defines a flag.

    The explanation is sentences without the last point. `default_text` is the
    default in words, if it is no fixed value.
    """
    if self.inherited is not None:
      default, default_text = None, self.inherited
    elif default_text is None:
      default_text = parsers.to_text(default)
    flags.DEFINE(
        parsers.Parser(values),
        name,
        default,
        # After a list, in a line of its own.
        explanation
        + (
            f'(default: {default_text})'
            if explanation.endswith('\n')
            else f' (default: {default_text}).'
        ),
        flag_values=self.values,
    )
    self._names.append(name)

  def repeated(
      self, name: str, values: value_types.ValueType, explanation: str
  ) -> None:
    """Defines a flag that may be given several times; its value is a list."""
    flags.DEFINE_multi(
        parsers.Parser(values), None, name, [], '', flag_values=self.values
    )
    # absl would add a line of its own.
    self.values[name].help = f'{explanation} (default: none).'
    self._names.append(name)

  def boolean(self, name: str, explanation: str, default: bool = False) -> None:
    """Defines a flag that is on or off."""
    flags.DEFINE_boolean(
        name,
        default,
        f'{explanation} (default: {"yes" if default else "no"}).',
        flag_values=self.values,
    )
    # absl has no argument for it.
    self.values[name].parser = parsers.Parser(value_types.BOOLEAN)
    self._names.append(name)

  def group(self, title: str) -> FlagGroup:
    """Returns the group of all flags defined so far."""
    return FlagGroup(title, tuple(self._names))


def base_class(*declared: options.Option) -> Any:
  """Returns a base class of groups, whose flags are options of the catalog."""
  return dataclasses.make_dataclass(
      'Options',
      [
          (option.name, Any, dataclasses.field(metadata={_OPTION: option}))
          for option in declared
      ],
      bases=(Flags,),
      # The derived class has its own methods.
      init=False,
      repr=False,
      eq=False,
      frozen=True,
  )


def define(
    definer: Definer, option: options.Option, default: Any = None
) -> None:
  """Defines the flag of an option with this default."""
  if option.values is value_types.BOOLEAN:
    definer.boolean(option.name, option.explain(), default)
    return
  default_text = option.default_text
  if default_text is None and isinstance(default, float):
    default_text = f'{default:g}'
  definer(option.name, option.values, option.explain(), default, default_text)


def value(
    option: options.Option, flags: ParsedFlags, understood: Container[str]
) -> Any:
  """Returns the value that a run uses; None if the flag has no effect.

  `understood` are the features of the algorithm.
  """
  if option.feature is not None and option.feature not in understood:
    return None
  if not all(condition.holds(flags) for condition in option.conditions):
    return None
  if option.ignored is not None and option.ignored(flags):
    return None
  if option.excludes is not None and flags.overrules(
      option.excludes, option.name
  ):
    return None
  given = getattr(flags, option.name)
  if given is None and option.compute is not None:
    return option.compute(flags)
  if given is not None and option.convert is not None:
    return option.convert(given)
  return given


@dataclasses.dataclass(frozen=True)
class Flags:
  """The base class of groups; `TITLE` is the group's title in `--help`."""

  TITLE: ClassVar[str]

  @classmethod
  def specs(cls) -> dict[str, options.Option]:
    """Returns the flags' options by name."""
    return {
        field.name: field.metadata[_OPTION] for field in dataclasses.fields(cls)
    }

  @classmethod
  def define(
      cls,
      values: flags.FlagValues,
      *,
      inherited: Optional[str] = None,
      **defaults: Any,
  ) -> FlagGroup:
    """Defines the flags and returns their group for `--help`.

    Args:
      values: Where the flags are defined.
      inherited: If not None, the flags have no defaults; this text says where
        values that are not given come from.
      **defaults: The program's defaults in place of the declared ones.
    """
    definer = Definer(values, inherited)
    for name, spec in cls.specs().items():
      define(definer, spec, defaults.get(name, spec.default))
    return definer.group(cls.TITLE)

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """Checks that every flag that is given has an effect.

    Raises:
      ValueError: If a flag has no effect because of another one, or excludes
        it, unless one of them overrules the other.
    """
    for name, spec in cls.specs().items():
      other = spec.excludes
      if (
          other is not None
          and None not in (getattr(flags, name), getattr(flags, other))
          and flags.source(name) == flags.source(other)
      ):
        raise ValueError(options.exclusion(flags.text(name), flags.text(other)))
      for condition in spec.conditions:
        if not condition.holds(flags):
          flags.refuse_unless_overruled(
              name,
              condition.option,
              condition.explain(flags),
          )
          break

  @classmethod
  def read(
      cls,
      flags: ParsedFlags,
      understood: Container[str] = (),
      **known: Any,
  ) -> Self:
    """Reads or computes the values of checked flags.

    `understood` are the features of the algorithm. Known values are not read.
    """
    values = {
        name: value(spec, flags, understood)
        for name, spec in cls.specs().items()
        if name not in known
    }
    return cls(**values, **known)

  def arguments(self, *groups: type['Flags']) -> dict[str, Any]:
    """Returns the values that the library takes, by the arguments' names.

    A value that is None is left out: the library has its own default.

    Args:
      *groups: The groups whose flags are wanted. Default: all flags.
    """
    arguments = {}
    for group in groups or (type(self),):
      for name, spec in group.specs().items():
        value = getattr(self, name)
        if spec.argument is not None and value is not None:
          arguments[spec.argument] = value
    return arguments

  def replaced(self, **values: Any) -> Self:
    """Returns the same values except for some."""
    return dataclasses.replace(self, **values)

  def name_flags(self, text: str) -> str:
    """Replaces the library's names of arguments in a text by the flags' names.

    An argument's name is followed by `=`. A name that several flags could have
    is kept.
    """
    flags_of: dict[str, list[str]] = {}
    for name, spec in self.specs().items():
      if spec.argument is not None and getattr(self, name) is not None:
        flags_of.setdefault(spec.argument, []).append(name)
    for argument, names in flags_of.items():
      if len(names) == 1:
        text = re.sub(rf'(?<![^ (]){argument}=', f'{names[0]}=', text)
    return text
