"""Checks of numbers that are needed in several places."""

from typing import Any

import tensorflow as tf


def all_finite(tensors: Any) -> tf.Tensor:
  """Whether all numbers are finite.

  Args:
    tensors: A nested structure of tensors. Tensors that do not hold floats
      count as finite.

  Returns:
    A bool scalar; true if there is no tensor.
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
    `a` if the condition is true, else `b`. Unlike with arithmetic, numbers of
    the other structure that are not finite have no influence.
  """
  return tf.nest.map_structure(lambda x, y: tf.where(condition, x, y), a, b)


def where_or_zero(condition: tf.Tensor, values: Any) -> Any:
  """Selects a nested structure, or zeros.

  Args:
    condition: A bool scalar.
    values: A nested structure of tensors.

  Returns:
    `values` if the condition is true, else zeros of the same shapes and dtypes.
  """
  return where(condition, values, tf.nest.map_structure(tf.zeros_like, values))
