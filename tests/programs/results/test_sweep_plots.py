"""Tests for the plots of sweeps."""

import itertools
import math

import matplotlib.image
import numpy as np
import pytest

from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.results import figures
from tff_bn.programs.results import report
from tff_bn.programs.results import sweep_plots


def _axis(name, *labels):
  return axes_lib.Axis(
      name, tuple(axes_lib.Point(label, {name: label}) for label in labels)
  )


_ALGORITHMS = _axis('algorithm', 'fedavg', 'fbn')
_GAMMA = _axis('gamma', '0', '0.5', '1')
_STEPS = _axis('local_steps', '1', '5')
_ATTACKS = _axis('attack', 'sf', 'alie')


def _runs(axes, accuracy, seeds=(0, 1)):
  """Makes runs with two rounds; `accuracy` gets the labels and the seed."""
  return [
      report.Run(
          cell.labels,
          seed,
          [
              dict(round=0, test_accuracy=0.0, test_loss=2.0),
              dict(
                  round=4,
                  test_accuracy=accuracy(cell.labels, seed),
                  test_loss=1.0,
              ),
          ],
      )
      for seed in seeds
      for cell in axes_lib.product(axes)
  ]


def _drawings(axes, runs, folder, monkeypatch, title='digits', saves=False):
  """Draws the figures; they are saved only where a test looks at the files."""
  drawings = {}
  save = figures.save

  def keep(folder, new):
    drawings.update(new)
    if saves:
      save(folder, new)

  monkeypatch.setattr(figures, 'save', keep)
  results = [report.result(run, 1) for run in runs]
  sweep_plots.save_figures(folder, runs, results, 3, axes, title)
  return drawings


def _panels(drawing):
  """The heat maps of a figure by their titles."""
  return {axes.get_title(): axes for axes in drawing.axes if axes.images}


def _numbers(axes):
  texts = {
      (t.get_position()[1], t.get_position()[0]): t.get_text()
      for t in axes.texts
  }
  rows = max(row for row, _ in texts) + 1
  columns = max(column for _, column in texts) + 1
  return [[texts[r, c] for c in range(columns)] for r in range(rows)]


def test_heat_map_of_two_swept_flags(tmp_path, monkeypatch):
  axes = [_GAMMA, _STEPS, _ALGORITHMS]

  def accuracy(labels, seed):
    return (
        0.1 * float(labels['gamma'])
        + 0.01 * int(labels['local_steps'])
        + 0.5 * (labels['algorithm'] == 'fbn')
        + 0.002 * seed
    )

  drawings = _drawings(
      axes, _runs(axes, accuracy), tmp_path, monkeypatch, saves=True
  )
  drawing = drawings['heat_map_gamma_local_steps']
  panels = _panels(drawing)
  assert list(panels) == ['fedavg', 'fbn']
  # The mean of the seeds adds 0.1 %.
  assert _numbers(panels['fedavg']) == [
      ['1.1', '5.1'],
      ['6.1', '10.1'],
      ['11.1', '15.1'],
  ]
  assert _numbers(panels['fbn'])[2] == ['61.1', '65.1']
  for panel in panels.values():
    (image,) = panel.images
    assert image.get_array().shape == (3, 2)
    assert image.get_clim() == pytest.approx((1.1, 65.1))
  first = panels['fedavg']
  assert [t.get_text() for t in first.get_yticklabels()] == ['0', '0.5', '1']
  assert [t.get_text() for t in first.get_xticklabels()] == ['1', '5']
  assert drawing.get_supxlabel() == 'local_steps'
  assert drawing.get_supylabel() == 'gamma'
  *measured, title = drawing.get_suptitle().splitlines()
  assert ' '.join(measured) == (
      "Accuracy in %, global model, or clients' own models (mean), on the whole"
      ' test set: mean over the last 3 evaluated rounds, mean over 2 seeds'
  )
  assert title == 'digits'
  for name in drawings:
    pixels = matplotlib.image.imread(tmp_path / f'{name}.png')
    assert pixels[..., :3].std() > 0.01
  assert set(drawings) == {
      'heat_map_gamma_local_steps',
      'test_accuracy',
      'test_loss',
  }


