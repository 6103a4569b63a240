"""Tests for functions that users name."""

import sys

import pytest

from tff_bn.common import user_functions


def test_function():
  function = user_functions.import_function('model', 'math:sqrt')
  assert function(9.0) == 3.0


@pytest.mark.parametrize('name', ['math', 'math:', ':sqrt', ':'])
def test_incomplete_names(name):
  with pytest.raises(
      ValueError, match=f'^hook={name}: must have the form package.module:NAME'
  ):
    user_functions.import_function('hook', name)


@pytest.mark.parametrize(
    'name', ['math:nope', 'nomodule:f', './math:sqrt', 'a:b:c']
)
def test_wrong_names(name):
  with pytest.raises(ValueError, match=f'^hook={name}: the module'):
    user_functions.import_function('hook', name)


def test_no_function():
  with pytest.raises(ValueError, match='^hook=math:pi must be a function'):
    user_functions.import_function('hook', 'math:pi')


@pytest.mark.parametrize(
    'code', ['raise SystemExit(0)', 'raise KeyError', 'def f(:']
)
def test_modules_that_cannot_be_imported(code, tmp_path, monkeypatch):
  (tmp_path / 'users_script.py').write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match='users_script.* can not be imported'):
    user_functions.import_function('hook', 'users_script:f')
  assert 'users_script' not in sys.modules
