"""Tests that the requirements are pinned, complete and necessary."""

from collections.abc import Sequence
import importlib.metadata
import importlib.util
import pathlib
import re
import sysconfig

from packaging import markers
from packaging import requirements
from packaging import utils
import pytest

from tff_bn.imports import dependencies

_ROOT = pathlib.Path(__file__).parents[2]
_FILES = (
    'requirements.txt',
    'requirements-cuda.txt',
    'requirements-docs.txt',
    'requirements-files.txt',
    'requirements-logging.txt',
    'requirements-ray.txt',
)
# The project's tools to build, install, test and run the notebooks.
_TOOLS = (
    'hypothesis',
    'ipykernel',
    'mypy',
    'nbclient',
    'playwright',
    'pyink',
    'pytest',
    'pytest-xdist',
    'ruff',
    'setuptools',
    'wheel',
)

# These ask for versions of 2023, but work with later ones.
_OUTDATED_METADATA = frozenset(
    [
        'tensorflow-federated',
        'tensorflow-model-optimization',
        'tensorflow-privacy',
    ]
)

# Requirements of distributions that nothing in the project imports.
_NEVER_IMPORTED = {
    'dp-accounting': {'mpmath'},
    'databricks-sdk': {'google-auth'},
    'etils': {'einops'},
    'huggingface-hub': {'hf-xet'},
    'mlflow-skinny': {'gitpython', 'python-dotenv', 'uvicorn'},
    'tensorflow': {'google-pasta', 'libclang'},
    'tensorflow-datasets': {'array-record', 'pyarrow', 'simple-parsing'},
    # tff_bn/imports/tff_stand_ins.py replaces it.
    'tensorflow-federated': {'google-vizier'},
    'tensorflow-privacy': {'tensorflow-estimator', 'tensorflow-probability'},
    'wandb': {'cwevals', 'opentelemetry-exporter-otlp-proto-http'},
}


def _lines(file: str = 'requirements.txt') -> list[str]:
  text = (_ROOT / file).read_text()
  return [line for line in text.splitlines() if not line.startswith('#')]


def _pins(python_version: str) -> dict[str, str]:
  """Returns the version of each distribution for a version of Python."""
  pins = {}
  for line in _lines():
    requirement = requirements.Requirement(line)
    environment = {'python_version': python_version}
    if requirement.marker and not requirement.marker.evaluate(environment):
      continue
    name = utils.canonicalize_name(requirement.name)
    assert name not in pins, f'{name} is pinned twice'
    (specifier,) = requirement.specifier
    pins[name] = specifier.version
  return pins


@pytest.mark.parametrize('file', _FILES)
class TestFile:

  def test_lines_are_names_and_versions(self, file: str):
    pattern = (
        r'[a-z0-9-]+==[0-9][0-9a-z.]*( ; python_version (<|>=) "3\.1[23]")?'
    )
    assert not [
        line for line in _lines(file) if not re.fullmatch(pattern, line)
    ]

  def test_lines_are_sorted(self, file: str):
    names = [line.partition('==')[0] for line in _lines(file)]
    assert names == sorted(names)

  def test_file_names_no_host(self, file: str):
    text = (_ROOT / file).read_text()
    assert not re.search(r'://|--(extra-)?index|--find|@', text)


@pytest.mark.parametrize('file', _FILES)
class TestLockedFile:

  def test_lines_have_hashes(self, file: str):
    pattern = (
        '[a-z0-9-]+==[0-9][0-9a-z.]*'
        r"( ; python_full_version (<|>=) '3\.1[23]')?"
        '( --hash=sha256:[0-9a-f]{64})+'
    )
    lines = _lines(f'locked/{file}')
    assert not [line for line in lines if not re.fullmatch(pattern, line)]

  def test_versions_are_the_same(self, file: str):
    pins = []
    for line in _lines(f'locked/{file}'):
      text = line.partition(' --hash')[0].replace('_full_', '_')
      pins.append(text.replace("'", '"'))
    assert pins == _lines(file)


@pytest.mark.parametrize('python_version', ['3.11', '3.12', '3.13'])
def test_main_versions(python_version: str):
  pins = _pins(python_version)
  assert pins['tensorflow'].startswith('2.21.')
  assert pins['keras'].startswith('3.')
  assert pins['numpy'].startswith('2.')


