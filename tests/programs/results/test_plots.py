"""Tests for plots."""

import example_runs
import matplotlib.image
import numpy as np
import pytest

from tff_bn.programs.results import plots
from tff_bn.programs.results import report


def test_mean_and_deviation():
  rounds, mean, deviation = plots.mean_and_deviation(
      example_runs.RUNS[:2], 'test_accuracy'
  )
  np.testing.assert_array_equal(rounds, [1, 2, 3])
  np.testing.assert_allclose(mean, [0.2, 0.6, 0.8])
  np.testing.assert_allclose(deviation, np.full(3, 0.02**0.5))


def test_mean_leaves_out_what_is_not_finite():
  runs = [
      report.Run(
          {'algorithm': 'a'}, 0, [dict(round=1, x=1.0), dict(round=2, x=np.inf)]
      ),
      report.Run(
          {'algorithm': 'a'}, 1, [dict(round=1, x=np.nan), dict(round=3, x=4.0)]
      ),
      report.Run({'algorithm': 'a'}, 2, [dict(round=2, x=9.0)]),
  ]
  rounds, mean, deviation = plots.mean_and_deviation(runs, 'x')
  np.testing.assert_array_equal(rounds, [1, 2, 3])
  np.testing.assert_array_equal(mean, [1, 9, 4])
  np.testing.assert_array_equal(deviation, [0, 0, 0])


def _lines(axes):
  return {line.get_label(): line.get_xydata() for line in axes.get_lines()}


def test_accuracy_figure():
  drawing = plots.accuracy_figure(example_runs.RUNS, 'my title')
  title, note = drawing.get_suptitle().splitlines()
  assert title == 'my title'
  assert '± one standard deviation' in note
  global_axes, client_axes = drawing.axes
  # It is not known which of the runs have own models.
  assert global_axes.get_title() == (
      "Global model, or clients' own models (mean), on\nthe whole test set"
  )
  assert client_axes.get_title() == (
      "Each client's model on its own test data (mean)"
  )
  assert global_axes.yaxis.get_major_formatter()(0.5) == '50%'
  np.testing.assert_allclose(
      _lines(global_axes)['fedavg'], [[1, 0.2], [2, 0.6], [3, 0.8]]
  )
  assert list(_lines(client_axes)) == ['fedbn']
  assert global_axes.get_xlabel() == 'Round'
  assert global_axes.get_ylabel() == 'Accuracy'
  bottom, top = global_axes.get_ylim()
  assert bottom == 0 and 1 < top < 1.1
  (legend,) = drawing.legends
  assert [text.get_text() for text in legend.get_texts()] == [
      'fedavg',
      'fedbn',
  ]
  (band,) = global_axes.collections
  edges = band.get_paths()[0].vertices
  half_width = 0.02**0.5
  assert edges[:, 1].min() == pytest.approx(0.2 - half_width)
  assert edges[:, 1].max() == pytest.approx(0.8 + half_width)


def _run_with_costs(algorithm, seed, megabytes, accuracies=(0.25, 0.5, 0.75)):
  """Returns a run with rounds 0, 10 and 20, which send this many megabytes."""
  return report.Run(
      {'algorithm': algorithm},
      seed,
      [
          dict(
              round=round_num,
              test_accuracy=accuracy,
              test_loss=1.0,
              exchanges=2 * round_num * (megabytes > 0),
              megabytes=megabytes * round_num,
          )
          for round_num, accuracy in zip((0, 10, 20), accuracies)
      ],
  )


