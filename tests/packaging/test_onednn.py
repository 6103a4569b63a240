"""Tests that TensorFlow uses oneDNN, unless the user decides otherwise."""

import os
import subprocess
import sys

import pytest

from tff_bn.imports import onednn
from tff_bn.imports import versions


@pytest.mark.parametrize(
    ('value', 'modules', 'expected'),
    [
        (None, {}, '1'),
        ('0', {}, '0'),
        ('1', {}, '1'),
        # It has read the variable already.
        (None, {'tensorflow': None}, 'not set'),
    ],
)
def test_users_and_tensorflow_come_first(monkeypatch, value, modules, expected):
  monkeypatch.delenv(onednn.VARIABLE, raising=False)
  if value is not None:
    monkeypatch.setenv(onednn.VARIABLE, value)
  monkeypatch.setattr(sys, 'modules', modules)
  onednn.switch_on()
  assert onednn.setting() == expected


@pytest.mark.parametrize('value', [None, '0'])
def test_the_package_switches_it_on(value):
  code = f'import os, tff_bn; print(os.environ[{onednn.VARIABLE!r}])'
  environment = {k: v for k, v in os.environ.items() if k != onednn.VARIABLE}
  if value is not None:
    environment[onednn.VARIABLE] = value
  printed = subprocess.run(
      [sys.executable, '-c', code],
      env=environment,
      check=True,
      capture_output=True,
      text=True,
  ).stdout
  assert printed.strip() == (value or '1')


def test_runs_record_it(monkeypatch):
  versions.versions.cache_clear()
  monkeypatch.setenv(onednn.VARIABLE, '0')
  assert versions.versions()[onednn.VARIABLE] == '0'
  versions.versions.cache_clear()
