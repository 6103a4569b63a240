"""Tests of the pictures and tables of docs/algorithms/."""

from xml.etree import ElementTree

import algorithm_pages
import algorithm_pictures
import pytest

_PAGES = sorted(algorithm_pages.PAGES.glob('*.md'))


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


@pytest.mark.slow
@pytest.mark.parametrize('path', _PAGES, ids=lambda path: path.stem)
def test_traffic_is_up_to_date(path):
  text = path.read_text(encoding='utf-8')
  # After a change, run scripts/algorithm_pages.py.
  assert algorithm_pages.with_traffic(text) == text
  assert ('<!-- traffic' in text) == (path.stem != 'centralized')
