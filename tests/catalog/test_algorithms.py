"""Tests of the algorithms' and corrections' entries, and of their names."""

import inspect
import re
import sys
import types

import pytest

from tff_bn.catalog import algorithms
from tff_bn.catalog import rules
from tff_bn.programs import train
from tff_bn.programs.cli import command_line

_FEDERATED = (
    *('fedavg', 'fedbn', 'silobn', 'local_affine', 'fedstein', 'fbn'),
    *('fixbn', 'hbn'),
    *('fedper', 'fedrep', 'lg_fedavg', 'fedbabu', 'ditto'),
)
_FEDTAN = ('fedtan', 'fedtan_forward_only', 'fedtan_ii')


def test_algorithms_alone():
  for name, algorithm in algorithms.ALGORITHMS.items():
    assert algorithms.find(name) is algorithm
    assert algorithm.correction is None


def test_corrections_alone_are_of_fedavg():
  for name, correction in algorithms.CORRECTIONS.items():
    algorithm = algorithms.find(name)
    assert algorithm.name == name
    assert algorithm.builds == 'tff_bn.algorithms.fed_avg:build_fed_avg'
    assert algorithm.correction is correction
    both = algorithms.find(f'fedavg+{name}')
    assert both.builds == algorithm.builds
    assert both.correction is correction


# Without shared statistics, or without batch statistics in training.
_NO_GREG = ('fedbn', 'silobn', 'lg_fedavg', 'fbn', 'hbn')


@pytest.mark.parametrize('correction', list(algorithms.CORRECTIONS))
@pytest.mark.parametrize('name', list(algorithms.ALGORITHMS))
def test_every_combination_is_made_or_refused(name, correction):
  possible = name in _FEDERATED or (name in _FEDTAN and correction == 'fedprox')
  if correction == 'greg' and name in _NO_GREG:
    possible = False
  both = f'{name}+{correction}'
  if not possible:
    message = f"{correction} can't be combined with {name}: "
    with pytest.raises(ValueError, match=f'^{re.escape(message)}'):
      algorithms.find(both)
    return
  found = algorithms.find(both)
  base = algorithms.ALGORITHMS[name]
  assert found.name == both
  assert found.correction.name == correction
  assert found.builds == base.builds
  assert found.arguments == base.arguments
  own = {option.name for option in found.correction.options}
  assert found.understood == base.understood | own


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('fedprx', 'Did you mean fedprox?'),
        ('fedbm+scaffold', 'must be one of centralized, fedavg,'),
        ('fedbn+', 'as in fedbn+fedprox'),
        ('', 'must be one of'),
        ('fedprox+fedbn', 'correction last: fedbn+fedprox.'),
        ('fedprox+scaffold', 'choose one of them'),
        ('fedbn+fedprox+moon', 'fedprox and moon are both corrections'),
        ('fedbn+fbn', 'fedbn and fbn both decide how batch norm'),
        ('fedbn+fbn+moon', 'fedbn and fbn both decide how batch norm'),
        ('mine:A+fedbn', 'mine:A and fedbn both decide how batch norm'),
        ('fedbn+mine:A+moon', 'mine:A and moon are both corrections'),
    ],
)
def test_names_that_are_refused(name, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    algorithms.find(name)
  with pytest.raises(ValueError, match=re.escape(message)):
    algorithms.ALGORITHM.values.parse(name)


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('fbn', 'its clients normalize with running statistics in training'),
        ('hbn', 'its clients normalize with running statistics in training'),
        ('fedbn', 'its clients keep their BN statistics, so the server has no'),
        ('silobn', 'its clients keep their BN statistics'),
        ('lg_fedavg', 'its clients keep their BN statistics'),
        ('fedtan', 'the first step of its rounds'),
    ],
)
def test_greg_needs_batch_statistics_and_shared_ones(name, reason):
  message = f"greg can't be combined with {name}: {reason}"
  with pytest.raises(ValueError, match=re.escape(message)):
    algorithms.find(f'{name}+greg')


def test_refused_on_the_command_line(capsys):
  assert train.run(['--algorithm=dsgd+fedprox']) == command_line.USAGE_ERROR
  error = capsys.readouterr().err
  assert "--algorithm=dsgd+fedprox: fedprox can't be combined with dsgd" in (
      ' '.join(error.split())
  )


