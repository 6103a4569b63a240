"""Tests for suggestions of flags."""

from absl import flags as absl_flags
import pytest

from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_names
from tff_bn.programs.plan import sweeps


@pytest.mark.parametrize(
    ('given', 'meant'),
    [
        ('learning_rate', 'client_learning_rate'),
        ('lr', 'client_learning_rate'),
        ('epochs', 'local_epochs'),
        ('steps', 'local_steps'),
        ('clients', 'num_clients'),
        ('server_lr', 'server_learning_rate'),
        ('alpha', 'dirichlet_alpha'),
        ('Batch-Size', 'batch_size'),
        # Misspelled names of flags.
        ('server_learning_rat', 'server_learning_rate'),
        ('rouns', 'rounds'),
    ],
)
def test_flags_of_training(given, meant):
  with pytest.raises(command_line.UsageError) as error:
    command_line.parse(train.define_flags, [f'--{given}=1'])
  assert str(error.value) == (
      f'--{given} is not a flag of this program. Did you mean {meant}? See'
      ' --help.'
  )


def test_only_flags_of_the_program_are_suggested():
  for program, given, meant in (
      (train, 'method', 'algorithm'),
      (compare, 'method', 'algorithms'),
      (train, 'random_state', 'seed'),
      (compare, 'random_state', 'seeds'),
      (evaluate, 'model_dir', 'run'),
      (evaluate, 'clients', 'num_clients'),
  ):
    with pytest.raises(
        command_line.UsageError, match=f' Did you mean {meant}[?] '
    ):
      command_line.parse(program.define_flags, [f'--{given}=1'])
  with pytest.raises(command_line.UsageError) as error:
    command_line.parse(evaluate.define_flags, ['--wd=1'])
  assert 'Did you mean' not in str(error.value)


def test_swept_flags():
  with pytest.raises(ValueError, match='Did you mean client_learning_rate[?]$'):
    sweeps.SweepParser().parse('lr=0.1,0.2')


def test_table_names_flags():
  known = set()
  for program in (train, compare, evaluate):
    values = absl_flags.FlagValues()
    program.define_flags(values)
    known |= set(values)
  table = flag_names._OTHER_NAMES
  assert set(table) <= known
  # No name is a flag itself, or its own explanation.
  for flag, names in table.items():
    assert not known & set(names), flag
    assert len(set(names)) == len(names)
