"""Conversions between Python values and the leaves of TFF computations."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import aligned_arrays
from tff_bn.common import batch_arrays
from tff_bn.runtime import client_dataset
from tff_bn.runtime import element_structure


@dataclasses.dataclass
class Argument:
  """A checked and flattened argument, not yet on any device.

  Attributes:
    server: The leaves at the server or equal for all clients, depth first.
    clients: For each client the leaves of its values, depth first; `None` if
      the argument has no values that differ between clients.
  """

  server: list[Any]
  clients: Optional[list[list[Any]]]

  def copied(self) -> 'Argument':
    """Returns an argument that shares no arrays with the caller's."""
    server, clients = tf.nest.map_structure(
        lambda value: value.copy() if isinstance(value, np.ndarray) else value,
        (self.server, self.clients),
    )
    return Argument(server, clients)


def flatten_argument(value: Any, type_spec: tff.Type) -> Argument:
  """Checks an argument and flattens it.

  Raises:
    TypeError: If the value does not have the type.
    ValueError: If parts of the value are for different numbers of clients.
  """
  argument = Argument([], None)
  _flatten(value, type_spec, 'argument', argument)
  return argument


def _flatten(
    value: Any, type_spec: tff.Type, name: str, argument: Argument
) -> None:
  if isinstance(type_spec, tff.FederatedType):
    if type_spec.all_equal or type_spec.placement is tff.SERVER:
      argument.server += _leaves(value, type_spec.member, name)
      return
    if not isinstance(value, (list, tuple)):
      raise TypeError(
          f'The {name} must be a list with one value for each client, but is a'
          f' {type(value).__name__}.'
      )
    if argument.clients is None:
      argument.clients = [[] for _ in value]
    if len(value) != len(argument.clients):
      raise ValueError(
          f'The {name} has values of {len(value)} clients, but other parts have'
          f' values of {len(argument.clients)}.'
      )
    checked: list[Any] = []
    form: Optional[_Form] = None
    for number, (leaves, member) in enumerate(zip(argument.clients, value)):
      own = None if form is None else form.leaves(member)
      if own is None:
        own = _leaves(member, type_spec.member, f'{name}[{number}]', checked)
        if number == 0:
          form = _Form.of(member, own, type_spec.member)
      leaves += own
  elif isinstance(type_spec, tff.StructType):
    for element, part, element_name in _elements(value, type_spec, name):
      _flatten(part, element, element_name, argument)
  else:
    argument.server += _leaves(value, type_spec, name)


class _Form(NamedTuple):
  """The form of a client's value, to flatten other clients' values fast.

  Attributes:
    value: The value, whose leaves are all arrays of the right type.
    order: The place of each leaf in the order of `tf.nest.flatten`.
    types: The types of the leaves.
  """

  value: Any
  order: Sequence[int]
  types: Sequence[tff.TensorType]

  @classmethod
  def of(
      cls, value: Any, leaves: Sequence[Any], type_spec: tff.Type
  ) -> Optional['_Form']:
    """Returns the form of a value with some leaves, if it has one."""
    types = element_structure.leaf_types(type_spec)
    places = {id(leaf): n for n, leaf in enumerate(tf.nest.flatten(value))}
    has_form = set(map(id, leaves)) == set(places) and all(
        map(_has_type, leaves, types)
    )
    if not has_form or len(leaves) != len(places):
      return None
    return cls(value, [places[id(leaf)] for leaf in leaves], types)

  def leaves(self, value: Any) -> Optional[list[Any]]:
    """Returns the leaves of a value; `None` if it has another form."""
    try:
      tf.nest.assert_same_structure(self.value, value)
    except (TypeError, ValueError):
      return None
    flat = tf.nest.flatten(value)
    leaves = [flat[place] for place in self.order]
    return leaves if all(map(_has_type, leaves, self.types)) else None


def _type_error(name: str, type_spec: tff.Type, problem: str) -> TypeError:
  return TypeError(f'The {name} must be of type {type_spec}, but {problem}.')


