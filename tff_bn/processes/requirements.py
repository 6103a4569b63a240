"""What algorithms need of their arguments and of the model."""

from typing import Any

import keras
import numpy as np

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import Role
from tff_bn.layers import discovery


def check_positive_integer(name: str, value: Any) -> None:
  """Raises a `ValueError` if an argument is no whole number from 1 on."""
  if not isinstance(value, (int, np.integer)) or value < 1:
    raise ValueError(f'{name}={value} must be a whole number, at least 1.')


def check_all_shared(
    algorithm: str, model: BatchNormModel, reason: str
) -> None:
  """Checks that all clients can have the same model.

  Args:
    algorithm: The name of the algorithm that needs it.
    model: The model.
    reason: Why it needs it.

  Raises:
    ValueError: If the model has position encodings that are a client's own.
  """
  layers = [v.layer for v in model.variables if v.role is Role.PERSONAL_PHASE]
  if layers:
    raise ValueError(
        f'{algorithm} is impossible with position encodings that are a'
        f" client's own, as in the layers {', '.join(layers)} of the model"
        f' {model.keras_model.name!r}: {reason}. Use personal_share=0, or'
        ' fedavg.'
    )


def trained_batch_norm_layers(
    algorithm: str, model: BatchNormModel
) -> list[keras.layers.Layer]:
  """Finds the layers with running statistics that training changes.

  Args:
    algorithm: The name of the algorithm that needs them.
    model: The model.

  Returns:
    The layers in the order of their variables.

  Raises:
    ValueError: If there is none.
  """
  layer_of = {
      id(layer.moving_mean): layer
      for layer in discovery.batch_norm_layers(model.keras_model)
      if layer.trainable
  }
  if not layer_of:
    raise ValueError(
        f'{algorithm} is about the statistics of batch normalization layers,'
        f' but the model {model.keras_model.name!r} has no such layer that is'
        ' trained. Use a model with batch normalization, or fedavg.'
    )
  return [
      layer_of[id(variable)]
      for variable in model.keras_model.weights
      if id(variable) in layer_of
  ]
