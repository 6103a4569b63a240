"""Conversions between TFF's types and TensorFlow's structures."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff


def leaf_types(type_spec: tff.Type) -> list[tff.Type]:
  """Returns the tensor and sequence types inside a type, depth first."""
  if isinstance(type_spec, tff.StructType):
    return [
        leaf
        for _, element in tff.structure.iter_elements(type_spec)
        for leaf in leaf_types(element)
    ]
  return [type_spec]


def leaf_names(type_spec: tff.Type, prefix: str = '') -> list[str]:
  """Returns the place of each of `leaf_types`, such as `weights.trainable[0]`.

  Args:
    type_spec: The type.
    prefix: The name of the whole.
  """
  if not isinstance(type_spec, tff.StructType):
    return [prefix]
  names = []
  for index, (name, element) in enumerate(
      tff.structure.iter_elements(type_spec)
  ):
    if name is None:
      place = f'{prefix}[{index}]'
    else:
      place = f'{prefix}.{name}' if prefix else name
    names += leaf_names(element, place)
  return names


def unflatten(type_spec: tff.Type, leaves: Iterator[Any]) -> Any:
  """Builds nested `tff.structure.Struct`s from leaves.

  Args:
    type_spec: The structure's type.
    leaves: An iterator over the leaves, depth first, which may have more leaves
      than the type.

  Returns:
    The structure, or the leaf if the type is not a `tff.StructType`.
  """
  if not isinstance(type_spec, tff.StructType):
    return next(leaves)
  return tff.structure.Struct(
      [
          (name, unflatten(element, leaves))
          for name, element in tff.structure.iter_elements(type_spec)
      ]
  )


def tensor_spec(type_spec: tff.Type) -> tf.TensorSpec:
  """Returns the spec of a leaf's tensor; a dataset is its variant tensor."""
  if isinstance(type_spec, tff.SequenceType):
    return tf.TensorSpec([], tf.variant)
  return tf.TensorSpec(type_spec.shape, tf.as_dtype(type_spec.dtype))


def pack(type_spec: tff.Type, leaves: Iterable[Any]) -> Any:
  """Builds a structure for `tf.data` from leaves.

  Args:
    type_spec: The structure's type.
    leaves: The leaves, depth first.

  Returns:
    Nested `OrderedDict`s (where elements have names) and tuples.
  """
  remaining = iter(leaves)

  def build(type_spec):
    if not isinstance(type_spec, tff.StructType):
      return next(remaining)
    elements = [
        (name, build(element))
        for name, element in tff.structure.iter_elements(type_spec)
    ]
    if elements and elements[0][0] is not None:
      return collections.OrderedDict(elements)
    return tuple(value for _, value in elements)

  return build(type_spec)


def unpack(type_spec: tff.Type, element: Any) -> list[Any]:
  """Returns the leaves, depth first, of a structure of `tf.data`."""
  if not isinstance(type_spec, tff.StructType):
    return [element]
  return [
      leaf
      for index, (name, part) in enumerate(
          tff.structure.iter_elements(type_spec)
      )
      for leaf in unpack(part, element[index if name is None else name])
  ]


def map_dataset(
    dataset: tf.data.Dataset,
    element_type: tff.Type,
    result_type: tff.Type,
    function: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> tf.data.Dataset:
  """Applies a function to a dataset's elements.

  Args:
    dataset: The dataset.
    element_type: The type of its elements.
    result_type: The type of the new elements.
    function: Maps the leaves of an element to the leaves of a new element.

  Returns:
    The dataset of the new elements.
  """
  is_tuple = isinstance(dataset.element_spec, tuple)

  def call(*parts):
    # `tf.data` passes a tuple's parts as arguments, but a dictionary whole.
    element = parts if is_tuple else parts[0]
    return pack(result_type, function(unpack(element_type, element)))

  return dataset.map(call)


def reduce_dataset(
    dataset: tf.data.Dataset,
    element_type: tff.Type,
    initial: Sequence[tf.Tensor],
    function: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> list[tf.Tensor]:
  """Reduces a dataset's elements to a state.

  Args:
    dataset: The dataset.
    element_type: The type of its elements.
    initial: The leaves of the state before the first element.
    function: Maps the concatenated leaves of the state and of an element to the
      leaves of the next state.

  Returns:
    The leaves of the last state.
  """

  def call(state, element):
    return tuple(function([*state, *unpack(element_type, element)]))

  return list(dataset.reduce(tuple(initial), call))


def spec(element_type: tff.Type) -> Any:
  """Returns the spec of a dataset's elements."""
  return pack(element_type, [tensor_spec(t) for t in leaf_types(element_type)])


def from_variant(variant: tf.Tensor, element_type: tff.Type) -> tf.data.Dataset:
  """Returns the dataset that a variant tensor holds."""
  return tf.data.experimental.from_variant(variant, spec(element_type))
