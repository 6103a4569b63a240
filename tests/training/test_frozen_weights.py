"""Tests of runs of a model with weights that training cannot change."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import small_models
import tensorflow as tf
import tensorflow_federated as tff
import training_example

from tff_bn import algorithms
from tff_bn import training
from tff_bn.keras_model import raw_inputs

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_LAYERS = keras.layers
_CONFIG = dataclasses.replace(
    training_example.CONFIG, rounds=3, checkpoint_every=1, evaluate_every=3
)


@keras.saving.register_keras_serializable('test_frozen_weights')
class _Limited(_LAYERS.Layer):
  """Some values have a lower limit; constants need not be finite numbers."""

  def build(self, shape):
    self.limit = self.add_weight(
        shape[1:], keras.initializers.Constant(-np.inf), trainable=False
    )
    self.is_limited = self.add_weight(
        shape[1:], 'ones', dtype='bool', trainable=False
    )

  def call(self, x):
    limited = tf.maximum(x, tf.convert_to_tensor(self.limit))
    return tf.where(tf.convert_to_tensor(self.is_limited), limited, x)


def _model(data, seed=0):
  def keras_model_fn():
    initializer = keras.initializers.GlorotUniform(seed=seed)
    frozen = keras.Sequential(
        [
            _LAYERS.Dense(700, kernel_initializer=initializer),
            _LAYERS.BatchNormalization(),
            _Limited(),
        ],
        name='backbone',
    )
    frozen.trainable = False
    initializer = keras.initializers.GlorotUniform(seed=1)
    return keras.Sequential(
        [
            keras.Input(data.element_spec[0].shape[1:]),
            _LAYERS.Flatten(),
            frozen,
            _LAYERS.Dense(4, kernel_initializer=initializer),
            _LAYERS.BatchNormalization(momentum=0.5),
            _LAYERS.ReLU(),
            _LAYERS.Dense(10, kernel_initializer=initializer),
        ]
    )

  return small_models.classifier(keras_model_fn, data.element_spec)


@pytest.fixture(scope='module')
def data():
  return training_example.build_data()


@pytest.fixture(scope='module')
def train(data):
  """Trains with an algorithm, and returns the model and the results."""

  @functools.cache
  def build(name):
    model = _model(data)
    optimizer = tff.learning.optimizers.build_sgdm(0.1)
    return model, getattr(algorithms, name)(model, optimizer)

  def train_in(run_dir, name, rounds=_CONFIG.rounds, other_model=None):
    model, process = build(name)
    model = other_model or model
    config = dataclasses.replace(_CONFIG, rounds=rounds)
    return model, training.train(process, model, data, config, run_dir)

  return train_in


def _sizes(run_dir, pattern):
  return [path.stat().st_size for path in run_dir.rglob(pattern)]


@pytest.mark.parametrize(
    'name',
    ['build_fed_avg', pytest.param('build_fed_bn', marks=pytest.mark.slow)],
)
def test_the_runs_files_have_them_only_in_the_final_model(
    name, data, train, tmp_path
):
  model, result = train(tmp_path, name)
  constants = [model.variables[p] for p in sorted(model.constants)]
  num_bytes = sum(v.num_bytes for v in constants)
  assert len(constants) == 8 and num_bytes == 700 * (4 * (64 + 6) + 1)
  states = _sizes(tmp_path, 'state.npz')
  assert len(states) == 3 and max(states) < num_bytes / 5
  initial = model.from_model_weights(model.initial_weights)
  values = model.from_model_weights(result.model_weights)
  for position in model.constants:
    assert values[position].tobytes() == initial[position].tobytes()
  if name == 'build_fed_bn':
    assert max(_sizes(tmp_path, 'client_states.sqlite*')) < num_bytes
    own = np.load(tmp_path / 'model' / 'clients.npy').dtype.names
    assert len(own) == 4
    assert not set(own) & {v.name for v in constants}
  # The saved models are whole, and compute the same.
  x, _ = next(iter(data.test_dataset(20)))
  expected = model.to_keras(result.model_weights)(x)
  loaded = keras.models.load_model(tmp_path / 'model' / 'model.keras')
  alone = raw_inputs.unwrap(loaded)
  np.testing.assert_array_equal(alone(x), expected)
  with np.load(tmp_path / 'model' / 'weights.npz') as arrays:
    for info, value in zip(model.variables, values, strict=True):
      np.testing.assert_array_equal(arrays[info.name], value)


def test_a_continued_run_needs_the_same_frozen_weights(data, train, tmp_path):
  _, expected = train(tmp_path / 'at_once', 'build_fed_bn')
  folder = tmp_path / 'continued'
  train(folder, 'build_fed_bn', rounds=2)
  with pytest.raises(
      ValueError,
      match=r'a run that differs in weights that training cannot change, such',
  ):
    train(folder, 'build_fed_bn', other_model=_model(data, seed=7))
  _, found = train(folder, 'build_fed_bn')
  assert found.resumed_from == 2
  for a, b in zip(
      tf.nest.flatten(found.model_weights),
      tf.nest.flatten(expected.model_weights),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)