def test_options_and_their_users():
  assert algorithms.users('proximal_strength') == ['fedprox', 'fedbs']
  assert algorithms.users('moon_temperature') == ['moon']
  assert algorithms.users('pooled') == ['fbn', 'dsgd_fbn']
  assert algorithms.users(algorithms.CLIENT_MODELS) == [
      *('fedbn', 'silobn', 'local_affine', 'fedstein', 'fedap', 'fedper'),
      *('fedrep', 'lg_fedavg', 'ditto', 'single'),
  ]


def test_options_have_the_builders_defaults():
  compared = set()
  for entry in (
      *algorithms.ALGORITHMS.values(),
      *algorithms.CORRECTIONS.values(),
  ):
    parameters = inspect.signature(entry.load()).parameters
    for option in entry.options:
      parameter = parameters.get(option.argument)
      if parameter is not None and parameter.default is not parameter.empty:
        assert parameter.default == option.default, (entry.name, option.name)
        compared.add(option.name)
  assert {'moments', 'pooled', 'proximal_strength', 'moon_weight'} <= compared


def _build(model, client_optimizer, **options):
  return (model, client_optimizer, options)


def _correct(model, client_optimizer, *, build_process, **options):
  return build_process(model, client_optimizer, correction='mine', **options)


@pytest.fixture(name='mine')
def _mine(monkeypatch):
  """A user's module."""
  module = types.SimpleNamespace(
      build=_build,
      correct=_correct,
      ENTRY=algorithms.Algorithm(
          'mine',
          'an entry',
          _build,
          (algorithms.STATISTICS,),
          features=(algorithms.CLIENT_MODELS,),
      ),
      CORRECTION=algorithms.Correction('mine', 'corrects', _correct),
      RULE=rules.RULES['median'],
      NUMBER=3,
  )
  monkeypatch.setitem(sys.modules, 'mine', module)
  return module


@pytest.mark.usefixtures('mine')
class TestPartsOfUsers:

  def test_a_builder_gets_what_fedavg_gets(self):
    found = algorithms.find('mine:build')
    fedavg = algorithms.ALGORITHMS['fedavg']
    assert found.name == 'mine:build'
    assert found.builder()(1, 2, seed=3) == (1, 2, dict(seed=3))
    assert found.understood == fedavg.understood
    assert found.features == fedavg.features

  def test_an_entry_says_what_it_gets(self):
    found = algorithms.find('mine:ENTRY')
    assert found.name == 'mine:ENTRY'
    assert found.description == 'an entry'
    assert found.understood == {'statistics', algorithms.CLIENT_MODELS}

  @pytest.mark.parametrize('correction', ['mine:correct', 'mine:CORRECTION'])
  def test_corrections(self, correction):
    found = algorithms.find(f'mine:build+{correction}')
    assert found.name == f'mine:build+{correction}'
    assert found.builder()(1, 2) == (1, 2, dict(correction='mine'))
    with pytest.raises(ValueError, match="can't be combined with fedtan: the"):
      algorithms.find(f'fedtan+{correction}')
    found = algorithms.find(f'mine:ENTRY+{correction}')
    assert found.understood == {'statistics', algorithms.CLIENT_MODELS}

  def test_a_correction_alone_corrects_fedavg(self):
    found = algorithms.find('mine:CORRECTION')
    assert found.builds == algorithms.ALGORITHMS['fedavg'].builds
    assert found.correction.name == 'mine:CORRECTION'

  @pytest.mark.parametrize(
      ('name', 'message'),
      [
          ('mine:biuld', "has no 'biuld'. Did you mean build?"),
          ('mine:RULE', 'mine:RULE must be .*Algorithm or Corr.*is a Rule'),
          ('mine:NUMBER', 'mine:NUMBER must be .*but is a int'),
          ('fedbn+mine:ENTRY', 'must be .*Correction, .*but is a Algorithm'),
          ('mine:CORRECTION+moon', 'must have the correction last'),
          ('nowhere:build', "the module 'nowhere' can not be imported"),
      ],
  )
  def test_what_is_none(self, name, message):
    algorithms.ALGORITHM.values.parse(name)  # It imports nothing.
    with pytest.raises(ValueError, match=message):
      algorithms.ALGORITHM.values.load(name)


def test_labels_are_short_and_different():
  assert algorithms.labels(['fedbn', 'a.b:X', 'fedbn+a:Y', 'a:Z+b:Z']) == {
      'fedbn': 'fedbn',
      'a.b:X': 'X',
      'fedbn+a:Y': 'fedbn+Y',
      'a:Z+b:Z': 'Z+Z',
  }
  assert algorithms.labels(['a:X', 'b:X', 'fbn']) == {
      'a:X': 'a:X',
      'b:X': 'b:X',
      'fbn': 'fbn',
  }
