"""Tests that code and commands in the README and in docs/ work."""

import itertools
import pathlib
import re
import shlex

import keras
import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn.imports import dependencies
from tff_bn.programs import analyze
from tff_bn.programs import cli
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train

_ROOT = pathlib.Path(__file__).parents[1]
_PAGES = {
    path.name: path.read_text(encoding='utf-8')
    for path in (_ROOT / 'README.md', *sorted((_ROOT / 'docs').glob('*.md')))
}
_PROGRAMS = {
    program.name: program
    for program in (
        *(module.PROGRAM for module in (train, compare, evaluate)),
        *analyze.ANALYSES.values(),
    )
}


def _blocks(page, language):
  return re.findall(rf'^```{language}\n(.*?)^```', _PAGES[page], re.M | re.S)


@pytest.mark.parametrize(
    'page',
    [
        page
        for page in _PAGES
        # The hooks need further packages; they have their own test.
        if page != 'logging.md' and _blocks(page, 'python')
    ],
)
def test_python_code_runs(page, tmp_path, monkeypatch, toy):
  toy.dtype = 'float32'
  dataset = toy.dataset(20, 0)
  namespace = dict(
      keras_model_fn=toy.keras_model,
      dataset=dataset,
      client_datasets=[dataset, toy.dataset(30, 1)],
  )
  if page == 'python.md':
    namespace = {}  # It is complete.
  monkeypatch.chdir(tmp_path)
  context = tff.framework.get_context_stack().current
  try:
    for block in _blocks(page, 'python'):
      imports = '' if page == 'python.md' else 'import keras\n'
      exec(imports + block, namespace)
  finally:
    tff.framework.set_default_context(context)

  if 'keras_model' in namespace:
    saved = keras.models.load_model('model.keras')
    x = np.random.default_rng(0).normal(size=(5, *saved.input_shape[1:]))
    np.testing.assert_allclose(
        saved.predict(x, verbose=0),
        namespace['keras_model'].predict(x, verbose=0),
        rtol=1e-6,
    )
  if page == 'data_and_models.md':
    assert namespace['my_model']((8, 8, 1), 10).output_shape == (None, 10)
  if page == 'python.md':
    assert 'moving_mean_4' in namespace['output'].client_states[0]


def _commands():
  for block in itertools.chain(*(_blocks(page, 'sh') for page in _PAGES)):
    for line in block.replace('\\\n', ' ').splitlines():
      words = shlex.split(line, comments=True)
      if words and words[0] == analyze.NAME:
        yield [' '.join(words[:2]), *words[2:]]
      elif words and words[0] in _PROGRAMS:
        yield words


@pytest.mark.parametrize('words', list(_commands()), ids=' '.join)
def test_commands_have_the_programs_flags(words):
  program = _PROGRAMS[words[0]]
  cli.parse(program.define_flags, words[1:])


def test_pinned_packages_are_those_of_the_package():
  (block,) = (b for b in _blocks('installing.md', 'sh') if '[federated]' in b)
  _, command = block.replace('\\\n', ' ').splitlines()
  assert [word for word in shlex.split(command) if '==' in word] == list(
      dependencies.PINNED_PACKAGES
  )


def test_files_that_are_named_are_there():
  for page, text in _PAGES.items():
    for path in re.findall(
        r'(?:programs/presets|scripts|tff_bn)/[\w./]+\.\w+|'
        r'requirements[\w-]*\.txt|benchmarks/\w+\.py',
        text,
    ):
      assert (_ROOT / path).is_file(), (page, path)


def test_links_lead_somewhere():
  for page, text in _PAGES.items():
    folder = _ROOT if page == 'README.md' else _ROOT / 'docs'
    links = re.findall(r'\]\(([^)#]+?)(#[\w-]+)?\)', text)
    assert links or page != 'README.md'
    for link, anchor in links:
      if '://' in link:
        continue
      assert (folder / link).exists(), (page, link)
      assert not anchor, 'Pages are short: link to the whole page.'


def test_readme_is_short():
  assert len(_PAGES['README.md'].splitlines()) <= 200


def test_tables_have_a_header():
  # GitHub shows a table without one as text.
  for page, text in _PAGES.items():
    text = re.sub('^```.*?^```', '', text, flags=re.M | re.S)
    for table in re.findall(r'(?:^\|.*\n)+', text, re.M):
      rows = table.splitlines()
      assert re.fullmatch(r'[| :-]+', rows[1]), (page, rows[0])
      assert len({row.count('|') for row in rows}) == 1, (page, rows[0])
