"""Tests for the names that `--algorithm` takes."""

import inspect
import re

import pytest

from tff_bn import algorithms
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.flags import algorithm_flags
from tff_bn.programs.flags import registry

_FEDERATED = (
    *('fedavg', 'fedbn', 'silobn', 'local_affine', 'fbn', 'fixbn', 'hbn'),
)
_FEDTAN = ('fedtan', 'fedtan_forward_only', 'fedtan_ii')


@pytest.mark.parametrize('name', list(registry.ALGORITHMS))
def test_algorithms_alone(name):
  assert registry.find(name) is registry.ALGORITHMS[name]
  assert registry.find(name).correction is None


@pytest.mark.parametrize('name', list(registry.CORRECTIONS))
def test_corrections_alone_are_of_fedavg(name):
  algorithm = registry.find(name)
  assert algorithm.name == name
  assert algorithm.builder_name == 'build_fed_avg'
  assert algorithm.correction is registry.CORRECTIONS[name]
  both = registry.find(f'fedavg+{name}')
  assert both.builder_name == 'build_fed_avg'
  assert both.correction is algorithm.correction


@pytest.mark.parametrize('correction', list(registry.CORRECTIONS))
@pytest.mark.parametrize('name', list(registry.ALGORITHMS))
def test_every_combination_is_made_or_refused(name, correction):
  possible = name in _FEDERATED or (name in _FEDTAN and correction == 'fedprox')
  both = f'{name}+{correction}'
  if not possible:
    message = f"{correction} can't be combined with {name}: "
    with pytest.raises(ValueError, match=f'^{re.escape(message)}'):
      registry.find(both)
    return
  found = registry.find(both)
  base = registry.ALGORITHMS[name]
  assert found.name == both
  assert found.correction.name == correction
  assert found.builder_name == base.builder_name
  assert found.arguments == base.arguments
  assert set(found.flags) == {*base.flags, *found.correction.flags}


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
    ],
)
def test_names_that_are_refused(name, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    registry.find(name)


def test_refused_on_the_command_line(capsys):
  assert train.run(['--algorithm=dsgd+fedprox']) == command_line.USAGE_ERROR
  error = capsys.readouterr().err
  assert "--algorithm=dsgd+fedprox: fedprox can't be combined with dsgd" in (
      ' '.join(error.split())
  )


def test_flags_and_their_users():
  assert registry.users('proximal_strength') == ['fedprox', 'fedbs']
  assert registry.users('moon_temperature') == ['moon']
  assert registry.users('pooled') == ['fbn', 'dsgd_fbn']


def test_flags_have_the_builders_defaults():
  compared = set()
  specs = algorithm_flags.AlgorithmOptions.specs()
  for entry in (*registry.ALGORITHMS.values(), *registry.CORRECTIONS.values()):
    builder = getattr(algorithms, entry.builder_name)
    parameters = inspect.signature(builder).parameters
    for name in entry.flags:
      parameter = parameters.get(name in specs and specs[name].argument)
      if parameter is not None and parameter.default is not parameter.empty:
        assert parameter.default == specs[name].default, (entry.name, name)
        compared.add(name)
  assert {'moments', 'pooled', 'proximal_strength', 'moon_weight'} <= compared
