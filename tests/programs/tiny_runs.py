"""Tiny runs, the results of analyses, and the same training in Keras."""

import json
import shutil
from typing import NamedTuple

import csv_rows
import keras
import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf

from tff_bn import data as tff_bn_data
from tff_bn.common import files
from tff_bn.papers import analyze as analyze_program
from tff_bn.papers import figures
from tff_bn.papers.run_analyses import analysis_programs
from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.programs.runs import run_folder
from tff_bn.training import manifests
from tff_bn.training import saved_models

# The common flags of all runs.
FLAGS = (
    '--dataset=digits',
    '--model=mlp3',
    '--split=dirichlet',
    '--num_clients=4',
    '--rounds=1',
    '--local_steps=1',
    '--batch_size=8',
    '--client_learning_rate=0.5',
)


class Result(NamedTuple):
  """The files of an analysis.

  Attributes:
    rows: The rows of its CSV file.
    markdown: Its Markdown file.
    drawings: Its figures, by name.
    folder: The folder.
  """

  rows: list[dict[str, str]]
  markdown: str
  drawings: dict
  folder: object


def analyze(name, run, *arguments, folder=None):
  """Analyzes a run, a list of runs, or none, and returns the results."""
  runs = [run] if hasattr(run, 'exists') else run
  drawings = {}
  save = figures.save

  def keep(plots, new_drawings):
    drawings.update(new_drawings)
    save(plots, new_drawings)

  arguments = [name, *arguments]
  if runs:
    arguments.append(f'--run={",".join(map(str, runs))}')
  if folder is not None:
    arguments.append(f'--output_dir={folder}')
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(figures, 'save', keep)
    assert analyze_program.run(arguments) == 0
  if name in run_folder.RUN_ANALYSES:
    assert set(drawings) == set(run_folder.RUN_ANALYSES[name])
  folder = folder or runs[0]
  for drawing in drawings:
    pixels = matplotlib.image.imread(folder / 'plots' / f'{drawing}.png')
    assert min(pixels.shape[:2]) > 250
    assert pixels[..., :3].std() > 0.01  # Something is drawn.
  markdown = (folder / f'{name}.md').read_text(encoding='utf-8')
  return Result(
      csv_rows.read(folder / f'{name}.csv'), markdown, drawings, folder
  )


def with_flags(run, folder, **flags):
  """Copies a run as if it had other flags; None removes a flag."""
  shutil.copytree(run, folder)
  texts = {
      name: str(text)
      for name, text in {**run_folder.read_flags(run), **flags}.items()
      if text is not None
  }
  files.replace(
      folder / 'flags.txt', ''.join(f'--{k}={v}\n' for k, v in texts.items())
  )
  manifest = manifests.read(folder / 'model', saved_models.FORMAT)
  manifests.write(folder / 'model', {**manifest, 'settings': texts})
  return folder


def split(seed=0, num_clients=4):
  """Returns the data of a run."""
  return tff_bn_data.split_dataset(
      tff_bn_data.load_dataset('digits'),
      'dirichlet',
      num_clients,
      seed,
      dirichlet_alpha=0.5,
  )


def load(run, client=None):
  """Loads the global model of a run, or of a client, for scaled samples."""
  model = alone(
      keras.models.load_model(run / 'model/model.keras', compile=False)
  )
  if client is not None:
    manifest = json.loads((run / 'model/manifest.json').read_bytes())
    records = np.load(run / 'model/clients.npy')
    record = records[manifest['clients'].index(client)]
    for name in records.dtype.names:
      # A name ends with the position.
      model.weights[int(name.rpartition('_')[2])].assign(record[name])
  return model


def alone(model):
  """Returns the model that takes scaled samples, given one of a file."""
  return model.layers[-1] if model.name == 'raw_inputs' else model


def analyzed(run):
  """Loads a run as its analyses do."""
  named = analysis_programs.named_runs((str(run),), is_trusted=True)
  (loaded,) = analyzed_run.load(named)
  return loaded


def batches(data, client, *, seed=0, round_num=2, batch_size=8, **length):
  """Returns a client's batches in a round, by default after the run's."""
  return list(
      data.client_dataset(
          [client],
          seed=seed,
          round_num=round_num,
          batch_size=batch_size,
          **(length or dict(local_steps=1)),
      )
  )


def train(model, client_batches, rate, momentum=0.0):
  """Trains a model with SGD and Polyak's momentum."""
  loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  velocity = [0.0] * len(model.trainable_variables)
  for x, y in client_batches:
    with tf.GradientTape() as tape:
      loss = loss_fn(y, model(x, training=True))
    for i, (variable, gradient) in enumerate(
        zip(
            model.trainable_variables,
            tape.gradient(loss, model.trainable_variables),
            strict=True,
        )
    ):
      velocity[i] = momentum * velocity[i] + gradient
      variable.assign_sub(rate * velocity[i])
  return model


def evaluate(model, data):
  """Computes accuracy and loss on the test data in NumPy."""
  logits = model(data.dataset.x_test, training=False).numpy().astype(float)
  logits -= logits.max(axis=1, keepdims=True)
  log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  y = data.dataset.y_test
  return (
      float((logits.argmax(axis=1) == y).mean()),
      float(-log_p[np.arange(len(y)), y].mean()),
  )
