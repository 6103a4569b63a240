"""Tests for the names of what accuracies and losses are measured on."""

import pytest

from tff_bn.training import measures


def test_different_numbers_have_different_names():
  names = [
      measures.name(column, has_client_models)
      for column in ('train_x', 'test_x', 'client_test_x', 'client_train_x')
      for has_client_models in (False, True, None)
  ]
  assert all(names) and len(set(names)) == 6


@pytest.mark.parametrize('column', ['num_clients', 'round', 'megabytes'])
def test_other_columns_have_none(column):
  assert not measures.name(column, True)
