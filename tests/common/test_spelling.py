"""Tests for suggestions of misspelled names."""

import pytest

from tff_bn.common import spelling


@pytest.mark.parametrize(
    ('name', 'known', 'meant'),
    [
        ('dirichlett', ['iid', 'dirichlet'], 'dirichlet'),
        ('xyz', ['iid', 'dirichlet'], None),
        ('RESNET20', ['resnet20', 'vgg11'], 'resnet20'),
    ],
)
def test_suggestion(name, known, meant):
  expected = f' Did you mean {meant}?' if meant else ''
  assert spelling.suggestion(name, known) == expected


@pytest.mark.parametrize(
    ('name', 'known', 'meant'),
    [
        # Names of places that are similar by chance.
        ('paris', ['madrid', 'rome'], None),
        ('hamburg', ['salzburg', 'freiburg'], None),
        ('lisbon', ['berlin', 'london'], None),
        ('boston', ['london', 'houston'], None),
        # Typing errors.
        ('madird', ['madrid', 'rome'], 'madrid'),
        ('Clinic-2', ['clinic_1', 'clinic_2'], 'clinic_2'),
        ('client_7', ['client_0007', 'client_0123'], 'client_0007'),
        ('rome', ['Rome', 'Paris'], 'Rome'),
    ],
)
def test_given_names_must_be_very_similar(name, known, meant):
  expected = f' Did you mean {meant}?' if meant else ''
  assert spelling.suggestion(name, known, are_given=True) == expected
