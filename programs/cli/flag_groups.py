"""Groups of flags: a dataclass declares its flags, checks them and reads them.

A group is a frozen dataclass that is derived from `Flags`. Each field is a
flag, and `flag(...)` says everything about it: how it is parsed, its default,
its help and when it has an effect. An instance has the values that a run uses:
a flag without effect is None.
"""

from collections.abc import Callable, Container, Mapping
import dataclasses
import re
from typing import Any, ClassVar, Optional, Self

from absl import flags

from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.parsed_flags import ParsedFlags

_SPEC = 'flag'
OWN_NAME = '<own name>'

POSITIVE_INTEGER = parsers.NumberParser(int, minimum=1)
INTEGER = parsers.NumberParser(int)
POSITIVE = parsers.NumberParser(float, above=0)
NOT_NEGATIVE = parsers.NumberParser(float, minimum=0)
SHARE = parsers.NumberParser(float, minimum=0, maximum=1)
MOMENTUM = parsers.NumberParser(float, minimum=0, below=1)
# A batch, the steps and the passes of a client's round are in memory at once.
BATCH_SIZE = parsers.NumberParser(int, minimum=1, maximum=10**6)
STEPS = parsers.NumberParser(int, minimum=1, maximum=10**6)
MEAN_STEPS = parsers.NumberParser(float, minimum=0, maximum=STEPS.maximum)
EPOCHS = parsers.NumberParser(int, minimum=1, maximum=10**4)
# Each client has an entry in several tables in memory.
NUM_CLIENTS = parsers.NumberParser(int, minimum=1, maximum=10**6)
# 30 years; Python cannot wait for more than 300.
SECONDS = parsers.NumberParser(float, above=0, maximum=10**9)
SEED = parsers.NumberParser(int, minimum=0, maximum=2**32 - 1)
TEXT = parsers.TextParser()


@dataclasses.dataclass(frozen=True)
class FlagGroup:
  """Flags that `--help` prints together.

  Attributes:
    title: The group's title.
    names: The flags' names, in the order in which they are printed.
  """

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
      parser: flags.ArgumentParser,
      explanation: str,
      default: Any = None,
      default_text: Optional[str] = None,
  ) -> None:
    """Defines a flag.

    Args:
      name: The flag's name.
      parser: Parses and checks its value.
      explanation: What it does: sentences without the last point.
      default: Its default.
      default_text: The default in words, if it is no fixed value.
    """
    if self.inherited is not None:
      default, default_text = None, self.inherited
    elif default_text is None:
      default_text = parsers.to_text(default)
    flags.DEFINE(
        parser,
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
      self, name: str, parser: flags.ArgumentParser, explanation: str
  ) -> None:
    """Defines a flag that may be given several times; its value is a list."""
    flags.DEFINE_multi(parser, None, name, [], '', flag_values=self.values)
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
    self.values[name].parser = parsers.BooleanParser()
    self._names.append(name)

  def group(self, title: str) -> FlagGroup:
    """Returns the group of all flags defined so far."""
    return FlagGroup(title, tuple(self._names))


@dataclasses.dataclass(frozen=True)
class Condition:
  """A condition under which a flag has an effect.

  Attributes:
    flag: The other flag that decides it.
    holds: Whether the flag has an effect, given all flags.
    reason: Why it has none, as the end of a sentence without its point; `{}`
      stands for the value of the other flag.
  """

  flag: str
  holds: Callable[[ParsedFlags], bool]
  reason: str


def only_for(name: str, value: str) -> Condition:
  """Returns the condition that another flag has this value."""
  return Condition(
      name,
      lambda flags: getattr(flags, name) == value,
      f'is only for --{name}={value}',
  )


@dataclasses.dataclass(frozen=True)
class FlagSpec:
  """The declaration of a flag; see `flag` for the attributes."""

  parser: Optional[flags.ArgumentParser]
  explanation: str | Callable[[], str]
  default: Any = None
  default_text: Optional[str] = None
  compute: Optional[Callable[[ParsedFlags], Any]] = None
  convert: Optional[Callable[[Any], Any]] = None
  conditions: tuple[Condition, ...] = ()
  ignored: Optional[Callable[[ParsedFlags], bool]] = None
  feature: Optional[str] = None
  argument: Optional[str] = None

  def define(self, define: Definer, name: str, default: Any) -> None:
    """Defines the flag with this default."""
    explanation = self.explanation
    if callable(explanation):
      explanation = explanation()
    if self.parser is None:
      define.boolean(name, explanation, default)
      return
    default_text = self.default_text
    if default_text is None and isinstance(default, float):
      default_text = f'{default:g}'
    define(name, self.parser, explanation, default, default_text)

  def value(
      self, flags: ParsedFlags, name: str, understood: Container[str]
  ) -> Any:
    """Returns the value that a run uses; None if the flag has no effect."""
    if self.feature is not None and self.feature not in understood:
      return None
    if not all(condition.holds(flags) for condition in self.conditions):
      return None
    if self.ignored is not None and self.ignored(flags):
      return None
    value = getattr(flags, name)
    if value is None and self.compute is not None:
      return self.compute(flags)
    if value is not None and self.convert is not None:
      return self.convert(value)
    return value


