"""Tests for the charts that become PNG files, read from their SVG."""

import dataclasses
import itertools
import math
import re
import types

import drawn
import example_runs
import matplotlib.image
import numpy as np
import pytest
import vl_convert

from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.results import charts
from tff_bn.programs.results import plots
from tff_bn.programs.results import report


def test_accuracy_of_algorithms():
  chart = plots.of_algorithms(example_runs.RUNS, 'my title')['accuracy']
  assert drawn.title(chart) == (
      'my title line: mean over 2 seeds, band: ± one standard deviation'
  )
  assert drawn.lines(chart) == {
      'fedavg': [(1, 0.2), (2, 0.6), (3, 0.8)],
      'fedbn': [(1, 0.25), (3, 0.75)],
  }
  texts = drawn.texts(chart)
  # It is not known which of the runs have own models.
  for text in (
      "Accuracy: global model, or clients' own models (mean), on the whole test"
      ' set',
      "Accuracy: each client's model on its own test data (mean)",
      *('Round', 'Accuracy', '60%'),
  ):
    assert text in texts
  # The legend has each line once.
  assert [text for text in texts if text.startswith('fed')] == [
      'fedavg',
      'fedbn',
  ]
  first, *_ = drawn.marks(chart, 'high')
  assert float(first['high']) == pytest.approx(0.2 + 0.02**0.5, rel=1e-5)
  assert float(first['Accuracy'].rstrip('%')) == pytest.approx(5.8579)


def test_bands_of_accuracies_end_at_0_and_at_100_percent():
  runs = [
      report.Run({'algorithm': 'a'}, seed, [dict(round=1, test_accuracy=value)])
      for seed, value in enumerate((0.0, 1.0))
  ]
  chart = plots.of_algorithms(runs, '')['accuracy']
  band, *_ = drawn.marks(chart, 'high')
  assert (band['Accuracy'], float(band['high'])) == ('0%', 1)


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
      _run_with_costs('single', 0, 0.0),
      _run_with_costs('fedavg', 0, 0.5),
      _run_with_costs('fedavg', 1, 0.5, (0.25, 0.25, 0.25)),
      _run_with_costs('fedtan', 0, 2.0),
      # Of a process whose costs are unknown.
      report.Run(
          {'algorithm': 'other'}, 0, [dict(round=20, test_accuracy=0.9)]
      ),
  ]
  found = plots.of_algorithms(runs, '')
  assert drawn.lines(found['accuracy_by_megabytes'], 'MB sent') == {
      'single': [(0, 0.75), (40, 0.75)],
      'fedavg': [(0, 0.25), (5, 0.375), (10, 0.5)],
      'fedtan': [(0, 0.25), (20, 0.5), (40, 0.75)],
  }
  assert 'sends nothing' in drawn.title(found['accuracy_by_megabytes'])
  assert 'sends nothing' not in drawn.title(found['accuracy'])
  lines = drawn.lines(
      found['accuracy_by_exchanges'], 'Exchanges between server and clients'
  )
  assert [x for x, _ in lines['fedtan']] == [0, 20, 40]


@pytest.mark.parametrize('ratio', [4.8, 5.2, 1 / 5.2])
def test_costs_of_different_size_have_a_logarithmic_axis(ratio):
  runs = [
      _run_with_costs('single', 0, 0.0),
      _run_with_costs('fedavg', 0, 1.0),
      _run_with_costs('fedtan', 0, ratio),
  ]
  found = plots.of_algorithms(runs, '')
  lines = drawn.lines(found['accuracy_by_megabytes'], 'MB sent')
  # Where nothing has been sent is nowhere on a logarithmic axis.
  start = 0 if ratio == 4.8 else 10
  assert [x for x, _ in lines['fedavg']] == [*range(start, 30, 10)]
  assert lines['single'][0][0] == pytest.approx(
      min(start, ratio * start), rel=1e-5
  )
  scale = found['accuracy_by_megabytes']['hconcat'][0]['encoding']['x']['scale']
  assert (scale.get('type') == 'log') == (ratio != 4.8)


