"""Tests of tables and figures that analyses make from given numbers."""

import csv_rows
import numpy as np
import pytest

from tff_bn.papers.run_analyses import fusion_analysis
from tff_bn.papers.run_analyses import preference_analysis
from tff_bn.papers.run_analyses import run_tables
from tff_bn.papers.run_analyses import shuffle_test_analysis

# Two runs: one lacks a layer, the other has two values for each layer.
_ROWS = [
    run_tables.LayerValue('r', 'a', 1.0),
    run_tables.LayerValue('r', 'a', 4.0),
    run_tables.LayerValue('r', 'b', 0.5),
    run_tables.LayerValue('r', 'b', 0.5),
    run_tables.LayerValue('s', 'b', 3.0),
    run_tables.LayerValue('s', 'x', 7.0),
]


def test_layer_markdown():
  text = run_tables.layer_markdown(_ROWS, '.2f', ['A note.'])
  cells = csv_rows.cells(text)
  assert cells[0] == ['Layer', 'r', 's']
  assert cells[2] == ['a', '2.50 ± 2.12', '–']
  assert cells[3] == ['b', '0.50 ± 0.00', '3.00']
  assert cells[4] == ['x', '–', '7.00']
  assert text.splitlines()[6:] == [
      '- A note.',
      '- Mean ± standard deviation over seeds and clients.',
  ]
  assert '±' not in run_tables.layer_markdown(_ROWS[4:], '.2f', [])


def _errors(container):
  """Returns half the lengths of the error bars."""
  _, _, (lines,) = container.errorbar
  return [
      np.ptp(segment[:, 1]) / 2
      for segment in lines.get_segments()
      if segment.size
  ]


def test_layer_figure():
  drawing = run_tables.layer_figure(_ROWS, 'my label', 'my title')
  (axes,) = drawing.axes
  title, note = drawing.get_suptitle().splitlines()
  assert title == 'my title'
  assert note == 'error bars: ± one standard deviation'
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
  # The bars of a layer are side by side around its tick.
  for position in range(3):
    left, right = (container[position] for container in bars.values())
    assert left.get_x() + left.get_width() == pytest.approx(right.get_x())
    assert right.get_x() == pytest.approx(position)
    assert left.get_facecolor() != right.get_facecolor()
  (legend,) = drawing.legends
  assert [text.get_text() for text in legend.get_texts()] == ['r', 's']


def test_layer_figure_of_one_run():
  drawing = run_tables.layer_figure(_ROWS[4:], '', 'my title')
  assert drawing.get_suptitle() == 'my title'
  assert not drawing.legends
  # The width is limited.
  rows = [_ROWS[0]._replace(layer=f'l{i}') for i in range(200)]
  assert run_tables.layer_figure(rows, '', '').get_figwidth() == 16
  assert drawing.get_figwidth() < 8


def test_permutations_figure():
  first = {'a': np.array([0, 2, 1, 3]), 'b': np.array([1, 0])}
  second = {'b': np.array([0, 1])}
  drawing = run_tables.permutations_figure(
      {'r': first, 's': second}, x_label='x', y_label='y', title='my title'
  )
  panels = drawing.axes
  titles = [axes.get_title() for axes in panels]
  assert titles == ['a [0.500]', 'b [0.000]', 'b [1.000]', '']
  for axes, indices in zip(panels, [*first.values(), *second.values()]):
    (points,) = axes.collections
    expected = list(enumerate(indices))
    np.testing.assert_array_equal(points.get_offsets(), expected)
    # The diagonal begins at the top left, as in a matrix.
    bottom, top = axes.get_ylim()
    assert bottom > top
    assert axes.get_xlim() == (top, bottom)
    assert axes.get_xlabel() == 'x'
  assert not panels[3].axison
  assert panels[0].get_ylabel() == 'r\ny'
  assert panels[2].get_ylabel() == 's\ny'
  assert drawing.get_suptitle() == 'my title'


def test_units_of_the_last_four_layers_are_drawn():
  layers = {name: np.array([0, 1]) for name in 'abcde'}
  drawing = run_tables.permutations_figure(
      {'r': layers}, x_label='', y_label='', title=''
  )
  titles = [axes.get_title() for axes in drawing.axes]
  assert titles == [f'{name} [1.000]' for name in 'bcde']


