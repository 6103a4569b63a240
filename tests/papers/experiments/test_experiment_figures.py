"""Tests of the figures of experiments: what is drawn, from made-up numbers."""

from matplotlib import colors as mpl_colors
import numpy as np
import pytest

from tff_bn.papers import figures
from tff_bn.papers.experiments import experiment_figures
from tff_bn.papers.experiments import experiment_numbers
from tff_bn.papers.experiments import paper_form
from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.results import line_styles
from tff_bn.programs.results import report

_LABELS = {
    'method': ('a', 'b'),
    'rate': ('0.1', '1', '10'),
    'data': ('iid', 'skew'),
}


def _value(labels, column):
  """A number that says where it belongs."""
  parts = [_LABELS[name].index(label) for name, label in labels.items()]
  return 10 * sum(10**i * part for i, part in enumerate(parts)) + len(column)


def _numbers(show, *, with_paper=True):
  dimensions = show.shown_dimensions
  columns = show.value or show.y
  numbers = experiment_numbers.Numbers(
      dimensions, {name: _LABELS[name] for name in dimensions}, columns, {}, {}
  )
  for labels in numbers.combinations(dimensions):
    for column in columns:
      value = _value(dict(zip(dimensions, labels)), column)
      numbers.ours[labels, column] = experiment_numbers.Number(value, 1.5, 2)
      if with_paper:
        numbers.paper[labels, column] = experiment_numbers.Number(value + 1)
  return numbers


def _draw(show, tmp_path, runs=(), **options):
  drawing = experiment_figures.draw(
      _numbers(show, **options), show, runs, 'The title', ()
  )
  figures.save(tmp_path / 'plots', {'experiment': drawing})
  assert (tmp_path / 'plots' / 'experiment.png').stat().st_size > 5000
  return drawing


def _legend(drawing):
  return [text.get_text() for text in drawing.legends[0].get_texts()]


def test_lines_on_a_logarithmic_scale(tmp_path):
  show = paper_form.Show(
      'lines',
      x=('rate',),
      lines=('method',),
      panels=('data',),
      value=('test_loss',),
  )

  drawing = _draw(show, tmp_path)

  left, right = drawing.axes
  assert [axes.get_title() for axes in drawing.axes] == ['iid', 'skew']
  assert left.get_xscale() == 'log'
  assert left.get_xlabel() == 'rate' and left.get_ylabel() == 'Test loss'
  assert _legend(drawing) == ['the paper', 'a', 'b']
  ours, _, _ = right.containers[1]
  np.testing.assert_array_equal(ours.get_xdata(), [0.1, 1, 10])
  np.testing.assert_array_equal(
      ours.get_ydata(),
      [
          _value({'data': 'skew', 'method': 'b', 'rate': rate}, 'test_loss')
          for rate in _LABELS['rate']
      ],
  )
  paper = [line for line in right.lines if line.get_label() == 'the paper']
  np.testing.assert_array_equal(paper[1].get_ydata(), ours.get_ydata() + 1)


def test_bars_stand_beside_each_other(tmp_path):
  show = paper_form.Show(
      'bars', x=('data',), lines=('method',), value=('test_accuracy',)
  )

  drawing = _draw(show, tmp_path)

  (axes,) = drawing.axes
  assert [t.get_text() for t in axes.get_xticklabels()] == ['iid', 'skew']
  bars = [
      bar
      for bars in axes.containers
      if hasattr(bars, 'patches')
      for bar in bars.patches
  ]
  np.testing.assert_allclose(
      [bar.get_x() + bar.get_width() / 2 for bar in bars], [-0.2, 0.8, 0.2, 1.2]
  )
  assert bars[1].get_height() == _value(
      {'method': 'a', 'data': 'skew'}, 'test_accuracy'
  )
  paper = [line for line in axes.lines if line.get_label() == 'the paper']
  np.testing.assert_allclose(paper[0].get_xdata(), [-0.2, 0.8])


def test_an_algorithm_has_its_color():
  show = paper_form.Show(
      'bars', x=('data',), lines=('rate', 'method'), value=('test_accuracy',)
  )
  varied = [
      axes_lib.Axis(
          'method',
          (
              axes_lib.Point('a', {'algorithm': 'fedtan'}),
              axes_lib.Point('b', {'algorithm': 'fedavg'}),
          ),
      ),
      axes_lib.Axis('rate', (axes_lib.Point('0.1', {'batch_size': '1'}),)),
  ]
  labels = {'rate': ('0.1',), 'method': ('a', 'b'), 'data': ('iid',)}
  numbers = experiment_numbers.Numbers(
      show.shown_dimensions, labels, ('test_accuracy',), {}, {}
  )

  drawing = experiment_figures.draw(numbers, show, (), 'The title', varied)

  legend = drawing.legends[0]
  assert [
      mpl_colors.to_hex(patch.get_facecolor()) for patch in legend.get_patches()
  ] == [
      line_styles.of_algorithm(name)['color'].lower()
      for name in ('fedtan', 'fedavg')
  ]


def test_a_table_becomes_bars_of_its_rows(tmp_path):
  show = paper_form.Show(
      'table', rows=('method',), columns=('data',), value=('test_accuracy',)
  )

  drawing = _draw(show, tmp_path, with_paper=False)

  assert _legend(drawing) == ['a', 'b']
  (axes,) = drawing.axes
  assert [t.get_text() for t in axes.get_xticklabels()] == ['iid', 'skew']