def test_an_algorithm_has_the_same_color_everywhere():
  runs = [_run_with_costs(name, 0, 1.0) for name in ('fedbn', 'fbn', 'fedavg')]

  def colors(shown):
    found = plots.of_algorithms(shown, '')
    return [
        {mark['Line']: mark['color'] for mark in drawn.marks(chart, 'Mean')}
        for chart in found.values()
    ]

  first, *others = colors(runs)
  assert len(set(first.values())) == 3
  assert all(other == first for other in others)
  assert colors(runs[1:])[0].items() <= first.items()
  assert colors(runs[::-1])[0] == first


def test_lines_with_the_same_color_have_other_dashes():
  labels = [dict(algorithm=a, gamma=g) for a in ('fbn', 'fedbn') for g in '01']
  runs = [report.Run(named, 0, []) for named in labels]
  styles = charts.styles({run.name: [run] for run in runs})
  assert len({style['color'] for style in styles.values()}) == 2
  assert len({str(style) for style in styles.values()}) == 4
  styles = charts.styles({run.name: [run] for run in runs[:2]})
  assert len({style['color'] for style in styles.values()}) == 2


@pytest.mark.parametrize(('num_rounds', 'opacity'), [(1, 1), (30, 0)])
def test_a_single_point_is_visible(num_rounds, opacity):
  rows = [dict(round=r, test_accuracy=0.5) for r in range(num_rounds)]
  run = report.Run({'algorithm': 'a'}, 0, rows)
  chart = plots.of_algorithms([run], 'my title')['accuracy']
  assert drawn.title(chart) == 'my title'
  *_, circles = chart['hconcat'][0]['layer']
  assert circles['mark']['opacity'] == opacity


def test_losses_have_a_logarithmic_axis():
  rows = [
      dict(round=1, test_loss=4.0, train_loss=0.0),
      dict(round=2, test_loss=0.5),
  ]
  runs = [
      report.Run({'algorithm': 'a'}, seed, rows[: 2 - seed]) for seed in (0, 1)
  ]
  chart = plots.of_algorithms(runs, '')['loss']
  assert drawn.lines(chart)['a'] == [(1, 4.0), (2, 0.5)]
  runs[1] = report.Run({'algorithm': 'a'}, 1, [dict(round=1, test_loss=0.1)])
  chart = plots.of_algorithms(runs, '')['loss']
  # The band ends at half of the smallest mean.
  band, *_ = drawn.marks(chart, 'high')
  assert float(band['Loss']) == 0.25
  assert '0.5' in drawn.texts(chart)


def test_negative_losses_are_visible():
  rows = [dict(round=1, test_loss=-0.2), dict(round=2, test_loss=0.3)]
  run = report.Run({'algorithm': 'a'}, 0, rows)
  chart = plots.of_algorithms([run], '')['loss']
  # d3 writes another minus sign.
  points = drawn.marks(chart, 'Mean')
  assert [mark['Mean'].replace('\u2212', '-') for mark in points] == [
      '-0.2',
      '0.3',
  ]


def test_axes_say_if_lower_is_better():
  rows = [dict(round=1, test_mae=0.2, test_r2=0.3, test_loss=0.1)]
  run = report.Run({'algorithm': 'a'}, 0, rows)
  charts = plots.of_algorithms([run], '')
  assert 'MAE (lower is better)' in drawn.texts(charts['mae'])
  assert 'R²' in drawn.texts(charts['r2'])


def _data(counts, client_ids, class_names=(), task='classification'):
  return types.SimpleNamespace(
      label_distribution=lambda: np.array(counts),
      client_ids=client_ids,
      class_names=class_names,
      task=task,
  )


def _labels(*data):
  return plots.label_distribution(_data(*data), 'labels')['label_distribution']


def test_label_distribution():
  chart = _labels([[7, 0, 2], [0, 5, 0]], ['ann', 'bob'])
  assert drawn.marks(chart, 'Class', 'Examples')[2] == {
      'Class': '2',
      'Client': 'ann',
      'Examples': '2',
  }
  # There is no number where there are no examples.
  assert [text for text in drawn.texts(chart) if text] == [
      *('7', '2', '5', '0', '7', 'Examples', 'labels'),
      *('0', '1', '2', 'Class', 'ann', 'bob', 'Client'),
  ]
  # 2 is in a light cell.
  assert drawn.white_texts(chart) == ['7', '5']


