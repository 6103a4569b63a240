"""Models with batch normalization in every position that Keras allows.

Each `Case` is a small model with its data, in the dtype of Keras's `floatx` and
dtype policy at the time it is built.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tff_bn import models
from tff_bn.keras_model.batch_norm_model import BatchNormModel

layers = keras.layers
Model = keras.Model
Input = keras.Input

NUM_CLASSES = 3


def cross_entropy() -> keras.losses.Loss:
  """Returns the mean cross-entropy of logits."""
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@dataclasses.dataclass(frozen=True)
class Values:
  """One input of a model.

  Attributes:
    shape: The shape of a sample.
    kind: `'normal'`; `'tokens'`: whole numbers from 0 to 9; `'padded'`: normal,
      but with time steps of zeros at the end.
  """

  shape: tuple[int, ...]
  kind: str = 'normal'

  @property
  def dtype(self) -> str:
    if self.kind == 'tokens':
      return 'int32'
    return keras.config.floatx()

  def draw(self, rng: np.random.Generator, client: int, size: int):
    """Draws data; means, deviations, frequencies, lengths differ by client."""
    shape = (size, *self.shape)
    if self.kind == 'tokens':
      numbers = rng.integers(1, 5 + 2 * (client % 3), shape)
      return np.where(self._padding(rng, shape), 0, numbers).astype(self.dtype)
    x = rng.normal(client % 3 - 1, 0.5 + client % 3, shape)
    if self.kind == 'padded':
      x[self._padding(rng, shape[:2])] = 0
    return x.astype(self.dtype)

  @staticmethod
  def _padding(rng, shape):
    lengths = rng.integers(1, shape[1] + 1, shape[0])
    return np.arange(shape[1]) >= lengths[:, np.newaxis]


@dataclasses.dataclass(frozen=True)
class Case:
  """A model with its data.

  Attributes:
    build: Returns a new model.
    inputs: A structure of `Values`, as the model takes it.
    loss_fn: Returns the loss.
  """

  build: Callable[[], keras.Model]
  inputs: Any = Values((4,))
  loss_fn: Callable[[], Any] = cross_entropy

  def model(self) -> BatchNormModel:
    """Returns the federated model, the same at each call."""
    keras.utils.set_random_seed(1)
    x_spec = tf.nest.map_structure(
        lambda v: tf.TensorSpec((None, *v.shape), v.dtype), self.inputs
    )
    y_spec = tf.TensorSpec((None,), tf.int32)
    model = BatchNormModel(self.build, (x_spec, y_spec), self.loss_fn)
    if not model.constants:
      return model
    # Processes have their values from the function.
    weights = model.to_model_weights(_shaken(model, 1))
    return BatchNormModel(
        lambda: model.to_keras(weights), model.input_spec, self.loss_fn
    )

  def batch(self, client: int, size: int) -> tuple[Any, np.ndarray]:
    """Returns a client's batch, the same at each call."""
    rng = np.random.default_rng([client, size])
    x = tf.nest.map_structure(lambda v: v.draw(rng, client, size), self.inputs)
    # The shares of the classes differ between clients.
    y = rng.choice(NUM_CLASSES, size, p=np.roll([0.6, 0.3, 0.1], client))
    return x, y.astype(np.int32)


def shaken_weights(model: BatchNormModel, seed: int = 0):
  """Returns weights with no scale 1 and no shift or statistic 0."""
  constants = model.from_model_weights(model.initial_weights)
  return model.to_model_weights(
      [
          constants[position] if position in model.constants else value
          for position, value in enumerate(_shaken(model, seed))
      ]
  )


def _shaken(model: BatchNormModel, seed: int) -> list[np.ndarray]:
  rng = np.random.default_rng(seed)
  values = model.from_model_weights(model.initial_weights)
  shaken = []
  for info, value in zip(model.variables, values):
    if info.batch_norm is not None and info.role.value == 'moving_variance':
      value = value * rng.uniform(0.5, 2, value.shape)
    elif info.batch_norm is not None:
      value = value + rng.normal(0, 0.3, value.shape)
    shaken.append(np.asarray(value, info.dtype.as_numpy_dtype))
  return shaken


