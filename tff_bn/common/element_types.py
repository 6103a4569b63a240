"""Checks that the elements of a user's dataset have the type of a model."""

from collections.abc import Iterator, Mapping
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

# The parts of a batch.
_PARTS = ('x', 'y', 'sample_weight')


def check_elements(name: str, element_spec: Any, expected: tff.Type) -> None:
  """Raises a `TypeError` if a dataset's elements have another type.

  The error says how to convert them, if that is known.

  Args:
    name: The name of the dataset, for the error.
    element_spec: Its `element_spec`.
    expected: The type of the batches `(x, y)` or `(x, y, sample_weight)` that a
      model takes.
  """
  try:
    given = tff.to_type(tff.types.tensorflow_to_type(element_spec))
  # TFF has no type for some specs, such as that of other datasets.
  except (NotImplementedError, TypeError, ValueError) as error:
    raise TypeError(
        f'{name}: the elements of the dataset are {element_spec}, but must be'
        f' {_batches(expected)}.'
    ) from error
  if expected.is_assignable_from(given):
    return
  parts = _parts(expected)
  if not parts or parts != _parts(given):
    raise TypeError(
        f'{name}: the elements of the dataset have the type {given}, but must'
        f' be {_batches(expected)}.{_parts_advice(given, expected)}'
        f'{pairs_advice(element_spec)}'
    )
  problems = [
      problem
      for index, part in enumerate(parts)
      for problem in _problems(part, given[index], expected[index])
  ]
  advice = ''
  converted = [
      _convert(part, given[index], expected[index])
      for index, part in enumerate(parts)
  ]
  if None not in converted:
    advice = (
        f' Use dataset.map(lambda {", ".join(parts)}:'
        f' ({", ".join(map(str, converted))})).'
    )
  elif _is_batch_missing(given[0], expected[0]):
    advice = ' The dataset is not batched: use dataset.batch(batch_size).'
  raise TypeError(f'{name}: {"; ".join(problems)}.{advice}')


def pairs_advice(spec: Any) -> str:
  """Returns ' ' and a sentence on how to make pairs of elements, or ''."""
  if isinstance(spec, Mapping):
    return (
        ' Use dataset.map to make pairs, such as lambda batch: (batch[X],'
        ' batch[Y]).'
    )
  return ''


def _parts(type_spec: tff.Type) -> tuple[str, ...]:
  """Returns the names of the parts of batches; empty for other elements."""
  if isinstance(type_spec, tff.StructType):
    names = tff.structure.name_list_with_nones(type_spec)
    if names in ([None] * 2, [None] * 3):
      return _PARTS[: len(names)]
  return ()


def _batches(expected: tff.Type) -> str:
  """Describes the batches that a model takes."""
  kind = 'pairs ' if len(_parts(expected)) == 2 else ''
  return f'{kind}({", ".join(_parts(expected))}) of the type {expected}'


def _parts_advice(given: tff.Type, expected: tff.Type) -> str:
  """Returns ' ' and a sentence about weights that are missing or unknown."""
  if not _parts(given) or not _parts(expected):
    return ''
  advice = 'build the model with input_spec=dataset.element_spec'
  if len(_parts(given)) > len(_parts(expected)):
    return (
        f' To use the weights, {advice}; to drop them, use'
        ' dataset.map(lambda x, y, sample_weight: (x, y)).'
    )
  return (
      ' Add weights by dataset.map(lambda x, y: (x, y,'
      f' tf.ones(tf.shape(y)[:1]))), or {advice}.'
  )


def _problems(place: str, given: tff.Type, expected: tff.Type) -> Iterator[str]:
  """Yields a part of the error for each part that has another type."""
  if expected.is_assignable_from(given):
    return
  if isinstance(given, tff.StructType) and isinstance(expected, tff.StructType):
    names = tff.structure.name_list_with_nones(expected)
    if tff.structure.name_list_with_nones(given) == names:
      for index, name in enumerate(names):
        inner = f'{place}[{index if name is None else repr(name)}]'
        yield from _problems(inner, given[index], expected[index])
      return
  if isinstance(given, tff.TensorType) and isinstance(expected, tff.TensorType):
    dtypes = [tf.as_dtype(t.dtype).name for t in (given, expected)]
    if dtypes[0] != dtypes[1]:
      yield f'{place} has the dtype {dtypes[0]}, but must have {dtypes[1]}'
    if not _has_shape(given, expected):
      shapes = [tf.TensorShape(t.shape) for t in (given, expected)]
      yield f'{place} has the shape {shapes[0]}, but must have {shapes[1]}'
    return
  yield f'{place} has the type {given}, but must have {expected}'


def _has_shape(given: tff.TensorType, expected: tff.TensorType) -> bool:
  return expected.is_assignable_from(
      tff.TensorType(expected.dtype, given.shape)
  )


def _convert(name: str, given: tff.Type, expected: tff.Type) -> Optional[str]:
  """Returns code that converts a part; `None` if there is none."""
  if expected.is_assignable_from(given):
    return name
  if not isinstance(given, tff.TensorType) or not isinstance(
      expected, tff.TensorType
  ):
    return None
  code = name
  if not _has_shape(given, expected) and given.shape and given.shape[-1] == 1:
    given = tff.TensorType(given.dtype, given.shape[:-1])
    code = f'tf.squeeze({code}, -1)'
  dtypes = [tf.as_dtype(t.dtype) for t in (given, expected)]
  if not _has_shape(given, expected) or tf.string in dtypes:
    return None
  if dtypes[0] != dtypes[1]:
    code = f'tf.cast({code}, tf.{dtypes[1].name})'
  return code


def _is_batch_missing(given: tff.Type, expected: tff.Type) -> bool:
  """Whether a tensor lacks only the first axis."""
  return (
      isinstance(given, tff.TensorType)
      and isinstance(expected, tff.TensorType)
      and given.shape is not None
      and expected.shape is not None
      and list(given.shape) == list(expected.shape[1:])
  )
