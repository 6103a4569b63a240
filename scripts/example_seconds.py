"""Measures the seconds of training with one example, for docs/experiments.md.

It writes benchmarks/results/example_seconds.csv: the CPU time of a step of
plain SGD with one core, for each model and shape of the experiments.
"""

import os
import time

os.environ['TF_NUM_INTRAOP_THREADS'] = '1'
os.environ['TF_NUM_INTEROP_THREADS'] = '1'

import experiments_page
import keras
import numpy as np
import tensorflow as tf

from tff_bn import models
from tff_bn.common import files
from tff_bn.imports import dependencies
from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_plan
from tff_bn.programs.results import tables

_BATCH_SIZE = 8
_STEPS = 3


def _machine() -> str:
  with open('/proc/cpuinfo', encoding='utf-8') as file:
    for line in file:
      if line.startswith('model name'):
        return line.partition(':')[2].strip()
  return 'unknown'


def _measure(model_name: str, shape: str, num_classes: int) -> float:
  """Returns the seconds for one example."""
  sides = tuple(int(side) for side in shape.split('x'))
  model = models.build_model_fn(model_name, sides, num_classes)()
  model.compile(
      keras.optimizers.SGD(0.01),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )
  x = np.random.default_rng(0).normal(size=(_BATCH_SIZE, *sides))
  y = np.zeros(_BATCH_SIZE, np.int32)
  model.train_on_batch(x, y)
  start = time.process_time()
  for _ in range(_STEPS):
    model.train_on_batch(x, y)
  return (time.process_time() - start) / _STEPS / _BATCH_SIZE


def main() -> None:
  """Measures all models."""
  dependencies.require_tff()
  tf.config.set_visible_devices([], 'GPU')
  wanted = {}
  for name in experiment_files.names():
    plan = experiment_plan.check_all(name)['paper']
    for run in plan.comparison.trained() if plan.comparison else ():
      try:
        wanted[experiments_page.model_and_shape(name, run.settings)] = None
      except ValueError as error:
        print(error)
  rows = []
  for model_name, shape, num_classes in sorted(wanted):
    seconds = _measure(model_name, shape, num_classes)
    print(model_name, shape, f'{seconds:.5f}', flush=True)
    rows.append([model_name, shape, num_classes, seconds, _machine()])
    keras.backend.clear_session()
  columns = ['model', 'shape', 'classes', 'seconds_per_example', 'machine']
  files.replace(experiments_page.SECONDS, tables.csv_text(columns, rows))


if __name__ == '__main__':
  main()