def test_label_distribution_of_a_segmentation_counts_pixels():
  texts = drawn.texts(_labels([[9, 3]], ['ann'], (), 'segmentation'))
  assert {'Pixels', 'Class'} < set(texts)
  assert 'Examples' not in texts


def test_label_distribution_names_the_classes():
  names = ['cat', '$dog$', 'a name that is much longer than others']
  texts = drawn.texts(_labels(np.eye(3, dtype=int), 'abc', names))
  assert {'cat', '$dog$'} < set(texts)
  assert any(re.fullmatch('a name that is.*…', text) for text in texts)


def test_label_distribution_of_many_clients_is_not_cluttered():
  names = [f'writer {i}' for i in range(500)]
  chart = _labels(np.ones((500, 62), int), names)
  assert 'the first 200 of 500 clients' in drawn.title(chart)
  (cells,) = chart['layer']  # There are no numbers in them.
  # No examples is the lightest color, whatever the smallest number is.
  assert cells['encoding']['color']['scale'] == {'domainMin': 0}
  assert len(drawn.texts(chart)) < 130


@pytest.mark.parametrize(
    ('runs', 'by_costs'),
    [
        (example_runs.RUNS, ['exchanges']),
        (
            [_run_with_costs('fedavg', 0, 1.0), _run_with_costs('a', 0, 2.0)],
            ['exchanges', 'megabytes'],
        ),
        ([_run_with_costs('fedavg', seed, 1.0) for seed in (0, 1)], []),
        ([_run_with_costs(name, 0, 0.0) for name in 'ab'], []),
    ],
    ids=['some columns', 'a comparison', 'one algorithm', 'nothing sent'],
)
def test_costs_are_for_comparisons(runs, by_costs):
  assert set(plots.of_algorithms(runs, '')) == {
      *('accuracy', 'loss'),
      *(f'accuracy_by_{name}' for name in by_costs),
  }


