"""Tests of the wheel that setup.py builds."""

import ast
import configparser
import importlib
import importlib.metadata
import pathlib
import shutil
import subprocess
import sys
import textwrap
import zipfile

from packaging import requirements
import pytest

import tff_bn
from tff_bn.imports import dependencies

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDERS = {
    'tff_bn': 'tff_bn',
    'layers': 'tff_bn/layers',
    'papers': 'tff_bn/papers',
    'programs': 'tff_bn/programs',
}
# The packages that need `pip install --no-deps`.
_PINNED = {pin.partition('==')[0] for pin in dependencies.PINNED_PACKAGES}


@pytest.fixture(scope='module')
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
  """A wheel of the working tree with a new package, preset and experiment."""
  source = tmp_path_factory.mktemp('source')
  for folder in (*_FOLDERS, 'tests'):
    shutil.copytree(
        _ROOT / folder,
        source / folder,
        ignore=shutil.ignore_patterns('__pycache__'),
    )
  for file in ('setup.py', 'pyproject.toml', 'LICENSE'):
    shutil.copy(_ROOT / file, source)
  for folder in _FOLDERS:
    package = source / folder / 'new' / 'newer'
    package.mkdir(parents=True)
    (package / '__init__.py').touch()
    (package.parent / '__init__.py').touch()
  presets = source / 'programs' / 'presets'
  presets.mkdir(exist_ok=True)
  (presets / 'new.flags').touch()
  experiments = source / 'papers' / 'experiments' / 'new'
  experiments.mkdir(parents=True)
  for name in ('table_1.toml', 'table_1.csv'):
    (experiments / name).touch()
  target = tmp_path_factory.mktemp('wheel')
  command = [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-index']
  command += ['--no-deps', '--no-build-isolation', '--wheel-dir', target, '.']
  subprocess.run(command, cwd=source, check=True, capture_output=True)
  (path,) = target.iterdir()
  with zipfile.ZipFile(path) as file:
    yield file


def _information(wheel: zipfile.ZipFile, name: str) -> str:
  (path,) = [
      path for path in wheel.namelist() if path.endswith(f'.dist-info/{name}')
  ]
  return wheel.read(path).decode()


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile):
  expected = {
      'tff_bn.pth',
      'tff_bn/programs/presets/new.flags',
      'tff_bn/papers/experiments/new/table_1.toml',
      'tff_bn/papers/experiments/new/table_1.csv',
  }
  for folder, package in _FOLDERS.items():
    expected |= {f'{package}/new/__init__.py'}
    expected |= {f'{package}/new/newer/__init__.py'}
    for pattern in (
        '*.py',
        'presets/*.flags',
        'experiments/*/*.toml',
        'experiments/*/*.csv',
        'templates/*',
    ):
      expected |= {
          f'{package}/{path.relative_to(_ROOT / folder).as_posix()}'
          for path in (_ROOT / folder).rglob(pattern)
      }
  held = {path for path in wheel.namelist() if '.dist-info/' not in path}
  assert held == expected


def test_wheel_has_name_version_and_license(wheel: zipfile.ZipFile):
  metadata = _information(wheel, 'METADATA').splitlines()
  assert 'Name: tff_bn' in metadata
  assert f'Version: {tff_bn.__version__}' in metadata
  assert 'Requires-Python: >=3.11,<3.14' in metadata
  assert 'Apache License' in _information(wheel, 'licenses/LICENSE')


def test_installed_version_is_the_packages():
  assert importlib.metadata.version('tff_bn') == tff_bn.__version__


def test_console_scripts_are_functions(wheel: zipfile.ZipFile):
  entry_points = configparser.ConfigParser(delimiters='=')
  entry_points.read_string(_information(wheel, 'entry_points.txt'))
  scripts = dict(entry_points['console_scripts'])
  assert set(scripts) == {
      f'tff-bn-{name}' for name in ('analyze', 'compare', 'evaluate', 'train')
  }
  for target in scripts.values():
    module, _, function = target.partition(':')
    assert callable(getattr(importlib.import_module(module), function))


def _needs(wheel: zipfile.ZipFile) -> list[requirements.Requirement]:
  return [
      requirements.Requirement(line.partition(': ')[2])
      for line in _information(wheel, 'METADATA').splitlines()
      if line.startswith('Requires-Dist: ')
  ]


def _third_party_imports() -> set[str]:
  names = set()
  for folder in _FOLDERS:
    for path in (_ROOT / folder).rglob('*.py'):
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
          names.update(alias.name.split('.')[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
          names.add(node.module.split('.')[0])
  return names - set(sys.stdlib_module_names) - {'tff_bn'}


def test_everything_imported_is_required(wheel: zipfile.ZipFile):
  provided = set()
  for name in _PINNED | {need.name for need in _needs(wheel)}:
    files = importlib.metadata.files(name)
    provided |= {path.parts[0].removesuffix('.py') for path in files}
  missing = _third_party_imports() - provided
  assert not missing, f'add to setup.py what provides {missing}'


def test_plain_install_needs_keras_and_numpy_only(wheel: zipfile.ZipFile):
  needs = _needs(wheel)
  assert {need.name for need in needs if not need.marker} == {'keras', 'numpy'}
  # pip cannot resolve what these ask for.
  assert not _PINNED & {need.name for need in needs}


def test_versions_match_the_checks(wheel: zipfile.ZipFile):
  metadata = _information(wheel, 'METADATA')
  oldest, newest = dependencies.TENSORFLOW_VERSIONS
  after = (newest[0], newest[1] + 1)
  texts = ['.'.join(map(str, version)) for version in (oldest, after)]
  assert f'tensorflow<{texts[1]},>={texts[0]}' in metadata
  keras = '.'.join(map(str, dependencies.OLDEST_KERAS_VERSION))
  assert f'Requires-Dist: keras>={keras}\n' in metadata


def test_start_up_file_installs_the_import_hook(wheel: zipfile.ZipFile):
  """The file imports nothing else, because Python runs it at each start."""
  code = """
      import sys
      before = set(sys.modules)
      exec(sys.stdin.read())
      assert set(sys.modules) == before, set(sys.modules) - before
      assert type(sys.meta_path[0]).__name__ == 'TffFinder'
  """
  text = wheel.read('tff_bn.pth').decode('ascii')
  assert text.startswith('import ')
  assert text.count('\n') == 1
  subprocess.run(
      [sys.executable, '-S', '-c', textwrap.dedent(code)],
      input=text,
      text=True,
      check=True,
  )


def test_start_up_file_is_installed():
  files = importlib.metadata.files('tff_bn')
  assert 'tff_bn.pth' in {path.name for path in files}
