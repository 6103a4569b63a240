"""Compares rounds of keras.applications models with Keras's own training.

FedTAN with MobileNetV2 is in test_fedtan_equivalence.py. Dropout
layers drop nothing here: they would drop other values in the rounds than in the
comparison.
"""

import functools

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn.layers import all_layers
from tff_bn.layers import batch_norm_layers
from tff_bn.layers import is_batch_norm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures('in_process_runtime'),
]

_RATE = 0.01
_MOMENTUM = 0.9
_NUM_CLASSES = 10
_SIZES = 24, 16
# The layer after which each model is cut.
_LAST_LAYERS = {
    'EfficientNetB0': 'block3b_add',
    'MobileNetV2': 'block_6_project',
}
_INPUT_SPEC = (
    tf.TensorSpec([None, 32, 32, 3], tf.float32),
    tf.TensorSpec([None], tf.int32),
)


def _new_keras_model(name):
  keras.utils.set_random_seed(1)
  whole = getattr(keras.applications, name)(
      weights=None,
      input_shape=_INPUT_SPEC[0].shape[1:],
      include_top=False,
  )
  # Later blocks have the same layers as earlier ones.
  features = whole.get_layer(_LAST_LAYERS[name]).output
  pooled = keras.layers.GlobalAveragePooling2D()(features)
  model = keras.Model(whole.input, keras.layers.Dense(_NUM_CLASSES)(pooled))
  for layer in all_layers(model):
    if isinstance(layer, keras.layers.Dropout):
      layer.rate = 0.0
    if is_batch_norm(layer):
      layer.momentum = _MOMENTUM
  return model


@functools.cache
def _initial(name):
  """A model, which is slow to build, and its weights."""
  model = _new_keras_model(name)
  return model, model.get_weights()


def _keras_model(name):
  """Returns the shared model of that name with its initial weights."""
  model, weights = _initial(name)
  model.set_weights(weights)
  return model


def _loss():
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _batches():
  """Returns the clients' batches, images of different brightness."""
  rng = np.random.default_rng(2)
  return [
      (
          (rng.normal(size=(size, 32, 32, 3)) * (client + 1) + client).astype(
              np.float32
          ),
          rng.integers(0, _NUM_CLASSES, size).astype(np.int32),
      )
      for client, size in enumerate(_SIZES)
  ]


def _union():
  """Returns the union of the clients' batches."""
  return tuple(np.concatenate(parts) for parts in zip(*_batches()))


def _step(name, batch):
  """Returns the variables after a step of Keras's training, in its order."""
  model = _keras_model(name)
  model.compile(keras.optimizers.SGD(_RATE), _loss(), jit_compile=False)
  model.train_on_batch(*batch)
  return model.get_weights()


def _fbn_step(name, batch):
  """Makes a step that normalizes with the moving statistics; updates them."""
  model = _keras_model(name)
  layers = batch_norm_layers(model)
  inputs = keras.Model(model.input, [layer.input for layer in layers])
  values = inputs(batch[0], training=False)
  trainable = [v.value for v in model.trainable_variables]
  with tf.GradientTape() as tape:
    loss = _loss()(batch[1], model(batch[0], training=False))
  for variable, gradient in zip(trainable, tape.gradient(loss, trainable)):
    variable.assign_sub(_RATE * gradient)
  for layer, value in zip(layers, values):
    value = value.numpy().astype(np.float64).reshape(-1, value.shape[-1])
    for variable, of_batch in (
        (layer.moving_mean, value.mean(axis=0)),
        (layer.moving_variance, value.var(axis=0, ddof=1)),
    ):
      variable.assign(_MOMENTUM * variable + (1 - _MOMENTUM) * of_batch)
  return model.get_weights()


def _round(name, build):
  """Returns the variables after a round."""
  model = BatchNormModel(lambda: _new_keras_model(name), _INPUT_SPEC, _loss)
  process = build(model, tff.learning.optimizers.build_sgdm(_RATE))
  datasets = [
      tf.data.Dataset.from_tensor_slices(batch).batch(len(batch[1]))
      for batch in _batches()
  ]
  return client_rounds.run(process, datasets, 1).weights(model)


def _assert_same_step(name, found, expected):
  """Asserts equal changes of variables, relative to the whole change.

  Small batches make the gradients of the first layers large and sensitive to
  rounding.
  """
  model = _keras_model(name)
  before = model.get_weights()
  for trainable in (True, False):
    errors, changes = [
        [
            (new - old).ravel().astype(np.float64)
            for variable, new, old in zip(model.weights, expected, reference)
            if variable.trainable == trainable
        ]
        for reference in (found, before)
    ]
    change = np.linalg.norm(np.concatenate(changes))
    assert change > 0
    error = np.linalg.norm(np.concatenate(errors)) / change
    assert error <= (0.1 if trainable else 1e-3), error


@pytest.mark.parametrize('name', ['EfficientNetB0'])
def test_fedtan_is_a_keras_step_on_the_union(name):
  found = _round(name, algorithms.build_fedtan)

  _assert_same_step(name, found, _step(name, _union()))


@pytest.mark.parametrize('name', ['MobileNetV2'])
def test_fbn_is_a_step_on_the_union_by_running_statistics(name):
  found = _round(name, algorithms.build_fbn)

  _assert_same_step(name, found, _fbn_step(name, _union()))
