"""Fixtures for the tests of training."""

import os

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


@pytest.fixture(scope='module', autouse=True)
def no_waiting_for_the_disk():
  """Only a power failure could tell the difference."""
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(os, 'fsync', lambda descriptor: None)
    yield


@pytest.fixture(scope='session')
def evaluators():
  """What evaluators consist of, by model and number of concurrent batches."""
  return {}


@pytest.fixture(autouse=True)
def shared_evaluators(request, evaluators, monkeypatch):
  """Lets all runs with a model use one evaluator, which is traced once.

  Most of a short run's time would go into its tracing.
  """
  if request.module.__name__ == 'test_evaluation':
    return  # Its tests observe the tracing.
  initialize = evaluation.Evaluator.__init__

  def initialize_once(self, model):
    key = model, evaluation._num_concurrent()
    if key not in evaluators:
      initialize(self, model)
      evaluators[key] = vars(self)
    vars(self).update(evaluators[key])

  monkeypatch.setattr(evaluation.Evaluator, '__init__', initialize_once)
