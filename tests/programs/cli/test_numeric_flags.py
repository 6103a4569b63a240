"""The ranges of the numbers that all programs take."""

import re

from absl import flags as absl_flags
import pytest

from tff_bn.catalog import value_types
from tff_bn.papers import analyze
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.runs import run_process

_PROGRAMS = (
    *(train.PROGRAM, compare.PROGRAM, evaluate.PROGRAM, run_process.PROGRAM),
    *analyze.ANALYSES.values(),
)


def _flags(program):
  values = absl_flags.FlagValues()
  groups = program.define_flags(values)
  return {name: values[name] for group in groups for name in group.names}


def _number_parser(flag):
  values = flag.parser.values
  values = getattr(values, 'element', values)
  return values if isinstance(values, value_types.Number) else None


# The programs share most flags.
_NUMERIC = {
    (name, _number_parser(flag)): flag
    for program in _PROGRAMS
    for name, flag in _flags(program).items()
    if _number_parser(flag)
}
_OUT_OF_RANGE = ('nan', 'inf', '-inf', '1e300', '-1e300', '1e39')
_NO_INT = (*_OUT_OF_RANGE, '9' * 23, '-' + '9' * 23, '1e3', '0.5', f'{2**32}')


def test_every_flag_with_a_number_is_in_the_list():
  names = {name for name, _ in _NUMERIC}
  assert {'client_learning_rate', 'seeds'} <= names
  for program in _PROGRAMS:
    for name, flag in _flags(program).items():
      value = flag.default
      if isinstance(value, tuple) and value:
        value = value[0]
      is_number = isinstance(value, (int, float)) and not flag.boolean
      assert not is_number or name in names


@pytest.mark.parametrize(
    ('parser', 'flag'),
    [(parser, flag) for (_, parser), flag in _NUMERIC.items()],
    ids=[name for name, _ in _NUMERIC],
)
def test_numbers_out_of_range(parser, flag):
  is_int = parser.number_type is int
  noun = 'a whole number' if is_int else 'a number'
  expected = re.compile(
      rf'must be {noun}, (at least|greater than) [-+.\de]+ and'
      r' (at most|less than) [-+.\de]+\.'
  )
  for text in _NO_INT if is_int else _OUT_OF_RANGE:
    with pytest.raises(ValueError, match=expected):
      flag.parser.parse(text)
  if not is_int:
    # float32 may round it to 0.
    with pytest.raises(ValueError, match='float32|greater than 1 '):
      flag.parser.parse('1e-300')


@pytest.mark.parametrize(
    'argument, allowed',
    [
        ('--image_size=99999x99999', 'at most 10000 pixels'),
        (f'--image_size={"9" * 23}x1', 'at most 10000 pixels'),
        (f'--client_learning_rate_schedule={2**31}:0.1', 'at most 2147483647'),
        (f'--client_learning_rate_schedule={"9" * 23}:1', 'at most 2147483647'),
        ('--client_learning_rate_schedule=6:1e300', r'from 0 to 3.4e\+38'),
        (f'--sweep=batch_size=32,{"9" * 23}', 'at least 1 and at most 1000000'),
        ('--sweep=dirichlet_alpha=1e300', r'at most 3.4e\+38'),
    ],
)
def test_numbers_in_texts(argument, allowed):
  with pytest.raises(command_line.UsageError, match=f'^--.*: .*{allowed}'):
    command_line.parse(compare.define_flags, [argument])


@pytest.mark.parametrize(
    'argument',
    [
        # Whatever float32 can hold is an attack that one may try.
        '--attack_strength=3.4e38',
        '--attack_strength=1e-37',
        '--clipping_radius=1e38',
        '--client_learning_rate=1e38',
        '--rounds=2147483647',
        '--local_steps=12224',
        '--num_clients=100000',
        '--image_size=4096x10000',
        '--client_learning_rate_schedule=6000:0.1,2147483647:0',
        '--trusted_client=-10',
        f'--seed={2**32 - 1}',
        '--pan_amplitude=0',
        '--pan_period=64',
    ],
)
def test_numbers_that_are_allowed(argument):
  command_line.parse(train.define_flags, [argument])
