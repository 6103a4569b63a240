"""Functions of TFF's optimizers, for clients and the server."""

from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

LEARNING_RATE = tff.learning.optimizers.LEARNING_RATE_KEY


def default_hyperparameters(
    optimizer: tff.learning.optimizers.Optimizer,
) -> Any:
  """Returns the hyperparameters that an optimizer starts with, by name."""
  spec = tf.TensorSpec([], tf.float32)
  return optimizer.get_hparams(optimizer.initialize(spec))


def hyperparameter_dtype(
    optimizer: tff.learning.optimizers.Optimizer, specs: Any
) -> tf.DType:
  """Returns the dtype that an optimizer's hyperparameters must have.

  TFF's optimizers keep hyperparameters as Python floats, which become float32
  tensors in a state. With float64 weights, some optimizers (SGD with momentum)
  need float64 hyperparameters, while others (Yogi) need float32.

  Args:
    optimizer: The optimizer.
    specs: The `tf.TensorSpec`s of the weights.

  Returns:
    The weights' dtype if possible, else float32.
  """
  dtype = next((spec.dtype for spec in tf.nest.flatten(specs)), tf.float32)
  if dtype == tf.float32:
    return dtype

  def step(weights):
    state = initialize_optimizer(optimizer, specs, dtype)
    return optimizer.next(state, weights, weights)

  try:
    tf.function(step).get_concrete_function(specs)
  except TypeError:
    return tf.float32
  return dtype


def check_hyperparameters(
    name: str, optimizer: tff.learning.optimizers.Optimizer, dtype: tf.DType
) -> None:
  """Checks that an optimizer's hyperparameters are finite.

  Args:
    name: The name of the argument with the optimizer.
    optimizer: The optimizer.
    dtype: The hyperparameters' dtype, see `hyperparameter_dtype`.

  Raises:
    ValueError: If one is not finite, such as 1e300 in float32.
  """
  for hparam, value in default_hyperparameters(optimizer).items():
    with np.errstate(over='ignore'):
      converted = np.asarray(value).astype(dtype.as_numpy_dtype)
    if not np.all(np.isfinite(converted)):
      raise ValueError(
          f'{name} has {hparam}={value}, which is not finite in {dtype.name}.'
      )


def initialize_optimizer(
    optimizer: tff.learning.optimizers.Optimizer, specs: Any, dtype: tf.DType
) -> Any:
  """Returns an optimizer's initial state, with hyperparameters as tensors.

  Args:
    optimizer: The optimizer.
    specs: The `tf.TensorSpec`s of the weights.
    dtype: The hyperparameters' dtype, see `hyperparameter_dtype`.
  """
  return tf.nest.map_structure(
      lambda x: x if tf.is_tensor(x) else tf.constant(x, dtype),
      optimizer.initialize(specs),
  )
