"""What clients and the server both need of TFF's optimizers."""

from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

LEARNING_RATE = tff.learning.optimizers.LEARNING_RATE_KEY


def default_hyperparameters(
    optimizer: tff.learning.optimizers.Optimizer,
) -> Any:
  """The hyperparameters that an optimizer starts with, by name."""
  spec = tf.TensorSpec([], tf.float32)
  return optimizer.get_hparams(optimizer.initialize(spec))


def hyperparameter_dtype(
    optimizer: tff.learning.optimizers.Optimizer, specs: Any
) -> tf.DType:
  """Finds the dtype that an optimizer's hyperparameters must have.

  TFF's optimizers keep hyperparameters as Python floats. As part of a state
  these become float32 tensors, which do not go with float64 weights in some
  optimizers (SGD with momentum), while others (Yogi) work with float32 only.

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
    name: The name of the argument that the optimizer was.
    optimizer: The optimizer.
    dtype: The hyperparameters' dtype, see `hyperparameter_dtype`.

  Raises:
    ValueError: If one is not, as 1e300 in float32.
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
  """Initializes an optimizer, with all hyperparameters as tensors.

  Args:
    optimizer: The optimizer.
    specs: The `tf.TensorSpec`s of the weights.
    dtype: The hyperparameters' dtype, see `hyperparameter_dtype`.

  Returns:
    The optimizer's state, all tensors.
  """
  return tf.nest.map_structure(
      lambda x: x if tf.is_tensor(x) else tf.constant(x, dtype),
      optimizer.initialize(specs),
  )
