"""Tests that AutoGraph converts no function of this package.

Each process that converts a function parses its source code, which takes time.
"""

import pathlib

import client_rounds
import pytest
import tensorflow as tf

# TensorFlow has no public name for the functions that it has converted.
from tensorflow.python.autograph.impl import api
import toy_problem

from tff_bn.training import evaluation

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def converted(monkeypatch):
  """Returns a function that lists the project's converted functions."""
  # Earlier tests have converted functions, too.
  cache = type(api._TRANSPILER._cache)()
  monkeypatch.setattr(api._TRANSPILER, '_cache', cache)

  def names():
    return [
        f'{pathlib.Path(code.co_filename).relative_to(_ROOT)}:{code.co_name}'
        for code in cache._cache
        if _ROOT in pathlib.Path(code.co_filename).parents
        and '.venv' not in code.co_filename
    ]

  return names


def test_conversions_are_found(converted):
  def identity(x):
    return x

  assert not converted()
  tf.autograph.to_graph(identity)
  assert converted() == ['tests/algorithms/test_autograph.py:identity']


@pytest.mark.parametrize(
    'builder_name',
    [
        'build_fed_avg',
        pytest.param('build_fbn', marks=pytest.mark.slow),
        pytest.param('build_hbn', marks=pytest.mark.slow),
        pytest.param('build_fedtan', marks=pytest.mark.slow),
    ],
)
def test_own_functions_are_not_converted(builder_name, converted):
  problem = toy_problem.Toy()
  data = client_rounds.datasets(problem, [8, 8])
  model, process = client_rounds.toy_process(builder_name)
  client_rounds.Training(process, 2).next_round(data)
  weights = process.get_model_weights(process.initialize())
  evaluation.Evaluator(model).evaluate(weights, data[0])
  assert not [name for name in converted() if not name.startswith('tests/')]
