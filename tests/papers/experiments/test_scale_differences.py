"""Tests of the sentences on how a scale differs from the paper's."""

from tff_bn.papers.experiments import scale_differences
from tff_bn.programs.plan import axes


def _axis(name, **flags_of_points):
  points = [
      axes.Point(label, flags) for label, flags in flags_of_points.items()
  ]
  return axes.Axis(name, tuple(points))


def test_flags():
  paper = dict(rounds='3000', model='cnn', augment='flip', evaluate_every='5')
  here = dict(rounds='80', model='cnn', batch_size='4', evaluate_every='1')

  found = scale_differences.describe((paper, (), ()), (here, (), ()))

  assert found == ('rounds=80 instead of 3000', 'batch_size=4', 'no augment')


def test_long_values_are_not_repeated():
  found = scale_differences.describe(
      (dict(dataset=40 * 'x'), (), ()), (dict(dataset='digits'), (), ())
  )

  assert found == ("dataset=digits instead of the paper's",)


def test_axes():
  paper = (
      _axis('gamma', a={}, b={}, c={}),
      _axis('data', cifar={'dataset': 'cifar'}),
      _axis('epochs', short={'rounds': '300'}, long={'rounds': '75'}),
      _axis('same', x={}),
  )
  here = (
      _axis('gamma', a={}, c={}),
      _axis('data', digits={'dataset': 'digits'}),
      _axis('epochs', short={'rounds': '64'}, long={'rounds': '75'}),
      _axis('same', x={}),
  )

  assert scale_differences.describe(({}, paper, ()), ({}, here, ())) == (
      'gamma without b',
      'data: digits instead of cifar',
      'short: rounds=64 instead of 300',
  )


def test_analyses():
  paper = ({}, (), [dict(epochs='9'), dict(layers='a')])
  here = ({}, (), [dict(epochs='2'), dict(layers='a')])

  assert scale_differences.describe(paper, here) == ('epochs=2 instead of 9',)
