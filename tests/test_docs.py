"""Tests that the documentation builds."""

import pathlib
import re

import pytest
from sphinx.cmd import build

import tff_bn

_ROOT = pathlib.Path(__file__).parents[1]

# MyST and Sphinx use what a later Sphinx changes; the versions are pinned.
pytestmark = pytest.mark.filterwarnings(
    'ignore::sphinx.deprecation.RemovedInSphinx11Warning'
)


@pytest.fixture(scope='module')
def site(tmp_path_factory) -> pathlib.Path:
  """The documentation, built with warnings as errors."""
  folder = tmp_path_factory.mktemp('site')
  arguments = ['--quiet', '--fail-on-warning', '--keep-going', '--conf-dir']
  code = build.main([*arguments, str(_ROOT / 'docs'), str(_ROOT), str(folder)])
  assert code == 0
  return folder


@pytest.mark.slow
def test_pages_need_no_network(site):
  pages = list(site.rglob('*.html'))
  assert site / 'docs' / 'index.html' in pages
  assert site / 'README.html' in pages
  for page in pages:
    text = page.read_text(encoding='utf-8')
    loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"', text)
    loaded += re.findall(r'<link [^>]*href="([^"]*)"', text)
    assert loaded
    assert not [url for url in loaded if re.match(r'(https?:)?//', url)], page


@pytest.mark.slow
def test_reference_has_every_public_name(site):
  text = ''.join(
      page.read_text(encoding='utf-8')
      for page in (site / 'docs' / 'api').glob('*.html')
  )
  documented = set(re.findall(r'id="(tff_bn\.[\w.]+)"', text))
  for name in tff_bn.__all__:
    if name == 'programs':  # They have a page of their own.
      continue
    member = getattr(tff_bn, name)
    names = [f'tff_bn.{name}']
    if hasattr(member, '__all__'):
      names = [f'tff_bn.{name}.{inner}' for inner in member.__all__]
    for full_name in names:
      assert full_name in documented or _is_no_function_or_class(full_name)


def _is_no_function_or_class(full_name):
  """Whether the name is a module or a constant, which need no entry."""
  value = tff_bn
  for part in full_name.split('.')[1:]:
    value = getattr(value, part)
  return not callable(value)
