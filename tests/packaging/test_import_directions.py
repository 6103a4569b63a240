"""Tests that imports point one way: papers → programs → tff_bn → layers."""

import ast
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_PACKAGES = {
    'layers': 'tff_bn.layers',
    'tff_bn': 'tff_bn',
    'programs': 'tff_bn.programs',
    'papers': 'tff_bn.papers',
}
# The rooms of programs/, each of which may import those before it. The entry
# points are last.
_ROOMS = ('cli', 'flags', 'plan', 'results', 'testing', 'runs', '')
# Descriptions of data that every room may import, and that import no room.
_DESCRIPTIONS = ('plan.axes', 'runs.run_folder', 'runs.run_timing')


def _imports(node):
  """Yields the modules that code imports, also late, except for types."""
  if isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.dump(node.test):
    return
  if isinstance(node, ast.Import):
    yield from (alias.name for alias in node.names)
  elif isinstance(node, ast.ImportFrom):
    yield from (f'{node.module}.{alias.name}' for alias in node.names)
  for child in ast.iter_child_nodes(node):
    yield from _imports(child)


def _modules(folder):
  """Yields each module of a package with its imports."""
  for path in sorted((_ROOT / folder).rglob('*.py')):
    name = path.relative_to(_ROOT / folder).with_suffix('').as_posix()
    tree = ast.parse(path.read_text(encoding='utf-8'))
    yield name.replace('/', '.'), set(_imports(tree))


@pytest.mark.parametrize('folder', ['layers', 'tff_bn', 'programs'])
def test_a_package_imports_no_later_one(folder):
  names = list(_PACKAGES)
  later = [_PACKAGES[name] for name in names[names.index(folder) + 1 :]]
  if folder == 'layers':
    later.remove('tff_bn')
  found = {
      (module, imported)
      for module, imports in _modules(folder)
      for imported in imports
      if any(f'{imported}.'.startswith(f'{package}.') for package in later)
  }
  assert not found


def test_no_text_in_a_program_names_a_module_of_the_papers():
  """A text could be imported."""
  for path in (_ROOT / 'programs').rglob('*.py'):
    assert 'tff_bn.papers' not in path.read_text(encoding='utf-8'), path


def _room(module):
  return _ROOMS.index(module.partition('.')[0] if '.' in module else '')


def test_rooms_of_programs_import_no_later_one():
  found = set()
  for module, imports in _modules('programs'):
    for imported in imports:
      package, _, name = imported.partition('tff_bn.programs.')
      # An attribute of a module is not a part of its name.
      name = '.'.join(name.split('.')[:2])
      if package or not name or name in _DESCRIPTIONS:
        continue
      if module in _DESCRIPTIONS or _room(name) > _room(module):
        found.add((module, name))
  assert not found
