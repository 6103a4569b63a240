"""Tests for `tff-bn-analyze fedbn_toy`."""

import csv_rows
import numpy as np
import pytest
import tiny_runs

from tff_bn.papers import analyze
from tff_bn.papers.simulations import fedbn_toy
from tff_bn.programs.runs import run_folder

_FLAGS = ('--num_points=50', '--weight=1.5', '--noise=0.2', '--seed=3')


def test_table_and_figures(tmp_path):
  result = tiny_runs.analyze('fedbn_toy', [], *_FLAGS, folder=tmp_path)
  expected = fedbn_toy.run(
      fedbn_toy.Settings(num_points=50, weight=1.5, noise=0.2, seed=3)
  )
  assert set(result.drawings) == {'local_losses', 'error_surface'}
  numbers = [
      (choice.name, str(client + 1), choice, client)
      for choice in expected.choices
      for client in range(2)
  ]
  assert len(result.rows) == len(numbers)
  for row, (name, number, choice, client) in zip(result.rows, numbers):
    assert (row['model'], row['client']) == (name, number)
    for column, values in (
        ('weight', choice.weights),
        ('scale', choice.scales),
        ('loss', choice.losses),
    ):
      np.testing.assert_allclose(float(row[column]), values[client], rtol=1e-5)
  cells = csv_rows.cells(result.markdown)
  assert cells[0] == ['Model', 'Loss of client 1', 'Loss of client 2']
  assert cells[3][1] == f'{expected.choices[1].losses[0]:.4f}'
  panels = result.drawings['local_losses'].axes
  for axes, curves in zip(panels, (expected.without_bn, expected.with_bn)):
    first, second, average = axes.get_lines()
    np.testing.assert_array_equal(first.get_ydata(), curves.losses[0])
    np.testing.assert_array_equal(second.get_ydata(), curves.losses[1])
    assert average.get_xdata()[0] == curves.best.mean()
  run_folder.remove(tmp_path)
  assert not list(tmp_path.glob('fedbn_toy*'))


def test_more_clients(tmp_path):
  result = tiny_runs.analyze(
      'fedbn_toy', [], '--deviations=1,2,3', *_FLAGS, folder=tmp_path
  )
  assert {row['client'] for row in result.rows} == {'1', '2', '3'}


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        ('--num_points=10001', 'at most 10000.'),
        ('--deviations=1', '--deviations=1.0 must be at least two'),
    ],
)
def test_wrong_flags(argument, message, tmp_path, capsys):
  arguments = ['fedbn_toy', f'--output_dir={tmp_path}', argument]
  assert analyze.run(arguments) == 2
  assert message in capsys.readouterr().err
  assert not list(tmp_path.iterdir())
