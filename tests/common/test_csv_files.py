"""Tests for `tff_bn.common.csv_files`."""

import csv
import io

import pytest

from tff_bn.common import csv_files


@pytest.mark.parametrize(
    ('digits', 'numbers'),
    [
        (8, ['1.2345679', '3.3333333e-11', '0.1']),
        (None, ['1.23456789012', '3.3333333333333335e-11', '0.1']),
    ],
)
def test_cells(digits, numbers):
  text = csv_files.to_csv(
      ['a', 'b', 'c'],
      [[1.23456789012, 2, 'x,y'], [1e-10 / 3, '', 'say "z"'], [0.1, None, 'µ']],
      digits=digits,
  )
  first, second, third = numbers
  assert text == (
      f'a,b,c\n{first},2,"x,y"\n{second},,"say ""z"""\n{third},,µ\n'
  )
  assert next(csv.DictReader(io.StringIO(text))) == dict(
      a=first, b='2', c='x,y'
  )


def test_no_rows():
  assert csv_files.to_csv(['a'], []) == 'a\n'
