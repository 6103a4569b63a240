"""Tests that the notebooks run."""

import pathlib
import re
import sys
import types

from IPython.core import interactiveshell
import nbformat
import pytest

from tff_bn.imports import dependencies

_NOTEBOOKS = sorted(
    (pathlib.Path(__file__).parents[1] / 'colab').glob('*.ipynb')
)


@pytest.mark.parametrize('path', _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  assert not any(cell.get('outputs') for cell in notebook.cells)


@pytest.mark.parametrize('path', _NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_installs_the_package_in_colab(path, monkeypatch):
  first = next(
      cell
      for cell in nbformat.read(path, as_version=4).cells
      if cell['cell_type'] == 'code'
  )
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


def test_fedavg_and_fedbn_on_digits(capsys):
  (path,) = (p for p in _NOTEBOOKS if p.stem == 'fedavg_and_fedbn_on_digits')
  shell = interactiveshell.InteractiveShell()
  for cell in nbformat.read(path, as_version=4).cells:
    if cell['cell_type'] == 'code':
      source = cell['source'].replace('ROUNDS = 20 ', 'ROUNDS = 10 ')
      shell.run_cell(source).raise_error()

  accuracy = {
      name: float(percent)
      for name, percent in re.findall(
          r'(FedAvg|FedBN): ([\d.]+)% after 10 rounds', capsys.readouterr().out
      )
  }
  assert accuracy['FedBN'] > accuracy['FedAvg'] + 3