def test_error_message_has_the_same_pins():
  """The message names the packages that need `pip install --no-deps`."""
  assert set(dependencies.PINNED_PACKAGES) <= set(_lines())
  names = {pin.partition('==')[0] for pin in dependencies.PINNED_PACKAGES}
  assert names >= _OUTDATED_METADATA


def _needs(name: str, extras: frozenset[str]) -> list[requirements.Requirement]:
  """Returns the requirements of an installed distribution on this Python."""
  # Not from sys.path: the repository may contain the metadata of an old build.
  path = [sysconfig.get_path('purelib'), sysconfig.get_path('platlib')]
  distribution, *_ = importlib.metadata.distributions(name=name, path=path)
  needs = []
  for text in distribution.requires or []:
    need = requirements.Requirement(text)
    if not need.marker or any(
        need.marker.evaluate({'extra': extra}) for extra in extras or {''}
    ):
      needs.append(need)
  return needs


def test_pins_are_complete_consistent_and_needed():
  """Follows the requirements in the metadata of installed distributions."""
  pins = _pins(markers.default_environment()['python_version'])
  todo = [
      (name.partition('==')[0], frozenset())
      for name in (*_TOOLS, *dependencies.PINNED_PACKAGES)
  ]
  todo.append(('tff-bn', frozenset({'', 'federated'})))
  seen = set()
  while todo:
    distribution = todo.pop()
    if distribution in seen:
      continue
    seen.add(distribution)
    name, extras = distribution
    for need in _needs(name, extras):
      needed = utils.canonicalize_name(need.name)
      if needed in _NEVER_IMPORTED.get(name, ()):
        continue
      assert needed in pins, f'{name} needs {need}, which is not pinned'
      if name not in _OUTDATED_METADATA:
        assert need.specifier.contains(
            pins[needed]
        ), f'{name} needs {need}, but {pins[needed]} is pinned'
      todo.append((needed, frozenset(need.extras)))
  superfluous = set(pins) - {name for name, _ in seen}
  assert not superfluous


@pytest.mark.parametrize(
    ('kind', 'roots'),
    [
        ('ray', [('tff-bn', 'ray')]),
        ('docs', [(name, '') for name in ('furo', 'myst-parser', 'sphinx')]),
        ('files', [('datasets', ''), ('pyarrow', '')]),
        ('logging', [('mlflow-skinny', ''), ('wandb', '')]),
    ],
)
def test_added_pins_are_complete_and_needed(
    kind: str, roots: Sequence[tuple[str, str]]
):
  """These files are installed in addition to requirements.txt."""
  file = f'requirements-{kind}.txt'
  added = dict(line.split('==') for line in _lines(file))
  # Installed by `make test` only.
  installs = {'logging': 'wandb', 'files': 'datasets'}.get(kind)
  if installs and importlib.util.find_spec(installs) is None:
    pytest.skip(f'{file} is not installed')
  pins = {
      **_pins(markers.default_environment()['python_version']),
      **added,
  }
  todo, seen = list(roots), {name for name, _ in roots}
  while todo:
    name, extra = todo.pop()
    for need in _needs(name, frozenset({extra} if extra else ())):
      needed = utils.canonicalize_name(need.name)
      if needed in _NEVER_IMPORTED.get(name, ()):
        continue
      assert needed in pins, f'{name} needs {need}, which is not pinned'
      assert need.specifier.contains(
          pins[needed], prereleases=True
      ), f'{name} needs {need}, but {pins[needed]} is pinned'
      if needed not in seen:
        seen.add(needed)
        todo.append((needed, ''))
  assert added.keys() <= seen


def test_added_files_agree():
  pins = {}
  for file in _FILES:
    if file == 'requirements.txt':
      continue
    for line in _lines(file):
      name, _, version = line.partition('==')
      assert pins.setdefault(name, version) == version, name


def test_pins_for_cuda_match_tensorflow():
  needs = {
      utils.canonicalize_name(need.name): need.specifier
      for need in _needs('tensorflow', frozenset({'and-cuda'}))
      if need.name.startswith('nvidia-')
  }
  pins = dict(line.split('==') for line in _lines('requirements-cuda.txt'))
  assert pins.keys() == needs.keys()
  for name, version in pins.items():
    assert needs[name].contains(version), f'{name}{needs[name]}'
