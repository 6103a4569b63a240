"""TFF's types of tensors and datasets in terms of TensorFlow."""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff


def leaf_types(type_spec: tff.Type) -> list[tff.Type]:
  """The tensor and sequence types that a type consists of, depth first."""
  if isinstance(type_spec, tff.StructType):
    return [
        leaf
        for _, element in tff.structure.iter_elements(type_spec)
        for leaf in leaf_types(element)
    ]
  return [type_spec]


def unflatten(type_spec: tff.Type, leaves: Iterator[Any]) -> Any:
  """Makes leaves, depth first, a structure as TFF uses it.

  Args:
    type_spec: The structure's type.
    leaves: The leaves; as many are taken as the type has.

  Returns:
    Nested `tff.structure.Struct`s, or a leaf.
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
  """The spec of the tensor of a leaf; a dataset is its variant tensor."""
  if isinstance(type_spec, tff.SequenceType):
    return tf.TensorSpec([], tf.variant)
  return tf.TensorSpec(type_spec.shape, tf.as_dtype(type_spec.dtype))


def pack(type_spec: tff.Type, leaves: Sequence[Any]) -> Any:
  """Makes leaves, depth first, a structure as `tf.data` uses it.

  Args:
    type_spec: The structure's type.
    leaves: The leaves.

  Returns:
    Nested `OrderedDict`s (where elements have names) and tuples.
  """
  return _pack(type_spec, iter(leaves))


def _pack(type_spec: tff.Type, leaves: Iterator[Any]) -> Any:
  if not isinstance(type_spec, tff.StructType):
    return next(leaves)
  elements = [
      (name, _pack(element, leaves))
      for name, element in tff.structure.iter_elements(type_spec)
  ]
  if elements and elements[0][0] is not None:
    return collections.OrderedDict(elements)
  return tuple(value for _, value in elements)


def unpack(type_spec: tff.Type, element: Any) -> list[Any]:
  """The leaves, depth first, of a structure as `tf.data` uses it."""
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
    function: Makes the leaves of a new element of those of an element.

  Returns:
    The dataset of the new elements.
  """
  is_tuple = isinstance(dataset.element_spec, tuple)

  def call(*parts):
    # `tf.data` hands over the parts of a tuple, but a dictionary as it is.
    element = parts if is_tuple else parts[0]
    return pack(result_type, function(unpack(element_type, element)))

  return dataset.map(call)


def reduce_dataset(
    dataset: tf.data.Dataset,
    element_type: tff.Type,
    initial: Sequence[tf.Tensor],
    function: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> list[tf.Tensor]:
  """Reduces a dataset.

  Args:
    dataset: The dataset.
    element_type: The type of its elements.
    initial: The leaves of the state before the first element.
    function: Makes the leaves of the new state of those of the old one,
      followed by those of an element.

  Returns:
    The leaves of the last state.
  """

  def call(state, element):
    return tuple(function([*state, *unpack(element_type, element)]))

  return list(dataset.reduce(tuple(initial), call))


def spec(element_type: tff.Type) -> Any:
  """The spec of a dataset's elements."""
  return pack(element_type, [tensor_spec(t) for t in leaf_types(element_type)])


def from_variant(variant: tf.Tensor, element_type: tff.Type) -> tf.data.Dataset:
  """The dataset of a variant tensor."""
  return tf.data.experimental.from_variant(variant, spec(element_type))
