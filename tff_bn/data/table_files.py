"""Datasets from tables: CSV and Parquet files, read by pandas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import csv
import gzip
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from absl import logging
import numpy as np

from tff_bn.catalog import datasets
from tff_bn.catalog import table_options
from tff_bn.common import memory
from tff_bn.common import seeding
from tff_bn.common import spelling
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import natural_clients
from tff_bn.data import table_encoding
from tff_bn.imports import lazy

if TYPE_CHECKING:
  import pandas as pd
else:
  pd = lazy.Module('pandas')

_DELIMITERS = ',;\t'
_CSV_SUFFIXES = ('.csv', '.csv.gz')
# The beginning of the names that pandas gives to columns without one.
_UNNAMED = 'Unnamed: '
# What the column of test data may have.
_IS_TEST = {'train': False, 'test': True, '0': False, '1': True}
_IS_TEST.update({'false': False, 'true': True})
# Ids of clients that are numbers, and those whose texts Python writes, too.
_WHOLE_NUMBER = re.compile(r'-?\d+', re.ASCII)
_WRITTEN_NUMBER = re.compile(r'0|-?[1-9]\d{0,17}', re.ASCII)


def load_csv(name: str, **options: Any) -> dataset_lib.Dataset:
  """Loads a dataset from a CSV file, or from all CSV files in a folder.

  In a folder, each file has the rows of one client, whose id is the file's
  name, unless a column has the ids. The columns are separated by commas,
  semicolons or tabs, as the first line shows, and its fields are their names.
  Files may be compressed (`.csv.gz`).

  Args:
    name: `csv:PATH`.
    **options: See `to_dataset`.

  Returns:
    The dataset. Its samples are vectors of features.

  Raises:
    ValueError: If a file can't be read, files have different columns, or the
      columns do not form a dataset.
  """
  return _load(name, _read_csv, **options)


def load_parquet(name: str, **options: Any) -> dataset_lib.Dataset:
  """Loads a dataset from a Parquet file or folder, which needs pyarrow.

  See `load_csv`. The name is `parquet:PATH`.
  """
  return _load(name, _read_parquet, **options)


def _load(
    name: str,
    read: Callable[
        [str, str, Optional[str]], tuple[pd.DataFrame, Optional[np.ndarray]]
    ],
    **options: Any,
) -> dataset_lib.Dataset:
  source = f'dataset={name}'
  path = os.path.expanduser(datasets.path(name))
  try:
    is_there = os.path.isfile(path) or os.path.isdir(path)
  # The path may contain a null character.
  except ValueError:
    is_there = False
  if not is_there:
    raise ValueError(f'{source}: there is no file or folder {path!r}.')
  table, clients = read(source, path, options.get('client_column'))
  if not len(table):
    raise ValueError(f'{source}: the table has no rows.')
  return to_dataset(name, table, clients, **options)


def _read_csv(
    source: str, path: str, client_column: Optional[str]
) -> tuple[pd.DataFrame, Optional[np.ndarray]]:
  """Returns the table, and the clients of its rows if they are known."""
  files = [path]
  if os.path.isdir(path):
    files = [
        os.path.join(path, file)
        for file in sorted(os.listdir(path))
        if file.endswith(_CSV_SUFFIXES)
    ]
    if not files:
      raise ValueError(
          f'{source}: {path!r} has no files that end in'
          f' {" or ".join(_CSV_SUFFIXES)}.'
      )
  memory.check_fits(
      f'{source}: the files of {path!r}', sum(map(os.path.getsize, files))
  )
  names = [os.path.basename(file) for file in files]
  clients = [name.split('.csv')[0] for name in names]
  if client_column is None:
    _check_different(source, names, clients)
  parts = [read_csv_file(source, file, client_column) for file in files]
  for file, part in zip(files, parts):
    if set(part.columns) != set(parts[0].columns):
      different = sorted(set(part.columns) ^ set(parts[0].columns))
      raise ValueError(
          f'{source}: {file!r} and {files[0]!r} have different columns; only'
          f' one of them has {different[0]!r}.'
      )
  if not os.path.isdir(path):
    return parts[0], None
  # Errors name the file of a row.
  return (
      pd.concat(parts, keys=names),
      np.repeat(np.array(clients), [len(part) for part in parts]),
  )


def _check_different(
    source: str, names: Sequence[str], clients: Sequence[str]
) -> None:
  """Checks that each file in a folder is another client."""
  first: dict[str, str] = {}
  for name, client in zip(names, clients):
    if first.setdefault(client, name) != name:
      raise ValueError(
          f'{source}: {first[client]!r} and {name!r} have the rows of the same'
          f' client {client!r}; remove or rename one of them.'
      )


def read_csv_file(
    source: str, file: str, text_column: Optional[str] = None
) -> pd.DataFrame:
  """Reads a CSV file; a `ValueError` begins with `source`.

  A column may keep its texts, such as 007 and NA.
  """
  # Reading from a pipe may last forever.
  if not os.path.isfile(file):
    raise ValueError(f'{source}: {file!r} is no regular file.')
  try:
    opener = gzip.open if file.endswith('.gz') else open
    with opener(file, 'rt', encoding='utf-8', newline='') as opened:
      first = opened.readline()
    delimiter = max(_DELIMITERS, key=first.count)
    names = next(csv.reader([first], delimiter=delimiter), [])
    twice = [name for name in names if names.count(name) > 1]
    if twice:  # pandas would rename it.
      raise ValueError(f'the column {twice[0]!r} occurs twice')
    # Read in one piece, a column has one dtype.
    table = pd.read_csv(file, sep=delimiter, low_memory=False)
    # pandas would take the first fields for names of the rows.
    if not isinstance(table.index, pd.RangeIndex):
      raise ValueError('rows have more fields than the first line')
    if text_column in table.columns:
      table[text_column] = pd.read_csv(
          file,
          sep=delimiter,
          usecols=[text_column],
          dtype=str,
          keep_default_na=False,
      )
    return table
  # A damaged file may raise anything.
  except Exception as error:
    reason = str(error).split('\n', maxsplit=1)[0]
    raise ValueError(
        f'{source}: {file!r} is no readable CSV file ({reason}).'
    ) from error


def _read_parquet(
    source: str, path: str, client_column: Optional[str]
) -> tuple[pd.DataFrame, None]:
  del client_column  # Columns have types.
  try:
    return pd.read_parquet(path), None
  except ImportError as error:
    raise ValueError(
        f'{source} needs the package pyarrow, which is not installed: pip'
        ' install pyarrow.'
    ) from error
  # A damaged file may raise anything.
  except Exception as error:
    reason = str(error).split('\n', maxsplit=1)[0]
    raise ValueError(
        f'{source}: {path!r} is no readable Parquet file or folder ({reason}).'
    ) from error


def to_dataset(
    name: str,
    table: pd.DataFrame,
    clients: Optional[np.ndarray],
    *,
    missing_values: Optional[str] = None,
    categories: Optional[str] = None,
    encoding: Optional[table_encoding.TableEncoding] = None,
    task: Optional[str] = None,
    is_part: bool = False,
    **options: Any,
) -> dataset_lib.Dataset:
  """Makes the dataset of a table.

  Args:
    name: The dataset's name.
    table: The table.
    clients: The ids of the rows' clients, if there is no column of them.
    missing_values: What replaces missing values; see `table_options` for this
      and the other options.
    categories: What a column of texts becomes.
    encoding: How columns become features. Default: the training rows decide.
    task: What a model learns from the labels, see `Dataset`.
    is_part: Whether the training data may lack classes, see `create_dataset`.
    **options: The other options, see `read_rows`.

  Raises:
    ValueError: If a column is missing or can't be used.
  """
  rows = read_rows(name, table, clients, is_part=is_part, **options)
  return encoded(
      name,
      rows,
      missing_values=missing_values,
      categories=categories,
      encoding=encoding,
      task=task,
      is_part=is_part,
  )


class Rows(NamedTuple):
  """What the columns of a table say about its rows.

  Attributes:
    is_test: Whether each row is test data.
    y: The labels.
    class_names: The names of the classes, or of several columns of labels.
    groups: The attributes of `Dataset` about the clients.
    features: The other columns.
  """

  is_test: np.ndarray
  y: np.ndarray
  class_names: tuple[str, ...]
  groups: dict[str, Any]
  features: pd.DataFrame

  def to_dataset(
      self, name: str, x: np.ndarray, **attributes: Any
  ) -> dataset_lib.Dataset:
    """Returns the dataset, given the samples; see `create_dataset`."""
    is_test = self.is_test
    return dataset_lib.create_dataset(
        name,
        x[~is_test],
        self.y[~is_test],
        x[is_test],
        self.y[is_test],
        **{'class_names': self.class_names, **self.groups, **attributes},
    )


def read_rows(
    name: str,
    table: pd.DataFrame,
    clients: Optional[np.ndarray],
    *,
    label_column: Optional[Sequence[str]] = None,
    client_column: Optional[str] = None,
    test_column: Optional[str] = None,
    test_share: Optional[float] = None,
    ignored_columns: Optional[Sequence[str]] = None,
    is_test: Optional[np.ndarray] = None,
    is_part: bool = False,
) -> Rows:
  """Reads the columns that are no features.

  Args:
    name: The dataset's name.
    table: The table.
    clients: The ids of the rows' clients, if there is no column of them.
    label_column: The columns of the labels; see `table_options` for this and
      the other options.
    client_column: The column of the clients' ids.
    test_column: The column that says which rows are test data.
    test_share: The share of test data without such a column.
    ignored_columns: Columns that are no features.
    is_test: Whether each row is test data, if the table says so itself.
    is_part: Whether the training data may lack classes, see `create_dataset`.

  Raises:
    ValueError: If a column is missing or can't be used.
  """
  source = f'dataset={name}'
  if not label_column:
    raise ValueError(
        f'{source} needs {table_options.LABEL_COLUMN.name}=NAME, the column'
        f' with the labels; its columns are {_columns(table)}.'
    )
  given = [
      (option, column)
      for option, columns in (
          (table_options.LABEL_COLUMN, label_column),
          (table_options.CLIENT_COLUMN, [client_column]),
          (table_options.TEST_COLUMN, [test_column]),
          (table_options.IGNORED_COLUMNS, ignored_columns or ()),
      )
      for column in columns
      if column is not None
  ]
  for option, column in given:
    if column not in table.columns:
      raise ValueError(
          f'{source} has no column {option.name}={column}; its columns are'
          f' {_columns(table)}.'
          f'{spelling.suggestion(column, map(str, table.columns))}'
      )
  used = [column for _, column in given]
  twice = [column for column in used if used.count(column) > 1]
  if twice:
    raise ValueError(
        f'{source}: the column {twice[0]!r} is given for two options.'
    )
  if client_column is not None:
    clients = _ids(source, client_column, table[client_column])
  if is_test is not None:
    pass
  elif test_column is not None:
    is_test = _read_is_test(source, test_column, table[test_column])
  else:
    share = table_options.TEST_SHARE.default
    is_test = _draw_is_test(
        source,
        clients,
        len(table),
        share if test_share is None else test_share,
    )
  y, class_names = _labels(
      source, table[list(label_column)], is_test, is_part=is_part
  )
  groups = {}
  if clients is not None:
    groups = natural_clients.attributes(
        source,
        clients[~is_test],
        clients[is_test],
        (int((~is_test).sum()), int(is_test.sum())),
    )
  features = table.drop(columns=used)
  unnamed = [c for c in map(str, features) if c.startswith(_UNNAMED)]
  if unnamed:
    logging.warning(
        '%s: the column %d has no name, so it is called %r and is a feature. If'
        ' it numbers the rows, leave it out by %s=%r.',
        source,
        list(map(str, table.columns)).index(unnamed[0]) + 1,
        unnamed[0],
        table_options.IGNORED_COLUMNS.name,
        unnamed[0],
    )
  return Rows(is_test, y, class_names, groups, features)


def encoded(
    name: str,
    rows: Rows,
    *,
    missing_values: Optional[str],
    categories: Optional[str],
    encoding: Optional[table_encoding.TableEncoding],
    **attributes: Any,
) -> dataset_lib.Dataset:
  """Makes the dataset of rows whose features are numbers and texts.

  See `to_dataset`; `attributes` are those of `create_dataset`.
  """
  source = f'dataset={name}'
  is_later = encoding is not None
  if encoding is None:
    encoding = table_encoding.TableEncoding.fit(
        source,
        rows.features[~rows.is_test],
        missing_values or table_options.MISSING.default,
        categories or table_options.CATEGORIES.default,
    )
  x = encoding.encode(source, rows.features, is_later=is_later)
  return rows.to_dataset(name, x, table=encoding, **attributes)


def _columns(table: pd.DataFrame) -> str:
  return spelling.name_some([str(column) for column in table.columns])


def _ids(source: str, column: str, values: pd.Series) -> np.ndarray:
  """Returns the ids of the rows' clients: texts or whole numbers."""
  missing = values.isna() | (values == '')
  if missing.any():
    row = table_encoding.row_name(values.index, missing)
    raise ValueError(
        f'{source}: {int(missing.sum()):,} rows have no client in the column'
        f' {column!r}, the first is {row}.'
    )
  if isinstance(values.dtype, pd.CategoricalDtype):
    values = values.astype(values.cat.categories.dtype)
  if pd.api.types.is_integer_dtype(values.dtype):
    return values.to_numpy(np.int64)
  if pd.api.types.is_float_dtype(values.dtype):
    raise _no_id(source, column, values.iloc[0])
  texts = values.map(str).to_numpy(str)
  different = np.unique(texts)
  if all(map(_WRITTEN_NUMBER.fullmatch, different)):
    return texts.astype(np.int64)
  # Ids such as 007 stay texts.
  if (
      not all(map(_WHOLE_NUMBER.fullmatch, different))
      and pd.to_numeric(pd.Series(different), errors='coerce').notna().all()
  ):
    raise _no_id(source, column, different[0])
  return texts


