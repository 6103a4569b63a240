"""Tests of predictions for files, without a run."""

import types

import csv_rows
import numpy as np
from PIL import Image
import pytest

from tff_bn.common import memory
from tff_bn.programs.testing import predictions


def _rows(tmp_path, manifest, outputs):
  """The rows of the table, and the printed texts."""
  np.save(tmp_path / 'x.npy', np.zeros((len(outputs), 2), np.float32))
  samples = predictions.read(
      [str(tmp_path / 'x.npy')],
      types.SimpleNamespace(
          manifest=dict(manifest, input_shape=[2], divisor=1)
      ),
      None,
  )
  path = tmp_path / 'predictions.csv'
  texts = predictions.write(path, samples, np.float32(outputs), manifest)
  rows = csv_rows.read(path)
  assert [row['row'] for row in rows] == [
      str(n + 1) for n in range(len(outputs))
  ]
  assert texts == [row[list(row)[2]] for row in rows]
  return rows


def _check_probabilities(rows, names, logits):
  np.testing.assert_allclose(
      [[float(row[f'probability of {n}']) for n in names] for row in rows],
      1 / (1 + np.exp(-np.array(logits))),
      rtol=1e-5,
  )


@pytest.mark.parametrize('names', [['no', 'yes'], []])
def test_binary(tmp_path, names):
  manifest = dict(task='binary', class_names=names)
  rows = _rows(tmp_path, manifest, [[2.0], [-1.0], [0.0]])
  no, yes = names or ('0', '1')
  assert [row['predicted'] for row in rows] == [yes, no, no]
  _check_probabilities(rows, (no, yes), [[-2, 2], [1, -1], [0, 0]])


def test_multilabel(tmp_path):
  manifest = dict(task='multilabel', class_names=['a', 'b', 'c'])
  logits = [[1.0, -1.0, 3.0], [-2.0, -1.0, -3.0]]
  rows = _rows(tmp_path, manifest, logits)
  assert [row['predicted'] for row in rows] == ['a c', '']
  _check_probabilities(rows, 'abc', logits)


@pytest.mark.parametrize(
    ('outputs', 'titles'),
    [
        ([[0.5], [-2.0]], ['predicted']),
        ([[0.5, 1.5], [2.0, -2.0]], ['predicted_1', 'predicted_2']),
    ],
)
def test_regression(tmp_path, outputs, titles):
  manifest = dict(task='regression', class_names=[])
  rows = _rows(tmp_path, manifest, outputs)
  assert list(rows[0]) == ['file', 'row', *titles]
  assert [[float(row[title]) for title in titles] for row in rows] == outputs


def test_segmentation_is_refused():
  with pytest.raises(ValueError, match='--run=a: its task is segmentation'):
    predictions.check_task('segmentation', 'a')


def test_a_picture_that_is_larger_than_the_memory(tmp_path, monkeypatch):
  path = str(tmp_path / 'a.png')
  Image.fromarray(np.zeros((4, 5, 3), np.uint8)).save(path)
  saved = types.SimpleNamespace(
      manifest=dict(input_shape=[4, 5, 3], divisor=255)
  )
  assert len(predictions.read([path], saved, None)) == 1
  monkeypatch.setattr(memory, 'total_bytes', lambda: 59)
  with pytest.raises(ValueError, match='the pixels take 0 GB of memory'):
    predictions.read([path], saved, None)
