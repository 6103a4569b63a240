"""Fixtures for the tests of training."""

import pytest
import training_fakes

from tff_bn.training import evaluation


@pytest.fixture(scope='session')
def model():
  """The model of the fakes, whose functions are traced once."""
  return training_fakes.build_model()


@pytest.fixture(scope='session')
def fake_model():
  """The same for modules in which another model has this name."""
  return training_fakes.build_model()


@pytest.fixture(scope='session', autouse=True)
def shared_evaluators():
  """Lets all runs with a model use one evaluator, which is traced once.

  Most of a short run's time would go into its tracing.
  """
  made = {}
  initialize = evaluation.Evaluator.__init__

  def initialize_once(self, model):
    key = model, evaluation._num_concurrent()
    if key not in made:
      initialize(self, model)
      made[key] = vars(self)
    vars(self).update(made[key])

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(evaluation.Evaluator, '__init__', initialize_once)
    yield
