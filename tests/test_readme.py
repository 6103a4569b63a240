"""Tests that code and commands in the README and in docs/ work."""

import itertools
import pathlib
import re
import shlex
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn.catalog import algorithms as catalog
from tff_bn.imports import dependencies
from tff_bn.papers import analyze
from tff_bn.papers import compare_with_experiments
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line

_ROOT = pathlib.Path(__file__).parents[1]
_PATHS = {
    path.name: path
    for path in (
        _ROOT / 'README.md',
        _ROOT / 'CONTRIBUTING.md',
        *sorted((_ROOT / 'docs').rglob('*.md')),
    )
}
_PAGES = {
    page: path.read_text(encoding='utf-8') for page, path in _PATHS.items()
}
# Their code has all that it needs.
_COMPLETE = ('README.md', 'python.md', 'training_in_python.md')
_PROGRAMS = {
    program.name: program
    for program in (
        *(train.PROGRAM, compare_with_experiments.PROGRAM, evaluate.PROGRAM),
        *analyze.ANALYSES.values(),
    )
}


# Pages of algorithms, which are alike, and pages that train several models.
_SLOW = frozenset(
    page
    for page, path in _PATHS.items()
    if path.parent.name == 'algorithms'
    and page not in ('fedavg.md', 'fedbn.md', 'fedtan.md', 'fbn.md')
) | {'python.md', 'training_in_python.md'}


def _blocks(page, language):
  return re.findall(rf'^```{language}\n(.*?)^```', _PAGES[page], re.M | re.S)


