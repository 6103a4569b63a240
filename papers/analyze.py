"""`tff-bn-analyze`: analyses of algorithms and of finished runs.

Each analysis is a program with its own flags; `ANALYSES` lists them.
"""

from collections.abc import Sequence
import sys
import textwrap
from typing import Optional

from tff_bn.common import spelling
from tff_bn.papers.privacy import leakage_analysis
from tff_bn.papers.privacy import messages_analysis
from tff_bn.papers.run_analyses import analysis_programs
from tff_bn.papers.simulations import fedbn_toy_analysis
from tff_bn.papers.simulations import normalization_error_analysis
from tff_bn.papers.simulations import pixel_values_analysis
from tff_bn.programs.cli import command_line

NAME = 'tff-bn-analyze'
# Name on the command line -> the program for the other arguments.
ANALYSES: dict[str, command_line.Program] = {
    normalization_error_analysis.NAME: normalization_error_analysis.PROGRAM,
    fedbn_toy_analysis.NAME: fedbn_toy_analysis.PROGRAM,
    pixel_values_analysis.NAME: pixel_values_analysis.PROGRAM,
    messages_analysis.NAME: messages_analysis.PROGRAM,
    leakage_analysis.NAME: leakage_analysis.PROGRAM,
    **analysis_programs.PROGRAMS,
}


def help_text() -> str:
  """Returns the text that `--help` prints without the name of an analysis."""
  blocks = [
      f'usage: {NAME} ANALYSIS [--flag=value ...]',
      textwrap.fill(
          'Explains what batch normalization, and the order of units, do in'
          ' federated learning, what algorithms send, and what it reveals.'
          f' `{NAME} ANALYSIS --help` explains its flags.',
          command_line.HELP_WIDTH,
      ),
      '\n'.join(
          ['Analyses:']
          + [
              f'  {name}\n'
              + textwrap.indent(
                  textwrap.fill(
                      program.description,
                      command_line.HELP_WIDTH - 6,
                      # The name of a program stays in one line.
                      break_on_hyphens=False,
                  ),
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
    return command_line.run(ANALYSES[name], rest)
  if name in command_line.HELP_FLAGS:
    print(help_text(), end='')
    return command_line.OK
  if name == command_line.VERSION_FLAG:
    command_line.print_version()
    return command_line.OK
  if not name or name.startswith('-'):
    problem = 'the first argument must name an analysis:'
  else:
    problem = f'{name!r} is not an analysis; there is'
  print(
      f'{NAME}: {problem} {", ".join(ANALYSES)}.'
      f'{spelling.suggestion(name, list(ANALYSES))} See --help.',
      file=sys.stderr,
  )
  return command_line.USAGE_ERROR


if __name__ == '__main__':
  sys.exit(run())
