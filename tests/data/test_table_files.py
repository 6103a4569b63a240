"""Datasets from tables."""

import gzip
import io
import re

import numpy as np
import pandas as pd
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.data import scaling
from tff_bn.data import table_encoding
from tff_bn.data import table_files

_TEXT = """user,age,sex,steps,part,ill
7,30,f,1.5,train,no
7,40,m,2.5,test,yes
../x,50,f,3.5,train,yes
../x,70,d,4.5,train,no
7,20,m,0.5,train,yes
"""
_OPTIONS = dict(label_column=['ill'], client_column='user', test_column='part')


def _write(path, text=_TEXT):
  path.write_text(text, encoding='utf-8')
  return f'csv:{path}'


def _load(path, text=_TEXT, **changes):
  return tff_bn_data.load_dataset(_write(path, text), **{**_OPTIONS, **changes})


def test_a_file(tmp_path):
  dataset = _load(tmp_path / 'a.csv')
  # Age; the sexes d, f and m; steps.
  np.testing.assert_array_equal(
      dataset.x_train,
      np.float32(
          [
              [30, 0, 1, 0, 1.5],
              [50, 0, 1, 0, 3.5],
              [70, 1, 0, 0, 4.5],
              [20, 0, 0, 1, 0.5],
          ]
      ),
  )
  np.testing.assert_array_equal(dataset.x_test, [[40, 0, 0, 1, 2.5]])
  assert dataset.class_names == ('no', 'yes')
  np.testing.assert_array_equal(dataset.y_train, [0, 1, 0, 1])
  np.testing.assert_array_equal(dataset.y_test, [1])
  data = tff_bn_data.split_dataset(dataset, 'natural', None, seed=0)
  assert data.client_ids == ('../x', '7')
  np.testing.assert_array_equal(data.train_indices['7'], [0, 3])
  np.testing.assert_array_equal(data.test_indices['7'], [0])
  assert not len(data.test_indices['../x'])


@pytest.mark.parametrize('delimiter', [';', '\t'])
def test_other_delimiters(tmp_path, delimiter):
  dataset = _load(tmp_path / 'a.csv', _TEXT.replace(',', delimiter))
  # Only the name differs.
  expected = _load(tmp_path / 'a.csv')
  assert dataset.fingerprint() == expected.fingerprint()


def test_a_folder_of_clients(tmp_path):
  header, *rows = _TEXT.splitlines()
  _write(tmp_path / 'south.csv', '\n'.join([header, *rows[:2]]))
  with gzip.open(tmp_path / 'north.csv.gz', 'wt') as file:
    file.write('\n'.join([header, *rows[2:]]))
  (tmp_path / 'readme.txt').write_text('no table')
  dataset = tff_bn_data.load_dataset(
      f'csv:{tmp_path}',
      **{**_OPTIONS, 'client_column': None, 'ignored_columns': ['user']},
  )
  assert dataset.client_names == ('north', 'south')
  np.testing.assert_array_equal(dataset.client_train, [0, 0, 0, 1])
  np.testing.assert_array_equal(dataset.client_test, [1])
  assert dataset.input_shape == (5,)


def test_ids_of_clients_keep_their_texts(tmp_path):
  def names(*ids):
    rows = [f'{i},{n},{n % 2}' for n, i in enumerate(ids * 2)]
    return _load(
        tmp_path / 'a.csv',
        '\n'.join(['who,x,y', *rows]),
        label_column=['y'],
        client_column='who',
        test_column=None,
        test_share=0.4,
    ).client_names

  assert names('007', '7', '08') == ('007', '08', '7')
  assert names('NA', 'u1', 'null') == ('NA', 'null', 'u1')
  # In the order of numbers.
  assert names('10', '9', '-1') == ('-1', '9', '10')
  assert names(str(10**30), '1') == ('1', str(10**30))
  with pytest.raises(ValueError, match='numbers such as 0.5; ids of clients'):
    names('0.5', '1')