def test_accuracy_against_what_was_sent():
  runs = [
      _run_with_costs('fedavg', 0, 0.5),
      _run_with_costs('fedavg', 1, 0.5, (0.25, 0.25, 0.25)),
      _run_with_costs('fedtan', 0, 2.0),
  ]
  (axes,) = plots.accuracy_figure(runs, 'my title', 'megabytes').axes
  lines = _lines(axes)
  np.testing.assert_allclose(
      lines['fedavg'], [[0, 0.25], [5, 0.375], [10, 0.5]]
  )
  np.testing.assert_allclose(
      lines['fedtan'], [[0, 0.25], [20, 0.5], [40, 0.75]]
  )
  assert axes.get_xlabel() == 'MB sent'
  assert axes.get_xscale() == 'linear'
  (axes,) = plots.accuracy_figure(runs, '', 'exchanges').axes
  assert 'Exchanges' in axes.get_xlabel()
  np.testing.assert_allclose(_lines(axes)['fedtan'][:, 0], [0, 20, 40])


@pytest.mark.parametrize(
    ('ratio', 'scale'), [(4.8, 'linear'), (5.2, 'log'), (1 / 5.2, 'log')]
)
def test_costs_of_different_size_have_a_logarithmic_axis(ratio, scale):
  runs = [
      _run_with_costs('single', 0, 0.0),
      _run_with_costs('fedavg', 0, 1.0),
      _run_with_costs('fedtan', 0, ratio),
  ]
  (axes,) = plots.accuracy_figure(runs, '', 'megabytes').axes
  assert axes.get_xscale() == scale
  # Where nothing has been sent is nowhere on a logarithmic axis.
  first = 0 if scale == 'linear' else 10
  assert _lines(axes)['fedavg'][0, 0] == first
  assert plots.accuracy_figure(runs, '').axes[0].get_xscale() == 'linear'


def test_what_sends_nothing_is_a_horizontal_line():
  runs = [
      _run_with_costs('single', 0, 0.0),
      _run_with_costs('fedavg', 0, 1.0),
      # Of a process whose costs are unknown.
      report.Run(
          {'algorithm': 'other'}, 0, [dict(round=20, test_accuracy=0.9)]
      ),
  ]
  drawing = plots.accuracy_figure(runs, '', 'megabytes')
  lines = _lines(drawing.axes[0])
  assert set(lines) == {'single (sends nothing)', 'fedavg'}
  left, right = lines['single (sends nothing)']
  assert left[0] < right[0]
  assert left[1] == right[1] == 0.75
  (legend,) = drawing.legends
  assert [text.get_text() for text in legend.get_texts()] == list(lines)


def test_algorithm_has_the_same_color_in_every_panel():
  rows = {
      'fedavg': dict(round=1, train_loss=1.0),
      'fedbn': dict(round=1, train_loss=1.0, test_loss=2.0),
      'single': dict(round=1, train_loss=1.0, test_loss=2.0),
  }
  drawing = plots.loss_figure(
      [report.Run({'algorithm': name}, 0, [row]) for name, row in rows.items()],
      '',
  )
  training, test = (
      {line.get_label(): line.get_color() for line in axes.get_lines()}
      for axes in drawing.axes
  )
  assert len(set(training.values())) == 3
  assert test == {name: training[name] for name in ('fedbn', 'single')}


def test_algorithm_has_the_same_color_in_every_figure():
  runs = [_run_with_costs(name, 0, 1.0) for name in ('fedbn', 'fbn', 'fedavg')]

  def colors(shown):
    (axes,) = plots.accuracy_figure(shown, '').axes
    return {line.get_label(): line.get_color() for line in axes.get_lines()}

  assert len(set(colors(runs).values())) == 3
  assert colors(runs[1:]).items() <= colors(runs).items()
  assert colors(runs[::-1]) == colors(runs)


def test_a_single_point_is_visible():
  for rows, marker in (((1,), 'o'), ((1, 2), 'None')):
    run = report.Run(
        {'algorithm': 'a'}, 0, [dict(round=r, test_accuracy=0.5) for r in rows]
    )
    (axes,) = plots.accuracy_figure([run], '').axes
    assert axes.get_lines()[0].get_marker() == marker


