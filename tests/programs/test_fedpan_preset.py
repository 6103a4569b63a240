"""Tests what position encodings do to weight divergence on digits."""

import pathlib

import csv_rows
import pytest

from tff_bn.papers import analyze
from tff_bn.programs import compare
from tff_bn.programs import train

_PRESET = pathlib.Path(train.__file__).parent / 'presets/fedpan_digits.flags'


@pytest.mark.slow
def test_strong_encodings_keep_hidden_layers_together(tmp_path):
  """20 clients, Dirichlet 0.1, 5 local epochs: in the first rounds.

  The paper's multiplicative encodings with amplitude 0.1 do less to weight
  divergence than the seed does, so they are not tested.
  """
  folders = {name: tmp_path / name for name in ('off', 'on')}
  for name, pan in (
      ('off', ['--pan=off']),
      ('on', ['--pan=add', '--pan_amplitude=1']),
  ):
    arguments = [
        f'--flagfile={_PRESET}',
        '--algorithms=fedavg',
        '--seeds=0',
        '--rounds=1',
        *pan,
        f'--output_dir={folders[name]}',
    ]
    assert compare.run(arguments) == 0
  arguments = [
      'weight_divergence',
      f'--run={folders["off"]},{folders["on"]}',
      '--num_rounds=5',
      f'--output_dir={tmp_path / "result"}',
  ]
  assert analyze.run(arguments) == 0
  found = {
      (row['run'], row['layer']): float(row['divergence'])
      for row in csv_rows.read(tmp_path / 'result' / 'weight_divergence.csv')
  }
  for layer in ('hidden', 'norm'):
    assert found['on', layer] < 0.99 * found['off', layer]