def test_save(tmp_path, monkeypatch):
  folder = tmp_path / 'plots'
  found = plots.of_algorithms(example_runs.RUNS, 'title')
  for _ in range(2):  # The second time overwrites the files.
    charts.save(folder, found)
  assert {path.stem for path in folder.iterdir()} == set(found)
  for path in folder.iterdir():
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 250
    assert pixels[..., :3].std() > 0.01  # Something is drawn.
    np.testing.assert_array_equal(pixels[0, 0], 1.0)  # On white.
  before = (folder / 'loss.png').read_bytes()
  monkeypatch.setattr(vl_convert, 'vegalite_to_png', lambda *_, **__: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    charts.save(folder, found)
  assert (folder / 'loss.png').read_bytes() == before


def test_lines_are_broken_between_words():
  text = 'a-long-word and/a/path_of_many_characters b'
  assert charts.wrapped(text, 12).splitlines() == [
      'a-long-word',
      'and/a/path_of_many_characters',
      'b',
  ]


def _axis(name, *labels):
  return axes_lib.Axis(
      name, tuple(axes_lib.Point(label, {name: label}) for label in labels)
  )


_ALGORITHMS = _axis('algorithm', 'fedavg', 'fbn')
_GAMMA = _axis('gamma', '0', '0.5', '1')
_STEPS = _axis('local_steps', '1', '5')
_ATTACKS = _axis('attack', 'sf', 'alie')


def _sweep(axes, accuracy, seeds=(0, 1), title='digits'):
  """Draws runs with two rounds; `accuracy` gets the labels and the seed."""
  runs = [
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
  results = report.results(runs, 1)
  return plots.of_sweep(runs, results, 3, axes, title)


def _panels(chart):
  """Returns the rows of numbers of the panels of a heat map by their titles."""
  found = {}
  for value in chart['data']['values']:
    rows = found.setdefault(value['panel'], {})
    number = value['value'] and round(value['value'], 1)
    rows.setdefault(value['row'], []).append(number)
  return {title: list(rows.values()) for title, rows in found.items()}


def test_heat_map_of_two_swept_flags():
  def accuracy(labels, seed):
    return (
        0.1 * float(labels['gamma'])
        + 0.01 * int(labels['local_steps'])
        + 0.5 * (labels['algorithm'] == 'fbn')
        + 0.002 * seed
    )

  found = _sweep([_GAMMA, _STEPS, _ALGORITHMS], accuracy)
  assert set(found) == {
      'heat_map_gamma_local_steps',
      'test_accuracy',
      'test_loss',
  }
  chart = found['heat_map_gamma_local_steps']
  # The mean of the seeds adds 0.1 %.
  assert _panels(chart) == {
      'fedavg': [[1.1, 5.1], [6.1, 10.1], [11.1, 15.1]],
      'fbn': [[51.1, 55.1], [56.1, 60.1], [61.1, 65.1]],
  }
  texts = drawn.texts(chart)
  assert drawn.white_texts(chart) == texts[10:16]  # The lower half is dark.
  rows = ['0', '0.5', '1', 'gamma']
  assert texts[:10] == [*rows, *2 * ['1', '5', 'local_steps']]
  assert texts[10:17] == ['1.1', '5.1', '6.1', '10.1', '11.1', '15.1', 'fedavg']
  assert texts[-1] == (
      "Accuracy in %, global model, or clients' own models (mean), on the whole"
      ' test set: mean over the last 3 evaluated rounds, mean over 2 seeds'
      ' digits'
  )


def test_worst_case_over_attacks():
  """The mean over the seeds is taken first, as in ByzFL."""

  def accuracy(labels, seed):
    # Means: 0.5 with sf, 0.4 with alie; the smallest of all is with sf.
    values = {
        ('sf', 0): 0.1,
        ('sf', 1): 0.9,
        ('alie', 0): 0.4,
        ('alie', 1): 0.4,
    }
    return values[labels['attack'], seed] + 0.05 * (labels['gamma'] == '1')

  found = _sweep([_ATTACKS, _GAMMA, _STEPS, _ALGORITHMS], accuracy)
  (name,) = (name for name in found if name.startswith('heat'))
  assert name == 'heat_map_gamma_local_steps'
  numbers = [[40.0] * 2, [40.0] * 2, [45.0] * 2]
  assert _panels(found[name]) == {'fedavg': numbers, 'fbn': numbers}
  assert 'the worst case over attack=sf,alie' in drawn.title(found[name])


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
        # Too many curves, or heat maps, are left out.
        (
            [_axis('rounds', *map(str, range(101))), _GAMMA, _STEPS],
            ['rounds_gamma', 'rounds_local_steps'],
        ),
    ],
)
def test_pairs(axes, names):
  found = _sweep(axes, lambda labels, seed: 0.5, seeds=(0,), title='')
  assert [
      name.removeprefix('heat_map_') for name in found if 'heat' in name
  ] == names
  num_cells = math.prod(len(a.points) for a in axes if a != _ALGORITHMS)
  assert ('test_loss' in found) == (num_cells <= 100)


def test_worst_case_of_the_algorithms_and_each_attack():
  found = _sweep(
      [_ATTACKS, _STEPS, _ALGORITHMS],
      lambda labels, seed: 0.2 if labels['attack'] == 'alie' else 0.7,
      seeds=(0,),
  )
  worst = found['heat_map_algorithm_local_steps']
  assert _panels(worst) == {'': [[20.0] * 2] * 2}
  assert 'one seed' in drawn.title(worst)
  each = found['heat_map_attack_local_steps']
  numbers = [[70.0] * 2, [20.0] * 2]
  assert _panels(each) == {'fedavg': numbers, 'fbn': numbers}
  assert 'worst' not in drawn.title(each)


def test_a_panel_for_each_value_of_further_flags():
  rounds = _axis('rounds', '4', '5', '6')
  found = _sweep(
      [_STEPS, rounds, _GAMMA, _ALGORITHMS],
      lambda labels, seed: int(labels['rounds']) / 10,
      seeds=(0,),
  )
  chart = found['heat_map_local_steps_gamma']
  assert _panels(chart) == {
      f'{algorithm}, rounds={number}': [[10.0 * number] * 3] * 2
      for number in (4, 5, 6)
      for algorithm in ('fedavg', 'fbn')
  }
  # Side by side: the algorithms.
  assert chart['columns'] == 2


def test_missing_values():
  missing = {'gamma': '0', 'local_steps': '5'}
  found = _sweep(
      [_GAMMA, _STEPS],
      lambda labels, seed: math.nan if labels == missing else 0.0,
  )
  chart = found['heat_map_gamma_local_steps']
  assert _panels(chart)[''][0] == [0.0, None]
  texts = drawn.texts(chart)
  assert (texts.count('–'), texts.count('0.0')) == (1, 5)


