"""Tests which variables count as constants, by Keras's own training step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn import BatchNormModel
from tff_bn.keras_model import training_writes

_LAYERS = keras.layers


def _frozen(layer):
  layer.trainable = False
  return layer


class _Writes(keras.layers.Layer):
  """Writes variables in a condition, a loop, a function and a gradient."""

  def build(self, shape):
    for name in ('read', 'condition', 'loop', 'function', 'gradient', 'never'):
      variable = self.add_weight((), 'ones', trainable=False, name=name)
      setattr(self, name, variable)
    self.mask = self.add_weight((), dtype='bool', trainable=False, name='mask')

  def call(self, x, training=None):
    if not training:
      self.never.assign(0.0)
      return x
    tf.cond(
        tf.reduce_sum(tf.square(x)) > 0,
        lambda: tf.convert_to_tensor(self.condition.assign_add(1.0)),
        lambda: tf.convert_to_tensor(self.read),
    )

    def body(step):
      self.loop.assign(2 * self.loop)
      return [step + 1]

    tf.while_loop(lambda step: step < 3, body, [0])
    tf.function(lambda: self.function.assign_add(1.0))()

    @tf.custom_gradient
    def with_gradient(y):
      def gradient(upstream):
        self.gradient.assign_add(1.0)
        return upstream * self.read

      return tf.identity(y), gradient

    return tf.where(self.mask, 0 * x, with_gradient(x))


class _Subclassed(keras.Model):
  """Has a dictionary as input and output, and a frozen layer."""

  def __init__(self):
    super().__init__()
    self.frozen = _frozen(_LAYERS.Dense(3))
    self.norm = _LAYERS.BatchNormalization()
    self.logits = _LAYERS.Dense(2)

  def call(self, x, training=None):
    hidden = self.norm(self.frozen(x['a']), training=training)
    return {'logits': self.logits(hidden), 'count': tf.constant(3)}


def _lora():
  dense, attention = _LAYERS.Dense(3), _LAYERS.EinsumDense('ab,bc->ac', 4)
  model = keras.Sequential([keras.Input((4,)), dense, attention])
  dense.enable_lora(1)
  attention.enable_lora(1)
  return model


def _adapted():
  layer = _LAYERS.Normalization()
  layer.adapt(np.random.default_rng(0).normal(size=(9, 4)))
  return layer


def _frozen_scale():
  model = keras.Sequential(
      [keras.Input((4,)), _LAYERS.BatchNormalization(), _LAYERS.Dense(2)]
  )
  model.layers[0].gamma.trainable = False
  return model


def _of(*layers, shape=(4,), dtype=None):
  return lambda: keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


# The names of the variables that are no constants although they are not
# trainable.
_CASES = {
    'lora': (_lora, []),
    'frozen_scale': (_frozen_scale, ['moving_mean', 'moving_variance']),
    'normalization': (lambda: _of(_adapted(), _LAYERS.Dense(2))(), []),
    'writes': (
        lambda: _of(_LAYERS.Dense(4), _Writes(), _LAYERS.Dense(2))(),
        ['condition', 'loop', 'function', 'gradient'],
    ),
    'recurrent': (
        lambda: _of(
            _frozen(
                _LAYERS.Bidirectional(_LAYERS.GRU(3, return_sequences=True))
            ),
            _frozen(_LAYERS.TimeDistributed(_LAYERS.Dense(3))),
            _LAYERS.Dense(2),
            shape=(5, 2),
        )(),
        [],
    ),
    'embedding': (
        lambda: _of(
            _frozen(_LAYERS.Embedding(7, 3)),
            _LAYERS.Flatten(),
            _LAYERS.Dense(2),
            dtype='int32',
        )(),
        [],
    ),
    # Also a frozen layer of this kind divides its kernel in training.
    'spectral_normalization': (
        lambda: _of(
            _frozen(_LAYERS.SpectralNormalization(_LAYERS.Dense(3))),
            _LAYERS.Dense(2),
        )(),
        ['kernel', 'vector_u'],
    ),
    'renorm': (
        lambda: _of(
            _LAYERS.BatchNormalization(renorm=True), _LAYERS.Dense(2)
        )(),
        [
            'moving_mean',
            'moving_variance',
            'moving_stddev',
            'renorm_mean',
            'renorm_stddev',
        ],
    ),
    'subclassed': (_Subclassed, ['moving_mean', 'moving_variance']),
}


class _AnyOutputs(keras.losses.Loss):
  """A loss for outputs of any form."""

  def call(self, y_true, y_pred):
    del y_pred
    return y_true


def _spec(name):
  if name == 'subclassed':
    return {'a': tf.TensorSpec((None, 4), tf.float32)}
  shape = (None, 5, 2) if name == 'recurrent' else (None, 4)
  return tf.TensorSpec(shape, tf.int32 if name == 'embedding' else tf.float32)


def _names(model, positions):
  return [model.weights[p].path.split('/')[-1] for p in sorted(positions)]


@pytest.mark.parametrize('name', _CASES)
def test_what_training_writes(name):
  build, expected = _CASES[name]
  spec = _spec(name)
  model = BatchNormModel(
      build, (spec, tf.TensorSpec((None,), tf.int32)), _AnyOutputs
  )
  keras_model = model.keras_model
  fixed = {id(v) for v in keras_model.non_trainable_weights}
  found = [
      p
      for p, variable in enumerate(keras_model.weights)
      if id(variable) in fixed and p not in model.constants
  ]
  assert _names(keras_model, found) == expected
  assert not any(model.variables[p].trainable for p in model.constants)
  # The truth: what a step of Keras changes, where these are not the same.
  before = [np.array(v) for v in keras_model.weights]
  rng = np.random.default_rng(0)
  x = tf.nest.map_structure(
      lambda s: tf.constant(rng.integers(1, 7, (6, *s.shape[1:])), s.dtype),
      spec,
  )
  with tf.GradientTape() as tape:
    loss = sum(
        tf.reduce_sum(tf.square(tf.cast(y, tf.float32)))
        for y in tf.nest.flatten(keras_model(x, training=True))
    )
  tape.gradient(loss, [v.value for v in keras_model.trainable_weights])
  changed = [
      p
      for p, (a, b) in enumerate(zip(before, keras_model.weights))
      if not np.array_equal(a, np.array(b))
  ]
  assert _names(keras_model, changed) == expected


def test_a_model_without_candidates_is_not_traced(monkeypatch):
  monkeypatch.setattr(training_writes, 'assigned_positions', None)
  model = BatchNormModel(
      _of(_LAYERS.Dense(3), _LAYERS.BatchNormalization(), _LAYERS.Dropout(0.5)),
      (tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int32)),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(),
  )
  assert not model.constants


_ARGUMENTS = {
    'Activation': ['relu'],
    'AveragePooling2D': [2],
    'Conv1D': [3, 2],
    'Conv2D': [3, 2],
    'Dense': [3],
    'DepthwiseConv2D': [2],
    'Dropout': [0.5],
    'Embedding': [9, 3],
    'GroupNormalization': [2],
    'Rescaling': [2.0],
    'Reshape': [(-1,)],
    'SeparableConv2D': [3, 2],
}


def _model_with(layer):
  """Returns a model with a layer of the given class, if it is not an input."""
  shape = (6,) if layer is _LAYERS.Embedding else (6, 4)
  inputs = keras.Input((6, *shape) if '2D' in layer.__name__ else shape)
  if layer is _LAYERS.InputLayer:
    return keras.Model(inputs, inputs)
  instance = layer(*_ARGUMENTS.get(layer.__name__, []))
  merges = layer in (_LAYERS.Add, _LAYERS.Concatenate, _LAYERS.Multiply)
  return keras.Model(inputs, instance([inputs, inputs] if merges else inputs))


@pytest.mark.parametrize(
    'layer',
    sorted(training_writes.READING_LAYERS, key=lambda layer: layer.__name__),
)
def test_known_layers_assign_only_statistics(layer):
  model = _model_with(layer)
  spec = tf.TensorSpec((None, *model.input_shape[1:]))
  positions = set(range(len(model.weights)))
  assert training_writes.are_only_read(model, positions)
  assigned = training_writes.assigned_positions(model, spec)
  assert set(_names(model, assigned)) <= {'moving_mean', 'moving_variance'}
  model.trainable = False
  assert not training_writes.assigned_positions(model, spec)


def _frozen_backbone():
  backbone = keras.Sequential(
      [
          keras.Input((8, 8, 3)),
          _LAYERS.Conv2D(4, 3),
          _LAYERS.BatchNormalization(),
          _LAYERS.ReLU(),
          _LAYERS.GlobalAveragePooling2D(),
      ]
  )
  inputs = keras.Input((8, 8, 3))
  return keras.Model(inputs, _LAYERS.Dense(2)(_frozen(backbone)(inputs)))


def test_a_frozen_backbone_is_not_traced(monkeypatch):
  monkeypatch.setattr(training_writes, 'assigned_positions', None)
  model = BatchNormModel(
      _frozen_backbone,
      (tf.TensorSpec((None, 8, 8, 3)), tf.TensorSpec((None,), tf.int32)),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(),
  )
  assert len(model.constants) == 6


class _MyDense(keras.layers.Dense):
  """Could assign its weights."""


@pytest.mark.parametrize(
    'build',
    [
        _Subclassed,
        _of(_MyDense(3)),
        _of(_LAYERS.TimeDistributed(_LAYERS.Dense(3)), shape=(2, 4)),
    ],
    ids=['subclassed', 'own_layer', 'wrapper'],
)
def test_unknown_layers_may_assign_everything(build):
  assert not training_writes.are_only_read(build(), set())