def test_title_of_the_labels_names_the_first_seed(monkeypatch, tmp_path):
  saved = {}
  monkeypatch.setattr(plots.figures, 'save', lambda _, f: saved.update(f))
  runs = example_runs.RUNS[:2]
  plots.save_figures(tmp_path, runs, np.eye(2, dtype=int), 'ab', 'title')
  assert saved['label_distribution'].get_suptitle() == 'title, seed 0'


def test_one_seed_has_no_band():
  drawing = plots.accuracy_figure(example_runs.RUNS[:1], 'my title')
  assert drawing.get_suptitle() == 'my title'


def test_a_single_algorithm_needs_no_legend():
  drawing = plots.loss_figure(example_runs.RUNS[:1], '')
  assert not drawing.legends
  (axes,) = drawing.axes
  assert axes.get_yscale() == 'log'


def test_label_distribution_figure():
  counts = np.array([[7, 0, 2], [0, 5, 0]])
  drawing = plots.label_distribution_figure(counts, ['ann', 'bob'], 'labels')
  axes = drawing.axes[0]
  np.testing.assert_array_equal(axes.images[0].get_array(), counts)
  assert [label.get_text() for label in axes.get_yticklabels()] == [
      'ann',
      'bob',
  ]
  assert {(t.get_position(), t.get_text()) for t in axes.texts} == {
      ((0, 0), '7'),
      ((2, 0), '2'),
      ((1, 1), '5'),
  }
  assert axes.get_xlabel() == 'Class'
  assert axes.get_ylabel() == 'Client'


def test_label_distribution_names_the_classes(tmp_path):
  names = ['cat', '$dog$', 'a name that is much longer than others']
  plots.save_figures(
      tmp_path, example_runs.RUNS[:1], np.eye(3, dtype=int), 'abc', '', names
  )
  drawing = plots.label_distribution_figure(np.eye(3), 'abc', '', names)
  labels = drawing.axes[0].get_xticklabels()
  texts = [label.get_text() for label in labels]
  assert texts == ['cat', '$dog$', 'a name that is much lon…']
  np.testing.assert_array_equal(drawing.axes[0].get_xticks(), range(3))
  # A name is no formula, even if it looks like one.
  assert not any(label.get_parse_math() for label in labels)
  # A hundred names can't be read.
  many = [f'class {number}' for number in range(100)]
  axes = plots.label_distribution_figure(np.eye(100), many, '', many).axes[0]
  assert len(axes.get_xticks()) < 30


def test_label_distribution_of_many_clients_is_not_cluttered():
  counts = np.ones((500, 62), int)
  names = [f'writer {i}' for i in range(500)]
  axes = plots.label_distribution_figure(counts, names, '').axes[0]
  assert not axes.texts
  # No examples is white, whatever the smallest number is.
  assert axes.images[0].get_clim() == (0, 1)
  assert len(axes.get_yticklabels()) < 50


@pytest.mark.parametrize(
    ('runs', 'by_costs'),
    [
        (example_runs.RUNS, ['exchanges']),
        (
            [_run_with_costs('fedavg', 0, 1.0), _run_with_costs('a', 0, 2.0)],
            ['exchanges', 'megabytes'],
        ),
        ([_run_with_costs('fedavg', seed, 1.0) for seed in (0, 1)], []),
        (
            [_run_with_costs('a', 0, 0.0), _run_with_costs('b', 0, 0.0)],
            [],
        ),
    ],
    ids=['some columns', 'a comparison', 'one algorithm', 'nothing sent'],
)
def test_save_figures(tmp_path, runs, by_costs):
  folder = tmp_path / 'plots'
  counts = np.array([[7, 0], [0, 5]])
  for _ in range(2):  # The second time overwrites the files.
    plots.save_figures(folder, runs, counts, ['a', 'b'], 'title')
  images = {path.name: path for path in folder.iterdir()}
  assert images.keys() == {
      'accuracy.png',
      'loss.png',
      'label_distribution.png',
      *(f'accuracy_by_{name}.png' for name in by_costs),
  }
  for path in images.values():
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 250
    assert pixels[..., :3].std() > 0.01  # Something is drawn.
