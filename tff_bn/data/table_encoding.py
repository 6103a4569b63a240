"""How the columns of a table become features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any, Optional, Self

import numpy as np

from tff_bn.catalog import table_options
from tff_bn.common import memory
from tff_bn.common import spelling
from tff_bn.imports import lazy

if TYPE_CHECKING:
  import pandas as pd
else:
  pd = lazy.Module('pandas')

# A column of more texts is free text, or names the rows.
_MAX_CATEGORIES = 1000
# What pandas reads as missing.
MISSING_TEXTS = 'empty, NA, None, null or nan'
# The category of missing values.
_MISSING = ''
# Such as 2026-01-31, 31.1.2026 and 1/31/2026, and maybe a time.
_DATE = re.compile(
    r'(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})([ T]\d.*)?',
    re.ASCII,
)
# The share of the texts of a column that must be numbers to call it a column of
# numbers with errors.
_MOSTLY = 0.5


@dataclasses.dataclass(frozen=True)
class Column:
  """A column of features.

  Attributes:
    name: The column's name.
    categories: The texts that it has, each of which becomes a feature that is 0
      or 1. None: it has numbers.
    fill: What replaces missing values: a number, or the text '' in a column of
      texts. None: they are errors.
    is_embedded: Whether the categories become one feature instead: the position
      of the text, or the number of texts for any other text.
  """

  name: str
  categories: Optional[tuple[str, ...]] = None
  fill: Optional[float | str] = None
  is_embedded: bool = False

  @property
  def num_features(self) -> int:
    """The number of features."""
    if self.categories is None or self.is_embedded:
      return 1
    return len(self.categories)

  def to_json(self) -> dict[str, Any]:
    """Returns the column for a file."""
    values = dataclasses.asdict(self)
    # Files and fingerprints of earlier versions have no such key.
    if not values.pop('is_embedded'):
      return values
    return {**values, 'embedded': True}


@dataclasses.dataclass(frozen=True)
class TableEncoding:
  """Maps the rows of a table to vectors of features.

  Attributes:
    columns: The columns in the order of their features.
  """

  columns: tuple[Column, ...]

  def to_json(self) -> list[dict[str, Any]]:
    """Returns the encoding for a file."""
    return [column.to_json() for column in self.columns]

  @property
  def category_counts(self) -> dict[int, int]:
    """The position of each feature that is a category -> how many it has."""
    counts, position = {}, 0
    for column in self.columns:
      if column.is_embedded and column.categories is not None:
        counts[position] = len(column.categories)
      position += column.num_features
    return counts

  @classmethod
  def from_json(cls, columns: Sequence[dict[str, Any]]) -> Self:
    """Reads what `to_json` returned."""
    return cls(
        tuple(
            Column(
                column['name'],
                None
                if column['categories'] is None
                else tuple(column['categories']),
                column['fill'],
                column.get('embedded', False),
            )
            for column in columns
        )
    )

  @classmethod
  def fit(
      cls,
      source: str,
      table: pd.DataFrame,
      missing: str,
      categories: str = table_options.ONE_HOT,
  ) -> Self:
    """Decides how the columns of the training data are encoded.

    Args:
      source: The beginning of errors, which names the dataset.
      table: The features of the training data.
      missing: A key of `table_options.MISSING_VALUES`.
      categories: A key of `table_options.CATEGORY_FEATURES`.

    Raises:
      ValueError: If there are no columns, or one can't be encoded, or no column
        has texts to embed.
    """
    if not len(table.columns):
      raise ValueError(f'{source}: there are no columns of features.')
    columns = tuple(
        _fit_column(source, table[name], missing) for name in table.columns
    )
    if categories == table_options.ONE_HOT:
      return cls(columns)
    if all(column.categories is None for column in columns):
      raise ValueError(
          f'{source} has no columns of texts, so that'
          f' {table_options.CATEGORIES.name}={categories} has no effect.'
      )
    return cls(
        tuple(
            dataclasses.replace(c, is_embedded=c.categories is not None)
            for c in columns
        )
    )

  def encode(
      self, source: str, table: pd.DataFrame, *, is_later: bool = False
  ) -> np.ndarray:
    """Returns the features of rows, float32 of shape `[n, features]`.

    A category that the training data lacks has only zeros, or, embedded, the
    number of categories.

    Args:
      source: The beginning of errors, which names the table.
      table: The rows.
      is_later: Whether a model is trained already, so that nothing else can
        fill missing values.

    Raises:
      ValueError: If a column is missing or holds other values than in the
        training data.
    """
    lacking = [c.name for c in self.columns if c.name not in table.columns]
    if lacking:
      raise ValueError(
          f'{source} has no column {lacking[0]!r}; its columns are'
          f' {spelling.name_some(list(map(str, table.columns)))}.'
      )
    width = sum(column.num_features for column in self.columns)
    memory.check_fits(
        f'{source}: the {width:,} features of {len(table):,} rows',
        4 * width * len(table),
    )
    features: np.ndarray = np.empty((len(table), width), np.float32)
    start = 0
    for column in self.columns:
      end = start + column.num_features
      features[:, start:end] = _encode_column(
          source, column, table[column.name], is_later
      )
      start = end
    return features


def of_manifest(manifest: Mapping[str, Any]) -> Optional[TableEncoding]:
  """Returns how a run's table became features; None if it had none."""
  columns = manifest.get('table')
  return None if columns is None else TableEncoding.from_json(columns)


def row_name(index: pd.Index, are_meant: Any) -> str:
  """Returns the first of some rows in words, for errors."""
  place = index[np.argmax(are_meant)]
  file = ''
  if isinstance(place, tuple):  # The table has several files.
    name, place = place
    file = f' of {name!r}'
  return f'row {int(place) + 1:,} below the header{file}'


