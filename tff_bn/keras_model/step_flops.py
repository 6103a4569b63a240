"""The number of floating point operations of a training step."""

import logging

import keras
import tensorflow as tf

# The gradients of a layer's inputs and of its weights cost as much as its
# output each.
_FORWARD_AND_BACKWARD = 3


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