def _norm(x: Any, **kwargs: Any) -> tf.Tensor:
  return layers.BatchNormalization(**kwargs)(x)


def _block(x: Any, units: int = 5, **kwargs: Any) -> tf.Tensor:
  return layers.ReLU()(_norm(layers.Dense(units)(x), **kwargs))


def _logits(x: Any) -> tf.Tensor:
  return layers.Dense(NUM_CLASSES)(x)


def in_default_dtype(model: keras.Model) -> keras.Model:
  """Returns a copy in which every layer has the default dtype."""

  def clone(layer):
    config = layer.get_config()
    config['dtype'] = keras.config.floatx()
    return layer.__class__.from_config(config)

  return keras.models.clone_model(model, clone_function=clone)


def mlp3():
  return in_default_dtype(models.build_mlp3((4,), NUM_CLASSES))


def small_cnn():
  return in_default_dtype(models.build_small_cnn((8, 8, 1), NUM_CLASSES))


def resnet20():
  return in_default_dtype(models.build_resnet20((8, 8, 3), NUM_CLASSES))


def mobile_net_v2():
  return keras.applications.MobileNetV2(
      weights=None,
      input_shape=(32, 32, 3),
      classes=10,
      classifier_activation=None,
  )


def two_branches():
  inputs = Input((4,))
  x = _block(inputs)
  shallow = _norm(layers.Dense(6)(x))
  deep = _norm(layers.Dense(6)(_block(_block(x))))
  third = _norm(layers.Dense(2)(x))
  x = layers.Concatenate()([layers.Add()([shallow, deep]), third, x])
  return Model(inputs, _logits(layers.ReLU()(x)))


def nested():
  inner_inputs = Input((5,))
  inner = Model(inner_inputs, _block(inner_inputs, 4), name='inner')
  middle = keras.Sequential(
      [
          layers.Dense(5),
          layers.BatchNormalization(),
          inner,
          layers.Dense(3),
      ],
      name='middle',
  )
  inputs = Input((4,))
  return Model(inputs, _logits(_norm(middle(layers.Dense(4)(inputs)))))


def nested_twice():
  inner_inputs = Input((4,))
  x = _block(_block(inner_inputs), 4)
  inner = Model(inner_inputs, x, name='inner')
  inputs = Input((4,))
  x = inner(layers.Dense(4)(inner(inputs)))
  return Model(inputs, _logits(x))


def nested_several_outputs():
  a, b = Input((4,), name='a'), Input((3,), name='b')
  x, y = _block(a, 3), _norm(b)
  inner = Model({'a': a, 'b': b}, [layers.Add()([x, y]), x], name='inner')
  inputs = Input((4,))
  total, x = inner({'a': inputs, 'b': layers.Dense(3)(inputs)})
  return Model(inputs, _logits(layers.Concatenate()([total, x])))


class InInference(layers.Layer):
  """Calls another layer in inference mode, even in training."""

  def __init__(self, layer: keras.layers.Layer, **kwargs: Any):
    super().__init__(**kwargs)
    self.layer = layer

  def call(self, inputs):
    return self.layer(inputs, training=False)


def nested_inference():
  inner_inputs = Input((4,))
  inner = Model(inner_inputs, _block(inner_inputs), name='inner')
  inputs = Input((4,))
  return Model(inputs, _logits(_block(InInference(inner)(inputs))))


def nested_frozen():
  inner_inputs = Input((4,))
  inner = Model(inner_inputs, _block(inner_inputs), name='inner')
  inner.trainable = False
  inputs = Input((4,))
  return Model(inputs, _logits(_block(inner(layers.Dense(4)(inputs)))))