def flag(
    parser: Optional[flags.ArgumentParser],
    explanation: str | Callable[[], str],
    default: Any = None,
    **options: Any,
) -> Any:
  """Declares a flag as a field of a dataclass that is derived from `Flags`.

  Args:
    parser: Parses and checks its value. None: the flag is on or off.
    explanation: What the flag does, for `--help`: sentences without the last
      point, or a function that returns them.
    default: Its default.
    **options: More attributes of `FlagSpec`. `default_text`: the default in
      words, if it is no fixed value. `compute`: computes it from the other
      flags. `convert`: changes a value that is given. `conditions`: when the
      flag has an effect; where it has none, giving it is an error. `ignored`:
      whether the flag has no effect for another reason. `feature`: the flag has
      an effect only on algorithms with this feature; `OWN_NAME` stands for the
      flag's name. `argument`: the library's name of the value, see
      `Flags.arguments`; `OWN_NAME` for the same name.

  Returns:
    The field.
  """
  return dataclasses.field(
      metadata={_SPEC: FlagSpec(parser, explanation, default, **options)}
  )


@dataclasses.dataclass(frozen=True)
class Flags:
  """The base class of groups: their fields are flags, see `flag`.

  Attributes:
    TITLE: The group's title in `--help`.
  """

  TITLE: ClassVar[str]

  @classmethod
  def specs(cls) -> dict[str, FlagSpec]:
    """Returns the flags' declarations by name."""
    specs = {}
    for field in dataclasses.fields(cls):
      spec = field.metadata[_SPEC]
      own = {
          name: field.name
          for name in ('feature', 'argument')
          if getattr(spec, name) == OWN_NAME
      }
      specs[field.name] = dataclasses.replace(spec, **own) if own else spec
    return specs

  @classmethod
  def define(
      cls,
      values: flags.FlagValues,
      *,
      inherited: Optional[str] = None,
      **defaults: Any,
  ) -> FlagGroup:
    """Defines the flags.

    Args:
      values: Where the flags are defined.
      inherited: If not None, the flags have no defaults; this text says where
        values that are not given come from.
      **defaults: The program's defaults in place of the declared ones.

    Returns:
      The group for `--help`.
    """
    define = Definer(values, inherited)
    for name, spec in cls.specs().items():
      spec.define(define, name, defaults.get(name, spec.default))
    return define.group(cls.TITLE)

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """Checks that every flag that is given has an effect.

    Args:
      flags: All flags of the program.

    Raises:
      ValueError: If a flag has no effect because of another one, unless that
        one overrules it.
    """
    for name, spec in cls.specs().items():
      for condition in spec.conditions:
        if not condition.holds(flags):
          flags.refuse_unless_overruled(
              name,
              condition.flag,
              condition.reason.format(getattr(flags, condition.flag)),
          )
          break

  @classmethod
  def read(
      cls,
      flags: ParsedFlags,
      understood: Container[str] = (),
      **known: Any,
  ) -> Self:
    """Reads the flags' values.

    Args:
      flags: All flags of the program, checked.
      understood: The features of the algorithm, see `flag`.
      **known: Values that are not read from `flags`.

    Returns:
      The values; those that depend on other flags are computed.
    """
    values = {
        name: spec.value(flags, name, understood)
        for name, spec in cls.specs().items()
        if name not in known
    }
    return cls(**values, **known)

  def arguments(self, *groups: type['Flags']) -> dict[str, Any]:
    """Returns the values that the library takes, by the arguments' names.

    Args:
      *groups: The groups whose flags are wanted. Default: all flags.

    Returns:
      The arguments. A value that is None is left out: the library has its own
      default.
    """
    arguments = {}
    for group in groups or (type(self),):
      for name, spec in group.specs().items():
        value = getattr(self, name)
        if spec.argument is not None and value is not None:
          arguments[spec.argument] = value
    return arguments

  def name_flags(self, text: str) -> str:
    """Replaces the library's names of arguments in a text by the flags' names.

    Args:
      text: The text, in which `=` follows the arguments' names.

    Returns:
      The text; a name that several flags could have is kept.
    """
    flags_of: dict[str, list[str]] = {}
    for name, spec in self.specs().items():
      if spec.argument is not None and getattr(self, name) is not None:
        flags_of.setdefault(spec.argument, []).append(name)
    for argument, names in flags_of.items():
      if len(names) == 1:
        text = re.sub(rf'(?<![^ (]){argument}=', f'{names[0]}=', text)
    return text


def listing(items: Mapping[str, Any]) -> str:
  """Returns lines that explain the values that a flag may have.

  Args:
    items: A description for each value, or an object with a `description`.

  Returns:
    The text.
  """
  return ''.join(
      f'  {name}: {getattr(item, "description", item)}\n'
      for name, item in items.items()
  )