def _fit_column(source: str, values: pd.Series, missing: str) -> Column:
  name = str(values.name)
  place = f'{source}: the column {name!r}'
  if pd.api.types.is_numeric_dtype(values.dtype):
    if missing == table_options.ERROR:
      return Column(name)
    numbers = _numbers(values)
    present = numbers[~np.isnan(numbers)]
    if not present.size:
      raise ValueError(
          f'{place} has no value in the training data; leave it out by'
          f' {table_options.IGNORED_COLUMNS.name}.'
      )
    average = np.mean if missing == table_options.MEAN else np.median
    return Column(name, fill=float(average(present)))
  is_filled = missing != table_options.ERROR
  texts = _texts(place, values, allows_missing=is_filled)
  categories = tuple(sorted(set(texts)))
  if len(categories) > _MAX_CATEGORIES:
    raise ValueError(
        f'{place} has {len(categories):,} different texts, such as'
        f' {categories[-1]!r}; at most {_MAX_CATEGORIES:,} become features.'
        f' Leave it out by {table_options.IGNORED_COLUMNS.name}.'
    )
  return Column(name, categories, _MISSING if is_filled else None)


def _encode_column(
    source: str, column: Column, values: pd.Series, is_later: bool
) -> np.ndarray:
  """Returns the features of a column, of shape `[n, features]`."""
  place = f'{source}: the column {column.name!r}'
  if column.categories is None:
    if not pd.api.types.is_numeric_dtype(values.dtype):
      raise ValueError(
          f'{place} has {_describe_texts(values)}, but numbers in the training'
          ' data.'
      )
    numbers = _numbers(values)
    if column.fill is not None:
      numbers = np.where(np.isnan(numbers), column.fill, numbers)
    _check_finite(place, numbers, values.index, is_later)
    return numbers[:, np.newaxis]
  texts = _texts(
      place,
      values,
      allows_missing=column.fill is not None,
      is_later=is_later,
  )
  categories = np.array(column.categories, object)
  if column.is_embedded:
    known = {text: number for number, text in enumerate(categories)}
    positions = [known.get(text, len(categories)) for text in texts]
    return np.array(positions)[:, np.newaxis]
  return np.asarray(texts[:, np.newaxis] == categories)


def _numbers(values: pd.Series) -> np.ndarray:
  """Returns numbers as float64; missing ones are NaN."""
  return values.to_numpy(np.float64, na_value=np.nan)


def _missing_advice(is_later: bool) -> str:
  """Returns what to do with missing values."""
  if is_later:
    return (
        'the column had all values in the training data, so nothing fills them;'
        ' fill them yourself, or remove the rows'
    )
  return (
      f'fill them by {table_options.MISSING.name}='
      f'{" or ".join(table_options.FILLING)}, or remove the rows'
  )


def _check_finite(
    place: str, numbers: np.ndarray, index: pd.Index, is_later: bool
) -> None:
  largest = float(np.finfo(np.float32).max)
  wrong = ~(np.abs(numbers) <= largest)
  if wrong.any():
    value = numbers[np.argmax(wrong)]
    advice = (
        _missing_advice(is_later)
        if math.isnan(value)
        else 'all values must be finite float32 numbers'
    )
    raise ValueError(
        f'{place} has {int(wrong.sum()):,} values that are missing, infinite or'
        f' too large, the first ({value}) in {row_name(index, wrong)};'
        f' {advice}.'
    )


def _texts(
    place: str,
    values: pd.Series,
    *,
    allows_missing: bool,
    is_later: bool = False,
) -> np.ndarray:
  """Returns the texts of a column of categories, an array of objects."""
  if (
      pd.api.types.is_datetime64_any_dtype(values.dtype)
      or pd.api.types.is_timedelta64_dtype(values.dtype)
      or _are_dates(values)
  ):
    raise ValueError(
        f'{place} has dates or times; store numbers, such as days, or leave it'
        f' out by {table_options.IGNORED_COLUMNS.name}.'
    )
  is_missing = values.isna()
  if is_missing.any() and not allows_missing:
    raise ValueError(
        f'{place} has {int(is_missing.sum()):,} missing values'
        f' ({MISSING_TEXTS}), the first in'
        f' {row_name(values.index, is_missing)}; {_missing_advice(is_later)}.'
    )
  present = values[~is_missing]
  wrong = [v for v in present if not isinstance(v, (str, bool, int, float))]
  if wrong:
    raise ValueError(
        f'{place} has values of the type {type(wrong[0]).__name__}; columns'
        ' hold numbers or texts.'
    )
  is_number = pd.to_numeric(present, errors='coerce').notna()
  if is_number.mean() > _MOSTLY and not is_number.all():
    raise ValueError(
        f'{place} has numbers and the text {present[~is_number].iloc[0]!r} in'
        f' {row_name(present.index, ~is_number)}; correct it, or leave it empty'
        ' if the value is missing.'
    )
  return values.astype(object).where(~is_missing, _MISSING).map(str).to_numpy()


def _are_dates(values: pd.Series) -> bool:
  """Whether all values that are present are texts of dates, as CSV has them."""
  present = values.dropna()
  return bool(len(present)) and all(
      isinstance(value, str) and _DATE.fullmatch(value) for value in present
  )


def _describe_texts(values: pd.Series) -> str:
  """Returns the texts of a column in words: the first that is no number."""
  present = values[values.notna()]
  is_text = pd.to_numeric(present, errors='coerce').isna()
  if is_text.any():
    text = str(present[is_text].iloc[0])
    return f'the text {text!r} in {row_name(present.index, is_text)}'
  return f'texts such as {str(next(iter(present), ""))!r}'
