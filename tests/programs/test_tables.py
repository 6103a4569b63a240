"""Tests for `tff_bn.programs.tables`."""

import csv
import io

from tff_bn.programs import tables


def test_csv():
  text = tables.csv_text(
      ['a', 'b', 'c'],
      [[1.23456789012, 2, 'x,y'], [1e-10 / 3, '', 'say "z"'], [0.1, None, 'µ']],
  )
  assert text == (
      'a,b,c\n1.2345679,2,"x,y"\n3.3333333e-11,,"say ""z"""\n0.1,,µ\n'
  )
  rows = list(csv.DictReader(io.StringIO(text)))
  assert rows[0] == dict(a='1.2345679', b='2', c='x,y')
  assert rows[1]['c'] == 'say "z"'
  assert tables.csv_text(['a'], []) == 'a\n'


def test_markdown():
  cells = [['x', 'long title'], ['abcdef', '1.5'], ['y', '22']]
  assert tables.markdown(cells, ['First.', 'Second.']) == (
      '| x      | long title |\n'
      '| ------ | ---------: |\n'
      '| abcdef |        1.5 |\n'
      '| y      |         22 |\n'
      '\n'
      '- First.\n'
      '- Second.\n'
  )


def test_narrow_columns_and_no_notes():
  assert tables.markdown([['a', 'b'], ['c', '±']]) == (
      '| a   |   b |\n| --- | --: |\n| c   |   ± |'
  )