def test_the_papers_heat_map_is_beside_ours(tmp_path):
  show = paper_form.Show(
      'heat_map',
      rows=('method',),
      columns=('rate',),
      panels=('data',),
      value=('test_accuracy',),
  )

  drawing = _draw(show, tmp_path)

  images = [axes.images[0] for axes in drawing.axes if axes.images]
  titles = [axes.get_title() for axes in drawing.axes if axes.images]
  assert titles[:4] == [
      'iid, here',
      'iid, the paper',
      'skew, here',
      'skew, the paper',
  ]
  expected = [
      [
          _value(
              {'data': 'skew', 'method': method, 'rate': rate}, 'test_accuracy'
          )
          for rate in _LABELS['rate']
      ]
      for method in _LABELS['method']
  ]
  np.testing.assert_array_equal(images[2].get_array(), expected)
  np.testing.assert_array_equal(images[3].get_array(), np.array(expected) + 1)
  assert images[2].get_clim() == images[3].get_clim()


def test_without_the_papers_numbers_there_is_one_heat_map(tmp_path):
  show = paper_form.Show(
      'heat_map', rows=('method',), columns=('rate',), value=('test_accuracy',)
  )

  drawing = _draw(show, tmp_path, with_paper=False)

  assert drawing.axes[0].get_title() == ''
  texts = [text.get_text() for text in drawing.axes[0].texts]
  assert (
      texts[1] == f'{_value({"method": "a", "rate": "1"}, "test_accuracy"):.3g}'
  )


@pytest.mark.parametrize('against', ['round', 'megabytes'])
def test_curves_are_means_over_seeds(tmp_path, against):
  show = paper_form.Show(
      'curves',
      x=(against,),
      y=('test_accuracy', 'train_loss'),
      lines=('method',),
      panels=('data',),
  )
  runs = [
      report.Run(
          {'method': method, 'data': data},
          seed,
          [
              {
                  'round': number,
                  'megabytes': 3.0 * number,
                  'test_accuracy': 0.1 * number + 0.2 * seed,
                  'train_loss': 1 / (number + 1),
              }
              for number in range(4)
          ],
      )
      for method in _LABELS['method']
      for data in _LABELS['data']
      for seed in (0, 1)
      # One of the panels has a single line.
      if (method, data) != ('b', 'skew')
  ]

  drawing = _draw(show, tmp_path, runs, with_paper=False)

  assert len(drawing.axes) == 4
  assert _legend(drawing) == ['a', 'b']
  first = drawing.axes[0]
  np.testing.assert_allclose(
      first.lines[0].get_xdata(),
      np.arange(4) * (3.0 if against == 'megabytes' else 1),
  )
  np.testing.assert_allclose(
      first.lines[0].get_ydata(), 0.1 * np.arange(4) + 0.1
  )
  assert first.get_xlabel() == against.capitalize()
  assert first.get_ylabel() == 'Test accuracy, %'
  assert first.yaxis.get_major_formatter()(0.25).startswith('25')
  assert [len(axes.lines) for axes in drawing.axes] == [2, 1, 2, 1]
  # Rows are metrics, columns are panels.
  assert drawing.axes[2].get_yscale() == 'log'
  assert drawing.axes[1].get_title() == 'skew'


@pytest.mark.parametrize(
    'column, factor', [('test_loss', 1), ('test_accuracy', 100)]
)
def test_the_papers_final_numbers_are_lines_across_curves(
    tmp_path, column, factor
):
  show = paper_form.Show('curves', x=('round',), y=(column,), lines=('method',))
  runs = [
      report.Run(
          {'method': 'b'}, 0, [{'round': r, column: 1.0} for r in (0, 1)]
      )
  ]

  (axes,) = _draw(show, tmp_path, runs).axes

  assert axes.lines[1].get_ydata()[0] == pytest.approx(
      (_value({'method': 'b'}, column) + 1) / factor
  )
  assert axes.lines[1].get_color() == axes.lines[0].get_color()


def test_bars_of_an_algorithm_with_different_corrections_differ():
  show = paper_form.Show(
      'bars', x=('data',), lines=('method',), value=('test_accuracy',)
  )
  varied = [
      axes_lib.Axis(
          'method',
          (
              axes_lib.Point('a', {'algorithm': 'fedbn'}),
              axes_lib.Point('b', {'algorithm': 'fedbn+fedprox'}),
          ),
      )
  ]
  drawing = experiment_figures.draw(
      _numbers(show, with_paper=False), show, (), 'A title', varied
  )
  (legend,) = drawing.legends
  first, second = (patch.get_facecolor() for patch in legend.get_patches())
  assert first != second


@pytest.mark.parametrize(
    'num_columns, rotation', [(2, 0), (10, 40)], ids=('few', 'many')
)
def test_long_labels_of_two_axes_can_be_read(tmp_path, num_columns, rotation):
  show = paper_form.Show(
      'bars', x=('optimizer', 'data'), value=('test_accuracy',)
  )
  labels = {
      'optimizer': ('Without momentum', 'With momentum'),
      'data': tuple(f'Non-i.i.d. {index}' for index in range(num_columns)),
  }
  numbers = experiment_numbers.Numbers(
      show.shown_dimensions, labels, ('test_accuracy',), {}, {}
  )

  drawing = experiment_figures.draw(numbers, show, (), 'The title', ())

  figures.save(tmp_path / 'plots', {'experiment': drawing})
  (axes,) = drawing.axes
  shown = axes.get_xticklabels()
  assert shown[1].get_text() == 'Without momentum,\nNon-i.i.d. 1'
  assert {label.get_rotation() for label in shown} == {rotation}
  assert drawing.get_size_inches()[0] < 12
  if not rotation:
    extents = [label.get_window_extent() for label in shown]
    for left, right in zip(extents, extents[1:]):
      assert left.x1 < right.x0
