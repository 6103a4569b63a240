"""Functions of nested structures of tensors."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

_T = TypeVar('_T')


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
    true_fn: Callable[[Sequence[_T]], Sequence[tf.Tensor]],
    false_fn: Callable[[Sequence[_T]], Sequence[tf.Tensor]],
    items: Sequence[_T],
) -> list[tf.Tensor]:
  """Maps items to tensors by one of two functions.

  Large tensors are computed by one function only and are not copied, other than
  with `tf.where`. For small ones, that is faster than a branch of the graph.

  Args:
    condition: A bool scalar, which selects `true_fn` if it is true.
    true_fn: Computes a tensor for each item of a list. It is called with some
      of the items, also inside a branch of the graph.
    false_fn: Like `true_fn`, with the same shapes and dtypes.
    items: Tensors, or tuples that start with a tensor. The shapes of these
      tensors tell how large the results are.

  Returns:
    The tensors. NaN and infinity of the other function are ignored.
  """
  is_large = [_is_large(item) for item in items]
  small, large = (
      [item for item, found in zip(items, is_large) if found is wanted]
      for wanted in (False, True)
  )
  small_values = iter(
      [
          tf.where(condition, x, y)
          for x, y in zip(true_fn(small), false_fn(small), strict=True)
      ]
  )
  large_values = iter(
      tf.cond(condition, lambda: true_fn(large), lambda: false_fn(large))
      if large
      else ()
  )
  return [next(large_values if found else small_values) for found in is_large]


def _is_large(item: Any) -> bool:
  """Whether copying it takes longer than a branch of the graph."""
  tensor = tf.convert_to_tensor(item[0] if isinstance(item, tuple) else item)
  return (tensor.shape.num_elements() or 0) >= 2**16


def where(condition: tf.Tensor, a: Any, b: Any) -> Any:
  """Selects the nested structure `a` if the condition is true, else `b`.

  Unlike arithmetic, this ignores NaN and infinity in the other structure.

  Args:
    condition: A bool scalar.
    a: A nested structure of tensors.
    b: A structure of the same form, shapes and dtypes.
  """
  tf.nest.assert_same_structure(a, b)
  chosen = choose(
      condition,
      lambda pairs: [x for x, _ in pairs],
      lambda pairs: [y for _, y in pairs],
      list(zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)),
  )
  return tf.nest.pack_sequence_as(a, chosen)


def where_or_zero(condition: tf.Tensor, values: Any) -> Any:
  """Returns a nested structure if the condition is true, else zeros.

  Args:
    condition: A bool scalar.
    values: A nested structure of tensors.
  """
  chosen = choose(
      condition,
      list,
      lambda tensors: [tf.zeros_like(tensor) for tensor in tensors],
      tf.nest.flatten(values),
  )
  return tf.nest.pack_sequence_as(values, chosen)