def live_in_frozen():
  # It normalizes with the batch's statistics, but its weights do not change.
  inner_inputs = Input((4,))
  inner = Model(inner_inputs, _block(inner_inputs), name='inner')
  inner.trainable = False
  inner.layers[-2].trainable = True
  inputs = Input((4,))
  return Model(inputs, _logits(_block(inner(layers.Dense(4)(inputs)))))


def shared_in_sequence():
  norm = layers.BatchNormalization(momentum=0.5)
  inputs = Input((4,))
  x = layers.ReLU()(norm(layers.Dense(5)(inputs)))
  x = layers.ReLU()(norm(layers.Dense(5)(x)))
  return Model(inputs, _logits(x))


def shared_in_parallel():
  norm = layers.BatchNormalization(momentum=0.5)
  inputs = Input((4,))
  a = norm(layers.Dense(5)(inputs))
  b = norm(layers.Dense(5)(_block(inputs)))
  c = norm(layers.Dense(5, activation='tanh')(inputs))
  x = layers.Add()([a, layers.ReLU()(b), layers.Multiply()([a, c])])
  return Model(inputs, _logits(x))


def called_from_another_model():
  # The layer has a call outside the model.
  norm = layers.BatchNormalization()
  inputs, other = Input((4,)), Input((5,))
  norm(layers.Dense(5)(other))
  x = norm(layers.Dense(5)(inputs))
  _block(x)
  return Model(inputs, _logits(layers.ReLU()(x)))


def part_of_another_model():
  whole = two_branches()
  middle = whole.layers[5].output
  return Model(whole.input, _logits(layers.ReLU()(middle)))


def norm_first():
  inputs = Input((4,))
  return Model(inputs, _logits(_norm(inputs)))


def norm_last():
  inputs = Input((4,))
  return Model(inputs, _norm(_logits(_block(inputs))))


def norm_alone():
  inputs = Input((NUM_CLASSES,))
  return Model(inputs, _norm(inputs))


def sequential():
  return keras.Sequential(
      [
          layers.Dense(5),
          layers.BatchNormalization(),
          layers.ReLU(),
          layers.Dense(NUM_CLASSES),
          layers.BatchNormalization(),
      ]
  )


def dict_inputs():
  wide, deep = Input((4,), name='wide'), Input((3,), name='deep')
  x = layers.Concatenate()([_norm(wide), _block(_block(deep))])
  return Model({'wide': wide, 'deep': deep}, _logits(_norm(x)))


def list_inputs():
  a, b, c = Input((4,)), Input((3,)), Input((2,))
  x = layers.Concatenate()([_block(b), _norm(a)])
  # Only the last stage needs one of the inputs.
  return Model([a, b, c], _logits(layers.Concatenate()([_norm(x), c])))


class TwoHeads(keras.losses.Loss):
  """Returns the cross-entropy of logits plus a number's squared error."""

  def call(self, y_true, y_pred):
    if isinstance(y_pred, dict):
      logits, number = y_pred['logits'], y_pred['number']
    else:
      logits, number = y_pred
    labels = tf.cast(y_true, tf.int32)  # Keras converts them to floats.
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    target = tf.cast(y_true, number.dtype)
    return entropy + 0.5 * tf.square(target - number[:, 0])


def list_outputs():
  inputs = Input((4,))
  x = _block(inputs)
  # The second output comes before the last batch normalization layer.
  return Model(inputs, [_logits(_block(x)), layers.Dense(1)(x)])


def dict_outputs():
  inputs = Input((4,))
  x = _block(inputs)
  number = _norm(layers.Dense(1)(x))
  return Model(inputs, {'number': number, 'logits': _logits(_block(x))})


def conv1d():
  inputs = Input((6, 2))
  x = layers.ReLU()(_norm(layers.Conv1D(4, 3)(inputs)))
  x = _norm(layers.Conv1D(4, 2, padding='causal')(x))
  return Model(inputs, _logits(layers.GlobalMaxPooling1D()(x)))


