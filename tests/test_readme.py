"""Tests that the README's code and commands work."""

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
_README = (_ROOT / 'README.md').read_text(encoding='utf-8')
_PROGRAMS = {
    program.name: program
    for program in (
        *(module.PROGRAM for module in (train, compare, evaluate)),
        *analyze.ANALYSES.values(),
    )
}


def _blocks(language):
  return re.findall(rf'^```{language}\n(.*?)^```', _README, re.M | re.S)


def test_python_code_runs(tmp_path, monkeypatch, toy):
  toy.dtype = 'float32'
  dataset = toy.dataset(20, 0)
  namespace = dict(
      keras_model_fn=toy.keras_model,
      dataset=dataset,
      client_datasets=[dataset, toy.dataset(30, 1)],
  )
  monkeypatch.chdir(tmp_path)
  context = tff.framework.get_context_stack().current
  try:
    for block in _blocks('python'):
      # pylint: disable-next=exec-used
      exec(f'import keras\n{block}', namespace)
  finally:
    tff.framework.set_default_context(context)

  saved = keras.models.load_model('model.keras')
  x, _ = toy.arrays(5, 2)
  np.testing.assert_allclose(
      saved.predict(x, verbose=0),
      namespace['keras_model'].predict(x, verbose=0),
      rtol=1e-6,
  )
  own_model = namespace['my_model']((8, 8, 1), 10)
  assert own_model.output_shape == (None, 10)
  assert 'moving_mean_4' in namespace['output'].client_states[0]


def _commands():
  for block in _blocks('sh'):
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
  (block,) = (block for block in _blocks('sh') if '[federated]' in block)
  _, command = block.replace('\\\n', ' ').splitlines()
  assert [word for word in shlex.split(command) if '==' in word] == list(
      dependencies.PINNED_PACKAGES
  )


def test_files_that_are_named_are_there():
  paths = re.findall(
      r'(?:programs/presets|scripts)/[\w.]+|requirements[\w-]*\.txt', _README
  )
  assert paths
  for path in paths:
    assert (_ROOT / path).is_file(), path
