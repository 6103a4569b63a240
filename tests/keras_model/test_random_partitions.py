"""Random partitions of random models: each variable is in exactly one part."""

import functools

import hypothesis
from hypothesis import strategies as st
import keras
import numpy as np
import small_models
import tensorflow as tf

from tff_bn.keras_model import partition as partition_lib
from tff_bn.keras_model.partition import Role
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.layers import batch_moments

_STATISTICS = frozenset({Role.MOVING_MEAN, Role.MOVING_VARIANCE})


class _Flags(keras.layers.Layer):
  """Changes a counter and a flag in training."""

  def build(self, input_shape):
    for name, dtype in (('steps', 'int32'), ('is_odd', 'bool')):
      variable = self.add_weight(
          name=name, dtype=dtype, initializer='zeros', trainable=False
      )
      setattr(self, name, variable)
    self.built = True

  def call(self, inputs, training=None):
    if training:
      self.steps.assign(self.steps + 1)
      self.is_odd.assign(keras.ops.logical_not(self.is_odd))
    return inputs


def _layer(kind, name):
  if kind == 'dense':
    return keras.layers.Dense(3, name=name)
  if kind == 'norm':
    return keras.layers.BatchNormalization(name=name)
  if kind == 'plain_norm':
    return keras.layers.BatchNormalization(scale=False, center=False, name=name)
  if kind == 'frozen':
    return keras.layers.BatchNormalization(trainable=False, name=name)
  if kind == 'frozen_dense':
    return keras.layers.Dense(3, trainable=False, name=name)
  if kind == 'dropout':
    return keras.layers.Dropout(0.5, name=name)
  if kind == 'flags':
    return _Flags(name=name)
  return keras.Sequential(
      [
          keras.layers.Dense(3, name=f'{name}_dense'),
          keras.layers.BatchNormalization(name=f'{name}_norm'),
      ],
      name=name,
  )


_KINDS = ('dense', 'norm', 'plain_norm', 'frozen', 'frozen_dense', 'dropout')
_KINDS += ('flags', 'block')


@functools.cache
def _model(kinds):
  return small_models.classifier(
      lambda: keras.Sequential(
          [keras.Input((3,))]
          + [_layer(kind, f'{kind}_{n}') for n, kind in enumerate(kinds)]
          + [keras.layers.Dense(2, name='head')]
      ),
      (3,),
  )


@st.composite
def _partitions(draw):
  roles = draw(st.frozensets(st.sampled_from(sorted(Role, key=str))))
  if roles & _STATISTICS:
    roles |= _STATISTICS
  patterns = {
      argument: draw(
          st.sampled_from(
              [None] * 3 + ['head', 'dense.*', '.*_0', 'block.*', '.*norm.*']
          )
      )
      for argument in ('local_layers', 'shared_layers', 'fixed_layers')
  }
  return partition_lib.Partition('mine', roles, **patterns)


def _random_values(model, rng):
  """Values whose differences are exact, in the order of the variables."""
  values = []
  for variable in model.variables:
    dtype = variable.dtype.as_numpy_dtype
    eighths = rng.integers(0, 64, variable.shape)
    if variable.dtype == tf.bool:
      values.append(np.asarray(eighths > 31))
    else:
      is_floating = variable.dtype.is_floating
      values.append(np.asarray(eighths / 8 if is_floating else eighths, dtype))
  return values


def _assert_same(found, expected):
  for value, other in zip(found, expected, strict=True):
    value, other = np.asarray(value), np.asarray(other)
    assert value.dtype == other.dtype
    np.testing.assert_array_equal(value, other)


@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
@hypothesis.given(
    kinds=st.lists(st.sampled_from(_KINDS), max_size=3).map(tuple),
    partition=_partitions(),
    seed=st.integers(0, 2**32),
)
def test_parts_are_disjoint_complete_and_put_together_again(
    kinds, partition, seed
):
  model = _model(kinds)
  try:
    weights = SharedWeights(model, partition)
  except ValueError as error:
    message = str(error)
    assert model.keras_model.name in message
    assert any(f'{name}=' in message for name in partition.layers) or (
        'mine' in message
    )
    return
  rng = np.random.default_rng(seed)
  before, after = _random_values(model, rng), _random_values(model, rng)
  initial = model.from_model_weights(model.initial_weights)
  for values in (before, after):
    for position in weights.constants:
      values[position] = initial[position]

  names = {v.name: position for position, v in enumerate(model.variables)}
  local = [names[name] for name in weights.local(before)]
  parts = [*weights.positions, *local, *weights.constants]
  assert sorted(parts) == list(range(len(model.variables)))
  for position, variable in enumerate(model.variables):
    role, path = variable.role, variable.path
    is_constant = position in model.constants or partition.is_fixed(role, path)
    assert (position in weights.constants) == is_constant
    is_local = partition.is_local(role, path) and not is_constant
    assert (position in local) == is_local

  shared = weights.shared(before)
  _assert_same(weights.merge(shared, weights.local(before)), before)

  # The update of a single client leads to the client's values.
  tensors = [list(map(tf.constant, values)) for values in (before, after)]
  update = weights.update(
      *tensors,
      [
          batch_moments.Moments(
              tf.ones([]), tensors[1][mean], tensors[1][variance]
          )
          for mean, variance in weights.statistics
      ],
  )
  trainable = tf.nest.map_structure(
      lambda value, difference: value - difference,
      weights.shared(tensors[0]).trainable,
      update.get('trainable', type(shared.trainable)()),
  )
  moved = weights.apply(weights.shared(tensors[0]), trainable, update)
  _assert_same(
      weights.merge(moved, weights.local(after)),
      weights.merge(weights.shared(after), weights.local(after)),
  )
