"""Tests of whole runs on Ray."""

import numpy as np
import pytest

from tff_bn.programs import compare
from tff_bn.programs import train

pytestmark = pytest.mark.slow

_FLAGS = (
    '--dataset=digits',
    '--model=small_cnn',
    '--split=dirichlet',
    '--num_clients=5',
    '--clients_per_round=4',
    '--rounds=2',
    '--evaluate_every=1',
    '--local_steps=2',
    '--batch_size=8',
)
_RAY = ('--runtime=ray', '--num_workers=2')


def _files(folder):
  """What has to be the same, as bytes."""
  names = sorted(
      str(path.relative_to(folder)) for path in folder.rglob('metrics.csv')
  )
  assert names
  found = {name: (folder / name).read_bytes() for name in names}
  for path in folder.rglob('weights.npz'):
    with np.load(path) as arrays:
      for name, array in arrays.items():
        found[f'{path.relative_to(folder)}: {name}'] = array.tobytes()
  return found


def test_files_are_those_of_one_process(tmp_path):
  for name, runtime in (('one', ()), ('ray', _RAY)):
    arguments = [
        *_FLAGS,
        *runtime,
        '--algorithms=fedtan,scaffold,centralized',
        '--seeds=0',
        '--attack=label_flip',
        '--num_attackers=1',
        f'--output_dir={tmp_path / name}',
    ]
    assert compare.run(arguments) == 0
  found, expected = _files(tmp_path / 'ray'), _files(tmp_path / 'one')
  assert found == expected
  assert len([name for name in found if name.endswith('.csv')]) == 3


def test_parts_of_users_a_robust_rule_and_local_models(tmp_path, monkeypatch):
  """Workers import the parts by name."""
  (tmp_path / 'my_data.py').write_text(
      'from tff_bn import data\n'
      'from tff_bn.data import splits\n'
      'def digits():\n'
      "  return data.load_dataset('digits')\n"
      'def iid(task):\n'
      '  size = len(task.labels)\n'
      '  return splits.split_iid(size, task.num_clients, task.seed)\n'
  )
  monkeypatch.chdir(tmp_path)
  for name, parts in (
      ('one', ('--dataset=digits', '--split=iid')),
      ('ray', ('--dataset=my_data:digits', '--split=my_data:iid', *_RAY)),
  ):
    arguments = [
        *_FLAGS,
        *parts,
        '--algorithm=silobn',
        '--model_aggregator=median',
        '--clients_per_round=5',
        '--augment=flip_rotate',
        '--pixel_scaling=standardized',
        '--train_share=0.5',
        f'--output_dir={name}',
    ]
    assert train.run(arguments) == 0
  assert _files(tmp_path / 'ray') == _files(tmp_path / 'one')
