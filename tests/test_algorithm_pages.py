"""Tests of docs/algorithms/: pictures and tables; and of segmentation.md."""

from xml.etree import ElementTree

import algorithm_pages
import algorithm_pictures
import digits_tables
import pytest
import segmentation_tables

_PAGES = sorted(algorithm_pages.PAGES.glob('*.md'))
# The comparison does not vary the momentum, which decides DSGD's results.
_NOT_COMPARED = ('dsgd',)


@pytest.mark.parametrize('name', algorithm_pictures.PICTURES)
def test_picture_is_up_to_date(name: str):
  text = algorithm_pages.picture_path(name).read_text(encoding='utf-8')
  # After a change, run scripts/algorithm_pages.py.
  assert text == algorithm_pictures.draw(algorithm_pictures.PICTURES[name])
  ElementTree.fromstring(text)


def test_every_picture_is_shown():
  text = ''.join(path.read_text(encoding='utf-8') for path in _PAGES)
  for name in algorithm_pictures.PICTURES:
    assert f'(images/{name}.svg)' in text


def test_messages_point_from_the_sender_to_the_receiver():
  picture = algorithm_pictures.draw(
      [algorithm_pictures.Down('model'), algorithm_pictures.Up('update')]
  )
  root = ElementTree.fromstring(picture)
  down, up = (
      element
      for element in root.iter('{http://www.w3.org/2000/svg}line')
      if element.get('class') == 'message'
  )
  assert int(down.get('x1')) < int(down.get('x2'))
  assert int(up.get('x1')) > int(up.get('x2'))
  assert int(down.get('y1')) < int(up.get('y1'))


@pytest.mark.parametrize('path', _PAGES, ids=lambda path: path.stem)
def test_results_are_up_to_date(path):
  text = path.read_text(encoding='utf-8')
  # After a change, run scripts/algorithm_pages.py.
  assert digits_tables.with_tables(text) == text
  assert ('<!-- digits' in text) == (path.stem not in _NOT_COMPARED)


def test_row_of_a_table(tmp_path, monkeypatch):
  results = tmp_path / 'digits.csv'
  lines = ['scheme,data,steps,column,mean']
  for scheme, mean in (('Centralized', 90), ('FedAvg', 70), ('New', 80.04)):
    for data, column in digits_tables.COLUMNS.values():
      lines.append(f'{scheme},{data},1 step,{column},{mean}')
      lines.append(f'{scheme},{data},5 steps,{column},{mean + 1}')
  results.write_text('\n'.join(lines))
  monkeypatch.setattr(digits_tables, 'RESULTS', results)

  text = digits_tables.with_tables(
      'a\n<!-- digits:\nNew\n-->\nold\n<!-- end -->\nb\n'
  )

  rows = [line for line in text.splitlines() if line.startswith('| ')][1:]
  assert [row.split(' | ')[0] for row in rows[1:]] == [
      '| Centralized',
      '| FedAvg',
      '| New',
  ]
  assert rows[-1] == '| New |' + ' 80.0 / 81.0 |' * 7
  assert 'old' not in text and text.endswith('<!-- end -->\nb\n')


def test_segmentation_is_up_to_date():
  text = segmentation_tables.PAGE.read_text(encoding='utf-8')
  # After a change, run scripts/algorithm_pages.py.
  assert segmentation_tables.with_table(text) == text
  assert '<!-- segmentation -->\n| scheme | bright |' in text


def test_table_of_segmentation(tmp_path, monkeypatch):
  results = tmp_path / 'segmentation.csv'
  results.write_text(
      'scheme,client,mean,deviation\n'
      'A,bright,80.04,1.06\nA,mean,70,2\nB,bright,7,0\nB,mean,60,0.5\n'
  )
  monkeypatch.setattr(segmentation_tables, 'RESULTS', results)

  text = segmentation_tables.with_table(
      'a\n<!-- segmentation -->\nold\n<!-- end -->\nb\n'
  )

  assert text == (
      'a\n<!-- segmentation -->\n| scheme | bright | mean |\n'
      '| --- | ---: | ---: |\n| A | 80.0 ± 1.1 | 70.0 ± 2.0 |\n'
      '| B | 7.0 ± 0.0 | 60.0 ± 0.5 |\n<!-- end -->\nb\n'
  )


@pytest.mark.slow
@pytest.mark.parametrize(
    'path', [*_PAGES, segmentation_tables.PAGE], ids=lambda path: path.stem
)
def test_traffic_is_up_to_date(path):
  text = path.read_text(encoding='utf-8')
  # After a change, run scripts/algorithm_pages.py.
  assert algorithm_pages.with_traffic(text) == text
  assert ('<!-- traffic' in text) == (path.stem != 'centralized')
