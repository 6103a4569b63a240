"""The type of a batch's labels."""

import tensorflow as tf


def label_spec(task, input_shape, num_outputs):
  """Returns the type of the labels of a batch."""
  k = num_outputs
  return {
      'multilabel': tf.TensorSpec((None, k), tf.int32),
      'regression': tf.TensorSpec((None, k), tf.float32),
      'segmentation': tf.TensorSpec((None, *input_shape[:2]), tf.int32),
  }.get(task, tf.TensorSpec((None,), tf.int32))