def conv3d():
  inputs = Input((4, 4, 3, 2))
  x = layers.ReLU()(_norm(layers.Conv3D(3, 2)(inputs)))
  return Model(inputs, _logits(layers.Flatten()(x)))


def depthwise():
  inputs = Input((6, 6, 2))
  x = _norm(layers.DepthwiseConv2D(3, depth_multiplier=2)(inputs))
  x = _norm(layers.SeparableConv2D(5, 2)(layers.ReLU()(x)))
  x = _norm(layers.Conv2DTranspose(3, 2)(layers.ReLU()(x)))
  return Model(inputs, _logits(layers.GlobalAveragePooling2D()(x)))


def axis_1():
  inputs = Input((5, 4))
  x = layers.ReLU()(_norm(layers.Dense(4)(inputs), axis=1))
  return Model(inputs, _logits(layers.Flatten()(_norm(x, axis=1))))


def axis_1_images():
  inputs = Input((3, 5, 4))
  x = layers.ReLU()(_norm(layers.Dense(4)(inputs), axis=1))
  return Model(inputs, _logits(layers.Flatten()(_norm(x, axis=-2))))


def options():
  inputs = Input((4,))
  x = _block(inputs, scale=False, epsilon=0.1, momentum=0.3)
  x = _block(x, center=False, epsilon=1e-5, momentum=0.0)
  x = _block(x, center=False, scale=False, momentum=0.9)
  return Model(inputs, _logits(x))


class MeanSquarePenalty(layers.Layer):
  """Adds the mean square of its inputs to the loss."""

  def call(self, inputs):
    self.add_loss(0.03 * tf.reduce_mean(tf.square(inputs)))
    return inputs


def regularizers():
  l2 = keras.regularizers.L2
  inputs = Input((4,))
  x = layers.Dense(5, kernel_regularizer=l2(0.1), activity_regularizer=l2(0.2))(
      inputs
  )
  x = MeanSquarePenalty()(x)
  x = _norm(
      x,
      gamma_regularizer=l2(0.1),
      beta_regularizer=keras.regularizers.L1(0.1),
      activity_regularizer=l2(0.05),
  )
  x = layers.Dense(3, bias_regularizer=l2(0.3))(layers.ReLU()(x))
  x = layers.ActivityRegularization(l2=0.1)(x)
  return Model(inputs, _logits(_norm(x)))


def frozen():
  inputs = Input((4,))
  x = _block(_block(_block(inputs), trainable=False))
  dense = layers.Dense(4, trainable=False)
  return Model(inputs, _logits(_norm(dense(x), trainable=False)))


def inference_call():
  inputs = Input((4,))
  x = layers.Dense(5)(_block(inputs))
  x = InInference(layers.BatchNormalization())(x)
  x = layers.BatchNormalization()(layers.Dense(5)(x), training=True)
  return Model(inputs, _logits(_block(x)))


def both_modes():
  # One call uses the statistics of the other.
  norm = layers.BatchNormalization(momentum=0.5)
  inputs = Input((4,))
  x = layers.Dense(5)(inputs)
  x = layers.Add()([norm(x), layers.ReLU()(InInference(norm)(x))])
  return Model(inputs, _logits(x))


def nothing_trainable_before():
  inputs = Input((4,))
  x = _norm(inputs, center=False, scale=False)
  return Model(inputs, _logits(_norm(x, center=False)))


def synchronized():
  inputs = Input((4,))
  x = _block(inputs, synchronized=True)
  x = layers.BatchNormalization(synchronized=True)(layers.Dense(5)(x))
  return Model(inputs, _logits(layers.ReLU()(x)))


class RenamedNorm(layers.BatchNormalization):
  """A subclass with the same computation."""


def subclass():
  inputs = Input((4,))
  x = layers.ReLU()(RenamedNorm()(layers.Dense(5)(inputs)))
  return Model(inputs, _logits(x))


def recurrent():
  inputs = Input((5, 3))
  x = layers.LSTM(4, return_sequences=True)(_norm(inputs))
  x, *state = layers.LSTM(4, return_state=True, return_sequences=True)(_norm(x))
  x = layers.LSTM(4)(_norm(x), initial_state=state)
  return Model(inputs, _logits(_norm(x)))