def test_drawn_test_rows(tmp_path):
  sizes = {'a': 10, 'b': 1, 'c': 4}
  rows = [f'{c},{n},{n % 2}' for c, size in sizes.items() for n in range(size)]
  text = '\n'.join(['who,x,y', *rows])
  options = dict(label_column=['y'], client_column='who', test_column=None)
  dataset = _load(tmp_path / 'a.csv', text, test_share=0.3, **options)
  assert np.bincount(dataset.client_test).tolist() == [3, 0, 1]
  assert np.bincount(dataset.client_train).tolist() == [7, 1, 3]
  again = _load(tmp_path / 'a.csv', text, test_share=0.3, **options)
  assert dataset.fingerprint() == again.fingerprint()
  default = _load(tmp_path / 'a.csv', text, **options)
  assert np.bincount(default.client_test).tolist() == [2, 0, 1]


@pytest.mark.parametrize(('missing', 'fill'), [('mean', 50), ('median', 30)])
def test_missing_values(tmp_path, missing, fill):
  text = 'age,sex,t,y\n30,f,0,0\n,,0,1\n100,m,0,1\n20,m,0,0\n,x,1,1\n'
  dataset = _load(
      tmp_path / 'a.csv',
      text,
      label_column=['y'],
      client_column=None,
      test_column='t',
      missing_values=missing,
  )
  # Age; then the texts "" (missing), f and m.
  np.testing.assert_array_equal(
      dataset.x_train,
      [[30, 0, 1, 0], [fill, 1, 0, 0], [100, 0, 0, 1], [20, 0, 0, 1]],
  )
  # A category that the training data lacks.
  np.testing.assert_array_equal(dataset.x_test, [[fill, 0, 0, 0]])


@pytest.mark.parametrize(
    ('categories', 'features'),
    [('one_hot', [[0, 0], [0, 1]]), ('embedded', [[2], [1]])],
)
def test_texts_that_only_later_rows_lack(tmp_path, categories, features):
  """They count as a text that the training rows lack."""
  text = 'sex,t,y\nf,0,0\nm,0,1\n,1,1\nm,1,0\n'
  one = dict(label_column=['y'], client_column=None, test_column='t')
  dataset = _load(
      tmp_path / 'a.csv',
      text,
      missing_values='mean',
      categories=categories,
      **one,
  )
  np.testing.assert_array_equal(dataset.x_test, features)
  encoding = table_encoding.TableEncoding.from_json(dataset.table.to_json())
  later = encoding.encode('later', pd.DataFrame({'sex': [None, 'm']}))
  np.testing.assert_array_equal(later, features)
  with pytest.raises(ValueError, match="'sex' has 1 missing .* row 3 .*fill"):
    _load(tmp_path / 'a.csv', text, categories=categories, **one)


def test_tasks(tmp_path):
  text = 'x,a,b,t\n1,0.5,1,0\n2,1.5,0,0\n3,2.5,1,1\n'
  one = dict(client_column=None, test_column='t')
  regression = _load(tmp_path / 'a.csv', text, label_column=['a'], **one)
  assert regression.task == 'regression'
  np.testing.assert_array_equal(regression.y_train, [[0.5], [1.5]])
  text = 'x,a,b,t\n1,0,1,0\n2,1,1,0\n3,0,0,1\n'
  several = _load(tmp_path / 'b.csv', text, label_column=['a', 'b'], **one)
  assert several.task == 'multilabel'
  assert several.class_names == ('a', 'b')


def test_the_encoding_of_a_run(tmp_path):
  """Rows that come later get the same features."""
  dataset = _load(tmp_path / 'a.csv')
  encoding = table_encoding.TableEncoding.from_json(dataset.table.to_json())
  assert encoding == dataset.table
  text = 'steps,new,sex,age,ill,user,part\n9,0,m,1,yes,3,0\n8,0,z,2,yes,3,1\n'
  later = tff_bn_data.load_dataset(
      _write(tmp_path / 'b.csv', text),
      class_names=('no', 'yes'),
      encoding=encoding,
      **_OPTIONS,
  )
  np.testing.assert_array_equal(later.x_train, [[1, 0, 0, 1, 9]])
  np.testing.assert_array_equal(later.x_test, [[2, 0, 0, 0, 8]])
  np.testing.assert_array_equal(later.y_test, [1])


