"""Datasets that the package `datasets` of Hugging Face saved to a folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from tff_bn.catalog import datasets as catalog
from tff_bn.catalog import table_options
from tff_bn.common import memory
from tff_bn.common import spelling
from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import table_encoding
from tff_bn.data import table_files

if TYPE_CHECKING:
  import pandas as pd
  import pyarrow as pa

_SERIES_NDIM = 3
_IMAGES_NDIM = 4
_ADVICE = 'datasets.load_dataset(...).save_to_disk(FOLDER) writes one'


def load_hugging_face(
    name: str,
    image_size: Optional[tuple[int, int]] = None,
    *,
    missing_values: Optional[str] = None,
    categories: Optional[str] = None,
    encoding: Optional[table_encoding.TableEncoding] = None,
    task: Optional[str] = None,
    is_part: bool = False,
    **options: Any,
) -> dataset_lib.Dataset:
  """Loads a folder written by `save_to_disk`; needs the package `datasets`.

  A `DatasetDict` has the split `train`, and `test` or `validation` for the test
  data. Without these two, and for a single `Dataset`, the test data is found as
  in tables. The features are one column of pictures or of arrays of numbers, or
  any columns of numbers and texts, which are a table.

  Args:
    name: `hf:FOLDER`.
    image_size: The height and width to resize images to. Default: no resizing.
    missing_values: What replaces missing values in a table.
    categories: What a column of texts becomes in a table.
    encoding: How the columns of a table become features. Default: the training
      rows decide.
    task: What a model learns from the labels, see `Dataset`.
    is_part: Whether the training data may lack classes, see `create_dataset`.
    **options: The other options of tables, see `table_files.read_rows`.

  Returns:
    The dataset. The names of a `ClassLabel` are those of the classes.

  Raises:
    ValueError: If the package is missing, if the folder can't be read or has
      other splits, or if a column is missing or can't be used.
  """
  source = f'dataset={name}'
  saved = _read(source, os.path.expanduser(catalog.path(name)))
  if saved.is_test is not None:
    for option in (table_options.TEST_COLUMN, table_options.TEST_SHARE):
      if options.get(option.name) is not None:
        raise ValueError(
            f'{source} has a split of test data, so that'
            f' {option.name}={options[option.name]} has no effect.'
        )
  label_columns = options.get('label_column') or ()
  for column in (
      *label_columns,
      *(options.get(name) for name in ('client_column', 'test_column')),
  ):
    if column in saved.nested:
      raise ValueError(
          f'{source}: the column {column!r} has the type'
          f' {saved.describe(column)}; labels, clients and the marks of test'
          ' data are numbers or texts.'
      )
  table = saved.to_pandas(label_columns)
  rows = table_files.read_rows(
      name, table, None, is_test=saved.is_test, is_part=is_part, **options
  )
  described: dict[str, Any] = dict(task=task, is_part=is_part)
  names = saved.class_names(*label_columns)
  if names is not None:
    described.update(num_classes=len(names), class_names=names)
  features = list(rows.features.columns)
  nested = [column for column in features if column in saved.nested]
  if not nested:
    dataset = table_files.encoded(
        name,
        rows,
        missing_values=missing_values,
        categories=categories,
        encoding=encoding,
        **described,
    )
    return classes.without_numbers(dataset)
  column = nested[0]
  others = [repr(other) for other in features if other != column]
  if others:
    raise ValueError(
        f'{source}: the column {column!r} ({saved.describe(column)}) can only'
        ' be the single feature; leave either it or the others'
        f' ({spelling.name_some(others)}) out by'
        f' {table_options.IGNORED_COLUMNS.name}=NAMES.'
    )
  if encoding is not None:
    raise ValueError(
        f'{source} has no table, as the training data had, but the column'
        f' {column!r} of the type {saved.describe(column)}.'
    )
  for option, value in (
      (table_options.MISSING, missing_values),
      (table_options.CATEGORIES, categories),
  ):
    if value not in (None, option.default):
      raise ValueError(
          f'{source} has no table, so that {option.name}={value} has no effect.'
      )
  x = saved.samples(source, column, image_size)
  dataset = rows.to_dataset(
      name, x, is_series=x.ndim == _SERIES_NDIM, **described
  )
  return classes.without_numbers(dataset)


class _Saved(NamedTuple):
  """A dataset that was saved.

  Attributes:
    table: The rows of all used splits, as Arrow stores them.
    features: The features of `datasets` by column.
    splits: The name and number of rows of each split; the name is empty if
      there are none.
    is_test: Whether each row is in a split of test data; None if there is none.
  """

  table: pa.Table
  features: Any
  splits: tuple[tuple[str, int], ...]
  is_test: Optional[np.ndarray]

  @property
  def nested(self) -> list[str]:
    """The columns that have more than a number or a text in each row."""
    return [
        field.name
        for field in self.table.schema
        # Arrays have types of their own.
        if field.type.num_fields or hasattr(field.type, 'storage_type')
    ]

  def describe(self, column: str) -> str:
    """Returns the type of a column."""
    return type(self.features[column]).__name__

  def class_names(self, *columns: str) -> Optional[tuple[str, ...]]:
    """Returns the names of the classes of a column; None if it has none."""
    names = [
        getattr(self.features.get(column), 'names', None) for column in columns
    ]
    return tuple(names[0]) if len(names) == 1 and names[0] else None

  def row_names(self) -> list[str]:
    """Returns what errors call each row."""
    return [
        f'row {number}{name and f" of {name}"}'
        for name, length in self.splits
        for number in range(1, length + 1)
    ]

  def to_pandas(self, label_columns: Any) -> pd.DataFrame:
    """Returns the columns of numbers and texts; the others are empty.

    Except in columns of labels, classes with names are texts.
    """
    import pandas as pd

    plain = [c for c in self.table.column_names if c not in self.nested]
    table = self.table.select(plain).to_pandas()
    for column in plain:
      names = self.class_names(column)
      if names is None:
        continue
      numbers = table[column].astype('Int64')
      # -1 is what datasets without labels of test data have.
      known = numbers.between(0, len(names) - 1).fillna(False)
      numbers = numbers.where(known)
      if column not in label_columns:
        table[column] = numbers.map(dict(enumerate(names)))
      else:
        table[column] = numbers if not known.all() else numbers.astype(int)
    for column in self.nested:
      table[column] = None
    table = table[self.table.column_names]
    if len(self.splits) > 1:
      # Errors name the split of a row.
      table.index = pd.MultiIndex.from_tuples(
          (name, number)
          for name, length in self.splits
          for number in range(length)
      )
    return table

  def samples(
      self,
      source: str,
      column: str,
      image_size: Optional[tuple[int, int]],
  ) -> np.ndarray:
    """Returns the pictures or arrays of a column, of shape `[n, ...]`."""
    from datasets import Image

    place = f'{source}: the column {column!r}'
    values = self.table.column(column).combine_chunks()
    if not isinstance(self.features[column], Image):
      return _to_array(place, self.describe(column), values)
    # It imports TensorFlow.
    from tff_bn.data import encoded_images

    names = self.row_names()
    rows = values.to_pylist()
    files = [row and row['bytes'] for row in rows]
    for file, row, name in zip(files, rows, names):
      if file is None:
        path = row and row['path']
        raise ValueError(
            f'{place} has no picture in {name}{path and f" ({path!r})" or ""};'
            ' save the dataset again with the files in it, or remove the row.'
        )
    return encoded_images.decode(
        source, files, [f'{column!r} of {name}' for name in names], image_size
    )


def _to_array(place: str, kind: str, values: pa.Array) -> np.ndarray:
  """Returns a column of lists of one length, as an array.

  `place` begins errors, and `kind` is the column's type in words.
  """
  import pyarrow as pa

  shape = [len(values)]
  values = getattr(values, 'storage', values)
  while hasattr(values.type, 'value_type') and values.type.num_fields == 1:
    if values.null_count:
      raise ValueError(f'{place} has rows without a value; remove them.')
    lengths = np.unique(
        values.value_lengths().to_numpy(zero_copy_only=False)
        if hasattr(values, 'value_lengths')
        else [values.type.list_size]
    )
    if len(lengths) != 1:
      raise ValueError(
          f'{place} has lists of different lengths, such as {lengths[0]} and'
          f' {lengths[-1]}; all samples need the same shape.'
      )
    shape.append(int(lengths[0]))
    values = values.flatten()
  if len(shape) > _IMAGES_NDIM or not (
      pa.types.is_boolean(values.type)
      or pa.types.is_integer(values.type)
      or pa.types.is_floating(values.type)
  ):
    raise ValueError(
        f'{place} has the type {kind} of {values.type} with'
        f' {len(shape) - 1} axes; samples are pictures, or numbers with one'
        ' axis (vectors), two (series) or three (images).'
    )
  memory.check_fits(f'{place}', values.nbytes)
  return values.to_numpy(zero_copy_only=False).reshape(shape)


def _read(source: str, path: str) -> _Saved:
  """Reads the splits of a folder."""
  try:
    is_there = os.path.isdir(path)
  # The path may contain a null character.
  except ValueError:
    is_there = False
  if not is_there:
    raise ValueError(f'{source}: there is no folder {path!r}.')
  try:
    import datasets
    from datasets import load_from_disk
    import pyarrow as pa
  # A folder `datasets` in the working folder would be imported, too.
  except ImportError as error:
    raise ValueError(
        f'{source} needs the package datasets, which is not installed'
        f' ({error}): pip install --no-deps -r requirements-files.txt.'
    ) from error
  splits = catalog.saved_splits(path)
  test = [split for split in catalog.TEST_SPLITS if split in splits][:1]
  used = [catalog.TRAIN_SPLIT, *test] if splits else ['']
  if not set(used) <= set(splits or ['']):
    raise ValueError(
        f'{source} has the splits {spelling.name_some(splits)}; it needs'
        f' {catalog.TRAIN_SPLIT}, and {" or ".join(catalog.TEST_SPLITS)}'
        ' unless a part of the training data is for tests.'
    )
  try:
    # An absolute path names no other file system.
    parts = [
        load_from_disk(os.path.abspath(os.path.join(path, split)))
        for split in used
    ]
    if not all(isinstance(part, datasets.Dataset) for part in parts):
      raise ValueError('it has datasets in its splits')
    tables = [part.with_format('arrow')[:] for part in parts]
  # A damaged file may raise anything.
  except Exception as error:
    reason = str(error).split('\n', maxsplit=1)[0]
    raise ValueError(
        f'{source}: {path!r} is no readable folder of a Dataset or DatasetDict'
        f' ({reason}); {_ADVICE}.'
    ) from error
  for split, part in zip(used, parts):
    if part.features != parts[0].features:
      raise ValueError(
          f'{source}: the splits {used[0]} and {split} have different columns:'
          f' {parts[0].features} and {part.features}.'
      )
    if not len(part):
      raise ValueError(
          f'{source} has no rows{split and f" in the split {split}"}.'
      )
  memory.check_fits(
      f'{source}: the rows of {path!r}', sum(table.nbytes for table in tables)
  )
  lengths = [len(table) for table in tables]
  return _Saved(
      pa.concat_tables(tables),
      parts[0].features,
      tuple(zip(used, lengths)),
      np.repeat([False, True], lengths) if test else None,
  )
