"""Models for `--model=unusual_models:NAME`; some analyses refuse some."""

import keras

layers = keras.layers


@keras.saving.register_keras_serializable('unusual_models')
class Subclassed(keras.Model):

  def __init__(self, num_classes, **kwargs):
    super().__init__(**kwargs)
    self.num_classes = num_classes
    self.flatten = layers.Flatten()
    self.hidden = layers.Dense(5, activation='relu', name='hidden')
    self.logits = layers.Dense(num_classes, name='logits')

  def call(self, x):
    return self.logits(self.hidden(self.flatten(x)))

  def get_config(self):
    return dict(super().get_config(), num_classes=self.num_classes)


def subclassed(input_shape, num_classes):
  model = Subclassed(num_classes)
  model.build((None, *input_shape))
  return model


def dense(input_shape, num_classes):
  inputs = keras.Input(input_shape)
  x = layers.Flatten()(inputs)
  x = layers.Dense(4, activation='relu', name='hidden')(x)
  return keras.Model(inputs, layers.Dense(num_classes)(x))


def linear(input_shape, num_classes):
  return keras.Sequential(
      [
          keras.Input(input_shape),
          layers.Flatten(),
          layers.Dense(num_classes, name='logits'),
      ]
  )


def frozen(input_shape, num_classes):
  """The first layer is frozen, with random weights."""
  inputs = keras.Input(input_shape)
  x = layers.Dense(6, trainable=False, name='frozen')(layers.Flatten()(inputs))
  x = layers.BatchNormalization(name='norm')(layers.Dense(5)(x))
  return keras.Model(inputs, layers.Dense(num_classes)(layers.ReLU()(x)))
