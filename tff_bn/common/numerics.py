"""Functions of nested structures of tensors."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_OfTensors = Callable[..., list[tf.Tensor]]


def all_finite(tensors: Any) -> tf.Tensor:
  """Returns whether all numbers are finite, a bool scalar.

  Args:
    tensors: A nested structure of tensors. Tensors without floats, and an empty
      structure, count as finite.
  """
  checks = [
      tf.reduce_all(tf.math.is_finite(tensor))
      for tensor in tf.nest.flatten(tensors)
      if tensor.dtype.is_floating
  ]
  return tf.reduce_all(tf.stack([tf.constant(True), *checks]))


def clip_by_global_norm(tensors: Any, clip_norm: float) -> Any:
  """Scales a nested structure of tensors down to a global norm.

  Args:
    tensors: A nested structure of tensors.
    clip_norm: The largest global norm.

  Returns:
    The structure. It is unchanged to the bit if its norm is not larger, unlike
    with `tf.clip_by_global_norm`. All numbers are NaN if the norm overflows.
  """
  norm = tf.linalg.global_norm(tf.nest.flatten(tensors))
  factor = tf.minimum(tf.ones([], norm.dtype), clip_norm / norm)
  # What is NaN is rejected; 0 would not be.
  factor = tf.where(tf.math.is_finite(norm), factor, norm - norm)
  return tf.nest.map_structure(lambda t: t * factor, tensors)


def choose(
    condition: tf.Tensor,
    true_fn: _OfTensors,
    false_fn: _OfTensors,
    *structures: Any,
) -> Any:
  """Maps nested structures to one structure, by one of two functions.

  Large tensors are computed by one function only and are not copied, other than
  with `tf.where`. For small ones, that is faster than a branch of the graph.

  Args:
    condition: A bool scalar, which selects `true_fn` if it is true.
    true_fn: Takes a list of tensors from each structure, and returns a list of
      results. It is called with some of the tensors, also inside a branch of
      the graph.
    false_fn: Like `true_fn`, with the same shapes and dtypes.
    *structures: At least one nested structure of tensors; all have the same
      form. The shapes in the first one tell how large the results are.

  Returns:
    A structure of the same form. NaN and infinity of the other function are
    ignored.
  """
  first, *others = structures
  for other in others:
    tf.nest.assert_same_structure(first, other)
  flat = [tf.nest.flatten(structure) for structure in structures]
  is_large = [_is_large(tensor) for tensor in flat[0]]
  small, large = (
      [[t for t, found in zip(f, is_large) if found is wanted] for f in flat]
      for wanted in (False, True)
  )
  small_values = iter(
      [
          tf.where(condition, x, y)
          for x, y in zip(true_fn(*small), false_fn(*small), strict=True)
      ]
  )
  large_values = iter(
      tf.cond(condition, lambda: true_fn(*large), lambda: false_fn(*large))
      if any(is_large)
      else ()
  )
  return tf.nest.pack_sequence_as(
      first,
      [next(large_values if found else small_values) for found in is_large],
  )


def _is_large(tensor: Any) -> bool:
  """Whether copying it takes longer than a branch of the graph."""
  size = tf.convert_to_tensor(tensor).shape.num_elements()
  return size is not None and size >= 2**16


def where(condition: tf.Tensor, a: Any, b: Any) -> Any:
  """Selects the nested structure `a` if the condition is true, else `b`.

  Unlike arithmetic, this ignores NaN and infinity in the other structure.

  Args:
    condition: A bool scalar.
    a: A nested structure of tensors.
    b: A structure of the same form, shapes and dtypes.
  """
  return choose(condition, lambda x, _: x, lambda _, y: y, a, b)


def where_or_zero(condition: tf.Tensor, values: Any) -> Any:
  """Returns a nested structure if the condition is true, else zeros.

  Args:
    condition: A bool scalar.
    values: A nested structure of tensors.
  """
  return choose(
      condition,
      list,
      lambda tensors: [tf.zeros_like(tensor) for tensor in tensors],
      values,
  )
