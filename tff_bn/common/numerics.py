"""Checks and choices of nested structures of tensors."""

from typing import Any

import tensorflow as tf


def all_finite(tensors: Any) -> tf.Tensor:
  """Whether all numbers are finite.

  Args:
    tensors: A nested structure of tensors. Tensors of other dtypes than floats
      count as finite.

  Returns:
    A bool scalar; true if there are no tensors.
  """
  checks = [
      tf.reduce_all(tf.math.is_finite(tensor))
      for tensor in tf.nest.flatten(tensors)
      if tensor.dtype.is_floating
  ]
  return tf.reduce_all(tf.stack([tf.constant(True), *checks]))


def where(condition: tf.Tensor, a: Any, b: Any) -> Any:
  """Selects between two nested structures.

  Args:
    condition: A bool scalar.
    a: A nested structure of tensors.
    b: A structure of the same form, shapes and dtypes.

  Returns:
    `a` if the condition is true, else `b`. Unlike in arithmetic, NaN or
    infinite values of the other structure have no influence.
  """
  return tf.nest.map_structure(lambda x, y: tf.where(condition, x, y), a, b)


def where_or_zero(condition: tf.Tensor, values: Any) -> Any:
  """Returns a nested structure, or zeros if the condition is false.

  Args:
    condition: A bool scalar.
    values: A nested structure of tensors.

  Returns:
    `values` if the condition is true, else zeros of the same shapes and dtypes.
  """
  return where(condition, values, tf.nest.map_structure(tf.zeros_like, values))
