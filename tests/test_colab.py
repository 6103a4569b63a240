"""Tests that the notebooks run."""

import pathlib
import re
import sys
import types

from IPython.core import interactiveshell
import nbclient
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


def test_fedavg_and_fedbn_on_digits(tmp_path):
  (path,) = (p for p in _NOTEBOOKS if p.stem == 'fedavg_and_fedbn_on_digits')
  notebook = nbformat.read(path, as_version=4)
  client = nbclient.NotebookClient(
      notebook,
      timeout=300,
      kernel_name='python3',
      resources={'metadata': {'path': str(tmp_path)}},
  )
  client.execute()

  text = '\n'.join(
      output.get('text', '')
      for cell in notebook.cells
      for output in cell.get('outputs', ())
  )
  accuracy = {
      name: float(percent)
      for name, percent in re.findall(r'(FedAvg|FedBN): ([\d.]+)%', text)
  }
  # After 20 rounds some 72 and 87 %.
  assert accuracy['FedBN'] > accuracy['FedAvg'] + 5
