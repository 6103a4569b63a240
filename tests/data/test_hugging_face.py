"""Datasets that the package `datasets` saved to a folder."""

import io
import json
import pathlib
import socket
import sys

import numpy as np
import pandas as pd
from PIL import Image
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.catalog import datasets as catalog

hf = pytest.importorskip('datasets')

_ROWS = {
    'user': ['7', '7', 'b', 'b', '7'],
    'age': [30, 40, 50, 70, 20],
    'sex': ['f', 'm', 'f', 'd', 'm'],
    'steps': [1.5, 2.5, 3.5, 4.5, 0.5],
    'part': ['train', 'test', 'train', 'train', 'train'],
    'ill': ['no', 'yes', 'yes', 'no', 'yes'],
}
_OPTIONS = dict(label_column=['ill'], client_column='user', test_column='part')
_PIXELS = np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5)
_NAMES = ['cat', 'dog', 'ant']


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
  def connect(*arguments):
    raise AssertionError('a connection is opened')

  monkeypatch.setattr(socket.socket, 'connect', connect)


def _load(path, **options):
  return tff_bn_data.load_dataset(f'hf:{path}', **options)


def _refused(path, match, **options):
  with pytest.raises(ValueError, match=match):
    _load(path, **{'label_column': ['label'], **options})


def _png(pixels):
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, 'PNG')
  return {'bytes': file.getvalue(), 'path': None}


def _pictures(pixels=_PIXELS, labels=(0, 1, 2, 0, 1, 2), **columns):
  features = {
      'image': hf.Image(),
      'label': hf.ClassLabel(names=_NAMES),
      **{name: hf.Value('string') for name in columns},
  }
  rows = dict(image=[_png(p) for p in pixels], label=list(labels), **columns)
  return hf.Dataset.from_dict(rows, features=hf.Features(features))


def _split(rows, num_test=2):
  """Returns the last rows as test data."""
  number = len(rows) - num_test
  return hf.DatasetDict(
      train=rows.select(range(number)),
      test=rows.select(range(number, len(rows))),
  )


def _saved(rows, path):
  rows.save_to_disk(path)
  return path


class TestTables:

  def test_is_the_same_as_from_csv(self, tmp_path):
    pd.DataFrame(_ROWS).to_csv(tmp_path / 'a.csv', index=False)
    found = _load(
        _saved(hf.Dataset.from_dict(_ROWS), tmp_path / 'a'), **_OPTIONS
    )
    expected = tff_bn_data.load_dataset(f'csv:{tmp_path}/a.csv', **_OPTIONS)
    assert found.fingerprint() == expected.fingerprint()
    assert found.client_names == ('7', 'b')
    data = tff_bn_data.split_dataset(found, 'natural', None, seed=0)
    np.testing.assert_array_equal(data.train_indices['7'], [0, 3])
    shares = [
        tff_bn_data.load_dataset(
            name, label_column=['ill'], ignored_columns=['user'], test_share=0.4
        ).x_test
        for name in (f'hf:{tmp_path}/a', f'csv:{tmp_path}/a.csv')
    ]
    np.testing.assert_array_equal(*shares)

  def test_splits_and_names_of_classes(self, tmp_path):
    features = hf.Features(
        age=hf.Value('int32'),
        sex=hf.ClassLabel(names=['f', 'm', 'd']),
        ok=hf.Value('bool'),
        label=hf.ClassLabel(names=_NAMES),
    )
    rows = hf.Dataset.from_dict(
        {
            'age': [30, None, 50, 70],
            'sex': [0, 2, 1, 2],
            'ok': [True, False, True, True],
            'label': [0, 2, 0, 2],
        },
        features=features,
    )
    path = _saved(
        hf.DatasetDict(
            train=rows.select(range(3)), validation=rows.select([3])
        ),
        tmp_path / 'a',
    )
    found = _load(path, label_column=['label'], missing_values='mean')
    # Age; the sexes d, f and m; ok.
    np.testing.assert_array_equal(
        found.x_train,
        [[30, 0, 1, 0, 1], [40, 1, 0, 0, 0], [50, 0, 0, 1, 1]],
    )
    np.testing.assert_array_equal(found.x_test, [[70, 1, 0, 0, 1]])
    # No row has the class `dog`.
    assert found.class_names == tuple(_NAMES)
    np.testing.assert_array_equal(found.y_train, [0, 2, 0])
    _refused(path, "'age' has 1 .* row 2 below the header of 'train'")
    _refused(path, 'test_share=0.5 has no effect', test_share=0.5)
    later = _load(path, label_column=['label'], encoding=found.table)
    np.testing.assert_array_equal(later.x_test, found.x_test)
    assert catalog.has_test_split(f'hf:{path}')

  def test_hidden_labels(self, tmp_path):
    path = _saved(_split(_pictures(labels=(0, 1, 2, 0, 1, -1))), tmp_path / 'a')
    _refused(path, "1 rows have no label .* row 2 below the header of 'test'")


