"""Random and damaged files of users: a dataset, or an error that names them."""

import gzip
import io
import struct
import warnings

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pandas as pd
import pytest

from tff_bn import data as tff_bn_data

_X = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
_Y = np.array([0, 1, 2, 0, 1, 2], np.uint8)
_TABLE = (
    'a,b,label,client\n'
    '1,x,0,ann\n2.5,y,1,bob\n-3,x,0,ann\n4e3,z,1,"c, d"\n5,y,0,bob\n6,x,1,ann\n'
)


def _npz(save):
  file = io.BytesIO()
  save(file, x_train=_X, y_train=_Y, x_test=_X[:3], y_test=_Y[:3])
  return file.getvalue()


def _idx(array):
  return struct.pack(f'>I{array.ndim}I', 0x800 + array.ndim, *array.shape) + (
      array.tobytes()
  )


_GREY = _idx(np.concatenate([_X, _X]))
# The files of each dataset, of which the first one is damaged.
_FILES = {
    'npz:a.npz': {'a.npz': _npz(np.savez)},
    'npz:compressed.npz': {'compressed.npz': _npz(np.savez_compressed)},
    'series:a.npz': {'a.npz': _npz(np.savez)},
    'csv:a.csv': {'a.csv': _TABLE.encode()},
    'csv:a.csv.gz': {'a.csv.gz': gzip.compress(_TABLE.encode(), mtime=0)},
    'csv:folder': {
        'folder/a.csv': _TABLE.encode(),
        'folder/b.csv': _TABLE.encode(),
    },
    'idx:images': {
        'images/train-images-idx3-ubyte': _GREY,
        'images/train-labels-idx1-ubyte': _idx(np.concatenate([_Y, _Y])),
        'images/t10k-images-idx3-ubyte': _idx(_X),
        'images/t10k-labels-idx1-ubyte': _idx(_Y),
    },
    'idx:compressed': {
        'compressed/train-images-idx3-ubyte.gz': gzip.compress(_GREY, mtime=0),
        'compressed/train-labels-idx1-ubyte': _idx(np.concatenate([_Y, _Y])),
        'compressed/t10k-images-idx3-ubyte': _idx(_X),
        'compressed/t10k-labels-idx1-ubyte': _idx(_Y),
    },
    'idx:labels': {
        'labels/t10k-labels-idx1-ubyte': _idx(_Y),
        'labels/train-images-idx3-ubyte': _GREY,
        'labels/train-labels-idx1-ubyte': _idx(np.concatenate([_Y, _Y])),
        'labels/t10k-images-idx3-ubyte': _idx(_X),
    },
}


def _load(name):
  is_table = name.startswith(('csv:', 'parquet:'))
  return tff_bn_data.load_dataset(
      name, **(dict(label_column=['label']) if is_table else {})
  )


@st.composite
def _damaged(draw, content):
  """A file with other bytes, without its end, or another one."""
  kind = draw(st.sampled_from(['bytes', 'bytes', 'cut', 'longer', 'random']))
  position = draw(st.integers(0, len(content) - 1))
  if kind == 'cut':
    return content[:position]
  if kind == 'random':
    # Some begin as files of the kind do.
    start = draw(st.sampled_from([0, 4, 8, 16]))
    return content[:start] + draw(st.binary(max_size=200))
  more = draw(st.binary(min_size=1, max_size=8))
  end = position if kind == 'longer' else position + len(more)
  return content[:position] + more + content[end:]


def _check(tmp_path_factory, name, files, damaged):
  kind, _, path = name.partition(':')
  folder = tmp_path_factory.getbasetemp() / 'damaged'
  first, *_ = files
  for file, content in files.items():
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(damaged if file == first else content)
  name = f'{kind}:{folder / path}'
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      dataset = _load(name)
  except ValueError as error:
    message = str(error)
    assert message.startswith(f'dataset={name}')
    assert message.endswith(('.', '?'))
    assert len(message) < 2000
    return
  assert isinstance(dataset, tff_bn_data.Dataset)
  assert len(dataset.x_train) == len(dataset.y_train)
  assert len(dataset.x_test) == len(dataset.y_test)


@pytest.mark.parametrize('name', _FILES)
@hypothesis.given(data=st.data())
def test_damaged_file(name, data, tmp_path_factory):
  files = _FILES[name]
  first, *_ = files.values()
  _check(tmp_path_factory, name, files, data.draw(_damaged(first)))


@pytest.mark.parametrize('name', _FILES)
def test_whole_file(name, tmp_path_factory):
  """The files above are datasets as long as they are not damaged."""
  kind, _, path = name.partition(':')
  folder = tmp_path_factory.mktemp('whole')
  for file, content in _FILES[name].items():
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(content)
  dataset = _load(f'{kind}:{folder / path}')
  assert len(dataset.x_train)


# Lines as spreadsheets and people write them.
_FIELD = st.one_of(
    st.sampled_from(
        [
            '',
            '0',
            '1',
            '-1',
            '1e5',
            'nan',
            'inf',
            '1e999',
            'NA',
            ' 3',
            '3,5',
            '"',
        ]
    ),
    st.text(max_size=5),
)


@hypothesis.given(
    names=st.lists(_FIELD, min_size=1, max_size=4),
    rows=st.lists(st.lists(_FIELD, max_size=5), max_size=8),
    delimiter=st.sampled_from([',', ';', '\t', '|']),
    newline=st.sampled_from(['\n', '\r\n', '\r']),
    encoding=st.sampled_from(['utf-8', 'utf-8-sig', 'utf-16', 'latin-1']),
)
def test_random_table(
    names, rows, delimiter, newline, encoding, tmp_path_factory
):
  lines = [delimiter.join(row) for row in [[*names, 'label'], *rows]]
  content = newline.join(lines).encode(encoding, 'replace')
  _check(tmp_path_factory, 'csv:a.csv', {'a.csv': content}, content)


@hypothesis.given(data=st.data())
def test_damaged_parquet(data, tmp_path_factory):
  pytest.importorskip('pyarrow')
  file = io.BytesIO()
  pd.read_csv(io.StringIO(_TABLE)).to_parquet(file)
  _check(
      tmp_path_factory,
      'parquet:a.parquet',
      {'a.parquet': b''},
      data.draw(_damaged(file.getvalue())),
  )
