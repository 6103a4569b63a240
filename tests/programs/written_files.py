"""Writes every file that the programs write besides the training.

For `faults`: the files are there, with other contents, before `write` replaces
them. Nothing is trained or evaluated; the numbers are made up.
"""

import contextlib
import pathlib
from unittest import mock

from matplotlib import figure
import numpy as np
import pandas as pd
import tensorflow_federated as tff

from tff_bn.catalog import tasks
from tff_bn.papers import analysis_report
from tff_bn.programs.results import charts
from tff_bn.programs.results import report
from tff_bn.programs.runs import run_folder
from tff_bn.programs.runs import run_timing
from tff_bn.programs.testing import detailed_evaluation
from tff_bn.programs.testing import evaluation_file
from tff_bn.programs.testing import held_out
from tff_bn.programs.testing import predictions
from tff_bn.programs.testing import source_evaluation
from tff_bn.training import client_metrics
from tff_bn.training import client_seconds


def _evaluation(folder, number):
  evaluation_file.add(
      folder / 'evaluation.csv',
      evaluation_file.Subject('runs/a', number, 'digits', '', 'saved'),
      [report.Evaluation('global', '', 9, dict(accuracy=number / 7, loss=1.0))],
  )


def _sources(folder, number):
  png = f'picture {number}'.encode()
  with mock.patch('vl_convert.vegalite_to_png', return_value=png):
    source_evaluation.write(
        folder,
        ['accuracy'],
        [
            source_evaluation.Result(
                'own', 'a', 'b', 9, {'accuracy': number / 7}
            )
        ],
        'Title',
    )


def _details(folder, number):
  saved = mock.Mock()
  saved.manifest = dict(
      task=tasks.CLASSIFICATION,
      class_names=['a', 'b'],
      num_classes=2,
      num_outputs=2,
  )
  rng = np.random.default_rng(number)
  batch = rng.integers(2, size=40), rng.normal(size=(40, 2))
  with detailed_evaluation.writing(saved, folder) as details:
    details.add('global', '', [batch])


def _predictions(folder, number):
  predictions.write(
      folder / 'predictions.csv',
      [mock.Mock(file=f'{n}.png', row=None) for n in range(3)],
      np.eye(3) * number,
      dict(task=tasks.CLASSIFICATION, class_names=['a', 'b', 'c']),
  )


def _client_metrics(folder, number):
  table = client_metrics.ClientMetrics(
      folder, is_over_time=False, is_due=lambda _: True
  )
  table.add(number, {'ann': dict(num_examples=3, accuracy=number / 7)})


def _client_seconds(folder, number):
  table = client_seconds.ClientSeconds()
  stack = mock.Mock()
  stack.current.client_seconds = [number / 7, 2.0]
  with mock.patch.object(
      tff.framework, 'get_context_stack', return_value=stack
  ):
    table.add_round(['ann', 'bob'])
  table.write(folder)


def _held_out(folder, number):
  rows = pd.DataFrame(
      dict(
          client=['ann'],
          statistics=['averaged'],
          round=[number],
          num_examples=[3],
          accuracy=[0.5],
          loss=[1.0],
      )
  )
  with mock.patch.object(held_out, 'read', return_value=rows):
    held_out.write_comparison(folder, [('fedavg', 0, folder)])


def _analysis(folder, number):
  drawing = figure.Figure(figsize=(1, 1))
  drawing.add_subplot().plot([0, number])
  analysis_report.write(
      folder,
      'messages',
      analysis_report.Report(f'a\n{number}\n', f'| {number} |', {'a': drawing}),
  )


def _charts(folder, number):
  png = f'picture {number}'.encode()
  with mock.patch('vl_convert.vegalite_to_png', return_value=png):
    charts.save(folder / 'charts', {'curves': {}, 'bars': {}})


def _flags(folder, number):
  run_folder.begin(
      folder, 'tff-bn-train', dict(rounds=str(number)), overwrite=False
  )
  run_timing.write(folder, 1.0, number)


_ALL = (
    *(_flags, _evaluation, _sources, _details, _predictions),
    _client_metrics,
    *(_client_seconds, _held_out, _analysis, _charts),
)


def _write(run_dir, number):
  folder = pathlib.Path(run_dir)
  folder.mkdir(parents=True, exist_ok=True)
  with contextlib.redirect_stdout(None):
    for write in _ALL:
      write(folder, number)


def prepare_write(run_dir):
  """Writes old files."""
  _write(run_dir, 1)


def write(run_dir):
  """Replaces all files."""
  _write(run_dir, 2)