def test_means_that_are_not_finite_are_the_worst():
  def accuracy(labels, seed):
    diverges = labels == {'attack': 'sf', 'gamma': '0', 'local_steps': '5'}
    return math.nan if diverges and seed else 0.5

  found = _sweep([_ATTACKS, _GAMMA, _STEPS], accuracy)
  panels = _panels(found['heat_map_gamma_local_steps'])
  assert panels[''] == [[50.0, None], [50.0] * 2, [50.0] * 2]


def test_curves_have_a_panel_for_each_combination():
  found = _sweep(
      [_STEPS, _GAMMA, _ALGORITHMS],
      lambda labels, seed: 0.25 + 0.5 * seed * (labels['algorithm'] == 'fbn'),
  )
  chart = found['test_accuracy']
  assert drawn.lines(chart) == {
      'fedavg': 6 * [(0, 0), (4, 0.25)],
      'fbn': 6 * [(0, 0), (4, 0.5)],
  }
  texts = drawn.texts(chart)
  assert [text for text in texts if 'local_steps' in text] == [
      f'local_steps={steps}, gamma={gamma}'
      for steps, gamma in itertools.product(('1', '5'), ('0', '0.5', '1'))
  ]
  assert [text for text in texts if text in ('fedavg', 'fbn')] == [
      'fedavg',
      'fbn',
  ]
  assert drawn.title(chart) == (
      "digits Accuracy: global model, or clients' own models (mean), on the"
      ' whole test set line: mean over 2 seeds, band: ± one standard deviation'
  )
  # Side by side: the values of the last swept flag.
  assert chart['columns'] == 3


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
def test_datasets_have_short_names(labels, shown):
  axes = [_axis('dataset', *labels), _STEPS, _ALGORITHMS]
  found = _sweep(axes, lambda labels, seed: 0.5, seeds=(0,))
  assert drawn.texts(found['heat_map_dataset_local_steps'])[0] == shown[0]
  panels = found['test_accuracy']['facet']['sort']
  assert [title.split(',')[0] for title in panels[::2]] == [
      f'dataset={name}' for name in shown
  ]


def _regression_runs(axes, mae):
  return [
      report.Run(
          cell.labels,
          0,
          [
              dict(
                  round=1,
                  test_loss=1.0,
                  test_mae=mae(cell.labels),
                  test_r2=0.5,
                  exchanges=2,
              )
          ],
          loss='mean squared error',
      )
      for cell in axes_lib.product(axes)
  ]


def test_heat_maps_of_errors():
  """The worst case is the largest error, and small ones are light."""
  axes = [_ATTACKS, _GAMMA, _STEPS]
  runs = _regression_runs(
      axes, lambda labels: 1.5 if labels['attack'] == 'alie' else 1.25
  )
  results = report.results(runs, 1)
  found = plots.of_sweep(runs, results, 1, axes, '')
  maps = {name for name in found if name.startswith('heat_map')}
  assert maps == {'heat_map_gamma_local_steps'}
  chart = found['heat_map_gamma_local_steps']
  assert {cell['value'] for cell in chart['data']['values']} == {1.5}
  assert chart['title']['text'][0].startswith('MAE, global model')
  rectangles, numbers = chart['spec']['layer']
  assert rectangles['encoding']['color']['scale']['reverse']
  assert "'.3f'" in str(numbers)


def test_curves_of_several_metrics():
  runs = _regression_runs([_ALGORITHMS], lambda labels: 1.0)
  found = plots.of_algorithms(runs, '')
  assert list(found) == ['mae', 'mae_by_exchanges', 'r2', 'loss']
  assert 'Loss (mean squared error)' in drawn.texts(found['loss'])
  assert 'R²' in drawn.texts(found['r2'])  # It has no smallest value.


def test_runs_with_several_losses_have_no_common_name():
  runs = _regression_runs([_ALGORITHMS], lambda labels: 1.0)
  runs[0] = dataclasses.replace(runs[0], loss='Huber')
  assert 'Loss' in drawn.texts(plots.of_algorithms(runs, '')['loss'])
