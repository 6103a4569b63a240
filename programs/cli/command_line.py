"""The programs' command lines: parsing, help, errors and exit codes.

Exit codes: 0 for success; 2 for a request that the program cannot fulfil, which
is found before any work is done; 1 if the work failed; 130 after Ctrl-C; 143
after SIGTERM. Errors are one paragraph on the standard error stream;
`--verbosity=1` adds the traceback.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import errno
import os
import sys
import textwrap
import traceback
from typing import Any, Optional
import warnings

from absl import flags
from absl import logging

import tff_bn
from tff_bn.catalog import value_types
from tff_bn.imports import dependencies
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import flag_names
from tff_bn.programs.cli import flagfiles
from tff_bn.programs.cli import named_code
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.cli.parsed_flags import Source
from tff_bn.training import termination

OK = 0
FAILED = 1
USAGE_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143

HELP_FLAGS = frozenset(
    dashes + name
    for dashes in ('-', '--')
    for name in ('h', 'help', 'helpshort', 'helpfull')
)
VERSION_FLAG = '--version'
HELP_WIDTH = 79
# Errors of TensorFlow can have pages of context.
_MAX_MESSAGE_LENGTH = 1500


class UsageError(Exception):
  """The program cannot fulfil a request."""


@contextlib.contextmanager
def checking_input() -> Iterator[None]:
  """Raises errors that wrong input causes as a `UsageError`."""
  try:
    yield
  except (
      TypeError,
      ValueError,
      FileNotFoundError,
      FileExistsError,
      NotADirectoryError,
      IsADirectoryError,
      PermissionError,
  ) as error:
    raise UsageError(_message(error)) from error
  except OSError as error:
    if error.errno != errno.ENAMETOOLONG:
      raise
    raise UsageError(_message(error)) from error


@dataclasses.dataclass(frozen=True)
class Program:
  """An absl program.

  Attributes:
    name: The command's name.
    description: Its purpose, in one paragraph.
    examples: Command lines, for `--help`.
    define_flags: Defines the program's flags and returns their groups.
    main: Does the work.
  """

  name: str
  description: str
  examples: tuple[str, ...]
  define_flags: Callable[[flags.FlagValues], tuple[flag_groups.FlagGroup, ...]]
  main: Callable[[ParsedFlags], None]


def parse(
    define_flags: Callable[[flags.FlagValues], Any],
    arguments: Sequence[str],
) -> ParsedFlags:
  """Parses arguments, which do not include the program's name.

  Raises:
    UsageError: If an argument is not understood, or if only the `flags.txt` of
      a run names code that is not part of this package.
  """
  values, without_runs, without_files = (flags.FlagValues() for _ in range(3))
  for each in (values, without_runs, without_files):
    define_flags(each)
  try:
    expanded = flagfiles.expand(arguments)
    for argument in expanded:
      parsers.check_characters(argument.text)
  except ValueError as error:
    raise UsageError(str(error)) from error
  # The first of these calls that fails shows where the mistake is: in the
  # command, in a flagfile, or in the flags.txt of a run.
  _parse_into(without_files, [a for a in expanded if a.path is None])
  _parse_into(without_runs, [a for a in expanded if not a.is_of_run])
  _parse_into(values, expanded)
  sources = {}
  for name in values:
    if without_files[name].present:
      sources[name] = Source.COMMAND_LINE
    elif values[name].present:
      sources[name] = Source.FLAGFILE
    else:
      sources[name] = Source.DEFAULT
  of_runs = {
      name: values[name].value
      for name in values
      if values[name].present and not without_runs[name].present
  }
  refuse_code(
      of_runs,
      values,
      lambda flag: _origin(flag, expanded),
      'give this flag in the command itself',
  )
  return ParsedFlags(values, sources)


def refuse_code(
    of_run: Mapping[str, Any],
    values: flags.FlagValues,
    origin: Callable[[str], str],
    remedy: str,
) -> None:
  """Raises a `UsageError` if a run's flags name code of somebody else.

  Args:
    of_run: The values of flags by name, which are only in a `flags.txt`.
    values: All flags of the program.
    origin: Returns the beginning of an error about a flag.
    remedy: What a user does who trusts the run.
  """
  types = {
      name: values[name].parser.values
      for name in values
      if isinstance(values[name].parser, parsers.Parser)
  }
  code = named_code.find(of_run, types)
  if code is not None:
    name, text = code
    words = types.get(name, value_types.TEXT).code_words
    raise UsageError(
        f'{origin(name)}{text} {words}. It is not run, because only the'
        " flags.txt of a run names it, which may be somebody else's. If you"
        f' trust it, {remedy}.'
    )


def _parse_into(
    values: flags.FlagValues, arguments: Sequence[flagfiles.Argument]
) -> None:
  """Parses arguments; an error names the file from which a flag comes."""
  try:
    rest = values(['', *(argument.text for argument in arguments)])[1:]
  except flags.UnrecognizedFlagError as error:
    raise UsageError(
        _origin(error.flagname, arguments)
        + f'--{error.flagname} is not a flag of this program.'
        + flag_names.suggestion(error.flagname, list(values))
        + ' See --help.'
    ) from error
  except (flags.Error, ValueError) as error:
    message = str(error).removeprefix('flag ')
    name = message.removeprefix('--').partition('=')[0]
    raise UsageError(_origin(name, arguments) + message) from error
  if rest:
    raise UsageError(
        f'{rest[0]!r} is not understood: all arguments are flags, like'
        ' --name=value. See --help.'
    )


def _origin(name: str, arguments: Sequence[flagfiles.Argument]) -> str:
  """Returns the beginning of an error about a flag: the file that has it."""
  paths = [
      argument.path
      for argument in arguments
      if argument.text.lstrip('-').partition('=')[0] == name
  ]
  # The last occurrence of a flag overrules the others.
  return f'{paths[-1]}: ' if paths and paths[-1] is not None else ''


def help_text(program: Program) -> str:
  """Returns the text that `--help` prints."""
  values = flags.FlagValues()
  groups = program.define_flags(values)
  blocks = [
      f'usage: {program.name} [--flag=value ...]',
      textwrap.fill(program.description, HELP_WIDTH),
  ]
  for group in groups:
    lines = [f'{group.title}:']
    for name in group.names:
      lines += _flag_help(name, values[name])
    blocks.append('\n'.join(lines))
  blocks.append(
      '\n'.join(
          (
              'Help and files of flags:',
              '  --flagfile=FILE',
              *_indented(
                  'Reads flags from FILE, one --name=value in a line, as in the'
                  ' flags.txt of a run. Flags after it overrule it. FILE is a'
                  f' path, or a preset: {", ".join(flagfiles.presets())}'
                  ' (default: none).'
              ),
              '  --help',
              *_indented('Prints this text.'),
              '  --version',
              *_indented('Prints the version of tff_bn.'),
          )
      )
  )
  blocks.append(
      '\n'.join(
          ['Examples:'] + [f'  {example}' for example in program.examples]
      )
  )
  return '\n\n'.join(blocks) + '\n'


def _flag_help(name: str, flag: flags.Flag) -> list[str]:
  title = f'  --[no]{name}' if flag.boolean else f'  --{name}'
  return [title, *_indented(flag.help)]


def _indented(text: str) -> list[str]:
  lines = []
  for line in text.split('\n'):
    lines += textwrap.wrap(
        line,
        HELP_WIDTH,
        initial_indent=' ' * 6,
        # The items of a list begin with spaces and have a hanging indent.
        subsequent_indent=' ' * (10 if line.startswith(' ') else 6),
        break_on_hyphens=False,
    )
  return lines


def print_version() -> None:
  """Prints the version of tff_bn."""
  print(f'tff_bn {tff_bn.__version__}')


def run(program: Program, arguments: Optional[Sequence[str]] = None) -> int:
  """Runs a program and returns its exit code.

  The arguments lack the program's name; None stands for this process's.
  """
  arguments = sys.argv[1:] if arguments is None else list(arguments)
  if not HELP_FLAGS.isdisjoint(arguments):
    print(help_text(program), end='')
    return OK
  if VERSION_FLAG in arguments:
    print_version()
    return OK
  verbosity = -1
  try:
    parsed = parse(program.define_flags, arguments)
    verbosity = parsed.verbosity
    _set_verbosity(verbosity)
    with termination.on_signals():
      program.main(parsed)
    return OK
  except UsageError as error:
    return _fail(program, error, USAGE_ERROR, verbosity)
  except KeyboardInterrupt as error:
    is_terminated = isinstance(error, termination.Terminated)
    ended = 'terminated' if is_terminated else 'interrupted'
    print(f'{program.name}: {ended}. {error}'.rstrip(), file=sys.stderr)
    return TERMINATED if is_terminated else INTERRUPTED
  except ModuleNotFoundError as error:
    missing = dependencies.missing_module(error.name or str(error))
    missing.__cause__ = error
    return _fail(program, missing, FAILED, verbosity)
  except Exception as error:
    return _fail(program, error, FAILED, verbosity)


def _set_verbosity(verbosity: int) -> None:
  """Sets how much libraries log; call it before TensorFlow is imported."""
  logging.set_verbosity(verbosity)
  if verbosity < 1:
    # TensorFlow's C++ code reports missing GPU libraries as errors. While it is
    # imported, it prints that oneDNN is on and that it finds no CUDA drivers,
    # before it reads the variable.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    for category in (DeprecationWarning, FutureWarning):
      warnings.filterwarnings('ignore', category=category)


def _fail(
    program: Program, error: Exception, exit_code: int, verbosity: int
) -> int:
  if verbosity >= 1:
    traceback.print_exception(error)
  names = flags.FlagValues()
  program.define_flags(names)
  message = parsers.name_flags(_message(error), names)
  print(f'{program.name}: {message}', file=sys.stderr)
  return exit_code


def _message(error: Exception) -> str:
  """Returns the error's message as one paragraph."""
  message = ' '.join(str(error).split())
  if len(message) > _MAX_MESSAGE_LENGTH:
    message = message[:_MAX_MESSAGE_LENGTH] + ' …'
  if isinstance(
      error, (UsageError, ImportError, ValueError, RuntimeError, OSError)
  ):
    return message or type(error).__name__
  return f'{type(error).__name__}: {message}'
