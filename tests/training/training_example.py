"""A small real run on digits, in TFF's native runtime.

Run as a program, this trains with the algorithm of its second argument in the
folder of its first; the third is the share of personal position encodings.
"""

import os
import subprocess
import sys

import keras
import psutil
import tensorflow_federated as tff

import tff_bn
from tff_bn import algorithms
from tff_bn import runtime
from tff_bn import training
from tff_bn.data import load_dataset
from tff_bn.data import split_dataset
from tff_bn.keras_model.batch_norm_model import BatchNormModel

BUILDERS = dict(
    fed_avg=algorithms.build_fed_avg,
    fed_bn=algorithms.build_fed_bn,
    scaffold=algorithms.build_scaffold,
)
CONFIG = training.TrainingConfig(
    rounds=8,
    clients_per_round=2,
    batch_size=8,
    local_steps=2,
    seed=3,
    evaluate_every=3,
    checkpoint_every=2,
)


def build_data():
  return split_dataset(load_dataset('digits'), 'iid', 4, 0)


def build_model(data, personal_share=0.0):
  initializer = keras.initializers.GlorotUniform(seed=0)

  def keras_model_fn():
    model = keras.Sequential(
        [
            keras.layers.Input(data.element_spec[0].shape[1:]),
            keras.layers.Flatten(),
            keras.layers.Dense(8, kernel_initializer=initializer),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Dense(10, kernel_initializer=initializer),
        ]
    )
    if personal_share:
      model = tff_bn.add_position_encodings(
          model, 'add', 0.5, personal_share=personal_share
      )
    return model

  return BatchNormModel(
      keras_model_fn,
      input_spec=data.element_spec,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [keras.metrics.SparseCategoricalAccuracy('accuracy')],
  )


def build_process(algorithm, model):
  # SCAFFOLD refuses momentum.
  momentum = None if algorithm == 'scaffold' else 0.9
  return BUILDERS[algorithm](
      model, tff.learning.optimizers.build_sgdm(0.1, momentum)
  )


def train_and_kill(run_dir, *arguments):
  """Trains in a process that is killed in round 3; returns its children."""
  process = subprocess.Popen(
      [sys.executable, __file__, os.fspath(run_dir), *arguments],
      stderr=subprocess.PIPE,
      text=True,
  )
  try:
    for line in process.stderr:
      if line.startswith('round 3/'):
        break
    children = psutil.Process(process.pid).children()
    return {child.name(): child for child in children}
  finally:
    process.kill()
    process.wait()
    process.stderr.close()


def main(run_dir, algorithm, personal_share='0'):
  data = build_data()
  model = build_model(data, float(personal_share))
  process = build_process(algorithm, model)
  with runtime.native_runtime():
    training.train(process, model, data, CONFIG, run_dir)


if __name__ == '__main__':
  main(*sys.argv[1:])
