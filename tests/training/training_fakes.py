"""Small stand-ins for a process and its data, and a program that trains them.

The processes compute in NumPy, so that no TFF runtime is needed. Run as a
program, this trains in the folder of its first argument.
"""

import collections
import functools
import io
import json
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn import training
from tff_bn.common import dataset_options
from tff_bn.keras_model import raw_inputs
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.processes.stateful_process import StatefulProcessOutput

_FEATURES = 3
CLIENT_IDS = ('anna', 'bert/..', 'ça', 'dora')
CONFIG = training.TrainingConfig(
    rounds=7,
    batch_size=4,
    local_steps=2,
    clients_per_round=2,
    evaluate_every=3,
    checkpoint_every=2,
)
# Parametrizes a test with processes without and with client states.
both_kinds = pytest.mark.parametrize(
    'stateful', [False, True], ids=['stateless', 'stateful']
)


def _accuracy():
  return [keras.metrics.SparseCategoricalAccuracy('accuracy')]


def build_model(metrics_fn=_accuracy, seed=0):
  # The same initial weights in every process of the operating system.
  initializer = keras.initializers.GlorotUniform(seed)
  return BatchNormModel(
      lambda: keras.Sequential(
          [
              keras.layers.Input([_FEATURES]),
              keras.layers.Dense(4, kernel_initializer=initializer),
              keras.layers.BatchNormalization(),
              keras.layers.Dense(2, kernel_initializer=initializer),
          ]
      ),
      input_spec=(
          tf.TensorSpec([None, _FEATURES], tf.float32),
          tf.TensorSpec([None], tf.int32),
      ),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=metrics_fn,
  )


@functools.cache
def _dataset(seed, num_examples, batch_size):
  rng = np.random.default_rng(seed)
  x = rng.normal(1.0, 2.0, [num_examples, _FEATURES]).astype(np.float32)
  y = rng.integers(0, 2, [num_examples]).astype(np.int32)
  return dataset_options.without_optimizer(
      tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
  )


class FakeData:
  """Four clients; the last one has no test data."""

  client_ids = CLIENT_IDS

  def __init__(self):
    self.calls = []

  def fingerprint(self):
    return 'fake'

  def client_number(self, client_id):
    return self.client_ids.index(client_id)

  def _batches(self, seed, num_examples, batch_size):
    return _dataset(tuple(seed), num_examples, batch_size)

  def client_dataset(
      self,
      client_ids,
      *,
      seed,
      round_num,
      batch_size,
      local_steps=None,
      local_epochs=None,
      augment=True,
  ):
    self.calls.append(
        dict(
            client_ids=tuple(client_ids),
            seed=seed,
            round_num=round_num,
            batch_size=batch_size,
            local_steps=local_steps,
            local_epochs=local_epochs,
            augment=augment,
        )
    )
    numbers = [CLIENT_IDS.index(client_id) for client_id in client_ids]
    return self._batches(
        [seed, round_num, *numbers], (local_steps or 1) * batch_size, batch_size
    )

  def test_dataset(self, batch_size):
    return self._batches([99], 7, batch_size)

  def client_test_dataset(self, client_id, batch_size):
    number = CLIENT_IDS.index(client_id)
    return self._batches([98, number], (5, 9, 6, 0)[number], batch_size)


class ValidatedData(FakeData):
  """The same clients with validation data, except for the last one."""

  validation_indices = {c: [0] for c in CLIENT_IDS[:-1]}

  def client_validation_dataset(self, client_id, batch_size):
    number = CLIENT_IDS.index(client_id)
    return self._batches([97, number], (6, 3, 8, 0)[number], batch_size)


def _mean_of(dataset):
  xs = [x.numpy() for x, _ in dataset]
  return np.concatenate(xs).mean(axis=0).astype(np.float32)


def _metrics(num_clients, total):
  return collections.OrderedDict(
      client_work=collections.OrderedDict(
          train=collections.OrderedDict(
              loss=np.float32(total),
              accuracy=np.float32(0.1),
              num_examples=np.int64(5),
          ),
          num_clients=np.int32(num_clients),
          num_dropped_clients=np.int32(total > 0),
      ),
      aggregator=(),
      finalizer=(),
  )


