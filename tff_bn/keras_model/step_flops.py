"""The number of floating point operations of a training step."""

from collections.abc import Callable
import functools
import logging

import keras
import tensorflow as tf

from tff_bn.keras_model import batch as batch_lib
from tff_bn.keras_model.batch_norm_model import BatchNormModel

# The gradients of a layer's inputs and of its weights cost as much as its
# output each.
_FORWARD_AND_BACKWARD = 3


def of_model(model: BatchNormModel) -> Callable[[int], float]:
  """Returns a function from a batch's number of samples to the operations."""
  return functools.partial(
      step_flops, model.keras_model, batch_lib.Batch(*model.input_spec).x
  )


def step_flops(
    keras_model: keras.Model, input_spec: object, batch_size: int
) -> float:
  """Estimates the floating point operations of a training step.

  Args:
    keras_model: The model.
    input_spec: The structure of its input, of `tf.TensorSpec`s of batches.
    batch_size: The number of samples in a batch.
  """
  spec = tf.nest.map_structure(
      lambda s: tf.TensorSpec([batch_size, *s.shape[1:]], s.dtype), input_spec
  )
  graph = (
      tf.function(lambda x: keras_model(x, training=False), autograph=False)
      .get_concrete_function(spec)
      .graph
  )
  profiler = tf.compat.v1.profiler
  options = profiler.ProfileOptionBuilder(
      profiler.ProfileOptionBuilder.float_operation()
  ).with_empty_output()
  logger = tf.get_logger()
  level = logger.level
  # TensorFlow warns of a function that the profiler itself calls.
  logger.setLevel(logging.ERROR)
  try:
    profile = profiler.profile(graph, cmd='op', options=options.build())
  finally:
    logger.setLevel(level)
  return _FORWARD_AND_BACKWARD * profile.total_float_ops
