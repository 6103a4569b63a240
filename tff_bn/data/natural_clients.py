"""The clients that a dataset has: which sample belongs to which client."""

from collections.abc import Iterable
import re
from typing import Any, Optional

from absl import logging
import numpy as np

from tff_bn.common import spelling
from tff_bn.data import arrays

# Line breaks would tear lists of clients apart, and no flag can name them.
_CONTROL_CHARACTER = re.compile('[\x00-\x1f\x7f-\x9f\u2028\u2029]')


def attributes(
    source: str,
    train: np.ndarray,
    test: Optional[np.ndarray],
    num_samples: tuple[int, int],
) -> dict[str, Any]:
  """Returns the attributes of `Dataset` about the clients of its samples.

  The clients are in the order of their ids: numbers by size, texts as Python
  sorts them. Clients that only the test data has do not train; a warning names
  them.

  Args:
    source: The beginning of errors, which names the dataset.
    train: The id of each training sample's client: texts or whole numbers.
    test: The same for the test samples. None: they belong to no client, so that
      only the whole test set is evaluated.
    num_samples: The numbers of training and test samples.

  Returns:
    The attributes whose names begin with `client_`.

  Raises:
    ValueError: If there is not one id for each sample, an id is empty or no
      UTF-8, has control characters, or texts and numbers are mixed.
  """
  ids = _ids(source, 'client_train', train, num_samples[0])
  test_ids = (
      ids[:0]
      if test is None
      else _ids(source, 'client_test', test, num_samples[1])
  )
  if test_ids.size and ids.dtype.kind != test_ids.dtype.kind:
    raise ValueError(
        f'{source}: only one of client_train and client_test has numbers;'
        ' clients are matched by their ids, so store both in the same way.'
    )
  names, numbers = np.unique(
      np.concatenate([ids, test_ids]), return_inverse=True
  )
  untrained = np.setdiff1d(test_ids, ids)
  if untrained.size:
    logging.warning(
        '%s: the clients %s have test samples only, so they do not take part;'
        ' their samples are in the whole test set.',
        source,
        spelling.name_some([str(name) for name in untrained]),
    )
  client_train, client_test = np.split(numbers, [len(ids)])
  return dict(
      client_train=client_train,
      client_test=None if test is None else client_test,
      client_names=tuple(str(name) for name in names),
  )


def check_characters(place: str, clients: Iterable[str]) -> None:
  """Checks that ids of clients are lines of text.

  Args:
    place: What has the clients; errors begin with it.
    clients: The ids.

  Raises:
    ValueError: If an id has a line break or another control character.
  """
  wrong = next(filter(_CONTROL_CHARACTER.search, clients), None)
  if wrong is not None:
    raise ValueError(
        f'{place} has the client {wrong!r}; ids of clients must not have line'
        ' breaks or other control characters.'
    )


def _ids(
    source: str, name: str, values: np.ndarray, num_samples: int
) -> np.ndarray:
  """Returns ids as integers or as texts."""
  array = arrays.to_array(source, name, values)
  if array.shape != (num_samples,):
    raise ValueError(
        f'{source}: {name} has the shape {array.shape}; it must have the id of'
        f' the client of each of the {num_samples} samples.'
    )
  if array.dtype.kind == 'S':
    try:
      array = np.char.decode(array, 'utf-8')
    except UnicodeDecodeError as error:
      raise ValueError(f'{source}: {name} is not UTF-8 ({error}).') from error
  if array.dtype.kind == 'u':
    return array.astype(np.int64)
  if array.dtype.kind not in 'iU':
    raise ValueError(
        f'{source}: {name} has the dtype {array.dtype}; ids of clients are'
        ' texts or whole numbers.'
    )
  if array.dtype.kind == 'U' and (array == '').any():
    first = int(np.argmax(array == ''))
    raise ValueError(f'{source}: {name} is empty for the sample {first}.')
  if array.dtype.kind == 'U':
    check_characters(f'{source}: {name}', map(str, np.unique(array)))
  return array
