"""Tests that run HBN, which replaces the model's layers."""

import csv_rows
import numpy as np
import pytest

from tff_bn.layers import HybridBatchNormalization
from tff_bn.layers import batch_norm_layers
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import jobs
from tff_bn.programs.runs import run_building

_SMALL = (
    '--model=mlp3',
    '--num_clients=4',
    '--classes_per_client=3',
    '--local_steps=2',
    '--batch_size=8',
)


def _settings(*arguments):
  flags = command_line.parse(train.define_flags, [*_SMALL, *arguments])
  settings_lib.check(flags)
  return settings_lib.resolve(flags, flags.algorithm, 0)


def test_model_has_hybrid_layers_and_the_same_weights(tmp_path, monkeypatch):
  """Runs of one comparison share the data, but not the model."""
  monkeypatch.setattr(run_building, 'build_process', lambda *_: None)
  builder = jobs.Builder()
  built = [
      builder.build(_settings(f'--algorithm={name}'), tmp_path)
      for name in ('fedavg', 'hbn', 'fbn')
  ]
  fedavg, hbn, fbn = (job.model for job in built)
  assert fbn is fedavg
  assert built[1].data is built[0].data
  layers = batch_norm_layers(hbn.keras_model)
  assert {type(layer) for layer in layers} == {HybridBatchNormalization}
  weights = [
      {
          v.path: v.numpy()
          for v in job.model.keras_model.weights
          if v.name != 'mixing'
      }
      for job in built[:2]
  ]
  assert weights[0].keys() == weights[1].keys()
  for path, value in weights[0].items():
    np.testing.assert_array_equal(weights[1][path], value)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            ['--normalization=group2'],
            '^hbn is impossible with --model=mlp3 and'
            ' --normalization=group2: The model .* has no batch normalization',
        ),
        (
            ['--algorithm=hbn+moon', '--normalization=none'],
            '^hbn.moon is impossible with .*--normalization=none',
        ),
    ],
)
def test_models_without_batch_normalization(tmp_path, arguments, message):
  with pytest.raises(ValueError, match=message):
    jobs.Builder().build(_settings('--algorithm=hbn', *arguments), tmp_path)


def test_run_and_evaluation(tmp_path):
  arguments = [
      *_SMALL,
      '--algorithm=hbn',
      '--hbn_statistics_rate=0.5',
      '--rounds=3',
      '--evaluate_every=2',
      f'--output_dir={tmp_path}',
  ]
  assert train.run(arguments) == command_line.OK
  rows = csv_rows.read(tmp_path / 'metrics.csv')
  assert [int(row['round']) for row in rows] == [0, 2, 3]
  # The evaluation is not counted.
  assert [int(row['exchanges']) for row in rows] == [0, 2, 3]
  # As in fedavg, 2350 numbers are sent. The mixture's shares are not.
  megabytes = 2350 * 4 * (1 + 4) * 3 / 2**20
  assert float(rows[-1]['megabytes']) == pytest.approx(megabytes)
  assert not (tmp_path / 'model' / 'clients.npy').exists()
  # The saved model has the statistics of the last evaluation.
  assert evaluate.run([f'--run={tmp_path}']) == command_line.OK
  result, *_ = csv_rows.read(tmp_path / 'evaluation.csv')
  assert float(result['loss']) == pytest.approx(
      float(rows[-1]['test_loss']), rel=1e-4
  )