def gru():
  inputs = Input((5, 3))
  x = layers.GRU(4, return_sequences=True)(_norm(inputs))
  x = layers.Bidirectional(layers.GRU(3))(_norm(x))
  return Model(inputs, _logits(_norm(x)))


def masking():
  inputs = Input((5, 3))
  x = _norm(layers.Masking()(inputs))
  x = layers.LSTM(4, return_sequences=True)(x)
  return Model(inputs, _logits(layers.GlobalAveragePooling1D()(_norm(x))))


def embedding():
  inputs = Input((5,), dtype='int32')
  x = layers.Embedding(12, 4, mask_zero=True)(inputs)
  x = layers.ReLU()(_norm(x))
  x = layers.Dense(4)(x)
  return Model(inputs, _logits(layers.GlobalAveragePooling1D()(_norm(x))))


class DenseBlock(layers.Layer):
  """A custom layer with batch normalization inside."""

  def __init__(self, units: int, **kwargs: Any):
    super().__init__(**kwargs)
    self.units = units
    self.dense = layers.Dense(units)
    self.norms = [layers.BatchNormalization() for _ in range(2)]

  def call(self, inputs, training=None):
    x = self.dense(inputs)
    a = self.norms[0](x, training=training)
    b = self.norms[1](tf.sin(x), training=training)
    return tf.nn.relu(a) + b

  def get_config(self):
    return {**super().get_config(), 'units': self.units}


def composite():
  inputs = Input((4,))
  x = DenseBlock(5)(inputs)
  x = DenseBlock(3)(_norm(x))
  return Model(inputs, _logits(x))


def residual():
  inputs = Input((4,))
  x = layers.Dense(5)(inputs)
  for _ in range(2):
    x = layers.Add()([x, _block(_norm(x))])
  gate = layers.Activation('sigmoid')(_norm(layers.Dense(5)(x)))
  x = layers.Multiply()([x, gate])
  x = layers.Add()([x, _norm(x), _norm(x), x])
  return Model(inputs, _logits(x))


def other_norms():
  inputs = Input((6,))
  x = layers.LayerNormalization()(layers.Dense(6)(inputs))
  x = layers.GroupNormalization(groups=2)(layers.Dense(6)(_norm(x)))
  x = layers.UnitNormalization()(layers.Dense(6)(_norm(x)))
  return Model(inputs, _logits(_norm(x)))


def lambdas():
  inputs = Input((4,))
  x = layers.Lambda(lambda t: keras.ops.concatenate([t, t * t], -1))(inputs)
  x = layers.Lambda(lambda t, power: t**power, arguments={'power': 3})(_norm(x))
  return Model(inputs, _logits(_norm(x)))


def operations():
  ops = keras.ops
  inputs = Input((4,))
  x = _norm(layers.Dense(6)(inputs) + 1.0)
  a, b = ops.split(x, 2, axis=-1)
  y = ops.concatenate([ops.relu(a), _norm(b * 2.0), inputs[:, 1:3]], axis=-1)
  y = ops.divide(y, 1.0 + ops.mean(ops.abs(y), -1, keepdims=True))
  y = ops.reshape(ops.stack([y, y**2], axis=1), [-1, 16])
  return Model(inputs, _logits(_norm(y)) - ops.sum(a, -1, keepdims=True))


class ScaleBy(layers.Layer):
  """Multiplies by a second tensor, which is a keyword argument."""

  def call(self, inputs, scale=None, factor=1.0):
    return inputs * scale * factor


def call_arguments():
  inputs = Input((4,))
  x = _norm(layers.Dense(5)(inputs))
  y = _norm(layers.Dense(5, activation='tanh')(x))
  x = ScaleBy()(x, scale=y, factor=0.5)
  return Model(inputs, _logits(_norm(ScaleBy()(x, scale=x))))