@pytest.mark.parametrize(
    ('row', 'message'),
    [
        ('1,x,m', "'steps' has the text 'x' in row 2 below .* but numbers in"),
        ('1,,m', r"'steps' has 1 .* \(nan\) in row 2 .*; the column had all"),
        ('1,0,', "'sex' has 1 missing .* in row 2 .*; the column had all"),
    ],
)
def test_later_rows_that_do_not_fit(tmp_path, row, message):
  encoding = _load(tmp_path / 'a.csv').table
  (tmp_path / 'b.csv').write_text(f'age,steps,sex\n1,2,f\n{row}\n')
  table = table_files.read_csv_file('later', str(tmp_path / 'b.csv'))
  with pytest.raises(ValueError, match=message):
    encoding.encode('later', table, is_later=True)


@pytest.mark.parametrize(
    ('text', 'changes', 'message'),
    [
        (_TEXT, dict(label_column=None), 'needs label_column=NAME.* user, age'),
        (
            _TEXT,
            dict(label_column=['il']),
            'no column label_column=il; .*Did you mean ill',
        ),
        (_TEXT, dict(client_column='who'), 'no column client_column=who'),
        (_TEXT, dict(test_column='ill'), "'ill' is given for two options"),
        (
            _TEXT,
            dict(test_column='sex'),
            "'sex' has the value 'f' in row 1 below .*must have train and test",
        ),
        (
            _TEXT.replace(',no', ','),
            {},
            r'2 rows have no label \(empty, NA.*\), the first is row 1 below',
        ),
        (
            _TEXT.replace('test,yes', 'test,unknown'),
            {},
            "label 'unknown' occurs in the test rows only, .*; remove these",
        ),
        (
            _TEXT.replace('40,m', ',m'),
            {},
            "'age' has 1 values that are missing.*row 2 below.*missing_values=",
        ),
        (
            _TEXT.replace('50,f', '50,'),
            {},
            "'sex' has 1 missing .* row 3 below",
        ),
        (
            _TEXT.replace('50,f', 'fifty,f'),
            {},
            "'age' has numbers and the text 'fifty' in row 3",
        ),
        (_TEXT.replace('../x', ''), {}, '2 rows have no client'),
        (_TEXT.replace('1.5', 'inf'), {}, "'steps' has 1 values .* infinite"),
        (
            _TEXT.replace('test', 'train'),
            {},
            'no test rows: .* test_column=part marks all as training data',
        ),
        (
            _TEXT.replace('train', 'test'),
            {},
            'no training rows: .* test_column=part marks all as test data',
        ),
        (
            _TEXT,
            dict(test_share=0.1, test_column=None),
            r'no test rows: test_share=0.1 of the rows of each client \(at most'
            r' 3\) is rounded to none.*test_column=NAME',
        ),
        (
            'a,y\n1,0\n2,1\n',
            dict(label_column=['y'], client_column=None, test_column=None),
            r'no test rows: test_share=0.2 of the rows \(2\) is rounded',
        ),
        (
            _TEXT.replace('yes', 'no'),
            {},
            "'ill' has the label 'no' only; .* at least two classes",
        ),
        (
            re.sub(r'\b[dfm],', '2020-01-31 10:30,', _TEXT),
            {},
            "'sex' has dates or times",
        ),
        (
            re.sub(r'\b[dfm],', '1/12/2020,', _TEXT),
            {},
            "'sex' has dates or times",
        ),
        (_TEXT.splitlines()[0], {}, 'the table has no rows'),
        ('', {}, 'is no readable CSV file'),
        (
            _TEXT.replace(',no', ',no,').replace(',yes', ',yes,'),
            {},
            'rows have more fields than the first line',
        ),
        (_TEXT.replace('age', 'user'), {}, "the column 'user' occurs twice"),
        ('user,part,ill\n1,0,a\n2,1,a\n2,0,b\n', {}, 'no columns of features'),
        (
            _TEXT,
            dict(missing_values='zero'),
            "missing_values='zero' must be one",
        ),
        (_TEXT, dict(test_share=0.0, test_column=None), 'test_share=0.0'),
        (_TEXT, dict(column='a'), "'column' is not an option"),
    ],
)
def test_refused(tmp_path, text, changes, message):
  with pytest.raises((TypeError, ValueError), match=message):
    _load(tmp_path / 'a.csv', text, **changes)


