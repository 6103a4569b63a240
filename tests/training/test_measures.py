"""Tests for the names of what accuracies and losses are measured on."""

import pytest

from tff_bn.training import measures


@pytest.mark.parametrize(
    ('column', 'has_client_models', 'name'),
    [
        ('train_loss', True, 'training batches of the round'),
        ('test_accuracy', False, 'global model on the whole test set'),
        (
            'test_loss',
            True,
            "clients' own models on the whole test set (mean)",
        ),
        (
            'test_loss',
            None,
            "global model, or clients' own models (mean), on the whole test"
            ' set',
        ),
        *(
            (
                'client_test_accuracy',
                has_client_models,
                "each client's model on its own test data (mean)",
            )
            for has_client_models in (False, True, None)
        ),
        ('num_clients', False, ''),
        ('round', True, ''),
        ('megabytes', None, ''),
    ],
)
def test_names_of_columns(column, has_client_models, name):
  assert measures.name(column, has_client_models) == name


def test_different_numbers_have_different_names():
  names = [
      measures.name(column, has_client_models)
      for column in ('train_x', 'test_x', 'client_test_x')
      for has_client_models in (False, True, None)
  ]
  assert len(set(names)) == 5
