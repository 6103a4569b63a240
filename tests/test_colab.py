"""Tests of the notebooks."""

import pathlib
import re
import sys
import types

from IPython.core import interactiveshell
from matplotlib import pyplot as plt
import nbformat
import pytest

from tff_bn.imports import dependencies

_FOLDER = pathlib.Path(__file__).parents[1] / 'colab'
_NOTEBOOKS = sorted(_FOLDER.glob('*.ipynb'))

notebooks = pytest.mark.parametrize(
    'path', _NOTEBOOKS, ids=lambda path: path.stem
)


def _read(path):
  return nbformat.read(path, as_version=4)


def _code_cells(path):
  return [cell for cell in _read(path).cells if cell['cell_type'] == 'code']


@notebooks
def test_notebook_is_executed(path):
  nbformat.validate(_read(path))
  cells = _code_cells(path)
  assert [cell['execution_count'] for cell in cells] == list(
      range(1, len(cells) + 1)
  )
  outputs = [output for cell in cells for output in cell['outputs']]
  assert not [o for o in outputs if o['output_type'] == 'error']
  assert any('image/png' in output.get('data', {}) for output in outputs)


@notebooks
def test_notebook_is_small_and_has_no_local_paths(path):
  text = path.read_text(encoding='utf-8')
  assert len(text) < 500_000
  assert not re.search(r'site-packages|/tmp/|/home/|/root/|/work/', text)


@notebooks
def test_links(path):
  prose = [
      c['source'] for c in _read(path).cells if c['cell_type'] == 'markdown'
  ]
  links = re.findall(r'\]\((?!https?:)([^)]+)\)', '\n'.join(prose))
  assert any('../docs/' in link for link in links)
  for link in links:
    assert (_FOLDER / link).is_file(), link


def test_page_lists_all_notebooks():
  page = (_FOLDER / 'README.md').read_text(encoding='utf-8')
  links = re.findall(r'\]\(([^)]+\.ipynb)\)', page)
  assert sorted(links) == [path.name for path in _NOTEBOOKS]


@notebooks
def test_first_cell_installs_the_package_in_colab(path, monkeypatch):
  first, *_ = _code_cells(path)
  installed = []
  shell = interactiveshell.InteractiveShell()
  shell.register_magic_function(installed.append, magic_name='pip')

  shell.run_cell(first['source']).raise_error()
  assert not installed

  colab = types.ModuleType('google.colab')
  monkeypatch.setitem(sys.modules, 'google.colab', colab)
  shell.run_cell(first['source']).raise_error()
  assert installed == [
      "install --quiet '/content/tff_bn[federated]'",
      'install --quiet --no-deps --ignore-requires-python '
      + ' '.join(dependencies.PINNED_PACKAGES),
  ]


@pytest.fixture(name='run')
def fixture_run(capsys):
  """Runs a notebook with some code replaced, and returns what it prints."""

  def run(stem, replaced=()):
    shell = interactiveshell.InteractiveShell()
    for cell in _code_cells(_FOLDER / f'{stem}.ipynb'):
      source = cell['source']
      for old, new in replaced:
        source = source.replace(old, new)
      shell.run_cell(source).raise_error()
    return capsys.readouterr().out

  yield run
  plt.close('all')


def _percent(pattern, text):
  """Returns the percentage behind the only match of a pattern."""
  ((number),) = re.findall(rf'{pattern}[^\n%]*?([\d.]+)%', text)
  return float(number)


@pytest.mark.slow
def test_fed_bn_in_your_keras_model(run):
  printed = run(
      'fed_bn_in_your_keras_model', [('ROUNDS = 30 ', 'ROUNDS = 10 ')]
  )

  assert re.search(r'kernel_0 .* averaged', printed)
  assert re.search(r'moving_mean_\d+ .* stays with the client', printed)
  assert (
      _percent(r'^FedBN: |\nFedBN: ', printed)
      > _percent(r'\nFedAvg: ', printed) + 3
  )


@pytest.mark.slow
def test_hospitals(run, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # The notebook changes it, too.
  printed = run('hospitals', [('ROUNDS = 30', 'ROUNDS = 15')])
  assert _percent('fedbn: ', printed) > _percent('fedavg: ', printed) + 10
  assert re.search(r'type_\d, as it should be', printed)
  before, after = re.findall(r'^\| paris .* ([\d.]+) \|$', printed, re.M)
  assert min(float(before), float(after)) > 70


@pytest.mark.slow
def test_why_batch_norm_breaks(run):
  # Plots are shown by a kernel only.
  printed = run('why_batch_norm_breaks', [('%matplotlib inline', '')])
  alike, one_class = printed.split('One class each')
  (group,) = re.findall(r'group normalization (\[.*\])', printed)
  assert all(float(x) < 1e-5 for x in re.findall(r"'([^']+)'", group))
  assert _percent('TFF: they', alike) < 50 < _percent('again', alike)
  assert _percent('again', one_class) < _percent('again', alike)


@pytest.mark.slow
def test_fedtan_step_by_step(run):
  printed = run('fedtan_step_by_step', [('ROUNDS = 60', 'ROUNDS = 20')])
  errors = dict(
      re.findall(r'(\w[\w, ]+?) +relative error ([\d.e+-]+)', printed)
  )
  assert float(errors['FedTAN']) < 1e-4 < 0.5 < float(errors['FedAvg'])
  assert float(errors['FedTAN, fused']) < 1e-4
  losses = dict(re.findall(r'(\w+) +loss ([\d.]+)', printed))
  assert float(losses['FedTAN']) == pytest.approx(
      float(losses['centralized']), rel=0.02
  )


@pytest.mark.slow
def test_byzantine_clients(run):
  printed = run('byzantine_clients')
  assert (
      _percent(r'statistics, NNM \+ median', printed)
      > _percent('statistics, mean', printed) + 20
  )
  assert (
      _percent(r'noise, NNM \+ median', printed)
      > _percent('noise, mean', printed) + 20
  )
  assert (
      _percent('class each, mean', printed)
      > _percent(r'class each, NNM \+ median', printed) + 20
  )


@pytest.mark.slow
def test_position_aware_neurons(run):
  printed = run('position_aware_neurons')
  changes = [float(x) for x in re.findall(r'change by ([\d.e+-]+)', printed)]
  assert changes[0] < 1e-5 and sorted(changes) == changes
