"""Models whose batch normalization layers can be converted, and data."""

import keras
import numpy as np

keras_layers = keras.layers


def randomize(model, seed=0):
  rng = np.random.default_rng(seed)
  for variable in model.weights:
    variable.assign(rng.uniform(0.5, 1.5, variable.shape))
  return model


def random_data(*shape, seed=1):
  return np.random.default_rng(seed).normal(1, 2, shape).astype(np.float32)


def nested():
  """Models in models, one of them called twice; layers in wrappers."""
  inner = keras.Sequential(
      [
          keras.Input([3]),
          keras_layers.Dense(3),
          keras_layers.BatchNormalization(name='innermost'),
      ],
      name='inner',
  )
  h = keras.Input([3])
  middle = keras.Model(
      h,
      keras_layers.BatchNormalization(name='middle_bn')(inner(inner(h))),
      name='middle',
  )
  without = keras.Sequential(
      [keras.Input([3]), keras_layers.Dense(3)], name='without'
  )
  bare = keras_layers.BatchNormalization(name='bare')
  inputs = keras.Input([5, 3])
  x = keras_layers.TimeDistributed(middle, name='middles')(inputs)
  x = keras_layers.TimeDistributed(bare, name='wrapped')(x)
  x = keras_layers.TimeDistributed(
      keras_layers.TimeDistributed(keras_layers.BatchNormalization(name='deep'))
  )(x[:, :, None])[:, :, 0]
  x = without(keras_layers.GlobalAveragePooling1D()(x))
  # Layers that are also called outside their model or wrapper.
  return keras.Model(inputs, bare(inner(x)), name='outer')


class AutoConfig(keras_layers.Layer):
  """Has no `get_config`; Keras keeps the arguments of its constructor."""

  def __init__(self, units=4, **kwargs):
    super().__init__(**kwargs)
    self.dense = keras_layers.Dense(units)
    self.norm = keras_layers.BatchNormalization()

  def build(self, input_shape):
    self.dense.build(input_shape)
    self.norm.build((*input_shape[:-1], self.dense.units))

  def call(self, x):
    return self.norm(self.dense(x))

  def compute_output_shape(self, input_shape):
    return (*input_shape[:-1], self.dense.units)


class Inner(keras_layers.Layer):
  """Has no configuration, unlike the layer that creates it."""

  def __init__(self, norm, **kwargs):
    super().__init__(**kwargs)
    self.norm = norm

  def call(self, x):
    return self.norm(x)


class InContainers(keras_layers.Layer):
  """Layers in lists, tuples, dictionaries, models, wrappers and layers."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    norm = keras_layers.BatchNormalization
    self.several = [AutoConfig(5), norm(), keras_layers.Dense(4)]
    self.by_name = {
        'b': norm(momentum=0.3, epsilon=0.1),
        'a': (norm(scale=False), 'a'),
    }
    self._alias = self.by_name['b']
    self.inner = Inner(norm(), name='inner_layer')
    self.wrapper = keras_layers.TimeDistributed(norm())
    self.model = keras.Sequential(
        [keras.Input([4]), keras_layers.Dense(3), norm(name='inside')]
    )

  def call(self, x):
    for layer in self.several:
      x = layer(x)
    x = self.inner(self.by_name['a'][0](self._alias(x)))
    return self.model(self.wrapper(x[:, None])[:, 0])


class GivenNorm(keras_layers.Layer):
  """Has its batch normalization in its configuration."""

  def __init__(self, norm, **kwargs):
    super().__init__(**kwargs)
    self.norm = norm

  def get_config(self):
    norm = keras.saving.serialize_keras_object(self.norm)
    return {**super().get_config(), 'norm': norm}

  @classmethod
  def from_config(cls, config):
    norm = keras.saving.deserialize_keras_object(config.pop('norm'))
    return cls(norm, **config)

  def call(self, x):
    return self.norm(x)


class OwnModel(keras.Model):
  """Builds its layers itself."""

  def __init__(self, units=2, **kwargs):
    super().__init__(**kwargs)
    self.units = units
    self.block = AutoConfig(5)
    self.norm = keras_layers.BatchNormalization()
    self.dense = keras_layers.Dense(units)

  def build(self, input_shape):
    self.block.build(input_shape)
    self.norm.build((None, 5))
    self.dense.build((None, 5))

  def get_config(self):
    return {**super().get_config(), 'units': self.units}

  def call(self, x):
    return self.dense(self.norm(self.block(x)))


class WrapperWithNorm(keras_layers.Wrapper):

  def __init__(self, layer, **kwargs):
    super().__init__(layer, **kwargs)
    self.norm = keras_layers.BatchNormalization()

  def call(self, x):
    return self.norm(self.layer(x))


# `Bidirectional` itself needs the registration.
@keras.saving.register_keras_serializable('convertible_models')
class Cell(keras_layers.Layer):

  def __init__(self, units, **kwargs):
    super().__init__(**kwargs)
    self.units = self.state_size = units
    self.dense = keras_layers.Dense(units)
    self.norm = keras_layers.BatchNormalization()

  def build(self, input_shape):
    self.dense.build((None, input_shape[-1] + self.units))
    self.norm.build((None, self.units))

  def get_config(self):
    return {**super().get_config(), 'units': self.units}

  def call(self, x, states, training=None):
    x = self.dense(keras.ops.concatenate([x, states[0]], axis=-1))
    x = self.norm(x, training=training)
    return x, [x]


def _own_model():
  model = OwnModel(3, name='own_model')
  model(random_data(2, 4))
  return model


def _recurrent():
  inputs = keras.Input([5, 4])
  x = keras_layers.RNN(Cell(3), return_sequences=True)(inputs)
  x = keras_layers.Bidirectional(keras_layers.RNN(Cell(2)))(x)
  return keras.Model(inputs, x)


def stack(*stacked, shape=(4,)):
  return keras.Sequential([keras.Input(shape), *stacked])


# For each kind: a model, an input, and how many classes must be derived.
HOLDERS = {
    'constructor': (lambda: stack(AutoConfig(5)), random_data(8, 4), 1),
    'containers': (lambda: stack(InContainers()), random_data(8, 4), 2),
    'argument': (
        lambda: stack(GivenNorm(keras_layers.BatchNormalization())),
        random_data(8, 4),
        0,
    ),
    'argument with its own': (
        lambda: stack(GivenNorm(GivenNorm(AutoConfig()))),
        random_data(8, 4),
        1,
    ),
    'model': (_own_model, random_data(8, 4), 2),
    'model in model': (lambda: stack(OwnModel(name='m')), random_data(8, 4), 2),
    'time distributed': (
        lambda: stack(
            keras_layers.TimeDistributed(AutoConfig(3)), shape=(5, 4)
        ),
        random_data(8, 5, 4),
        1,
    ),
    'wrapper': (
        lambda: stack(WrapperWithNorm(AutoConfig())),
        random_data(8, 4),
        2,
    ),
    'recurrent': (_recurrent, random_data(8, 5, 4), 3),
}
HOLDER_CLASSES = {
    x.__name__: x
    for x in (
        AutoConfig,
        InContainers,
        GivenNorm,
        OwnModel,
        WrapperWithNorm,
    )
}