def attention():
  inputs = Input((4, 3))
  x = _norm(layers.Dense(4)(inputs))
  y = layers.MultiHeadAttention(2, 3)(x, _norm(x), key=x)
  y = layers.Attention()([_norm(y), x])
  return Model(inputs, _logits(layers.Flatten()(y)))


class CallCounter(layers.Layer):
  """Counts its calls in training and adds the number to the outputs."""

  def build(self, input_shape):
    self.count = self.add_weight((), trainable=False, name='count')

  def call(self, inputs, training=None):
    if training:
      self.count.assign_add(1.0)
    return inputs * (1.0 + 0.1 * self.count)


def stateful():
  inputs = Input((4,))
  x = CallCounter()(_norm(layers.Dense(5)(CallCounter()(inputs))))
  return Model(inputs, _logits(_norm(layers.ReLU()(x))))


def unused_variable():
  inputs = Input((4,))
  a, b = _block(inputs), _block(inputs)
  return Model(inputs, _logits(layers.Add()([a, keras.ops.stop_gradient(b)])))


_IMAGE = Values((8, 8, 3))

CASES: dict[str, Case] = {
    'mlp3': Case(mlp3),
    'small_cnn': Case(small_cnn, Values((8, 8, 1))),
    'two_branches': Case(two_branches),
    'nested': Case(nested),
    'nested_twice': Case(nested_twice),
    'nested_several_outputs': Case(nested_several_outputs),
    'nested_inference': Case(nested_inference),
    'nested_frozen': Case(nested_frozen),
    'live_in_frozen': Case(live_in_frozen),
    'shared_in_sequence': Case(shared_in_sequence),
    'shared_in_parallel': Case(shared_in_parallel),
    'called_from_another_model': Case(called_from_another_model),
    'part_of_another_model': Case(part_of_another_model),
    'norm_first': Case(norm_first),
    'norm_last': Case(norm_last),
    'norm_alone': Case(norm_alone, Values((NUM_CLASSES,))),
    'sequential': Case(sequential),
    'dict_inputs': Case(
        dict_inputs, {'wide': Values((4,)), 'deep': Values((3,))}
    ),
    'list_inputs': Case(
        list_inputs, (Values((4,)), Values((3,)), Values((2,)))
    ),
    'list_outputs': Case(list_outputs, loss_fn=TwoHeads),
    'dict_outputs': Case(dict_outputs, loss_fn=TwoHeads),
    'conv1d': Case(conv1d, Values((6, 2))),
    'conv3d': Case(conv3d, Values((4, 4, 3, 2))),
    'depthwise': Case(depthwise, Values((6, 6, 2))),
    'axis_1': Case(axis_1, Values((5, 4))),
    'axis_1_images': Case(axis_1_images, Values((3, 5, 4))),
    'options': Case(options),
    'regularizers': Case(regularizers),
    'frozen': Case(frozen),
    'inference_call': Case(inference_call),
    'both_modes': Case(both_modes),
    'nothing_trainable_before': Case(nothing_trainable_before),
    'synchronized': Case(synchronized),
    'subclass': Case(subclass),
    'recurrent': Case(recurrent, Values((5, 3))),
    'gru': Case(gru, Values((5, 3))),
    'masking': Case(masking, Values((5, 3), 'padded')),
    'embedding': Case(embedding, Values((5,), 'tokens')),
    'composite': Case(composite),
    'residual': Case(residual),
    'other_norms': Case(other_norms, Values((6,))),
    'lambdas': Case(lambdas),
    'operations': Case(operations),
    'call_arguments': Case(call_arguments),
    'attention': Case(attention, Values((4, 3))),
    'stateful': Case(stateful),
    'unused_variable': Case(unused_variable),
}

# These take seconds.
LARGE_CASES: dict[str, Case] = {
    'resnet20': Case(resnet20, _IMAGE),
    'mobile_net_v2': Case(mobile_net_v2, Values((32, 32, 3))),
}