@pytest.mark.parametrize(
    'page',
    [
        pytest.param(page, marks=pytest.mark.slow) if page in _SLOW else page
        for page in _PAGES
        # CONTRIBUTING has parts of files, see tests/programs/test_adding.py;
        # test_extensions_work runs the code of extending.md. The hooks of
        # logging.md need further packages, and have their own test, as has
        # hospitals.md.
        if _blocks(page, 'python')
        and page
        not in (
            *('CONTRIBUTING.md', 'extending.md', 'logging.md'),
            'hospitals.md',
        )
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
  if page in _COMPLETE:
    namespace.clear()
  elif _PATHS[page].parent.name == 'algorithms':
    namespace['model'] = toy.model()
  monkeypatch.chdir(tmp_path)
  context = tff.framework.get_context_stack().current
  try:
    for block in _blocks(page, 'python'):
      imports = '' if page in _COMPLETE else 'import keras\n'
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
  if page == 'training_in_python.md':
    _check_training_in_python(namespace)


def _check_training_in_python(namespace):
  model, federated = (namespace[name] for name in ('model', 'federated'))
  x, y = federated.dataset.x_test, federated.dataset.y_test
  results = namespace['evaluate'](
      *namespace['best'], namespace['federated'].client_test_dataset
  )
  assert list(results) == namespace['names']
  # Keras's own `evaluate` is the truth.
  for name, weights in namespace['best_weights'].items():
    keras_model = model.to_keras(weights)
    keras_model.compile(loss=model.loss_fn(), metrics=model.metrics_fn())
    indices = federated.test_indices[name]
    np.testing.assert_allclose(
        [results[name]['loss'], results[name]['accuracy']],
        keras_model.evaluate(x[indices], y[indices], verbose=0),
        rtol=1e-5,
    )
    assert results[name]['accuracy'] > 0.85
  saved = keras.models.load_model('north.keras')
  np.testing.assert_allclose(
      saved(x), model.to_keras(namespace['best_weights']['north'])(x), rtol=1e-5
  )
  # It stops at about round 43.
  assert namespace['best_round'] == namespace['round_num'] - 5 < 90
  evaluate = namespace['evaluator'].evaluate
  accuracies = [
      evaluate(namespace[name], namespace['new_data'])['accuracy']
      for name in ('merged', 'adapted')
  ]
  # The initial weights are random: about 0.5 and 0.92.
  assert accuracies[0] < 0.7 < 0.8 < accuracies[1]
  for a, b in zip(
      model.from_model_weights(namespace['adapted']),
      namespace['continued'].to_keras().get_weights(),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)


def test_rule_on_a_matrix(capsys):
  (code,) = _blocks('robustness.md', 'python')
  exec(code, {})
  printed = capsys.readouterr().out.strip()
  assert code.splitlines()[-1].endswith(f'# {printed}')


@pytest.mark.slow
def test_extensions_work(monkeypatch, toy, in_process_runtime, tmp_path):
  toy.dtype = 'float32'
  namespace = dict(model=toy.model(), dataset=toy.dataset(20, 0))
  (tmp_path / 'my_rules.py').write_text(_blocks('extending.md', 'python')[0])
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  for block in _blocks('extending.md', 'python'):
    if 'def by_parity' in block:
      (tmp_path / 'my_splits.py').write_text(block)
    assert len(block.splitlines()) < 40
    exec(block, namespace)
  datasets = [toy.dataset(20, 0), toy.dataset(20, 1), toy.dataset(20, 2)]

  rule = namespace['Midrange'](num_byzantine=0)
  result, _ = rule.aggregate(
      tf.constant([[0.0, 5.0], [1.0, 1.0], [8.0, 2.0]]), tf.constant(0), ()
  )
  np.testing.assert_allclose(result, [4, 3])
  process = namespace['robust_process']
  process.next(process.initialize(), datasets)

  process = namespace['shift_process']
  state = process.initialize()
  client = process.initialize_client(state)
  assert list(client) == ['shift_3']
  output = process.next(state, [client] * 3, datasets)
  shifts = [after['shift_3'] for after in output.client_states]
  assert not np.allclose(shifts[0], shifts[1])

  digits = namespace['digits']
  labels = [
      digits.dataset.y_train[indices] % 2
      for indices in digits.train_indices.values()
  ]
  assert not labels[0].any() and labels[-1].all()
  assert sum(map(len, labels)) == len(digits.dataset.y_train)

  # A strong correction keeps the model where it was.
  distances = []
  for process in (namespace['drift_process'], _corrected(namespace, 0.5)):
    state = process.initialize()
    before = process.get_model_weights(state).trainable
    after = process.get_model_weights(
        process.next(state, datasets).state
    ).trainable
    distances.append(sum(np.abs(a - b).sum() for a, b in zip(after, before)))
  assert distances[1] < 0.9 * distances[0]

  # All parts take part in a comparison.
  module = types.SimpleNamespace(**namespace)
  monkeypatch.setitem(sys.modules, 'my_algorithms', module)
  arguments = [
      '--algorithms=my_algorithms:local_shift+my_algorithms:absolute',
      '--split=my_splits:by_parity',
      '--num_clients=3',
      '--model_aggregator=my_rules:Midrange',
      '--model=mlp3',
      '--rounds=1',
      '--seeds=0',
      f'--output_dir={tmp_path / "mine"}',
  ]
  assert compare_with_experiments.run(arguments) == command_line.OK
  table = (tmp_path / 'mine/results.md').read_text(encoding='utf-8')
  assert '| local_shift+absolute' in table
  assert 'local_shift+absolute: BN shifts stay with the client; a corr' in table


def _corrected(namespace, strength):
  """Builds the process of extending.md with another strength."""
  return algorithms.build_fed_avg(
      namespace['model'],
      tff.learning.optimizers.build_sgdm(0.1),
      local_steps=5,
      drift_correction=namespace['AbsoluteDistance'](strength),
  )


def test_every_algorithm_has_a_page():
  pages = {path.stem: path for path in (_ROOT / 'docs/algorithms').glob('*.md')}
  overview = _PAGES['algorithms.md']
  described = set(re.findall(r'^# |`\+?([a-z_]+)`', overview, re.M))
  for name in (*catalog.ALGORITHMS, *catalog.CORRECTIONS):
    assert name in described, name
    (link,) = set(
        re.findall(
            rf'\[[^\]]*`\+?{name}`[^\]]*\]\(algorithms/(\w+)\.md\)', overview
        )
    )
    assert (
        f'`{name}`' in _PAGES[f'{link}.md']
        or f'`+{name}`' in _PAGES[f'{link}.md']
    )
  linked = set(re.findall(r'\(algorithms/(\w+)\.md\)', overview))
  assert linked == set(pages)


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
  command_line.parse(program.define_flags, words[1:])


def test_pinned_packages_are_those_of_the_package():
  (block,) = (b for b in _blocks('installing.md', 'sh') if '[federated]' in b)
  _, command = block.replace('\\\n', ' ').splitlines()
  assert [word for word in shlex.split(command) if '==' in word] == list(
      dependencies.PINNED_PACKAGES
  )


def test_files_that_are_named_are_there():
  for page, text in _PAGES.items():
    if page == 'CONTRIBUTING.md':
      continue  # It names files that a contributor adds.
    for path in re.findall(
        r'(?:programs/presets|scripts|tff_bn)/[\w./]+\.\w+|'
        r'requirements[\w-]*\.txt|benchmarks/\w+\.py',
        text,
    ):
      assert (_ROOT / path).is_file(), (page, path)


def test_links_lead_somewhere():
  for page, text in _PAGES.items():
    folder = _PATHS[page].parent
    links = re.findall(r'\]\(([^)#]+?)(#[\w-]+)?\)', text)
    assert links or page != 'README.md'
    for link, anchor in links:
      if '://' in link:
        continue
      assert (folder / link).exists(), (page, link)
      if page != 'CONTRIBUTING.md':
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
