"""Tests of CITATION.cff and of the forms for issues."""

import pathlib

import pytest
import yaml

import tff_bn

_ROOT = pathlib.Path(__file__).parents[2]
_FORMS = sorted((_ROOT / '.github' / 'ISSUE_TEMPLATE').glob('*.yml'))
_FIELDS = {'textarea', 'input', 'dropdown', 'checkboxes'}


def test_citation_has_the_version():
  citation = yaml.safe_load((_ROOT / 'CITATION.cff').read_text())
  assert citation['version'] == tff_bn.__version__
  assert citation['cff-version'] == '1.2.0'
  # What the format requires.
  assert citation['message'] and citation['title'] and citation['authors']


def test_there_are_forms():
  assert [path.stem for path in _FORMS] == [
      'bug',
      'config',
      'feature',
      'question',
  ]


@pytest.mark.parametrize(
    'path', [p for p in _FORMS if p.stem != 'config'], ids=lambda p: p.stem
)
def test_form_has_what_github_requires(path: pathlib.Path):
  form = yaml.safe_load(path.read_text())
  assert form.keys() == {'name', 'description', 'labels', 'body'}
  fields = [part for part in form['body'] if part['type'] in _FIELDS]
  ids = [field['id'] for field in fields]
  assert fields and len(set(ids)) == len(ids)
  assert all(field['attributes']['label'] for field in fields)
  for part in form['body']:
    if part not in fields:
      assert part['type'] == 'markdown' and part['attributes']['value']