class TestPictures:

  def test_grey(self, tmp_path):
    found = _load(
        _saved(_split(_pictures()), tmp_path / 'a'), label_column=['label']
    )
    np.testing.assert_array_equal(found.x_train, _PIXELS[:4, ..., np.newaxis])
    np.testing.assert_array_equal(found.x_test[..., 0], _PIXELS[4:])
    assert found.x_train.dtype == np.uint8
    assert found.class_names == tuple(_NAMES)
    np.testing.assert_array_equal(found.y_train, [0, 1, 2, 0])
    np.testing.assert_array_equal(found.y_test, [1, 2])

  def test_grey_and_rgb_of_clients(self, tmp_path):
    rgb = np.stack([_PIXELS[0], _PIXELS[1], _PIXELS[2], _PIXELS[3]], axis=-1)
    rows = _pictures(
        [_PIXELS[0], rgb[..., :3], rgb, _PIXELS[1], _PIXELS[2], _PIXELS[3]],
        user=['b', 'a', 'a', 'b', 'a', 'b'],
        id=list('uvwxyz'),
    )
    found = _load(
        _saved(_split(rows), tmp_path / 'a'),
        label_column=['label'],
        client_column='user',
        ignored_columns=['id'],
    )
    np.testing.assert_array_equal(
        found.x_train[0], np.stack([_PIXELS[0]] * 3, axis=-1)
    )
    np.testing.assert_array_equal(found.x_train[1], rgb[..., :3])
    np.testing.assert_array_equal(found.x_train[2], rgb[..., :3])
    data = tff_bn_data.split_dataset(found, 'natural', None, seed=0)
    assert data.client_ids == ('a', 'b')
    np.testing.assert_array_equal(data.train_indices['a'], [1, 2])
    np.testing.assert_array_equal(data.test_indices['b'], [1])
    _refused(tmp_path / 'a', "'image' .Image. can only .*'user', 'id'")

  def test_different_sizes(self, tmp_path):
    pixels = [*_PIXELS[:5], np.zeros((3, 7), np.uint8)]
    path = _saved(_split(_pictures(pixels)), tmp_path / 'a')
    _refused(path, '4x5 .*row 1 of train.* and 3x7 .*row 2 of test')
    found = _load(path, label_column=['label'], image_size=(4, 5))
    np.testing.assert_array_equal(found.x_test[0, ..., 0], _PIXELS[4])
    assert found.x_test.shape == (2, 4, 5, 1) and not found.x_test[1].any()

  def test_refused(self, tmp_path):
    rows = _pictures()
    table = rows.to_dict()
    path = _saved(
        hf.Dataset.from_dict(
            {**table, 'image': [{'bytes': b'GIF89a', 'path': 'a.gif'}] * 6},
            features=rows.features,
        ),
        tmp_path / 'gif',
    )
    _refused(path, "'image' of row 1 is no readable PNG or JPEG")
    table['image'][1] = None
    path = _saved(
        hf.Dataset.from_dict(table, features=rows.features), tmp_path / 'b'
    )
    _refused(path, "'image' has no picture in row 2;")
    path = _saved(rows, tmp_path / 'c')
    _refused(path, 'missing_values=mean has no effect', missing_values='mean')
    _refused(path, "'image' has the type Image; labels", label_column=['image'])
    _refused(path, 'needs label_column=NAME.* image, label', label_column=None)
    _refused(
        path,
        'has no column label_column=lable.*Did you mean',
        label_column=['lable'],
    )


