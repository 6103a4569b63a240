"""Encodes a client's state as bytes."""

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
import hashlib
import json
import math
from typing import Any, Union

import numpy as np

ClientState = Union[
    np.ndarray, Mapping[str, 'ClientState'], Sequence['ClientState']
]
# The size of the header's length.
_LENGTH_BYTES = 4
CHECKSUM_BYTES = 16


class CorruptStateError(ValueError):
  """The bytes were not returned by `encode_state`."""


def frozen(state: Any) -> tuple[ClientState, int]:
  """Makes a nested structure of arrays read-only.

  Args:
    state: Nested dictionaries with string keys, lists and tuples of NumPy
      arrays, or of values that `np.asarray` turns into numeric arrays. Arrays
      that own their memory become read-only themselves; others are copied.

  Returns:
    Ordered dictionaries, lists and tuples of read-only arrays, and the size of
    these arrays in bytes.

  Raises:
    TypeError: If a leaf is not numeric, or a key is not a string.
  """
  return _checked(state, _read_only)


def _read_only(value: Any) -> np.ndarray:
  array = np.asarray(value)
  if not array.flags.owndata:
    array = array.copy()
  array.flags.writeable = False
  return array


def _checked(
    state: Any, to_array: Callable[[Any], np.ndarray]
) -> tuple[ClientState, int]:
  """Does what `frozen` does, with this function to make an array."""
  num_bytes = 0

  def check(value: Any) -> ClientState:
    nonlocal num_bytes
    # The first check saves the second one, which is slow for many arrays.
    if not isinstance(value, np.ndarray) and isinstance(value, Mapping):
      if not all(isinstance(key, str) for key in value):
        raise TypeError(f'The keys {list(value)} must be strings.')
      return collections.OrderedDict((k, check(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
      items = [check(item) for item in value]
      return items if isinstance(value, list) else tuple(items)
    array = to_array(value)
    if array.dtype.kind not in 'biufc':
      raise TypeError(
          f'A state holds numeric arrays, not {type(value).__name__} of dtype'
          f' {array.dtype}.'
      )
    num_bytes += array.nbytes
    return array

  return check(state), num_bytes


def encode_state(state: Any, owner: str = '') -> bytes:
  """Encodes a nested structure of arrays, with a checksum.

  Args:
    state: See `frozen`.
    owner: Only this owner can decode the bytes.

  Returns:
    The bytes.

  Raises:
    TypeError: See `frozen`.
  """
  leaves = []

  def describe(value: Any) -> Any:
    if isinstance(value, np.ndarray):
      leaves.append(value.tobytes())
      return [value.dtype.str, list(value.shape)]
    if isinstance(value, dict):
      return {'dict': [[key, describe(item)] for key, item in value.items()]}
    kind = 'list' if isinstance(value, list) else 'tuple'
    return {kind: [describe(item) for item in value]}

  checked, _ = _checked(state, np.asarray)
  header = json.dumps(describe(checked), separators=(',', ':')).encode()
  length = len(header).to_bytes(_LENGTH_BYTES, 'little')
  body = b''.join([length, header, *leaves])
  return _checksum(body, owner) + body


def _checksum(body: bytes, owner: str) -> bytes:
  name = owner.encode()
  digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
  digest.update(len(name).to_bytes(_LENGTH_BYTES, 'little') + name)
  digest.update(body)
  return digest.digest()


def check_checksum(data: bytes, owner: str) -> bytes:
  """Returns the body of encoded bytes, or raises a `CorruptStateError`."""
  if not isinstance(data, bytes):  # SQLite's BLOB columns accept other types.
    raise CorruptStateError('The state is not binary.')
  checksum, body = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
  if len(body) < _LENGTH_BYTES or _checksum(body, owner) != checksum:
    raise CorruptStateError('The checksum is wrong.')
  return body


def decode_state(data: bytes, owner: str = '') -> Any:
  """Decodes a state that `encode_state` encoded.

  Returns:
    Ordered dictionaries, lists and tuples of read-only arrays.

  Raises:
    CorruptStateError: If the bytes were changed or cut, or belong to another
      owner.
  """
  body = check_checksum(data, owner)
  start = _LENGTH_BYTES
  end = start + int.from_bytes(body[:_LENGTH_BYTES], 'little')
  offset = end

  def build(description: Any) -> Any:
    nonlocal offset
    if isinstance(description, list):
      dtype, shape = description
      array = np.frombuffer(body, dtype, math.prod(shape), offset)
      offset += array.nbytes
      return _read_only(array.reshape(shape))
    ((kind, items),) = description.items()
    if kind == 'dict':
      return collections.OrderedDict((key, build(item)) for key, item in items)
    built = [build(item) for item in items]
    return built if kind == 'list' else tuple(built)

  return build(_parsed(body[start:end]))


# The clients of a run have equal headers, so few are parsed.
@functools.lru_cache(maxsize=8)
def _parsed(header: bytes) -> Any:
  """Returns the description that `encode_state` wrote."""
  return json.loads(header)