def test_too_many_categories(tmp_path):
  rows = [f'n{n},{n % 2},{n % 3 == 0}' for n in range(1600)]
  text = '\n'.join(['name,y,t', *rows])
  options = dict(label_column=['y'], client_column=None, test_column='t')
  with pytest.raises(ValueError, match='1,066 different .* ignored_columns'):
    _load(tmp_path / 'a.csv', text, **options)
  text = '\n'.join(['name,y,t,x', *(f'{row},1' for row in rows)])
  dataset = _load(tmp_path / 'a.csv', text, ignored_columns=['name'], **options)
  assert dataset.input_shape == (1,)


def test_texts_that_are_no_dates(tmp_path):
  text = re.sub(r'\b[dfm],', '1.12.20,', _TEXT)
  assert _load(tmp_path / 'a.csv', text).input_shape == (3,)


def test_column_without_a_name(tmp_path, caplog):
  """An index that pandas wrote becomes a feature, which is rarely meant."""
  text = ''.join(
      f'{n - 1 if n else ""},{line}\n'
      for n, line in enumerate(_TEXT.splitlines())
  )
  assert _load(tmp_path / 'a.csv', text).input_shape == (6,)
  assert "ignored_columns='Unnamed: 0'" in caplog.text
  caplog.clear()
  ignored = dict(ignored_columns=['Unnamed: 0'])
  assert _load(tmp_path / 'a.csv', text, **ignored).input_shape == (5,)
  assert not caplog.text


def test_files_and_folders(tmp_path):
  def refused(name, message):
    with pytest.raises(ValueError, match=message):
      tff_bn_data.load_dataset(name, **_OPTIONS)

  refused(f'csv:{tmp_path}/none.csv', 'there is no file or folder')
  refused(f'csv:{tmp_path}', 'has no files that end in .csv or .csv.gz')
  _write(tmp_path / 'a.csv')
  _write(tmp_path / 'b.csv', _TEXT.replace('age', 'years'))
  refused(f'csv:{tmp_path}', "only one of them has 'age'")
  _write(tmp_path / 'b.csv', _TEXT.replace('40,m', ',m'))
  refused(f'csv:{tmp_path}', "'age' has 1 .* row 2 below the header of 'b.csv'")
  (tmp_path / 'twice').mkdir()
  for name in ('a.csv', 'a.csv.gz'):
    (tmp_path / 'twice' / name).write_bytes(b'Not read.')
  with pytest.raises(ValueError, match="'a.csv' and 'a.csv.gz' .* client 'a'"):
    tff_bn_data.load_dataset(f'csv:{tmp_path}/twice', label_column=['ill'])
  (tmp_path / 'c.csv').write_bytes(b'\xff\xfe\x00')
  refused(f'csv:{tmp_path}/c.csv', 'is no readable CSV file')
  with pytest.raises(ValueError, match='label_column=.*is for tables'):
    tff_bn_data.load_dataset('digits', label_column=['y'])
  with pytest.raises(ValueError, match='is read by its columns; use one'):
    tff_bn_data.load_dataset(f'domains:a=csv:{tmp_path}/a.csv,b=digits')


