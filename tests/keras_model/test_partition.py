"""Tests of the named partitions."""

import dataclasses

import pytest

from tff_bn.keras_model import partition
from tff_bn.keras_model.partition import Role

_TRAINED = {Role.SCALE, Role.SHIFT, Role.MIXING}
_STATISTICS = {Role.MOVING_MEAN, Role.MOVING_VARIANCE}


@pytest.mark.parametrize(
    ('name', 'local'),
    [
        ('fedavg', set()),
        ('fedbn', _TRAINED | _STATISTICS),
        ('silobn', _STATISTICS),
        ('local_affine', _TRAINED),
        ('hbn', {Role.MIXING}),
        ('single', set(Role)),
    ],
)
def test_named_partition_keeps_the_roles_of_its_paper(name, local):
  found = getattr(partition, name.upper())
  assert found.name == name
  # The phases of personal encodings are always local.
  local = local | {Role.PERSONAL_PHASE}
  assert {role for role in Role if found.is_local(role)} == local


@pytest.mark.parametrize('role', sorted(_STATISTICS, key=lambda r: r.value))
def test_mean_and_variance_belong_together(role):
  with pytest.raises(ValueError, match=f"'half' keeps {role.value} local"):
    partition.Partition('half', frozenset({role, Role.KERNEL}))


@pytest.mark.parametrize(
    ('pattern', 'path', 'expected'),
    [
        ('head', 'head', True),
        ('head.*', 'head_1', True),
        ('head', 'head_1', False),
        ('head', 'my_head', False),
        ('conv1', 'backbone/conv1', True),
        ('backbone/conv1', 'backbone/conv1', True),
        ('backbone/.*', 'backbone/conv1', True),
        # All layers inside of a layer.
        ('backbone', 'backbone/block/conv1', True),
        ('block', 'backbone/block/conv1', True),
        ('backbone/block', 'backbone/block/conv1', True),
        ('block/conv1', 'backbone/block/conv1', False),
        ('backbone', 'other/conv1', False),
    ],
)
def test_names_and_paths_of_layers(pattern, path, expected):
  assert partition.matches(pattern, path) == expected


def test_layers_are_local_with_all_roles():
  found = dataclasses.replace(partition.SILOBN, local_layers='head.*')
  for role in Role:
    assert found.is_local(role, 'head_1')
    assert found.is_local(role, 'hidden') == partition.SILOBN.is_local(role)
    assert found.is_local(role) == partition.SILOBN.is_local(role)


def test_shared_layers_make_all_others_local():
  found = partition.Partition('mine', frozenset(), shared_layers='head')
  for role in Role:
    assert found.is_local(role, 'hidden')
    assert found.is_local(role, 'head') == (role is Role.PERSONAL_PHASE)


def test_fixed_layers():
  found = partition.Partition('mine', frozenset(), fixed_layers='head')
  for role in Role:
    assert found.is_fixed(role, 'head') == (role is not Role.PERSONAL_PHASE)
    assert not found.is_fixed(role, 'hidden')
    assert not partition.FEDAVG.is_fixed(role, 'head')


@pytest.mark.parametrize(
    'argument', ['local_layers', 'shared_layers', 'fixed_layers']
)
def test_layers_are_a_regular_expression(argument):
  with pytest.raises(TypeError, match=f'{argument} must be .* but is 1'):
    partition.Partition('mine', frozenset(), **{argument: 1})
  with pytest.raises(ValueError, match=f"{argument}='\\(' is no regular expr"):
    partition.Partition('mine', frozenset(), **{argument: '('})
