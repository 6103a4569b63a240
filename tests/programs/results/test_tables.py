"""Tests for `tff_bn.programs.results.tables`."""

from tff_bn.programs.results import tables


def test_csv():
  text = tables.csv_text(['a', 'b'], [[1.23456789012, 2]])
  assert text == 'a,b\n1.2345679,2\n'


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


def test_labels_are_to_the_left():
  cells = [['a', 'b', 'c'], ['1', '2', '3']]
  assert tables.markdown(cells, num_labels=2) == (
      '| a   | b   |   c |\n| --- | --- | --: |\n| 1   | 2   |   3 |'
  )


def test_narrow_columns_and_no_notes():
  assert tables.markdown([['a', 'b'], ['c', '±']]) == (
      '| a   |   b |\n| --- | --: |\n| c   |   ± |'
  )
