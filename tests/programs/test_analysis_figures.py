"""Tests of tables and figures of the analyses that are made from numbers."""

import dataclasses

import numpy as np
import pytest

from tff_bn.programs.analyses.position_aware import fusion
from tff_bn.programs.analyses.position_aware import layers
from tff_bn.programs.analyses.position_aware import matching
from tff_bn.programs.analyses.position_aware import preference
from tff_bn.programs.analyses.position_aware import report
from tff_bn.programs.analyses.position_aware import shuffle_test

# Two runs, of which one lacks a layer and the other has two clients.
_ROWS = [
    report.LayerValue('r', 0, 'c0', 'a', 5, 1.0),
    report.LayerValue('r', 0, 'c1', 'a', 5, 4.0),
    report.LayerValue('r', 0, 'c0', 'b', '', 0.5),
    report.LayerValue('r', 0, 'c1', 'b', '', 0.5),
    report.LayerValue('s', 0, 'c0', 'b', '', 3.0),
    report.LayerValue('s', 0, 'c0', 'x', '', 7.0),
]


def test_layer_csv():
  text = report.layer_csv(_ROWS[:3], 'share')
  assert text.splitlines() == [
      'run,seed,client,layer,units,share',
      'r,0,c0,a,5,1',
      'r,0,c1,a,5,4',
      'r,0,c0,b,,0.5',
  ]
  rows = [dataclasses.replace(row, client='', units='') for row in _ROWS[:1]]
  text = report.layer_csv(rows, 'share')
  assert text.splitlines() == ['run,seed,layer,share', 'r,0,a,1']


def test_layer_markdown():
  lines = report.layer_markdown(_ROWS, 2, ['A note.']).splitlines()
  cells = [[c.strip() for c in line.strip('|').split('|')] for line in lines]
  assert cells[0] == ['Layer', 'r', 's']
  assert cells[2] == ['a', '2.50 ± 2.12', '–']
  assert cells[3] == ['b', '0.50 ± 0.00', '3.00']
  assert cells[4] == ['x', '–', '7.00']
  assert lines[6:] == [
      '- A note.',
      '- Mean ± standard deviation over seeds and clients.',
  ]
  assert '±' not in report.layer_markdown(_ROWS[4:], 2, [])


def _errors(container):
  """Half the lengths of the error bars."""
  _, _, (lines,) = container.errorbar
  return [
      np.ptp(segment[:, 1]) / 2
      for segment in lines.get_segments()
      if segment.size
  ]


def test_layer_figure():
  drawing = report.layer_figure(_ROWS, 'my label', 'my title')
  (axes,) = drawing.axes
  assert axes.get_title() == 'my title'
  assert axes.get_ylabel() == 'my label'
  labels = [text.get_text() for text in axes.get_xticklabels()]
  assert labels == ['a', 'b', 'x']
  bars = {c.get_label(): c for c in axes.containers if hasattr(c, 'patches')}
  assert list(bars) == ['r', 's']
  heights = {
      name: [bar.get_height() for bar in container]
      for name, container in bars.items()
  }
  np.testing.assert_array_equal(heights['r'], [2.5, 0.5, np.nan])
  np.testing.assert_array_equal(heights['s'], [np.nan, 3, 7])
  assert _errors(bars['r']) == pytest.approx([1.5 * 2**0.5, 0])
  assert bars['s'].errorbar is None
  # Those of a layer are side by side, around its tick.
  for position in range(3):
    left, right = (container[position] for container in bars.values())
    assert left.get_x() + left.get_width() == pytest.approx(right.get_x())
    assert right.get_x() == pytest.approx(position)
    assert left.get_facecolor() != right.get_facecolor()
  (legend,) = drawing.legends
  assert [text.get_text() for text in legend.get_texts()] == ['r', 's']


def test_layer_figure_of_one_run():
  drawing = report.layer_figure(_ROWS[4:], '', '')
  assert not drawing.legends
  # A wide figure is not too wide.
  rows = [dataclasses.replace(_ROWS[0], layer=f'l{i}') for i in range(200)]
  assert report.layer_figure(rows, '', '').get_figwidth() == 16
  assert drawing.get_figwidth() < 8


def test_assignment_figure():
  assignments = {
      ('r', 'a'): np.array([0, 2, 1, 3]),
      ('r', 'b'): np.array([1, 0]),
      ('s', 'b'): np.array([0, 1]),
  }
  drawing = matching.assignment_figure(assignments)
  panels = drawing.axes
  titles = [axes.get_title() for axes in panels]
  assert titles == ['a [0.500]', 'b [0.000]', 'b [1.000]', '']
  for axes, assignment in zip(panels, assignments.values()):
    (points,) = axes.collections
    expected = list(enumerate(assignment))
    np.testing.assert_array_equal(points.get_offsets(), expected)
    # The diagonal goes from the top at the left, as that of a matrix.
    bottom, top = axes.get_ylim()
    assert bottom > top
    assert axes.get_xlim() == (top, bottom)
    assert axes.get_xlabel() == 'Unit before'
  assert not panels[3].axison
  assert panels[0].get_ylabel() == 'r\nunit after'
  assert panels[2].get_ylabel() == 's\nunit after'


