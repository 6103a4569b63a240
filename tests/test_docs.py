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
    if name in ('papers', 'programs'):  # They have pages of their own.
      continue
    member = getattr(tff_bn, name)
    names = [f'tff_bn.{name}']
    if hasattr(member, '__all__'):
      names = [f'tff_bn.{name}.{inner}' for inner in member.__all__]
    for full_name in names:
      assert full_name in documented or _is_no_function_or_class(full_name)


@pytest.mark.slow
def test_first_page(site):
  text = (site / 'docs' / 'index.html').read_text(encoding='utf-8')
  # In the article, not in the side bar.
  article = text[text.index('<article') : text.index('</article')]
  plain = re.sub('<[^>]*>', '', article)
  assert 'make compare' in plain and 'make test' in plain
  assert 'In federated learning, clients such as' in plain
  (image,) = re.findall(r'<img [^>]*src="([^"]*)"', article)
  assert (site / 'docs' / image).is_file()
  assert '<a class="reference internal" href="algorithms.html">' in article
  assert 'site.css' in text and '<li' not in article
  # The results are below the pages of the papers.
  sidebar = text[: text.index('<article')]
  for paper in _result_pages():
    assert sidebar.count(f'href="results/{paper}.html"') == 1
  levels = re.findall(r'toctree-l(\d)"><a [^>]*results/experiments/', sidebar)
  assert len(levels) > 90 and set(levels) == {'2'}


def _result_pages() -> dict[str, list[str]]:
  """Returns the results that each page in docs/results lists."""
  pages = {}
  for page in (_ROOT / 'docs' / 'results').glob('*.rst'):
    (pattern,) = re.findall(
        r'^ +/(benchmarks/results/experiments/\S+)$',
        page.read_text(encoding='utf-8'),
        re.M,
    )
    pages[page.stem] = [path.stem for path in _ROOT.glob(f'{pattern}.md')]
  return pages


def test_each_result_is_on_the_page_of_its_paper():
  pages = _result_pages()
  index = (_ROOT / 'docs' / 'index.rst').read_text(encoding='utf-8')
  listed = [name for names in pages.values() for name in names]
  results = (_ROOT / 'benchmarks' / 'results' / 'experiments').glob('*.md')
  assert sorted(listed) == sorted(path.stem for path in results)
  for paper, names in pages.items():
    assert f'   results/{paper}\n' in index
    assert all(name.startswith(f'{paper}_') for name in names)


def _is_no_function_or_class(full_name):
  """Whether the name is a module or a constant, which need no entry."""
  value = tff_bn
  for part in full_name.split('.')[1:]:
    value = getattr(value, part)
  return not callable(value)