def test_worst_case_over_attacks(tmp_path, monkeypatch):
  """The mean over the seeds is taken first, as in ByzFL."""
  axes = [_ATTACKS, _GAMMA, _STEPS, _ALGORITHMS]

  def accuracy(labels, seed):
    # Means: 0.5 with sf, 0.4 with alie; the smallest of all is with sf.
    values = {
        ('sf', 0): 0.1,
        ('sf', 1): 0.9,
        ('alie', 0): 0.4,
        ('alie', 1): 0.4,
    }
    return values[labels['attack'], seed] + 0.05 * (labels['gamma'] == '1')

  drawings = _drawings(axes, _runs(axes, accuracy), tmp_path, monkeypatch)
  assert [name for name in drawings if name.startswith('heat')] == [
      'heat_map_gamma_local_steps'
  ]
  drawing = drawings['heat_map_gamma_local_steps']
  panels = _panels(drawing)
  assert list(panels) == ['fedavg', 'fbn']
  for panel in panels.values():
    assert _numbers(panel) == [['40.0'] * 2, ['40.0'] * 2, ['45.0'] * 2]
  title = ' '.join(drawing.get_suptitle().split())
  assert 'the worst case over attack=sf,alie' in title


@pytest.mark.parametrize(
    ('axes', 'names'),
    [
        ([_STEPS, _ALGORITHMS], ['algorithm_local_steps']),
        ([_ATTACKS, _ALGORITHMS], ['attack_algorithm']),
        (
            [_ATTACKS, _STEPS, _ALGORITHMS],
            ['algorithm_local_steps', 'attack_local_steps'],
        ),
        (
            [_STEPS, _GAMMA, _axis('rounds', '4', '5'), _ALGORITHMS],
            ['local_steps_gamma', 'local_steps_rounds', 'gamma_rounds'],
        ),
        # What an experiment varies need not contain the algorithm itself.
        ([_STEPS, _axis('scheme', 'a', 'b')], ['local_steps_scheme']),
    ],
)
def test_pairs(axes, names, tmp_path, monkeypatch):
  runs = _runs(axes, lambda labels, seed: 0.5, seeds=(0,))
  drawings = _drawings(axes, runs, tmp_path, monkeypatch, title='')
  assert [
      name.removeprefix('heat_map_') for name in drawings if 'heat' in name
  ] == names


def test_worst_case_of_the_algorithms_and_each_attack(tmp_path, monkeypatch):
  axes = [_ATTACKS, _STEPS, _ALGORITHMS]

  def accuracy(labels, seed):
    del seed
    return 0.2 if labels['attack'] == 'alie' else 0.7

  drawings = _drawings(
      axes, _runs(axes, accuracy, seeds=(0,)), tmp_path, monkeypatch
  )
  (worst,) = _panels(drawings['heat_map_algorithm_local_steps']).values()
  assert _numbers(worst) == [['20.0'] * 2] * 2
  assert 'one seed' in drawings['heat_map_algorithm_local_steps'].get_suptitle()
  each = _panels(drawings['heat_map_attack_local_steps'])
  assert list(each) == ['fedavg', 'fbn']
  assert _numbers(each['fbn']) == [['70.0'] * 2, ['20.0'] * 2]
  title = drawings['heat_map_attack_local_steps'].get_suptitle()
  assert 'worst' not in title


def test_a_panel_for_each_value_of_further_flags(tmp_path, monkeypatch):
  rounds = _axis('rounds', '4', '5', '6')
  axes = [_STEPS, rounds, _GAMMA, _ALGORITHMS]

  def accuracy(labels, seed):
    del seed
    return int(labels['rounds']) / 10

  drawings = _drawings(
      axes, _runs(axes, accuracy, seeds=(0,)), tmp_path, monkeypatch
  )
  panels = _panels(drawings['heat_map_local_steps_gamma'])
  assert list(panels) == [
      f'{algorithm}, rounds={number}'
      for number in (4, 5, 6)
      for algorithm in ('fedavg', 'fbn')
  ]
  assert _numbers(panels['fbn, rounds=5']) == [['50.0'] * 3] * 2


def test_missing_values(tmp_path, monkeypatch):
  axes = [_GAMMA, _STEPS]

  def accuracy(labels, seed):
    del seed
    if labels == {'gamma': '0', 'local_steps': '5'}:
      return math.nan
    return 0.5

  drawings = _drawings(axes, _runs(axes, accuracy), tmp_path, monkeypatch)
  (panel,) = _panels(drawings['heat_map_gamma_local_steps']).values()
  assert _numbers(panel)[0] == ['50.0', '–']
  runs = _runs(axes, lambda labels, seed: math.nan)
  _drawings(axes, runs, tmp_path, monkeypatch)


