"""Copies a Keras model with its weights."""

import keras

from tff_bn.common import checks
from tff_bn.keras_model import keras_copy


def copy_model(model: keras.Model) -> keras.Model:
  """Copies a model with its weights and `trainable` flags.

  `keras.models.clone_model` gives a copy new weights. With the weights set, it
  still lacks the mean and variance that `keras.layers.Normalization` computes
  with, and the `trainable` flags of single variables.

  Example:
  ```
  pretrained = keras.models.load_model('model.keras')
  pretrained.get_layer('backbone').trainable = False
  model = BatchNormModel(lambda: tff_bn.copy_model(pretrained), ...)
  ```

  Args:
    model: A Keras model. Custom layers and models need a configuration
      (`get_config`), as for saving the model.

  Returns:
    The new model, with its own weights. It is not compiled.

  Raises:
    TypeError: If `model` is not a Keras model.
  """
  checks.check_type('model', model, keras.Model, 'be a keras.Model')
  copy = keras_copy.PlainCopy()
  new_model = copy.layer(model)
  if model.built and not keras_copy.is_functional(model):
    keras_copy.build(new_model, model.get_build_config())
  copy.set_state(model)
  # Saving, which the line before uses, merges the weights of LoRA.
  new_model.set_weights(model.get_weights())
  for new, old in zip(new_model.weights, model.weights, strict=True):
    if new.trainable != old.trainable:
      new.trainable = old.trainable
  return new_model
