"""Rules, steps before rules and attacks of users, by `module:NAME`."""

import re
import sys

import csv_rows
import printed
import pytest
import tiny_runs

from tff_bn.catalog import rules
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings

_MODULE = """
from tff_bn import aggregators
from tff_bn.aggregators import pre_aggregation
from tff_bn.aggregators import robust_rule
from tff_bn.catalog import rules


class Trimmed(aggregators.TrimmedMean):
  pass


class Mixing(aggregators.NearestNeighborMixing):
  pass


class Flip(aggregators.SignFlipping):
  pass


ENTRY = rules.Rule(
    'x', 'clips', aggregators.CenteredClipping,
    (rules.NUM_BYZANTINE, rules.CLIPPING_RADIUS), needs_num_byzantine=True,
)
STEP = rules.Wrapper('x', 'clips', 'my_rules:Missing')
FOE = rules.Attack(
    'x', 'foe', aggregators.FallOfEmpires, strength=rules.FACTOR
)


class Unfinished(robust_rule.CheckedRule):
  pass


class Greedy(Trimmed):

  def __init__(self, num_byzantine, strength, *, num_clients=None):
    pass


class Plain:
  pass


def function():
  pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
  """The working folder has the module."""
  (tmp_path / 'my_rules.py').write_text(_MODULE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  yield tmp_path
  sys.modules.pop('my_rules', None)


def _settings(*arguments):
  flags = command_line.parse(
      train.define_flags, ['--num_clients=7', *arguments]
  )
  settings.check(flags)
  return settings.resolve(flags, flags.algorithm, flags.seed)


def _rules(*arguments):
  """Returns the classes of an aggregator, and the last object."""
  rule = _settings(*arguments).build_rule('model', 0, 7)
  names = [type(rule).__name__]
  while hasattr(rule, 'rule'):
    rule = rule.rule
    names.append(type(rule).__name__)
  return names, rule


def test_classes_and_entries_get_their_arguments(module):
  del module
  names, rule = _rules(
      '--model_aggregator=my_rules:Mixing+nnm+my_rules:Trimmed',
      '--num_byzantine=2',
  )
  assert names == ['Mixing', 'NearestNeighborMixing', 'Trimmed']
  assert (rule.num_byzantine, rule.num_clients) == (2, 7)
  names, rule = _rules('--model_aggregator=my_rules:Trimmed')
  assert (names, rule.num_byzantine) == (['Trimmed'], 0)
  arguments = ['--model_aggregator=clipping+my_rules:ENTRY']
  with pytest.raises(ValueError, match='my_rules:ENTRY has to withstand'):
    _rules(*arguments)
  arguments += ['--num_byzantine=1', '--clipping_radius=5']
  names, rule = _rules(*arguments)
  assert names == ['StaticClipping', 'CenteredClipping']
  assert (rule.num_byzantine, rule.radius) == (1, 5)
  with pytest.raises(ValueError, match='--trusted_client=1 is only for monna'):
    _rules(*arguments, '--trusted_client=1')
  for strength in (3, 7):
    arguments = ['--attack=my_rules:FOE', '--num_attackers=1']
    if strength != rules.FACTOR.default:
      arguments.append(f'--attack_strength={strength}')
    run = _settings(*arguments).build_rule('model', 0, 7)
    assert run.attack.factor == strength
  with pytest.raises(ValueError, match='my_rules:Flip, which has no strength'):
    _settings(
        '--attack=my_rules:Flip', '--num_attackers=1', '--attack_strength=1'
    )


@pytest.mark.parametrize(
    ('value', 'message'),
    [
        ('no_such_module:X', "'no_such_module' can not be imported"),
        ('nnm+my_rules:Trimed', "no 'Trimed'. Did you mean Trimmed?"),
        (
            'my_rules:Plain',
            'my_rules:Plain must be a rule: a class derived from'
            ' tff_bn.aggregators.robust_rule.CheckedRule, or an entry of'
            ' tff_bn.catalog.rules; it is the class Plain.',
        ),
        ('my_rules:function', 'it is of type function.'),
        ('my_rules:FOE', 'must be a rule: .*; it is of type Attack.'),
        ('my_rules:Unfinished', 'must define the methods aggregate_some.'),
        (
            'my_rules:Greedy',
            'must be callable as Greedy\\(num_byzantine, num_clients\\):'
            " missing a required argument: 'strength'.",
        ),
        (
            'my_rules:Mixing',
            'is a step before a rule; write the rule behind it, as in'
            ' my_rules:Mixing\\+median.',
        ),
        ('my_rules:STEP', 'is a step before a rule'),
        ('my_rules:STEP+mean', "'my_rules' has no 'Missing'"),
        ('my_rules:Trimmed+mean', 'is a rule, but a step before .* needed'),
        ('my_rules:ENTRY+mean', 'is a rule, but a step before .* needed'),
        ('Trimmed', 'must be one of mean, .* or a class or an entry of yours'),
    ],
)
def test_wrong_rules(value, message, module, capsys):
  del module
  arguments = [f'--model_aggregator={value}', '--num_byzantine=1']
  assert train.run([*arguments, '--output_dir=out']) == 2
  error = printed.error(capsys.readouterr().err)
  assert f'--model_aggregator={value}: ' in error
  assert re.search(message, error)


@pytest.mark.parametrize(
    ('value', 'message'),
    [
        (
            'Trimmed',
            'an attack: .* tff_bn.aggregators.Attack, .* class Trimmed',
        ),
        ('ENTRY', 'an attack: .* it is of type Rule'),
        ('Flipp', 'Did you mean Flip?'),
    ],
)
def test_wrong_attacks(value, message, module, capsys):
  del module
  arguments = [f'--attack=my_rules:{value}', '--num_attackers=1']
  assert train.run([*arguments, '--output_dir=out']) == 2
  error = printed.error(capsys.readouterr().err)
  assert f'--attack=my_rules:{value}: ' in error
  assert re.search(message, error)


def test_parsing_imports_nothing(module):
  (module / 'my_rules.py').write_text('raise RuntimeError')
  command_line.parse(
      train.define_flags,
      ['--model_aggregator=nnm+my_rules:Trimmed', '--attack=my_rules:Flip'],
  )


def _losses(folder):
  return [row['test_loss'] for row in csv_rows.read(folder / 'metrics.csv')]


@pytest.mark.slow
def test_runs_equal_those_of_our_own_rules(module, capsys):
  arguments = [
      *tiny_runs.FLAGS,
      '--algorithms=fedavg',
      '--seeds=0',
      '--num_byzantine=1',
      '--attack=my_rules:Flip',
      '--sweep=model_aggregator=nnm+trimmed_mean,nnm+my_rules:Trimmed',
      '--output_dir=out',
  ]
  assert compare.run(arguments) == 0
  runs = list((module / 'out/runs').iterdir())
  first, second = (csv_rows.read(run / 'metrics.csv') for run in runs)
  assert [r['test_loss'] for r in first] == [r['test_loss'] for r in second]
  capsys.readouterr()
  assert evaluate.run([f'--run={runs[0]}']) == 2
  assert 'names code' in capsys.readouterr().err
  assert evaluate.run([f'--run={runs[0]}', '--trust_run']) == 0
