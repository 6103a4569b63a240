"""Conversions between TFF's types and TensorFlow's structures."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff


def leaf_types(type_spec: tff.Type) -> list[tff.Type]:
  """Returns the tensor and sequence types inside a type, depth first."""
  if isinstance(type_spec, tff.FederatedType):
    return leaf_types(type_spec.member)
  if isinstance(type_spec, tff.StructType):
    return [
        leaf
        for _, element in tff.structure.iter_elements(type_spec)
        for leaf in leaf_types(element)
    ]
  return [type_spec]


def leaf_names(type_spec: tff.Type, prefix: str = '') -> list[str]:
  """Returns the places of `leaf_types`, such as `weights.trainable[0]`."""
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


def map_parts(type_spec: tff.Type, function: Callable[[tff.Type], Any]) -> Any:
  """Replaces the parts of a type that are not structs, depth first."""
  if not isinstance(type_spec, tff.StructType):
    return function(type_spec)
  return tff.structure.Struct(
      [
          (name, map_parts(element, function))
          for name, element in tff.structure.iter_elements(type_spec)
      ]
  )


def unflatten(type_spec: tff.Type, leaves: Iterator[Any]) -> Any:
  """Builds nested `tff.structure.Struct`s from the next leaves, depth first."""
  return map_parts(type_spec, lambda _: next(leaves))


def tensor_spec(type_spec: tff.Type) -> tf.TensorSpec:
  """Returns the spec of a leaf's tensor; a dataset is its variant tensor."""
  if isinstance(type_spec, tff.SequenceType):
    return tf.TensorSpec([], tf.variant)
  return tf.TensorSpec(type_spec.shape, tf.as_dtype(type_spec.dtype))


def pack(type_spec: tff.Type, leaves: Iterable[Any]) -> Any:
  """Builds nested `OrderedDict`s and tuples for `tf.data`, see `unflatten`."""
  struct = unflatten(type_spec, iter(leaves))
  if not isinstance(struct, tff.structure.Struct):
    return struct
  return tff.structure.to_odict_or_tuple(struct)


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
  """Maps the leaves of each element to the leaves of a new element."""
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
  """Reduces a dataset's elements to the leaves of a state.

  `function` gets one list: the leaves of the state, then the leaves of an
  element. It returns the leaves of the next state.
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
