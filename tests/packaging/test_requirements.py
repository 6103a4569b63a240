"""Tests of requirements.txt: pinned, complete, and nothing superfluous."""

import importlib.metadata
import pathlib
import re
import sysconfig

from packaging import markers
from packaging import requirements
from packaging import utils
import pytest

_ROOT = pathlib.Path(__file__).parents[2]

# What the project uses itself, beside the distribution's own requirements: to
# build and install, to test, and to run the notebooks.
_TOOLS = (
    'hypothesis',
    'ipykernel',
    'nbclient',
    'pyink',
    'pytest',
    'pytest-xdist',
    'ruff',
    'setuptools',
    'wheel',
)

# TensorFlow Federated asks for a jaxlib that is no longer published.
_KNOWN_CONFLICTS = {
    ('tensorflow-federated', 'jax'),
    ('tensorflow-federated', 'jaxlib'),
}


def _lines() -> list[str]:
  text = (_ROOT / 'requirements.txt').read_text()
  return [line for line in text.splitlines() if not line.startswith('#')]


def _pins(python_version: str) -> dict[str, str]:
  """The version of each distribution that one Python gets."""
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


def test_lines_are_names_and_versions():
  pattern = r'[a-z0-9-]+==[0-9][0-9a-z.]*( ; python_version [<>]=? "3\.1[01]")?'
  assert not [line for line in _lines() if not re.fullmatch(pattern, line)]


def test_lines_are_sorted():
  names = [line.partition('==')[0] for line in _lines()]
  assert names == sorted(names)


def test_file_names_no_host():
  text = (_ROOT / 'requirements.txt').read_text()
  assert not re.search(r'://|--(extra-)?index|--find|@', text)


@pytest.mark.parametrize('python_version', ['3.10', '3.11'])
def test_versions_known_to_work(python_version: str):
  pins = _pins(python_version)
  assert pins['tensorflow'].startswith('2.14.')
  assert pins['tensorflow-federated'] == '0.87.0'
  # TensorBoard's command imports pkg_resources, which 82 dropped.
  assert int(pins['setuptools'].split('.')[0]) < 82


def _needs(name: str, extras: frozenset[str]) -> list[requirements.Requirement]:
  """What an installed distribution asks for, on this Python."""
  # Not from sys.path, where an old build's metadata may lie in the repository.
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
  """Walks through the metadata of everything that is installed here."""
  pins = _pins(markers.default_environment()['python_version'])
  todo = [(name, frozenset()) for name in _TOOLS]
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
      assert needed in pins, f'{name} needs {need}, which is not pinned'
      if (name, needed) not in _KNOWN_CONFLICTS:
        assert need.specifier.contains(
            pins[needed]
        ), f'{name} needs {need}, but {pins[needed]} is pinned'
      todo.append((needed, frozenset(need.extras)))
  superfluous = set(pins) - {name for name, _ in seen}
  assert not superfluous
