"""Tests that the library does not speak the command line."""

import ast
import pathlib
import re

from absl import flags

import tff_bn
from tff_bn.programs import compare
from tff_bn.programs import train

_ROOT = pathlib.Path(tff_bn.__file__).parent
# A flag of another program.
_OTHER = re.compile('`tfds build [^`]*`')


def _texts(path):
  # An f-string's parts are constants, too.
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      yield _OTHER.sub('', node.value)


def test_no_flag_is_named():
  values = flags.FlagValues()
  train.define_flags(values)
  names = set(values)
  values = flags.FlagValues()
  compare.define_flags(values)
  names |= set(values)
  pattern = re.compile(f'--({"|".join(names)})([^a-z_]|$)')
  paths = sorted(_ROOT.rglob('*.py'))
  assert len(paths) > 100
  found = {
      f'{path.relative_to(_ROOT)}: {text}'
      for path in paths
      for text in _texts(path)
      if pattern.search(text)
  }
  assert not found
