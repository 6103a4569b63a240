"""What `tff-bn-compare` compares without `--algorithms`: a first look.

Clients with different classes make one local step in a round, for which FedTAN
and FBN are designed. Flags of the command overrule these settings.
"""

from collections.abc import Mapping, Sequence
from typing import Optional

from tff_bn.catalog import algorithms
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.cli.parsed_flags import Source
from tff_bn.programs.plan import axes

# The flags whose defaults are different in the first look.
FLAGS: Mapping[str, str] = {'rounds': '200', 'local_steps': '1'}
# Further flags of single algorithms. For fbn, they are the settings that need
# no tuning, see benchmarks/results/one_exchange.md.
OF_ALGORITHM: Mapping[str, Mapping[str, str]] = {
    'fbn': {
        'fbn_backward': 'running',
        'fbn_backward_restart': '1.5',
        'server_clip_norm': '0.3',
    }
}


def with_defaults(flags: ParsedFlags) -> ParsedFlags:
  """Returns the flags with the first look's defaults.

  Values that the command gives are unchanged.
  """
  texts = {name: t for name, t in FLAGS.items() if not flags.is_given(name)}
  return flags.replacing(texts, Source.DEFAULT)


def algorithm_axis(
    flags: ParsedFlags, swept: Sequence[axes.Axis] = ()
) -> axes.Axis:
  """Returns the compared algorithms with their settings.

  An algorithm has its own settings unless the command gives or sweeps one of
  them.
  """
  varied = {name for axis in swept for name in axis.flags}
  points = []
  for name in algorithms.COMPARED:
    own = OF_ALGORITHM.get(name, {})
    if any(flag in varied or flags.is_given(flag) for flag in own):
      own = {}
    points.append(axes.Point(name, {axes.ALGORITHM: name, **own}))
  return axes.Axis(axes.ALGORITHM, tuple(points))


def next_step(flags: ParsedFlags) -> Optional[str]:
  """Returns the command to try after the first look, and what it shows.

  Returns None if the flags chose other data or algorithms.
  """
  if any(map(flags.is_given, ('algorithms', 'dataset', 'split'))):
    return None
  return (
      'tff-bn-compare --dataset=digits_domains --split=domains'
      ' --output_dir=runs/domains\n'
      '       compares the same algorithms on clients whose images look'
      ' different, for which fedbn is made.'
  )


def explain() -> str:
  """Returns the settings as the help of `--algorithms` shows them."""
  parts = [f'{", ".join(algorithms.COMPARED)}, with {_as_flags(FLAGS)}']
  for name, texts in OF_ALGORITHM.items():
    parts.append(f'{name} with {_as_flags(texts)}')
  return '; '.join(parts)


def _as_flags(texts: Mapping[str, str]) -> str:
  return ' '.join(f'--{name}={text}' for name, text in texts.items())