@pytest.mark.parametrize('num_classes', [3, 10, 20, 21])
def test_classes_figure(num_classes):
  preferred = {
      'r': {'a': np.array([[0, 1, 2], [0, 2, 2]])},
      's': {
          'a': np.array([[1, 1], [num_classes - 1, 1]]),
          'b': np.array([[2, 0], [2, 0]]),
      },
  }
  drawing = preference_analysis.classes_figure(preferred, num_classes)
  panels = drawing.axes
  titles = [axes.get_title() for axes in panels]
  assert titles == ['a [0.667]', '', 'a [0.500]', 'b [1.000]']
  assert not panels[1].axison
  colors = {}
  results = [x for of_run in preferred.values() for x in of_run.values()]
  for axes, classes in zip(panels[:1] + panels[2:], results, strict=True):
    (image,) = axes.get_images()
    np.testing.assert_array_equal(image.get_array(), classes)
    for number in np.unique(classes):
      colors.setdefault(number, set()).add(
          tuple(image.cmap(image.norm(number)))
      )
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ['before', 'after']
  # Each class has one color, different from all others.
  assert all(len(of_class) == 1 for of_class in colors.values())
  assert len(set.union(*colors.values())) == len(colors)
  assert [panels[0].get_ylabel(), panels[2].get_ylabel()] == ['r', 's']
  if num_classes > 20:
    assert not drawing.legends
    return
  (legend,) = drawing.legends
  names = [text.get_text() for text in legend.get_texts()]
  assert names == [str(number) for number in range(num_classes)]
  for number, patch in enumerate(legend.get_patches()):
    if number in colors:
      assert {tuple(patch.get_facecolor())} == colors[number]


def test_classes_figure_names_the_classes():
  preferred = {'a': {'x': np.array([[0, 1], [1, 1]])}}
  names = ['cat', '$dog$']
  (legend,) = preference_analysis.classes_figure(preferred, 2, names).legends
  assert [text.get_text() for text in legend.get_texts()] == names
  assert not any(text.get_parse_math() for text in legend.get_texts())


def test_errors_of_seeds_are_averaged_in_the_figure():
  errors = [
      shuffle_test_analysis.Error(
          run, seed, mode, amplitude, period, error + 2 * seed
      )
      for run, seed in (('r', 0), ('r', 1), ('s', 1))
      for mode, period, amplitude, error in (
          *(('multiply', 2.0, 0.0, 0.0), ('multiply', 2.0, 0.5, 1.0)),
          *(('multiply', 1.0, 0.0, 0.0), ('multiply', 1.0, 0.5, 2.0)),
          *(('add', 2.0, 0.0, 0.0), ('add', 2.0, 0.5, 3.0)),
      )
  ]
  drawing = shuffle_test_analysis.error_figure(errors, 'my title')
  assert drawing.get_suptitle() == 'my title'
  titles = ['r: multiplicative', 'r: T = 2', 's: multiplicative', 's: T = 2']
  assert [axes.get_title() for axes in drawing.axes] == titles
  for number, axes in enumerate(drawing.axes):
    start = 1 if number < 2 else 2
    if number % 2:
      expected = {'multiplicative': [0, 1], 'additive': [0, 3]}
    else:
      expected = {'T = 2': [0, 1], 'T = 1': [0, 2]}
    assert {x.get_label(): list(x.get_ydata()) for x in axes.get_lines()} == {
        label: [start + y for y in values] for label, values in expected.items()
    }
    assert all(list(x.get_xdata()) == [0, 0.5] for x in axes.get_lines())
    assert axes.get_xlabel() == 'Amplitude A'


def test_accuracies_of_seeds_are_averaged_in_the_figure():
  fused = [
      fusion_analysis.Fused(
          'r', seed, method, coefficient, accuracy + 0.2 * seed, 1.0
      )
      for seed in (0, 1)
      for method, accuracy in (('average', 0.1), ('transport', 0.5))
      for coefficient in (0.0, 1.0)
  ]
  drawing = fusion_analysis.accuracy_figure(fused, 'my title')
  (axes,) = drawing.axes
  assert drawing.get_suptitle() == 'my title'
  lines = {line.get_label(): line for line in axes.get_lines()}
  assert list(lines) == ['r: average', 'r: optimal transport']
  for line, expected in zip(lines.values(), (0.2, 0.6)):
    assert list(line.get_xdata()) == [0, 1]
    np.testing.assert_allclose(line.get_ydata(), expected)
  dashes = {line.get_linestyle() for line in lines.values()}
  assert len(dashes) == 2
  assert len(drawing.legends) == 1
  # The axis shows the range of the values.
  bottom, top = axes.get_ylim()
  assert 0.1 < bottom < 0.2 and 0.6 < top < 0.7