def _no_id(source: str, column: str, number: Any) -> ValueError:
  return ValueError(
      f'{source}: the column {column!r} has numbers such as {number}; ids of'
      ' clients are texts or whole numbers.'
  )


def _read_is_test(source: str, column: str, values: pd.Series) -> np.ndarray:
  """Returns whether rows are test data, given the column that says so."""
  texts = values.map(lambda value: str(value).lower())
  wrong = ~texts.isin(list(_IS_TEST))
  if wrong.any():
    raise ValueError(
        f'{source}: the column {column!r} has the value'
        f' {values[wrong].iloc[0]!r} in'
        f' {table_encoding.row_name(values.index, wrong)}; it must have train'
        ' and test, 0 and 1, or false and true.'
    )
  is_test = texts.map(_IS_TEST).to_numpy(bool)
  if is_test.all() or not is_test.any():
    which, other = ('training', 'test')[:: 1 if is_test.all() else -1]
    raise ValueError(
        f'{source} has no {which} rows: the column'
        f' {table_options.TEST_COLUMN.name}={column} marks all as {other} data.'
    )
  return is_test


def _draw_is_test(
    source: str, clients: Optional[np.ndarray], num_rows: int, share: float
) -> np.ndarray:
  """Draws which rows are test data; each client keeps a training row."""
  rng = seeding.generator(seeding.Stream.TEST_SETS, 0)
  is_test: np.ndarray = np.zeros(num_rows, bool)
  whose = ' of each client (at most {})'
  if clients is None:
    whose = ' ({})'
    clients = np.zeros(num_rows, int)
  _, numbers = np.unique(clients, return_inverse=True)
  order = np.argsort(numbers, kind='stable')
  sizes = np.bincount(numbers)
  for rows in np.split(order, np.cumsum(sizes)[:-1]):
    number = min(round(share * len(rows)), len(rows) - 1)
    is_test[rng.choice(rows, number, replace=False)] = True
  if not is_test.any():
    raise ValueError(
        f'{source} has no test rows: {table_options.TEST_SHARE.name}={share} of'
        f' the rows{whose.format(sizes.max())} is rounded to none, and at least'
        ' one stays for training. Use a larger share, or'
        f' {table_options.TEST_COLUMN.name}=NAME.'
    )
  return is_test


