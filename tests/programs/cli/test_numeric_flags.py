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

_PROGRAMS = {
    'train': train.PROGRAM,
    'compare': compare.PROGRAM,
    'evaluate': evaluate.PROGRAM,
    'run_process': run_process.PROGRAM,
    **analyze.ANALYSES,
}


def _flags(program):
  values = absl_flags.FlagValues()
  groups = _PROGRAMS[program].define_flags(values)
  return {name: values[name] for group in groups for name in group.names}


def _number_parser(flag):
  values = getattr(flag.parser, 'values', None)
  values = getattr(values, 'element', values)
  return values if isinstance(values, value_types.Number) else None


_NUMERIC = [
    (program, name)
    for program in _PROGRAMS
    for name, flag in _flags(program).items()
    if _number_parser(flag)
]
_OUT_OF_RANGE = ('nan', 'inf', '-inf', '1e300', '-1e300', '1e39')
_NO_INT = (*_OUT_OF_RANGE, '9' * 23, '-' + '9' * 23, '1e3', '0.5', f'{2**32}')


def test_every_flag_with_a_number_is_in_the_list():
  assert ('train', 'client_learning_rate') in _NUMERIC
  assert ('compare', 'seeds') in _NUMERIC
  for program in _PROGRAMS:
    for name, flag in _flags(program).items():
      value = flag.default
      if isinstance(value, tuple) and value:
        value = value[0]
      is_number = isinstance(value, (int, float)) and not flag.boolean
      assert not is_number or (program, name) in _NUMERIC


@pytest.mark.parametrize('program, name', _NUMERIC)
def test_numbers_out_of_range(program, name):
  values = absl_flags.FlagValues()
  _PROGRAMS[program].define_flags(values)
  is_int = _number_parser(values[name]).number_type is int
  noun = 'a whole number' if is_int else 'a number'
  expected = re.compile(
      rf'must be {noun}, (at least|greater than) [-+.\de]+ and'
      r' (at most|less than) [-+.\de]+\.'
  )
  for text in _NO_INT if is_int else _OUT_OF_RANGE:
    # absl adds the flag and the text to the message.
    with pytest.raises(absl_flags.Error) as error:
      values(['', f'--{name}={text}'])
    message = str(error.value)
    assert message.startswith(f'flag --{name}={text}: ')
    assert expected.search(message), message
  if not is_int:
    # float32 may round it to 0.
    with pytest.raises(absl_flags.Error, match='float32|greater than 1 '):
      values(['', f'--{name}=1e-300'])


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
