"""Tests for `tff_bn.programs.results.figures`."""

import itertools

from matplotlib import colors
import matplotlib.image
import numpy as np
import pytest

from tff_bn.catalog import algorithms
from tff_bn.programs.results import figures


def _drawing(width=4.0):
  drawing = figures.new_figure(width=width, height=2.0)
  axes = drawing.subplots()
  axes.plot([0, 1], [1, 0], label='line')
  return drawing, axes


def test_saves_all_figures(tmp_path):
  folder = tmp_path / 'plots'
  figures.save(folder, dict(a=_drawing()[0], b=_drawing(6.0)[0]))
  assert sorted(path.name for path in folder.iterdir()) == ['a.png', 'b.png']
  for name, width in (('a', 4), ('b', 6)):
    pixels = matplotlib.image.imread(folder / f'{name}.png')
    assert pixels.shape[0] * width == pixels.shape[1] * 2
    assert pixels[..., :3].std() > 0.01
  # The folder may hold others.
  figures.save(folder, dict(c=_drawing()[0]))
  assert len(list(folder.iterdir())) == 3


def test_a_figure_is_never_there_in_part(tmp_path, monkeypatch):
  drawing, _ = _drawing()
  figures.save(tmp_path, dict(a=drawing))
  before = (tmp_path / 'a.png').read_bytes()

  def savefig(path, **_):
    path.write_bytes(b'half')
    raise OSError('disk full')

  monkeypatch.setattr(drawing, 'savefig', savefig)
  with pytest.raises(OSError, match='disk full'):
    figures.save(tmp_path, dict(a=drawing))
  assert (tmp_path / 'a.png').read_bytes() == before


def test_one_legend_for_all_axes():
  drawing = figures.new_figure(width=4.0, height=2.0)
  for axes, labels in zip(drawing.subplots(1, 2), (('b', 'a'), ('a', 'c'))):
    for label in labels:
      axes.plot([0], [0], label=label)
  figures.add_legend(drawing)
  (legend,) = drawing.legends
  assert [text.get_text() for text in legend.get_texts()] == ['b', 'a', 'c']


def test_tidy_axes():
  _, axes = _drawing()
  figures.tidy(axes)
  shown = {k for k, spine in axes.spines.items() if spine.get_visible()}
  assert shown == {'left', 'bottom'}
  assert axes.xaxis.get_gridlines()[0].get_visible()


def test_algorithms_have_different_colors():
  names = [*algorithms.ALGORITHMS, *algorithms.CORRECTIONS]
  styles = figures.line_styles(names)
  assert [styles[name] for name in names] == [
      figures.algorithm_style(name) for name in names
  ]
  rgb = [colors.to_rgb(styles[name]['color']) for name in names]
  for first, second in itertools.combinations(rgb, 2):
    assert np.linalg.norm(np.subtract(first, second)) > 0.2


def test_combinations_have_the_algorithms_color_and_other_dashes():
  style = figures.algorithm_style
  assert style('fedavg+moon') == style('moon')
  assert style('fedbn+fedprox')['color'] == style('fedbn')['color']
  assert style('fedbn+fedprox')['linestyle'] != style('fedbn')['linestyle']
  assert style('other') is None


def test_lines_without_an_algorithm_of_their_own_differ():
  styles = figures.line_styles(
      ['pan off', 'pan on', 'fbn', 'other'],
      {'pan off': 'fedavg', 'pan on': 'fedavg'},
  )
  assert len({style['color'] for style in styles.values()}) == 4
  assert styles['fbn'] == figures.algorithm_style('fbn')


def test_other_lines_have_no_color_of_an_algorithm():
  algorithms = ['fedbn', 'fedavg', 'fedtan']
  styles = figures.line_styles(['other', 'another', *algorithms])
  assert len({style['color'] for style in styles.values()}) == 5


def test_title_is_not_broken_within_words():
  drawing, _ = _drawing(3.1)  # 31 characters wide.
  figures.add_title(drawing, ' '.join(['a-long-word'] * 9))
  assert drawing.get_suptitle().split() == ['a-long-word'] * 9


@pytest.mark.parametrize('width', [3.1, 9.0])
def test_title_fits_into_the_figure(width):
  drawing, _ = _drawing(width)
  figures.add_title(drawing, 'Matched units before and after training', '', 'b')
  drawing.canvas.draw()
  box = drawing._suptitle.get_window_extent()
  assert 0 < box.x0 < box.x1 < drawing.bbox.width
  assert drawing.get_suptitle().splitlines()[-1] == 'b'


@pytest.mark.parametrize('width', [3.1, 9.0])
@pytest.mark.parametrize('length', [45, 150])
def test_long_words_are_smaller(width, length):
  word = 'x' * length
  drawing, _ = _drawing(width)
  figures.add_title(drawing, f'a {word} b')
  assert word in drawing.get_suptitle().split()
  drawing.canvas.draw()
  box = drawing._suptitle.get_window_extent()
  assert 0 < box.x0 < box.x1 < drawing.bbox.width


def test_titles_are_no_formulas():
  drawing, _ = _drawing(9.0)
  figures.add_title(drawing, 'from $5_ to $6_')
  drawing.canvas.draw()
  assert drawing.get_suptitle() == 'from $5_ to $6_'


def test_lines_are_broken_between_words():
  text = 'a-long-word and/a/path_of_many_characters b'
  assert figures.wrapped(text, 12).splitlines() == [
      'a-long-word',
      'and/a/path_of_many_characters',
      'b',
  ]


def test_colors_and_dashes_differ():
  assert len(set(figures.COLORS)) == len(figures.COLORS) == 7
  assert len(set(figures.DASHES)) == len(figures.DASHES) == 4
