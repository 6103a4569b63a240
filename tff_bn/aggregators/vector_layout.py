"""Conversion of structures of tensors to vectors and back."""

import math
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff


class VectorLayout:
  """Converts a structure of floats to one vector and back.

  Attributes:
    value_type: The structure's type.
    dtype: The vector's dtype: float64 if any tensor is float64, else float32.
    size: The number of entries of the vector.
  """

  def __init__(self, name: str, value_type: Any):
    """Initializes the layout of a type, or an argument of `tff.to_type`.

    Raises:
      TypeError: If `value_type` is not a structure of floats with static
        shapes. The message begins with `name`, of the aggregator.
    """
    self.value_type = tff.to_type(value_type)
    # `tff.structure` keeps the order of dictionaries; `tf.nest` sorts keys.
    self._types = dict(_leaves(self.value_type))
    wrong = [
        f'{path or "the value"}: {leaf}'
        for path, leaf in self._types.items()
        if not isinstance(leaf, tff.TensorType)
        or not tf.as_dtype(leaf.dtype).is_floating
        or None in leaf.shape
    ]
    if wrong:
      raise TypeError(
          f'{name} aggregates structures of floats of known shapes, but was'
          f' given {"; ".join(wrong)}.'
      )
    self._sizes = [math.prod(leaf.shape) for leaf in self._types.values()]
    self.size = sum(self._sizes)
    dtypes = {tf.as_dtype(leaf.dtype) for leaf in self._types.values()}
    self.dtype = tf.float64 if tf.float64 in dtypes else tf.float32

  def to_vector(self, value: Any) -> tf.Tensor:
    """Returns a structure as a vector."""
    tensors = [value]
    if isinstance(self.value_type, tff.StructType):
      tensors = tff.structure.flatten(
          tff.structure.from_container(value, recursive=True)
      )
    parts = [tf.reshape(tf.cast(t, self.dtype), [-1]) for t in tensors]
    return tf.ensure_shape(
        tf.concat([tf.zeros([0], self.dtype), *parts], axis=0), [self.size]
    )

  def columns(self, path: str) -> slice:
    """Returns where the leaf of a path, such as `0/mean`, is in a vector."""
    place = list(self._types).index(path)
    start = sum(self._sizes[:place])
    return slice(start, start + self._sizes[place])

  def from_vector(self, vector: tf.Tensor) -> Any:
    """Returns a vector as a structure."""
    parts = iter(tf.split(vector, self._sizes) if self._sizes else [])
    return tff.types.structure_from_tensor_type_tree(
        lambda t: tf.cast(tf.reshape(next(parts), t.shape), t.dtype),
        self.value_type,
    )


def _leaves(value_type: tff.Type, path: str = '') -> list[tuple[str, tff.Type]]:
  """Returns the paths and types of the leaves."""
  if not isinstance(value_type, tff.StructType):
    return [(path, value_type)]
  found = []
  for i, (name, element) in enumerate(tff.structure.iter_elements(value_type)):
    step = str(i) if name is None else name
    found += _leaves(element, f'{path}/{step}' if path else step)
  return found