def _elements(
    value: Any, type_spec: tff.StructType, name: str
) -> Iterator[tuple[tff.Type, Any, str]]:
  """Yields the type, the value and the name of each element."""
  try:
    struct = tff.structure.from_container(value)
  except TypeError as error:
    raise _type_error(
        name, type_spec, f'is a {type(value).__name__}'
    ) from error
  elements = tff.structure.to_elements(type_spec)
  given = tff.structure.name_list_with_nones(struct)
  expected = [element_name for element_name, _ in elements]
  has_same_names = None not in given and sorted(given) == sorted(
      element_name or '' for element_name in expected
  )
  if not has_same_names and (
      len(given) != len(expected)
      or any(None not in (g, e) and g != e for g, e in zip(given, expected))
  ):
    raise TypeError(
        f'The {name} must have the elements {expected}, but has {given}.'
    )
  for index, (element_name, element) in enumerate(elements):
    part = struct[element_name if has_same_names else index]
    suffix = f'[{index}]' if element_name is None else f'.{element_name}'
    yield element, part, name + suffix


def _leaves(
    value: Any,
    type_spec: tff.Type,
    name: str,
    checked: Optional[list[Any]] = None,
) -> list[Any]:
  """Checks a value and returns its leaves.

  `checked` has the spec and the type of the last dataset that was right, if
  any. It saves the checks of many clients that have the same.
  """
  checked = [] if checked is None else checked
  if isinstance(type_spec, tff.StructType):
    return [
        leaf
        for element, part, element_name in _elements(value, type_spec, name)
        for leaf in _leaves(part, element, element_name, checked)
    ]
  if isinstance(type_spec, tff.SequenceType):
    return [_sequence(value, type_spec, name, checked)]
  if isinstance(type_spec, tff.TensorType):
    return [_tensor(value, type_spec, name)]
  raise TypeError(
      f'The {name} has the type {type_spec}, but only tensors, datasets and'
      ' structures of them can be given.'
  )


def _tensor(value: Any, type_spec: tff.TensorType, name: str) -> Any:
  """Checks a value and returns it as a NumPy array or a tensor."""
  if _has_type(value, type_spec):
    return value  # The other checks are slow for many clients.
  dtype = tf.as_dtype(type_spec.dtype)
  if isinstance(value, tf.Variable):
    value = value.read_value()
  if isinstance(value, (np.ndarray, np.generic)) and dtype == tf.string:
    value = tf.convert_to_tensor(value)
  if isinstance(value, (tf.Tensor, np.ndarray, np.generic)):
    given = tf.as_dtype(value.dtype)
    if given != dtype:
      if not _is_part_of(given, dtype):
        raise _type_error(name, type_spec, f'is {given.name}')
      value = np.asarray(value, dtype.as_numpy_dtype)
  else:
    try:
      converted = np.asarray(tf.convert_to_tensor(value, dtype))
      fits = dtype == tf.string or _has_same_range(converted, value)
    except (TypeError, ValueError) as error:
      raise _type_error(name, type_spec, f'is {value!r}') from error
    if not fits:
      raise _type_error(name, type_spec, f'{value!r} is out of range')
    value = converted
  if not tf.TensorShape(type_spec.shape).is_compatible_with(value.shape):
    raise _type_error(name, type_spec, f'has the shape {list(value.shape)}')
  return value


def _has_type(value: Any, type_spec: tff.Type) -> bool:
  """Returns whether a value is an array of a tensor type without changes."""
  return (
      type(value) is np.ndarray
      and isinstance(type_spec, tff.TensorType)
      and value.dtype == type_spec.dtype
      and value.shape == type_spec.shape
  )


def _is_part_of(dtype: tf.DType, other: tf.DType) -> bool:
  """Returns whether `other` has the same kind and all values of `dtype`."""
  kinds = [
      (d.is_bool, d.is_integer, d.is_floating, d.is_complex)
      for d in (dtype, other)
  ]
  return kinds[0] == kinds[1] and np.can_cast(
      dtype.as_numpy_dtype, other.as_numpy_dtype
  )


def _has_same_range(converted: np.ndarray, value: Any) -> bool:
  """Returns whether all numbers were small enough for the new dtype."""
  if converted.dtype.kind in 'iu':
    return np.array_equal(converted, np.asarray(value))
  return np.array_equal(np.isfinite(converted), np.isfinite(value))


