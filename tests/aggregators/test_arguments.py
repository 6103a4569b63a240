"""Errors for wrong arguments of rules, steps before rules and attacks."""

import inspect
import math

import numpy as np
import pytest

from tff_bn import aggregators

# Arguments that are right.
_RIGHT = {
    'rule': aggregators.Mean(),
    'attack': aggregators.SignFlipping(),
    'num_byzantine': 1,
    'num_attackers': 1,
    'count': 1,
    'radius': 1.0,
    'max_norm': 1.0,
    'bucket_size': 2,
    'factor': 3.0,
    'epsilon': 0.5,
    'stddev': 1.0,
    'seed': 0,
    'momentum': 0.9,
}


def _create(name, **arguments):
  """Creates an object, with right arguments in place of those not given."""
  create = getattr(aggregators, name)
  needed = {
      parameter: _RIGHT[parameter]
      for parameter, specification in inspect.signature(
          create
      ).parameters.items()
      if specification.default is inspect.Parameter.empty
  }
  return create(**{**needed, **arguments})


@pytest.mark.parametrize(
    ('name', 'argument', 'values'),
    [
        ('TrimmedMean', 'num_byzantine', [-1, 1.5]),
        ('NearestNeighborMixing', 'num_byzantine', [-1, 1.5]),
        ('Mean', 'num_clients', [0]),
        ('MultiKrum', 'num_selected', [0]),
        ('CenteredClipping', 'radius', [0.0, math.nan]),
        ('CenteredClipping', 'num_iterations', [0]),
        ('GeometricMedian', 'smoothing', [0.0]),
        ('GeometricMedian', 'tolerance', [-1.0]),
        ('GeometricMedian', 'max_iterations', [0]),
        ('NearestNeighborAveraging', 'trusted_client', [0.5]),
        ('StaticClipping', 'max_norm', [0.0]),
        ('Bucketing', 'bucket_size', [0]),
        ('Bucketing', 'seed', [-1]),
        ('FallOfEmpires', 'factor', [math.nan]),
        ('InnerProductManipulation', 'epsilon', [0.0, math.inf]),
        ('ALittleIsEnough', 'deviations', [math.inf]),
        ('GaussianNoise', 'stddev', [-1.0]),
        ('GaussianNoise', 'seed', [-1]),
        ('OptimizedALittleIsEnough', 'num_evaluations', [0]),
        ('OptimizedInnerProductManipulation', 'first_step', [0.0]),
        ('OptimizedALittleIsEnough', 'ratio', [0.0, 1.0]),
        ('Attacked', 'num_attackers', [0]),
        ('FbnMomentsFactory', 'momentum', [1.0, -0.1, [0.5, 1.5]]),
    ],
)
def test_numbers(name, argument, values):
  _create(name)
  for value in values:
    with pytest.raises(
        ValueError, match=rf'^{argument}=\S+ of {name} must be a .*number'
    ):
      _create(name, **{argument: value})
  for value in ('1', True):
    with pytest.raises(
        TypeError, match=f'^{argument} of {name} must be .* but is {value!r}'
    ):
      _create(name, **{argument: value})


@pytest.mark.parametrize(
    'name',
    [
        *('NearestNeighborMixing', 'Bucketing', 'StaticClipping'),
        *('AdaptiveRobustClipping', 'Attacked'),
    ],
)
def test_rules(name):
  for wrong in ('median', aggregators.Krum, aggregators.SignFlipping()):
    with pytest.raises(
        TypeError,
        match=f'^{name} needs a rule .*Mean, CoordinateMedian, .*Bucketing',
    ):
      _create(name, rule=wrong)


@pytest.mark.parametrize('name', ['FalsifiedCounts', 'Attacked'])
def test_attacks(name):
  for wrong in ('sf', aggregators.Mean()):
    with pytest.raises(
        TypeError,
        match=f'^{name} needs an attack.*SignFlipping, .*, FalsifiedCounts.$',
    ):
      _create(name, attack=wrong)


def test_momentums():
  for momentum in (None, [0.9, 'a']):
    with pytest.raises(TypeError, match='^momentum of FbnMomentsFactory must'):
      _create('FbnMomentsFactory', momentum=momentum)


def test_falsified_counts():
  for count in ('1', True, None):
    with pytest.raises(TypeError, match='count=.* must be a number'):
      _create('FalsifiedCounts', count=count)


def test_values_that_do_not_fit_together():
  for name, arguments, message in (
      (
          'NearestNeighborAveraging',
          dict(trusted_client=-6, num_clients=5),
          'trusted_client=-6 .* not among 5 clients; use -5 to 4',
      ),
      (
          'MinimumDiameterAveraging',
          dict(num_byzantine=25),
          'num_byzantine=25 .* too long; use at most 24',
      ),
      (
          'SmallestMaximumEigenvalueAveraging',
          dict(num_byzantine=5, num_clients=100),
          'compares 75287520 sets of 100 clients; use num_byzantine of at most'
          ' 2',
      ),
  ):
    with pytest.raises(ValueError, match=message):
      _create(name, **arguments)


def test_numpy_integers_are_integers():
  assert aggregators.TrimmedMean(np.int64(2)).num_byzantine == 2
