"""Tests for `tff-bn-analyze pixel_values`."""

import re

import csv_rows
import numpy as np
import pytest
import tiny_runs

from tff_bn import data
from tff_bn.papers import analyze
from tff_bn.papers.simulations import pixel_values
from tff_bn.programs.cli import command_line
from tff_bn.programs.runs import run_folder


def test_shares_and_moments_of_each_domain(tmp_path):
  result = tiny_runs.analyze(
      'pixel_values', [], '--num_bins=4', '--num_pictures=3', folder=tmp_path
  )

  dataset = data.load_dataset('digits_domains')
  low, high = dataset.x_train.min(), dataset.x_train.max()
  assert set(result.drawings) == {'pixel_histograms', 'pictures'}
  assert len(result.rows) == 4 * len(dataset.domain_names)
  cells = csv_rows.cells(result.markdown)
  for number, name in enumerate(dataset.domain_names):
    values = dataset.x_train[dataset.domain_train == number].astype(float)
    rows = [row for row in result.rows if row['domain'] == name]
    # The interval of a value, counted without np.histogram; the last one has
    # the largest value, too.
    interval = np.minimum((values - low) / (high - low) * 4 // 1, 3)
    np.testing.assert_allclose(
        [float(row['share']) for row in rows],
        [np.mean(interval == k) for k in range(4)],
        atol=1e-3,
    )
    assert sum(float(row['share']) for row in rows) == pytest.approx(1)
    (cell,) = [cell for cell in cells if cell[0] == name]
    assert cell[1:] == [
        str(len(values)),
        f'{values.mean():.3f}',
        f'{values.std():.3f}',
    ]
  run_folder.remove(tmp_path)
  assert not list(tmp_path.glob('pixel_values*'))


def test_pictures_are_of_different_classes():
  labels = np.array([2, 2, 0, 1, 0, 2])

  order = pixel_values._different(labels)

  assert labels[order].tolist() == [0, 1, 2, 0, 2, 2]
  assert order.tolist() == [2, 3, 0, 4, 1, 5]


@pytest.mark.parametrize(
    'dataset, message',
    [
        ('digits', '--dataset=digits has no domains; use one that has'),
        ('sensor_windows', 'has samples of shape .*; use a dataset of images'),
    ],
)
def test_other_data_is_an_error(tmp_path, capsys, dataset, message):
  arguments = [f'--dataset={dataset}', f'--output_dir={tmp_path / "a"}']

  code = analyze.run(['pixel_values', *arguments])

  assert code == command_line.USAGE_ERROR
  assert re.search(message, capsys.readouterr().err)
