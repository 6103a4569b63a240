"""Tests of the pictures and tables of docs/algorithms/."""

from xml.etree import ElementTree

import algorithm_pages
import algorithm_pictures
import digits_tables
import pytest

_PAGES = sorted(algorithm_pages.PAGES.glob('*.md'))
# The comparison varies neither the momentum, which decides DSGD's results, nor
# the similarity of the clients' labels, which decides the other results.
_NOT_COMPARED = ('dsgd', 'ditto', 'fedbabu', 'fedper', 'fedrep', 'lg_fedavg')


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
  assert rows[-1] == '| New |' + ' 80.0 / 81.0 |' * 6
  assert 'old' not in text and text.endswith('<!-- end -->\nb\n')


@pytest.mark.slow
@pytest.mark.parametrize('path', _PAGES, ids=lambda path: path.stem)
def test_traffic_is_up_to_date(path):
  text = path.read_text(encoding='utf-8')
  # After a change, run scripts/algorithm_pages.py.
  assert algorithm_pages.with_traffic(text) == text
  assert ('<!-- traffic' in text) == (path.stem != 'centralized')