def _labels(
    source: str, labels: pd.DataFrame, is_test: np.ndarray, *, is_part: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
  """Returns the labels and the names of the classes, or of several columns."""
  missing = labels.isna().any(axis=1).to_numpy()
  if missing.any():
    row = table_encoding.row_name(labels.index, missing)
    raise ValueError(
        f'{source}: {int(missing.sum()):,} rows have no label'
        f' ({table_encoding.MISSING_TEXTS}), the first is {row}.'
    )
  are_texts = [
      not pd.api.types.is_numeric_dtype(labels[column].dtype)
      for column in labels.columns
  ]
  if len(labels.columns) > 1:
    if any(are_texts):
      column = labels.columns[are_texts.index(True)]
      raise ValueError(
          f'{source}: the column {column!r} has texts; several columns of'
          ' labels must have numbers.'
      )
    y = labels.to_numpy()
    is_float = y.dtype.kind == 'f'
    return y, () if is_float else tuple(map(str, labels.columns))
  values = labels.iloc[:, 0]
  if not are_texts[0]:
    return values.to_numpy(), ()
  texts = values.map(str).to_numpy(str)
  known = np.unique(texts if is_part else texts[~is_test])
  untrained = np.setdiff1d(texts, known)
  if untrained.size:
    raise ValueError(
        f'{source}: the label {str(untrained[0])!r} occurs in the test rows'
        ' only, so that no model can learn it; remove these rows, or add such'
        ' rows to the training data.'
    )
  if len(known) == 1 and not is_part:
    raise ValueError(
        f'{source}: the column {str(values.name)!r} has the label'
        f' {str(known[0])!r} only; a classifier needs at least two classes.'
    )
  classes = np.asarray(np.searchsorted(known, texts))
  return classes, tuple(str(text) for text in known)
