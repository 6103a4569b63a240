"""`tff-bn-analyze`: analyses of algorithms and of finished runs.

Each analysis is a program with its own flags; `ANALYSES` lists them.
"""

from collections.abc import Sequence
import sys
import textwrap
from typing import Optional

from tff_bn.common import spelling
from tff_bn.programs import cli
from tff_bn.programs.analyses import fedbn_toy
from tff_bn.programs.analyses import normalization_error
from tff_bn.programs.analyses.position_aware import trained_models

NAME = 'tff-bn-analyze'
# Name on the command line -> the program for the other arguments.
ANALYSES: dict[str, cli.Program] = {
    normalization_error.NAME: normalization_error.PROGRAM,
    fedbn_toy.NAME: fedbn_toy.PROGRAM,
    **trained_models.PROGRAMS,
}


def help_text() -> str:
  """Returns the text that `--help` prints without the name of an analysis."""
  blocks = [
      f'usage: {NAME} ANALYSIS [--flag=value ...]',
      textwrap.fill(
          'Explains what batch normalization, and the order of units, do in'
          f' federated learning. `{NAME} ANALYSIS --help` explains its flags.',
          cli.HELP_WIDTH,
      ),
      '\n'.join(
          ['Analyses:']
          + [
              f'  {name}\n'
              + textwrap.indent(
                  textwrap.fill(program.description, cli.HELP_WIDTH - 6),
                  ' ' * 6,
              )
              for name, program in ANALYSES.items()
          ]
      ),
      '\n'.join(
          ['Examples:']
          + [
              f'  {example}'
              for program in ANALYSES.values()
              for example in program.examples
          ]
      ),
  ]
  return '\n\n'.join(blocks) + '\n'


def run(arguments: Optional[Sequence[str]] = None) -> int:
  """Runs the program; returns its exit code."""
  arguments = sys.argv[1:] if arguments is None else list(arguments)
  name, rest = (arguments or [''])[0], arguments[1:]
  if name in ANALYSES:
    return cli.run(ANALYSES[name], rest)
  if name in cli.HELP_FLAGS:
    print(help_text(), end='')
    return cli.OK
  if name == cli.VERSION_FLAG:
    cli.print_version()
    return cli.OK
  if not name or name.startswith('-'):
    problem = 'the first argument must name an analysis:'
  else:
    problem = f'{name!r} is not an analysis; there is'
  print(
      f'{NAME}: {problem} {", ".join(ANALYSES)}.'
      f'{spelling.suggestion(name, list(ANALYSES))} See --help.',
      file=sys.stderr,
  )
  return cli.USAGE_ERROR


if __name__ == '__main__':
  sys.exit(run())