def test_means_that_are_not_finite_are_the_worst():
  results = [
      dict(attack=attack, seed=seed, x=x)
      for attack, seed, x in [
          ('a', 0, 1.0),
          ('a', 1, 3.0),
          ('b', 0, 9.0),
          ('b', 1, math.nan),
      ]
  ]
  means = sweep_plots.mean_over_seeds(results, ['attack'], 'x')
  assert means['a',] == 2
  assert math.isnan(means['b',])
  worst = sweep_plots.mean_over_seeds(results, [], 'x', ['attack'])
  assert math.isnan(worst[()])
  assert math.isnan(sweep_plots.mean_over_seeds(results, [], 'y')[()])


def test_curves_have_a_panel_for_each_combination(tmp_path, monkeypatch):
  axes = [_STEPS, _GAMMA, _ALGORITHMS]

  def accuracy(labels, seed):
    return 0.25 + 0.5 * seed * (labels['algorithm'] == 'fbn')

  drawings = _drawings(axes, _runs(axes, accuracy), tmp_path, monkeypatch)
  drawing = drawings['test_accuracy']
  assert [panel.get_title() for panel in drawing.axes] == [
      f'local_steps={steps}, gamma={gamma}'
      for steps, gamma in itertools.product(('1', '5'), ('0', '0.5', '1'))
  ]
  colors = set()
  for panel in drawing.axes:
    fedavg, fbn = panel.get_lines()
    assert (fedavg.get_label(), fbn.get_label()) == ('fedavg', 'fbn')
    np.testing.assert_allclose(fedavg.get_xydata(), [[0, 0], [4, 0.25]])
    np.testing.assert_allclose(fbn.get_xydata(), [[0, 0], [4, 0.5]])
    colors.add((fedavg.get_color(), fbn.get_color()))
  assert len(colors) == 1 and len(set(*colors)) == 2
  (legend,) = drawing.legends
  assert [t.get_text() for t in legend.get_texts()] == ['fedavg', 'fbn']
  title, measured, note = drawing.get_suptitle().splitlines()
  assert title == 'digits'
  assert measured == (
      "Global model, or clients' own models (mean), on the whole test set"
  )
  assert note.endswith('band: ± one standard deviation')
  assert drawing.axes[0].get_ylim() == (0, 1.02)
  assert drawings['test_loss'].axes[0].get_yscale() == 'log'
  # Side by side: the values of the last swept flag.
  grid = drawing.axes[0].get_gridspec()
  assert (grid.nrows, grid.ncols) == (2, 3)


def test_too_many_curves_are_left_out(tmp_path, monkeypatch):
  axes = [_axis('rounds', *map(str, range(1, 102))), _ALGORITHMS]
  runs = _runs(axes, lambda labels, seed: 0.5, seeds=(0,))
  drawings = _drawings(axes, runs, tmp_path, monkeypatch)
  assert list(drawings) == ['heat_map_algorithm_rounds']


def test_too_many_heat_maps_are_left_out(tmp_path, monkeypatch):
  axes = [_axis('rounds', *map(str, range(1, 102))), _GAMMA, _STEPS]
  runs = _runs(axes, lambda labels, seed: 0.5, seeds=(0,))
  drawings = _drawings(axes, runs, tmp_path, monkeypatch)
  assert list(drawings) == [
      'heat_map_rounds_gamma',
      'heat_map_rounds_local_steps',
  ]


@pytest.mark.parametrize(
    ('labels', 'shown'),
    [
        (
            ['npz:/home/ann/rgb.npz', 'folder:/data/paris', 'digits'],
            ['rgb', 'paris', 'digits'],
        ),
        # The short names would be equal.
        (
            ['folder:/data/paris', 'folder:/old/paris'],
            ['folder:/data/paris', 'folder:/old/paris'],
        ),
    ],
)
def test_datasets_have_short_names(tmp_path, monkeypatch, labels, shown):
  axes = [_axis('dataset', *labels), _STEPS, _ALGORITHMS]
  runs = _runs(axes, lambda labels, seed: 0.5, seeds=(0,))
  drawings = _drawings(axes, runs, tmp_path, monkeypatch)
  heat_map = drawings['heat_map_dataset_local_steps'].axes[0]
  assert [t.get_text() for t in heat_map.get_yticklabels()] == shown
  titles = [
      panel.get_title().replace('\n', ' ')
      for panel in drawings['test_accuracy'].axes
  ]
  assert [title.split(',')[0] for title in titles[:: len(_STEPS.points)]] == [
      f'dataset={name}' for name in shown
  ]