def _sequence(
    value: Any, type_spec: tff.SequenceType, name: str, checked: list[Any]
) -> Any:
  """Checks a value and returns a `tf.data.Dataset` or a `ClientDataset`."""
  if isinstance(value, (list, tuple)):
    rows = [
        _leaves(element, type_spec.element, f'{name}[{number}]')
        for number, element in enumerate(value)
    ]
    value = dataset_of_rows(rows, type_spec.element)
  if not isinstance(value, (tf.data.Dataset, client_dataset.ClientDataset)):
    raise TypeError(
        f'The {name} must be a tf.data.Dataset or a list, but is a'
        f' {type(value).__name__}.'
    )
  element_spec = value.element_spec
  if checked and checked[0] is element_spec and checked[1] is type_spec:
    return value
  element_type = tff.types.tensorflow_to_type(element_spec)
  if not type_spec.element.is_assignable_from(tff.to_type(element_type)):
    raise TypeError(
        f'The {name} must be a dataset with elements of type'
        f' {type_spec.element}, but its elements are of type {element_type}.'
    )
  if batch_arrays.leaf_order(element_spec) != batch_arrays.leaf_order(
      element_structure.spec(type_spec.element)
  ):
    raise TypeError(
        f'The {name} must be a dataset with elements of type'
        f' {type_spec.element}, but yields them in a Python container that'
        ' TensorFlow flattens in another order; use a collections.OrderedDict.'
    )
  checked[:] = [element_spec, type_spec]
  return value


def dataset_of_rows(
    rows: Sequence[Sequence[Any]], element_type: tff.Type
) -> tf.data.Dataset:
  """Builds a dataset; each row has an element's leaves, depth first."""
  if not rows:
    specs = map(
        element_structure.tensor_spec,
        element_structure.leaf_types(element_type),
    )
    parts = [
        [
            tf.zeros([0, *(size or 0 for size in spec.shape)], spec.dtype)
            for spec in specs
        ]
    ]
  else:
    # The last batch of a list is often smaller than the others.
    parts = [
        # Not `tf.stack`, which converts a list of 64-bit numbers to 32 bits.
        [np.stack(column) for column in zip(*part)]
        for _, part in itertools.groupby(
            rows, lambda row: [np.shape(leaf) for leaf in row]
        )
    ]
  datasets = (
      tf.data.Dataset.from_tensor_slices(
          element_structure.pack(element_type, columns)
      )
      for columns in parts
  )
  return functools.reduce(lambda a, b: a.concatenate(b), datasets)


def to_python(leaf: Any, type_spec: tff.Type) -> Any:
  """Converts a leaf's tensor to NumPy, or to a `tf.data.Dataset`."""
  if isinstance(type_spec, tff.SequenceType):
    return element_structure.from_variant(leaf, type_spec.element)
  return aligned_arrays.to_numpy(leaf)


def build_result(
    type_spec: tff.Type,
    leaves: Iterable[Any],
    num_clients: int,
    server_value: Callable[[Any], Any],
    client_values: Callable[[Any], list[Any]],
) -> Any:
  """Builds the Python value that TFF returns for a result.

  Args:
    type_spec: The result's type.
    leaves: The result's leaves, depth first.
    num_clients: The number of clients.
    server_value: Returns the value of a leaf that is at the server or equal for
      all clients.
    client_values: Returns each client's value of a leaf.
  """
  leaves = iter(leaves)
  server_values = map(server_value, leaves)

  # It does not refer to itself: that would keep all tensors of an invocation
  # until Python collects garbage.
  def value_of(part: tff.Type) -> Any:
    if not isinstance(part, tff.FederatedType):
      return next(server_values)
    if part.placement is tff.SERVER or part.all_equal:
      return element_structure.unflatten(part.member, server_values)
    columns = [
        client_values(next(leaves))
        for _ in element_structure.leaf_types(part.member)
    ]
    return _values_of_clients(part.member, columns, num_clients)

  value = element_structure.map_parts(type_spec, value_of)
  return tff.types.type_to_py_container(value, type_spec)


def _values_of_clients(
    type_spec: tff.Type, columns: Sequence[Sequence[Any]], num_clients: int
) -> list[Any]:
  """Returns each client's value, given the clients' values of each leaf."""

  def converted(leaves: Iterable[Any]) -> Any:
    struct = element_structure.unflatten(type_spec, iter(leaves))
    return tff.types.type_to_py_container(struct, type_spec)

  # TFF is slow, so it converts one value, whose form the others get.
  form = converted(range(len(columns)))
  order = tf.nest.flatten(form)
  if not all(isinstance(leaf, int) for leaf in order):
    # TensorFlow does not see into a `tff.structure.Struct`.
    return [converted(c[n] for c in columns) for n in range(num_clients)]
  return [
      tf.nest.pack_sequence_as(form, [columns[leaf][n] for leaf in order])
      for n in range(num_clients)
  ]