class TestArrays:

  @pytest.mark.parametrize('kind', ['vectors', 'lists', 'series', 'images'])
  def test_arrays(self, tmp_path, kind):
    shape, feature = {
        'vectors': ((3,), lambda: hf.Sequence(hf.Value('float32'), 3)),
        'lists': ((3,), lambda: hf.Sequence(hf.Value('float64'))),
        'series': ((4, 2), lambda: hf.Array2D((4, 2), 'float32')),
        'images': ((4, 5, 3), lambda: hf.Array3D((4, 5, 3), 'uint8')),
    }[kind]
    x = np.arange(6 * np.prod(shape)).reshape(6, *shape) % 200
    rows = hf.Dataset.from_dict(
        {'x': x.tolist(), 'label': [0, 1, 0, 1, 0, 1]},
        features=hf.Features(x=feature(), label=hf.Value('int64')),
    )
    found = _load(_saved(_split(rows), tmp_path / 'a'), label_column=['label'])
    np.testing.assert_array_equal(found.x_train, x[:4])
    np.testing.assert_array_equal(found.x_test, x[4:])
    assert (found.x_train.dtype == np.uint8) == (kind == 'images')
    np.testing.assert_array_equal(found.y_test, [0, 1])

  @pytest.mark.parametrize(
      ('x', 'match'),
      [
          ([[1.0], [2.0, 3.0]], 'lists of different lengths, such as 1 and 2'),
          ([['a'], ['b']], 'the type List of string with 1 axes'),
          ([[1.0], None], 'has rows without a value'),
      ],
  )
  def test_refused(self, tmp_path, x, match):
    rows = hf.Dataset.from_dict({'x': x * 2, 'label': [0, 1] * 2})
    _refused(_saved(rows, tmp_path / 'a'), match, test_share=0.5)


class TestFolders:

  def test_refused(self, tmp_path, monkeypatch):
    _refused(tmp_path / 'none', 'there is no folder')
    _refused(tmp_path, 'no readable folder of a Dataset.*save_to_disk')
    rows = _pictures()
    path = _saved(hf.DatasetDict(north=rows, south=rows), tmp_path / 'a')
    _refused(path, 'has the splits north, south; it needs train')
    other = rows.rename_column('image', 'picture')
    path = _saved(hf.DatasetDict(train=rows, test=other), tmp_path / 'b')
    _refused(path, 'train and test have different columns')
    path = _saved(
        hf.DatasetDict(train=rows, test=rows.filter(lambda row: False)),
        tmp_path / 'c',
    )
    _refused(path, 'has no rows in the split test')
    path = _saved(rows, tmp_path / 'd')
    state = json.loads((path / 'state.json').read_text())
    (path / state['_data_files'][0]['filename']).write_bytes(b'x')
    _refused(path, 'no readable folder')
    with pytest.raises(ValueError, match='is read by its columns'):
      tff_bn_data.load_dataset(f'domains:a=hf:{path},b=digits')
    monkeypatch.setitem(sys.modules, 'datasets', None)
    _refused(path, 'needs the package datasets.*requirements-files.txt')

  def test_writes_no_files(self, tmp_path):
    path = _saved(_split(_pictures()), tmp_path / 'a')
    before = sorted(pathlib.Path(tmp_path).rglob('*'))
    _load(path, label_column=['label'])
    assert sorted(pathlib.Path(tmp_path).rglob('*')) == before
