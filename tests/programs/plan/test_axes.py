"""Tests of the axes of a comparison."""

from tff_bn.programs.plan import axes


def _axis(name, **points):
  return axes.Axis(
      name,
      tuple(axes.Point(label, flags) for label, flags in points.items()),
  )


def test_product_varies_the_last_axis_fastest():
  first = _axis('skew', strong={'gamma': '0'}, weak={'gamma': '0.5'})
  second = _axis('method', a={'algorithm': 'fbn'}, b={'algorithm': 'fedavg'})

  cells = axes.product([first, second])

  assert [list(cell.labels.values()) for cell in cells] == [
      ['strong', 'a'],
      ['strong', 'b'],
      ['weak', 'a'],
      ['weak', 'b'],
  ]
  assert cells[1].flags == {'gamma': '0', 'algorithm': 'fedavg'}


def test_the_later_axis_counts():
  cells = axes.product(
      [
          _axis('rate', slow={'rate': '0.1', 'rounds': '9'}),
          _axis('time', short={'rounds': '2'}),
      ]
  )

  assert [cell.flags for cell in cells] == [{'rate': '0.1', 'rounds': '2'}]


def test_flags_of_an_axis_are_in_order():
  axis = _axis('a', x={'gamma': '0'}, y={'split': 'iid', 'gamma': '1'})

  assert axis.flags == ('gamma', 'split')