@pytest.mark.parametrize('num_classes', [3, 10, 20, 21])
def test_classes_figure(num_classes):
  preferred = {
      ('r', 'a'): [np.array([0, 1, 2]), np.array([0, 2, 2])],
      ('s', 'a'): [np.array([1, 1]), np.array([num_classes - 1, 1])],
      ('s', 'b'): [np.array([2, 0]), np.array([2, 0])],
  }
  drawing = preference.classes_figure(preferred, num_classes)
  panels = drawing.axes
  titles = [axes.get_title() for axes in panels]
  assert titles == ['a [0.667]', '', 'a [0.500]', 'b [1.000]']
  assert not panels[1].axison
  colours = {}
  for axes, classes in zip(panels[:1] + panels[2:], preferred.values()):
    (image,) = axes.get_images()
    np.testing.assert_array_equal(image.get_array(), np.stack(classes))
    for number in np.unique(classes):
      colours.setdefault(number, set()).add(
          tuple(image.cmap(image.norm(number)))
      )
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ['before', 'after']
  # A class has one colour, and no other class has it.
  assert all(len(of_class) == 1 for of_class in colours.values())
  assert len(set.union(*colours.values())) == len(colours)
  assert [panels[0].get_ylabel(), panels[2].get_ylabel()] == ['r', 's']
  if num_classes > 20:
    assert not drawing.legends
    return
  (legend,) = drawing.legends
  names = [text.get_text() for text in legend.get_texts()]
  assert names == [str(number) for number in range(num_classes)]
  for number, patch in enumerate(legend.get_patches()):
    if number in colours:
      assert {tuple(patch.get_facecolor())} == colours[number]


def test_errors_of_seeds_are_averaged_in_the_figure():
  errors = [
      shuffle_test.Error('r', seed, mode, amplitude, 1.0, error + 2 * seed)
      for seed in (0, 1)
      for mode, amplitude, error in (
          *(('multiply', 0.0, 0.0), ('multiply', 0.5, 1.0)),
          *(('add', 0.0, 0.0), ('add', 0.5, 3.0)),
      )
  ]
  drawing = shuffle_test.error_figure(errors, 'my title')
  assert drawing.get_suptitle() == 'my title'
  left, right = drawing.axes
  lines = [*left.get_lines(), *right.get_lines()]
  assert [line.get_label() for line in lines] == [
      *('T = 1', 'multiplicative', 'additive')
  ]
  assert [list(line.get_ydata()) for line in lines] == [[1, 2], [1, 2], [1, 4]]
  assert all(list(line.get_xdata()) == [0, 0.5] for line in lines)
  assert left.get_xlabel() == right.get_xlabel() == 'Amplitude A'


def test_accuracies_of_seeds_are_averaged_in_the_figure():
  fused = [
      fusion.Fused('r', seed, method, coefficient, accuracy + 0.2 * seed, 1.0)
      for seed in (0, 1)
      for method, accuracy in (('average', 0.1), ('transport', 0.5))
      for coefficient in (0.0, 1.0)
  ]
  drawing = fusion.accuracy_figure(fused, 'my title')
  (axes,) = drawing.axes
  assert axes.get_title() == 'my title'
  lines = {line.get_label(): line for line in axes.get_lines()}
  assert list(lines) == ['r: average', 'r: optimal transport']
  for line, expected in zip(lines.values(), (0.2, 0.6)):
    assert list(line.get_xdata()) == [0, 1]
    np.testing.assert_allclose(line.get_ydata(), expected)
  dashes = {line.get_linestyle() for line in lines.values()}
  assert len(dashes) == 2
  assert len(drawing.legends) == 1


def test_what_is_drawn_of_many_layers():
  results = [
      layers.Comparison(run, seed, client, layer, None, None, None, None)
      for run in ('r', 's')
      for seed in (0, 1)
      for client in ('c0', 'c1')
      for layer in ('a', 'b', 'c', 'd', 'e')
  ]
  shown = layers.shown(results)
  assert [(c.run, c.seed, c.client, c.layer) for c in shown] == [
      (run, 0, 'c0', layer)
      for run in ('r', 's')
      for layer in ('b', 'c', 'd', 'e')
  ]
