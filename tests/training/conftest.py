"""Fixtures for the tests of training."""

import pytest
import training_fakes


@pytest.fixture(scope='session')
def model():
  """The model of the fakes, whose functions are traced once."""
  return training_fakes.build_model()


@pytest.fixture(scope='session')
def fake_model(model):
  """The same, for modules in which another model has this name."""
  return model
