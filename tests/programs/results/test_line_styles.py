"""Tests for `tff_bn.programs.results.line_styles`."""

import itertools

from matplotlib import colors
import numpy as np

from tff_bn.catalog import algorithms as catalog
from tff_bn.programs.results import line_styles


def test_algorithms_have_different_colors():
  names = [*catalog.ALGORITHMS, *catalog.CORRECTIONS]
  styles = line_styles.choose(names)
  assert [styles[name] for name in names] == [
      line_styles.of_algorithm(name) for name in names
  ]
  rgb = [colors.to_rgb(styles[name]['color']) for name in names]
  for first, second in itertools.combinations(rgb, 2):
    assert np.linalg.norm(np.subtract(first, second)) > 0.2


def test_combinations_have_the_algorithms_color_and_other_dashes():
  style = line_styles.of_algorithm
  assert style('fedavg+moon') == style('moon')
  assert style('fedbn+fedprox')['color'] == style('fedbn')['color']
  assert style('fedbn+fedprox')['linestyle'] != style('fedbn')['linestyle']
  assert style('other') is None
  assert style('fedbn+Mine') is None


def test_lines_without_an_algorithm_of_their_own_differ():
  styles = line_styles.choose(
      ['pan off', 'pan on', 'fbn', 'other'],
      {'pan off': 'fedavg', 'pan on': 'fedavg'},
  )
  assert len({style['color'] for style in styles.values()}) == 4
  assert styles['fbn'] == line_styles.of_algorithm('fbn')


def test_other_lines_have_no_color_of_an_algorithm():
  algorithms = ['fedbn', 'fedavg', 'fedtan']
  styles = line_styles.choose(['other', 'another', *algorithms])
  assert len({style['color'] for style in styles.values()}) == 5


def test_many_lines_of_repeated_algorithms_differ():
  algorithms = ['centralized', 'fedavg', 'fedbn', 'silobn', 'single']
  twice = {f'{name} {i}': name for name in ('fedtan', 'fbn') for i in (1, 2)}
  styles = line_styles.choose([*algorithms, *twice], twice)
  assert len({style['color'] for style in styles.values()}) == 9


def test_colors_and_dashes_differ():
  assert len(set(line_styles.COLORS)) == len(line_styles.COLORS) == 7
  assert len(set(line_styles.DASHES)) == len(line_styles.DASHES) == 4
