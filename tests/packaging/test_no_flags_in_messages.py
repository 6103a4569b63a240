"""Tests that the library's messages name no command-line flags."""

import ast
import pathlib
import re

from absl import flags

import tff_bn
from tff_bn.programs import compare
from tff_bn.programs import train

_ROOT = pathlib.Path(tff_bn.__file__).parent
# A command of another program with flags.
_OTHER = re.compile('`tfds build [^`]*`')


def _texts(path):
  nodes = list(ast.walk(ast.parse(path.read_text(encoding='utf-8'))))
  parts = set()
  for node in nodes:
    if isinstance(node, ast.JoinedStr):
      constants = [n for n in node.values if isinstance(n, ast.Constant)]
      parts.update(constants)
      yield _OTHER.sub('', ''.join(n.value for n in constants))
  for node in nodes:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    if is_text and node not in parts:
      yield node.value


def test_no_flag_is_named():
  values = flags.FlagValues()
  train.define_flags(values)
  names = set(values)
  values = flags.FlagValues()
  compare.define_flags(values)
  names |= set(values)
  pattern = re.compile(f'--({"|".join(names)})([^a-z_]|$)')
  # Descriptions of options name flags; the errors of the catalog do not.
  paths = sorted(set(_ROOT.rglob('*.py')) - set(_ROOT.glob('catalog/*.py')))
  assert len(paths) > 100
  found = {
      f'{path.relative_to(_ROOT)}: {text}'
      for path in paths
      for text in _texts(path)
      if pattern.search(text)
  }
  assert not found
