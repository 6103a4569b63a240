"""Tests for the parsers of flag values."""

import pytest

from tff_bn.catalog import local_training
from tff_bn.catalog import value_types
from tff_bn.programs.cli import parsers


def test_number_in_range():
  for bounds in (dict(minimum=1), dict(maximum=1), dict(above=0, below=2)):
    parsed = value_types.Number(int, **bounds).parse('1')
    assert parsed == 1 and isinstance(parsed, int)


@pytest.mark.parametrize(
    'number_type, bounds, text, allowed',
    [
        (int, dict(minimum=1), '0', 'a whole number, at least 1'),
        (int, dict(above=0), '0', 'a whole number, greater than 0'),
        (int, dict(below=8), '8', 'a whole number, .* less than 8'),
        (float, dict(above=0), '0', 'a number, greater than 0'),
        (
            float,
            dict(minimum=0, maximum=1),
            '1.1',
            'a number, at least 0 and at most 1',
        ),
        (float, dict(minimum=0, below=1), '1', 'at least 0 and less than 1'),
        (int, {}, '9' * 23, 'at least -2147483647 and at most 2147483647'),
        (int, dict(minimum=1), '2147483648', 'at least 1 and at most 2147'),
        (float, dict(above=0), '1e39', r'greater than 0 and at most 3.4e\+38'),
        (float, {}, '-1e39', r'at least -3.4e\+38 and at most 3.4e\+38'),
    ],
)
def test_number_out_of_range(number_type, bounds, text, allowed):
  with pytest.raises(ValueError, match=f'must be .*{allowed}'):
    value_types.Number(number_type, **bounds).parse(text)


@pytest.mark.parametrize(
    'bounds, text, message',
    [
        (dict(above=0), '1e-300', 'is too small for float32; the smallest'),
        (dict(minimum=0), '1e-300', 'is too small for float32; the smallest'),
        ({}, '-1e-300', 'is too small for float32; the smallest'),
        (
            dict(minimum=0, below=1),
            '0.999999999',
            'is 1 in float32; it must be',
        ),
        (dict(above=1), '1.000000001', 'is 1 in float32; it must be'),
    ],
)
def test_number_that_float32_rounds(bounds, text, message):
  with pytest.raises(ValueError, match=f'^{message}'):
    value_types.Number(float, **bounds).parse(text)


@pytest.mark.parametrize('text', ['', ' '])
def test_text_must_not_be_empty(text):
  assert value_types.Text().parse('x y') == 'x y'
  with pytest.raises(ValueError, match='^must not be empty.$'):
    value_types.Text().parse(text)
  with pytest.raises(ValueError, match="^'': must not be empty.$"):
    value_types.List(value_types.Text()).parse(f'a,{text}')


def test_boolean():
  assert value_types.Boolean().parse('true') is True
  assert value_types.Boolean().parse('0') is False
  for text in ('maybe', ''):
    with pytest.raises(ValueError, match='^must be true or false.$'):
      value_types.Boolean().parse(text)


def test_choice():
  parser = value_types.Choice(
      ('red', 'green'), 'a number', lambda argument: argument.isdigit()
  )
  assert parser.parse('red') == 'red'
  assert parser.parse('7') == '7'
  allowed = '^must be one of red, green or a number[.]'
  with pytest.raises(ValueError, match=f'{allowed} Did you mean green[?]$'):
    parser.parse('Gren')
  with pytest.raises(ValueError, match=f'{allowed}$'):
    parser.parse('xyz')


def test_chain():
  parser = value_types.Chain(
      value_types.Choice(('nnm', 'bucketing')),
      value_types.Choice(('mean', 'median')),
  )
  for text in ('median', 'nnm+median', 'bucketing+nnm+mean'):
    assert parser.parse(text) == text
  for text in ('nnm', 'median+nnm', 'median+mean', 'other+median', ''):
    with pytest.raises(ValueError, match='^must be .*, as in nnm[+]median[.]'):
      parser.parse(text)


def test_spaces_in_a_tuple():
  parser = value_types.List(value_types.Choice(('red', 'green')))
  assert parser.parse('red, green') == ('red', 'green')


def test_values_with_commas_in_a_tuple():
  parser = value_types.List(value_types.TEXT)
  values = ('Smith, Ann', '"Bo" Lee', 'Wu')
  assert parser.parse('"Smith, Ann", """Bo"" Lee",Wu') == values
  assert parser.parse(parsers.to_text(values)) == values
  assert parsers.to_text(('a', 'b')) == 'a,b'
  with pytest.raises(ValueError, match='unexpected end of data'):
    parser.parse('"Smith, Ann')


def test_tuple():
  parser = value_types.List(value_types.Number(int, minimum=0))
  assert parser.parse('3, 1') == (3, 1)
  with pytest.raises(ValueError, match='3 is in the list twice'):
    parser.parse('3,1,3')
  with pytest.raises(ValueError, match="'': must be a whole number"):
    parser.parse('3,')
  with pytest.raises(ValueError, match="'-1': must be a whole number"):
    parser.parse('3,-1')


def test_schedule():
  assert local_training.parse_schedule('60:0.1,80:0') == ((60, 0.1), (80, 0.0))


@pytest.mark.parametrize(
    'text, reason',
    [
        ('', 'ROUND:FACTOR'),
        ('60', 'ROUND:FACTOR'),
        ('60:0.1:2', 'ROUND:FACTOR'),
        ('60:much', 'ROUND:FACTOR'),
        ('0:0.1', 'increasing rounds'),
        ('60:0.1,60:0.2', 'increasing rounds'),
        ('60:0.1,40:0.2', 'increasing rounds'),
        ('60:-0.1', 'factors'),
        ('60:nan', 'factors'),
        ('60:inf', 'factors'),
        (f'60:0.1,{2**31}:0.1', 'at most 2147483647'),
    ],
)
def test_wrong_schedule(text, reason):
  with pytest.raises(ValueError, match=reason):
    local_training.parse_schedule(text)


@pytest.mark.parametrize(
    'value, text',
    [
        (('a', 'b'), 'a,b'),
        ((0, 1), '0,1'),
        (0.1, '0.1'),
        (3, '3'),
        (True, 'true'),
        ('x', 'x'),
    ],
)
def test_to_text(value, text):
  assert parsers.to_text(value) == text


@pytest.mark.parametrize(
    'text, expected',
    [
        ('rounds=0 is too small.', '--rounds=0 is too small.'),
        ('Give (rounds=1) or `seed`.', 'Give (--rounds=1) or --seed.'),
        ('--rounds=0 and seed=1', '--rounds=0 and --seed=1'),
        ('other=1, num_rounds=1, /seed=1', 'other=1, num_rounds=1, /seed=1'),
        ('rounds and seed', 'rounds and seed'),
    ],
)
def test_name_flags(text, expected):
  assert parsers.name_flags(text, ['rounds', 'seed', 'seeds']) == expected