class TestParquet:

  def _load(self, path, **changes):
    return tff_bn_data.load_dataset(
        f'parquet:{path}', **{**_OPTIONS, **changes}
    )

  @pytest.fixture
  def table(self):
    return pd.read_csv(io.StringIO(_TEXT))

  def test_a_file(self, table, tmp_path):
    table.to_parquet(tmp_path / 'a.parquet')
    found = self._load(tmp_path / 'a.parquet')
    assert found.fingerprint() == _load(tmp_path / 'a.csv').fingerprint()
    assert found.client_names == ('../x', '7')

  def test_a_partitioned_folder(self, table, tmp_path):
    table['user'] = table['user'].map({'7': 7, '../x': 10})
    folder = tmp_path / 'parts'
    table.to_parquet(folder, partition_cols=['user'])
    found = self._load(folder)
    assert found.client_names == ('7', '10')
    np.testing.assert_array_equal(found.client_train, [1, 1, 0, 0])
    assert found.x_train[:, 0].tolist() == [50, 70, 30, 20]

  def test_categories_of_pandas(self, table, tmp_path):
    for column in ('sex', 'ill', 'part', 'user'):
      table[column] = table[column].astype('category')
    table['smokes'] = [True, False, False, True, True]
    table.to_parquet(tmp_path / 'a.parquet')
    found = self._load(tmp_path / 'a.parquet')
    np.testing.assert_array_equal(found.x_train[:, -1], [1, 0, 1, 1])
    np.testing.assert_array_equal(
        found.x_train[:, :-1], _load(tmp_path / 'a.csv').x_train
    )

  def test_refused(self, table, tmp_path):
    (tmp_path / 'a.parquet').write_bytes(b'PAR1')
    with pytest.raises(ValueError, match='is no readable Parquet file'):
      self._load(tmp_path / 'a.parquet')
    table['when'] = pd.Timestamp('2026-01-01')
    table.to_parquet(tmp_path / 'b.parquet')
    with pytest.raises(ValueError, match="'when' has dates .*ignored_columns"):
      self._load(tmp_path / 'b.parquet')
    self._load(tmp_path / 'b.parquet', ignored_columns=['when'])

  def test_without_pyarrow(self, table, tmp_path, monkeypatch):
    table.to_parquet(tmp_path / 'a.parquet')

    def read_parquet(path):
      raise ImportError('no pyarrow')

    monkeypatch.setattr(pd, 'read_parquet', read_parquet)
    with pytest.raises(ValueError, match='pip install pyarrow'):
      self._load(tmp_path / 'a.parquet')


class TestEmbedded:

  def test_a_file(self, tmp_path):
    text = _TEXT.replace('70,d', '70,').replace('40,m', '40,x')
    found = _load(
        tmp_path / 'a.csv', text, categories='embedded', missing_values='mean'
    )
    # Age; the sexes '', f and m; steps. The test row has an unknown one.
    np.testing.assert_array_equal(
        found.x_train,
        np.float32([[30, 1, 1.5], [50, 1, 3.5], [70, 0, 4.5], [20, 2, 0.5]]),
    )
    np.testing.assert_array_equal(found.x_test, [[40, 3, 2.5]])
    assert found.table.category_counts == {1: 3}
    columns = found.table.to_json()
    assert ['embedded' in column for column in columns] == [False, True, False]
    assert table_encoding.TableEncoding.from_json(columns) == found.table
    again = _load(
        tmp_path / 'a.csv', text.replace(',f,', ',m,'), encoding=found.table
    )
    np.testing.assert_array_equal(again.x_train[:, 1], [2, 2, 0, 2])

  def test_scaling_keeps_the_numbers(self, tmp_path):
    found = _load(tmp_path / 'a.csv', categories='embedded')
    scaled = scaling.pixel_scaling('standardized', found, np.arange(4))
    numbers = found.x_train[:, [0, 2]].astype(float)
    np.testing.assert_allclose(scaled.mean[[0, 2]], numbers.mean(axis=0))
    np.testing.assert_allclose(scaled.deviation[[0, 2]], numbers.std(axis=0))
    assert scaled.mean[1] == 0 and scaled.deviation[1] == 1

  def test_positions_of_several_columns(self):
    table = pd.DataFrame(dict(a=['x', 'y'], b=[1, 2], c=['u', 'u']))
    encoding = table_encoding.TableEncoding.fit('t', table, 'error', 'embedded')
    assert encoding.category_counts == {0: 2, 2: 1}
    one_hot = table_encoding.TableEncoding.fit('t', table, 'error')
    assert one_hot.category_counts == {}
    # As files of earlier versions have them.
    assert one_hot.to_json()[0] == dict(
        name='a', categories=('x', 'y'), fill=None
    )

  def test_without_texts(self, tmp_path):
    with pytest.raises(ValueError, match='no columns of texts.*=embedded has'):
      _load(tmp_path / 'a.csv', categories='embedded', ignored_columns=['sex'])