class FakeProcess:
  """A process whose clients have no states."""

  def __init__(self, model, fail_in_round=None):
    self._model = model
    self._fail_in_round = fail_in_round
    self.rounds = []

  def initialize(self):
    return collections.OrderedDict(
        weights=self._model.initial_weights,
        round=np.int32(0),
        empty=(),
        nan=np.array([np.nan, 1.0]),
    )

  def next(self, state, datasets):
    means = [_mean_of(dataset) for dataset in datasets]
    return self._update(state, means), _metrics(len(means), np.sum(means[-1]))

  def _update(self, state, means):
    round_num = int(state['round']) + 1
    self.rounds.append(round_num)
    if round_num == self._fail_in_round:
      raise KeyboardInterrupt
    total = np.sum(means, axis=0, dtype=np.float32)
    kernel, *rest = state['weights'].trainable
    new_state = collections.OrderedDict(state)
    # Every value depends on all rounds so far and their order.
    new_state['weights'] = ModelWeights(
        [kernel * np.float32(0.9) + total[:, np.newaxis] / 7, *rest],
        list(state['weights'].non_trainable),
    )
    new_state['round'] = np.int32(round_num)
    return new_state

  def get_model_weights(self, state):
    return state['weights']


class FakeOutput:
  """Has the attributes of TFF's `LearningProcessOutput`."""

  def __init__(self, state, metrics):
    self.state = state
    self.metrics = metrics


class FakeStatelessProcess(FakeProcess):

  def next(self, state, datasets):
    return FakeOutput(*super().next(state, datasets))


class FakeStatefulProcess(FakeProcess, StatefulLearningProcess):
  """A process whose clients' states are moving statistics and a counter."""

  has_client_models = True

  def initialize_client(self, state):
    mean, variance = state['weights'].non_trainable
    return collections.OrderedDict(
        moments=collections.OrderedDict(variance=variance, mean=mean),
        rounds=np.int64(0),
    )

  def next(self, state, client_states, datasets):
    means = [_mean_of(dataset) for dataset in datasets]
    new_client_states = []
    for client_state, mean in zip(client_states, means):
      moments = client_state['moments']
      new_client_states.append(
          collections.OrderedDict(
              moments=collections.OrderedDict(
                  variance=moments['variance'] * np.float32(1.1),
                  mean=moments['mean'] / 3 + mean[0],
              ),
              rounds=np.int64(client_state['rounds'] + 1),
          )
      )
    return StatefulProcessOutput(
        self._update(state, means),
        new_client_states,
        _metrics(len(means), np.sum(means[-1])),
    )

  def get_client_model_weights(self, state, client_state):
    moments = client_state['moments']
    return ModelWeights(
        list(state['weights'].trainable),
        [np.asarray(moments['mean']), np.asarray(moments['variance'])],
    )


def build_process(model, stateful, **kwargs):
  kind = FakeStatefulProcess if stateful else FakeStatelessProcess
  return kind(model, **kwargs)


def train(
    model, run_dir, config, stateful=False, data=None, process=None, **kwargs
):
  return training.train(
      process or build_process(model, stateful),
      model,
      data or FakeData(),
      config,
      run_dir,
      **kwargs,
  )


def saved_weights(path):
  """The weights in a model's file; to load the model would take longer."""
  found = {}

  def add(name, item):
    if isinstance(item, h5py.Dataset):
      found[name] = item[()].tobytes()

  with zipfile.ZipFile(path) as archive:
    content = io.BytesIO(archive.read('model.weights.h5'))
  with h5py.File(content) as file:
    file.visititems(add)
  assert found
  return found


def snapshot(run_dir):
  """Returns the results of a run, which must not depend on interruptions."""
  models = sorted((run_dir / 'model').rglob('*.keras'))
  assert models
  path = run_dir / 'model/clients.npy'
  return (
      (run_dir / 'metrics.csv').read_bytes(),
      {p.relative_to(run_dir).as_posix(): saved_weights(p) for p in models},
      path.read_bytes() if path.exists() else None,
  )


def load_client(run_dir, client_id):
  """Loads a client's own model, as a user with Keras and NumPy can do it.

  The model takes the samples of the training, also if the file takes raw ones.
  """
  manifest = json.loads((run_dir / 'model/manifest.json').read_bytes())
  records = np.load(run_dir / 'model/clients.npy', mmap_mode='r')
  assert len(records) == len(manifest['clients'])
  record = records[manifest['clients'].index(client_id)]
  model = keras.models.load_model(run_dir / 'model/model.keras')
  weights = model.get_weights()
  for name in records.dtype.names:
    # A name ends with the position.
    weights[int(name.rpartition('_')[2])] = np.array(record[name])
  model.set_weights(weights)
  return raw_inputs.unwrap(model)


def files(folder):
  """The content of all files of a folder."""
  return {
      path: path.read_bytes() for path in folder.rglob('*') if path.is_file()
  }


def main(run_dir, stateful, config):
  train(
      build_model(),
      run_dir,
      training.TrainingConfig(**json.loads(config)),
      stateful == 'stateful',
  )


if __name__ == '__main__':
  main(*sys.argv[1:])
