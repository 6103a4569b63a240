"""Options of tables: which columns are labels, clients, test data, features."""

from typing import Any

from tff_bn.catalog import value_types
from tff_bn.catalog.options import OWN_NAME
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option
from tff_bn.catalog.parts import listing


def _reads_tables(options: Any) -> bool:
  # It lists the options of this module.
  from tff_bn.catalog import datasets

  return datasets.has_tables(options.dataset)


def _lacks_test_split(options: Any) -> bool:
  from tff_bn.catalog import datasets

  return not datasets.has_test_split(options.dataset)


_ONLY_TABLES = (
    Condition(
        'dataset',
        _reads_tables,
        'has no effect with --dataset={}; it is for csv:PATH, parquet:PATH and'
        ' hf:PATH',
    ),
)
_ONLY_WITHOUT_TEST_SPLIT = (
    *_ONLY_TABLES,
    Condition(
        'dataset',
        _lacks_test_split,
        'has no effect with --dataset={}, which has a split of test data',
    ),
)
_COLUMNS = value_types.List(value_types.TEXT)

LABEL_COLUMN = Option(
    'label_column',
    _COLUMNS,
    'Column with the labels of a table: classes as texts or numbers from 0, or'
    ' floats for a regression. Several, separated by commas, are several labels'
    ' or targets',
    default_text='none, tables need it',
    argument=OWN_NAME,
    conditions=_ONLY_TABLES,
)
CLIENT_COLUMN = Option(
    'client_column',
    value_types.TEXT,
    'Column of a table with the id of the client to which a row belongs, such'
    ' as a hospital or a user',
    default_text='none',
    argument=OWN_NAME,
    conditions=_ONLY_TABLES,
)
TEST_COLUMN = Option(
    'test_column',
    value_types.TEXT,
    'Column of a table that says which rows are test data: train or test, 0 or'
    ' 1, or false or true',
    default_text='none, see --test_share',
    argument=OWN_NAME,
    conditions=_ONLY_WITHOUT_TEST_SPLIT,
    excludes='test_share',
)
TEST_SHARE = Option(
    'test_share',
    value_types.PART,
    'Share of the rows of a table, of each client if they are known, that are'
    ' test data without --test_column. The same rows in every run',
    0.2,
    argument=OWN_NAME,
    conditions=_ONLY_WITHOUT_TEST_SPLIT,
    excludes='test_column',
)
IGNORED_COLUMNS = Option(
    'ignored_columns',
    _COLUMNS,
    'Comma-separated columns of a table that are no features',
    default_text='none',
    argument=OWN_NAME,
    conditions=_ONLY_TABLES,
)
ERROR = 'error'
MEAN = 'mean'
MEDIAN = 'median'
# What fills missing values.
FILLING = (MEAN, MEDIAN)
MISSING_VALUES = {
    ERROR: 'they are errors',
    MEAN: (
        "the mean of the column's training rows of all clients; rows without a"
        ' text get a feature that says so'
    ),
    MEDIAN: 'the same with the median',
}
MISSING = Option(
    'missing_values',
    value_types.Choice(MISSING_VALUES),
    f'What replaces missing values in a table:\n{listing(MISSING_VALUES)}',
    ERROR,
    argument=OWN_NAME,
    conditions=_ONLY_TABLES,
)
ONE_HOT = 'one_hot'
EMBEDDED = 'embedded'
CATEGORY_FEATURES = {
    ONE_HOT: 'one feature for each text, which is 0 or 1',
    EMBEDDED: (
        'one feature, the number of the text, for which the model learns a'
        ' vector; for --model=tabular'
    ),
}
CATEGORIES = Option(
    'categories',
    value_types.Choice(CATEGORY_FEATURES),
    'What a column of texts becomes in a table:\n'
    f'{listing(CATEGORY_FEATURES)}',
    ONE_HOT,
    argument=OWN_NAME,
    conditions=_ONLY_TABLES,
)
OPTIONS = (
    LABEL_COLUMN,
    CLIENT_COLUMN,
    TEST_COLUMN,
    TEST_SHARE,
    IGNORED_COLUMNS,
    MISSING,
    CATEGORIES,
)
