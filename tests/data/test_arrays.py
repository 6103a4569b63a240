"""Tests of what datasets and clients' data accept, convert and refuse."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tff_bn import data as tff_bn_data
from tff_bn.data import arrays
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import federated
from tff_bn.training import round_data

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 3, 2, 1))
PIXELS[0, 0, 0, 0] = 255
GOOD = {
    'x_train': PIXELS.astype(np.uint8),
    'y_train': np.int32([0, 1, 2, 0, 1, 2]),
    'x_test': PIXELS[:2].astype(np.uint8),
    'y_test': np.int32([2, 0]),
}


def make(num_classes=3, **changes):
  return tff_bn_data.Dataset(
      'mine', **{'num_classes': num_classes, **GOOD, **changes}
  )


def refused(message, error=ValueError, **changes):
  with pytest.raises(error, match=message) as caught:
    make(**changes)
  assert '\n' not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize('split', ['train', 'test'])
@pytest.mark.parametrize(
    'dtype', ['i8', 'u1', 'u8', 'bool', 'f2', 'f8', '>i4', '>f8', 'longdouble']
)
@pytest.mark.parametrize('shape', [(-1,), (-1, 1)])
def test_labels_of_any_dtype(split, dtype, shape):
  labels = np.array([0, 1, 1, 0, 1, 0])[: len(GOOD[f'y_{split}'])]
  dataset = make(**{f'y_{split}': labels.astype(dtype).reshape(shape)})
  stored = getattr(dataset, f'y_{split}')
  assert stored.dtype == np.int32
  np.testing.assert_array_equal(stored, labels)


def test_lists_and_tensors():
  dataset = make(**{name: array.tolist() for name, array in GOOD.items()})
  tensors = make(**{name: tf.constant(array) for name, array in GOOD.items()})
  for name, array in GOOD.items():
    for made in (dataset, tensors):
      stored = getattr(made, name)
      assert type(stored) is np.ndarray
      assert stored.dtype == array.dtype
      np.testing.assert_array_equal(stored, array)


@pytest.mark.parametrize('dtype', [np.uint8, np.float32])
def test_arrays_of_the_stored_dtypes_are_not_copied(dtype):
  given = {**GOOD, 'x_train': PIXELS.astype(dtype)}
  given['x_test'] = given['x_train'][:2]
  dataset = make(**given)
  for name, array in given.items():
    assert getattr(dataset, name) is array


def all_batches(dataset):
  """The samples in each form in which a client's data is built."""
  data = federated.FederatedData(
      dataset, {'a': range(len(dataset.y_train))}, {'a': [0, 1]}
  )
  draw = dict(seed=0, round_num=0, batch_size=6, local_epochs=1)
  variant = round_data.RoundDataset(data, ['a'], **draw).build()
  yield from data.client_dataset(['a'], **draw).as_numpy_iterator()
  yield from tf.data.experimental.from_variant(
      variant, data.element_spec
  ).as_numpy_iterator()
  yield from data.test_dataset(6).as_numpy_iterator()
  split = tff_bn_data.split_dataset(dataset, 'iid', num_clients=1, seed=0)
  yield from split.client_dataset(['client_0'], **draw).as_numpy_iterator()


VECTORS = PIXELS[:, :, 0, 0]
SERIES = PIXELS[..., 0]


@pytest.mark.parametrize(
    ('x', 'expected'),
    [
        # Integers in images are pixels.
        (PIXELS.astype(np.uint8), PIXELS / 255),
        (PIXELS.astype(np.int16), PIXELS / 255),
        (PIXELS, PIXELS / 255),
        (PIXELS.astype('>u4'), PIXELS / 255),
        (np.asfortranarray(PIXELS), PIXELS / 255),
        (PIXELS // 255 * 255, PIXELS // 255),
        (0 * PIXELS, 0 * PIXELS),
        # Other values are used as they are.
        (PIXELS > 99, PIXELS > 99),
        (PIXELS * 1.0, PIXELS),
        (np.asfortranarray(PIXELS.astype('>f8')), PIXELS),
        (PIXELS.astype(np.float16), PIXELS),
        # So are numbers in vectors and series, except uint8.
        (VECTORS.astype(np.uint8), VECTORS / 255),
        (VECTORS.astype(np.int8), VECTORS.astype(np.int8)),
        (VECTORS - 10**6, VECTORS - 10**6),
        (VECTORS > 99, VECTORS > 99),
        (SERIES.astype(np.int16) - 300, SERIES - 300),
        (SERIES.astype(np.uint8), SERIES / 255),
    ],
)
def test_batches_have_the_meaning_of_the_samples(x, expected):
  labels = np.arange(6)
  dataset = make(6, x_train=x, y_train=labels, x_test=x, y_test=labels)
  assert dataset.input_shape == x.shape[1:]
  count = 0
  for batch_x, batch_y in all_batches(dataset):
    assert batch_x.dtype == np.float32
    assert batch_y.dtype == np.int32
    assert sorted(batch_y) == list(labels)
    np.testing.assert_allclose(batch_x, expected[batch_y], rtol=1e-6)
    count += 1
  assert count == 4


def test_no_test_data():
  for empty in (PIXELS[:0], PIXELS[:0].astype(float), PIXELS[:0] > 0):
    dataset = make(x_test=empty, y_test=[])
    assert dataset.x_test.shape == (0, 3, 2, 1)
    assert dataset.x_test.dtype == np.uint8


def changed(array, place, value):
  array = np.array(array)
  array[place] = value
  return array


FLOATS = PIXELS.astype(np.float32)
ONE_HOT = np.eye(3)[GOOD['y_train']]


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        # Samples.
        *(
            (
                {
                    'x_train': changed(FLOATS, (4, 1), value),
                    'x_test': FLOATS[:2],
                },
                'x_train has 2 values that are NaN.*in sample 4; all',
            )
            for value in (np.nan, np.inf, -np.inf)
        ),
        (
            dict(
                x_train=FLOATS[:2],
                y_train=[0, 1],
                x_test=changed(FLOATS[:2], (1, 0, 0), np.nan),
            ),
            'x_test has 1 value',
        ),
        (
            {'x_train': changed(PIXELS * 1.0, 5, 1e39), 'x_test': FLOATS[:2]},
            'x_train has 6 values .*too large for float32',
        ),
        (
            {'x_train': changed(PIXELS, 3, -7)},
            'x_train has the dtype int64 and values from -7 to 255; .*pixels'
            r' from 0 to 255.*x_train.astype\(np.float32\)',
        ),
        (
            {'x_test': changed(PIXELS[:2], 1, 256)},
            'x_test has the dtype int64 and values from .* to 256',
        ),
        (
            {'x_train': PIXELS // 255, 'x_test': PIXELS[:2] // 255},
            r'only the values 0 and 1, .*use x_train.astype\(np.float32\)',
        ),
        ({'x_train': PIXELS.astype(complex)}, 'x_train has the dtype complex'),
        ({'x_train': PIXELS.astype(str)}, 'x_train has the dtype <U'),
        ({'x_train': PIXELS.astype(object)}, 'x_train has the dtype object'),
        (
            {'x_test': PIXELS.astype('datetime64[s]')},
            'x_test has the dtype datetime64',
        ),
        ({'x_train': [[1, 2], [3]]}, 'x_train is no array of numbers'),
        ({'x_train': PIXELS[0, 0, 0]}, r'x_train has the shape \(1,\)'),
        ({'x_train': 3.0}, r'x_train has the shape \(\)'),
        ({'x_train': PIXELS[..., None]}, r'x_train has the shape \(6, .*imag'),
        ({'x_train': []}, r'x_train has the shape \(0,\)'),
        ({'x_train': PIXELS[:0], 'y_train': []}, 'x_train .*is empty'),
        ({'x_train': PIXELS[:, :0]}, 'x_train .*is empty'),
        ({'x_test': PIXELS[:0, :0], 'y_test': []}, 'x_test .*is empty'),
        (
            {'x_test': SERIES[:2]},
            r'x_train have the shape \(3, 2, 1\), but x_test has \(3, 2\)',
        ),
        (
            {'x_test': FLOATS[:2]},
            r'one of x_train \(uint8\) and x_test \(float32\) is .*uint8',
        ),
        (
            {'x_train': np.ma.masked_less(PIXELS, 99)},
            'x_train has masked values',
        ),
        # Labels.
        ({'y_train': [0, 1, 2, 0, 1]}, 'x_train has 6 .*y_train has 5 labels'),
        ({'y_test': [[1], [2], [0]]}, 'x_test has 2 .*y_test has 3 labels'),
        ({'y_train': [0, 1, 2, 0, -1, 2]}, 'y_train has the negative label -1'),
        ({'y_train': [0, 1, 2, 0, -1.0, 2]}, 'the negative label -1'),
        (
            {'y_train': [0, 1, 3, 0, 4, 2]},
            r'y_train has labels outside the 3 classes 0\.\.2: 3, 4\.',
        ),
        ({'y_test': [0, 3.0]}, r'y_test has .*outside the 3 .*: 3\.'),
        ({'y_test': np.uint8([0, 255])}, 'y_test has labels outside .*: 255'),
        ({'y_test': np.uint64([0, 2**63])}, 'y_test has the label 922337'),
        (
            {'y_train': [0, 1, 2, 0, 1.5, 2]},
            'y_train has the label 1.5; .*task=regression',
        ),
        ({'y_train': [0, 1, np.nan, 0, 1, 2]}, 'y_train has the label nan'),
        ({'y_train': [0, 1, np.inf, 0, 1, 2]}, 'y_train has the label inf'),
        (
            {'y_test': ['cat', 'dog']},
            r'y_test has the dtype <U3; .*np.unique\(y_train\), y_test\)',
        ),
        ({'y_test': np.array([0, 'a'], object)}, 'y_test has the dtype object'),
        ({'y_train': 1}, r'y_train has the shape \(\)'),
        # They could be masks, which the test labels are not.
        ({'y_train': PIXELS}, r'y_test .*shape \(2,\); with task=segmentation'),
        *(
            (
                {'y_train': ONE_HOT.astype(dtype)},
                r'y_train has the dtype \w+ and the shape \(6, 3\) with a'
                r' single 1 .*np.argmax\(y_train, axis=1\)\. .*=multilabel.$',
            )
            for dtype in (bool, int, np.uint8, float)
        ),
        (
            {'y_test': [[1, 0, 1], [0, 1, 0]]},
            r'y_test has the dtype int64 and the shape \(2, 3\); with'
            r' task=classification .*\[samples\].*np.argmax\(y_test, axis=1\)\.'
            ' Such labels fit task=multilabel or task=regression',
        ),
        (
            {'y_train': changed(ONE_HOT, 4, 0)},
            'float64 .*only the values 0 and 1.*task=multilabel; .*regression',
        ),
        (
            {'y_train': 0.9 * ONE_HOT + 0.1 / 3},
            r'soft labels\), use np.argmax\(y_train, axis=1\).*=regression',
        ),
        # The rest.
        ({'num_classes': 0}, 'num_classes=0 must be a whole number'),
        ({'num_classes': 3.0}, 'num_classes=3.0 must be a whole number'),
        (
            {'domain_train': [0] * 5, 'domain_names': ('a',)},
            r'domain_train has .*shape \(5,\); it must be 6 integers',
        ),
        (
            {'domain_test': [0, 1], 'domain_names': ('a',)},
            'domain_test has values from 0 to 1; .*in the 1 names',
        ),
        (
            {'client_train': [-1] * 6, 'client_names': 'ab'},
            'client_train has values from -1 to -1; .*in the 2 names',
        ),
        (
            {'client_test': [0.0, 1.0], 'client_names': 'ab'},
            'client_test has the dtype float64',
        ),
    ],
)
def test_refused(changes, message):
  text = refused(message, **changes)
  assert text.startswith(('dataset=mine', 'num_classes='))


def test_things_that_are_no_arrays():
  for values in (None, object(), tf.data.Dataset.range(6)):
    name = type(values).__name__
    refused(f'x_train must be .* but is a {name}', TypeError, x_train=values)
    refused(f'y_test must be .* but is a {name}', TypeError, y_test=values)
  with pytest.raises(TypeError, match='name must be the name of the dataset'):
    tff_bn_data.Dataset(3, **GOOD, num_classes=3)


def test_every_change_is_checked():
  dataset = make(x_train=FLOATS, x_test=FLOATS[:2])
  with pytest.raises(ValueError, match='y_train has the negative label -1'):
    dataclasses.replace(dataset, y_train=dataset.y_train - 1)
  with pytest.raises(ValueError, match='x_train has 36 values that are NaN'):
    dataset.replace_samples(lambda x: x * np.nan)


def test_groups_become_positions():
  dataset = make(
      domain_train=np.arange(6) % 2,
      domain_test=[1, 0],
      domain_names=['a', 'b'],
  )
  assert dataset.domain_train.dtype == dataset.domain_test.dtype == np.int32
  np.testing.assert_array_equal(dataset.domain_train, [0, 1, 0, 1, 0, 1])
  assert dataset.domain_names == ('a', 'b')
  data = tff_bn_data.split_dataset(dataset, 'domains', None, seed=0)
  np.testing.assert_array_equal(data.test_indices['a'], [1])


def test_large_arrays_are_read_once_and_in_parts(monkeypatch):
  """No temporary array has more values than a chunk, even for few rows."""
  monkeypatch.setattr(arrays, '_CHUNK_VALUES', 12)
  seen = []
  isfinite = np.isfinite

  def spy(values):
    seen.append(np.size(values))
    return isfinite(values)

  monkeypatch.setattr(np, 'isfinite', spy)
  x = changed(FLOATS, (5, 2, 1), np.nan)
  for given in (x, x.astype(float)):
    seen.clear()
    refused('1 values .*first in sample 5', x_train=given, x_test=FLOATS[:2])
    assert max(seen) <= 12
    assert sum(seen) == x.size
  several = changed(x, (2, 0, 1), np.nan)
  refused('2 values .*first in sample 2', x_train=several, x_test=FLOATS[:2])
  dataset = make(x_train=FLOATS * 1.0, x_test=FLOATS[:2])
  np.testing.assert_array_equal(dataset.x_train, FLOATS)
  seen.clear()
  mean = dataset_lib.Scaling(np.float32([1]), np.float32([2]))
  scaled = dataset.unchecked(scaling=mean).with_training_samples([3, 1])
  assert not seen
  assert scaled.scaling is mean
  np.testing.assert_array_equal(scaled.x_train, FLOATS[[3, 1]])
  assert scaled.fingerprint() != dataset.fingerprint()
  monkeypatch.setattr(arrays, '_CHUNK_VALUES', 3)
  refused('only the values 0 and 1', y_train=changed(ONE_HOT, 4, 0))


@pytest.mark.parametrize(
    ('changes', 'error', 'message'),
    [
        (dict(dataset='digits'), TypeError, r'dataset must be .*is a str'),
        (dict(train_indices=[[0]]), TypeError, 'train_indices must map the id'),
        (
            dict(train_indices={'a': [0, 6]}),
            ValueError,
            "train_indices: the client 'a' has positions from 0 to 6, but the"
            ' dataset has 6 samples',
        ),
        (
            dict(test_indices={'a': [-1]}),
            ValueError,
            "test_indices: the client 'a' has positions from -1 to -1",
        ),
        (
            dict(train_indices={'a': [0.0, 1.0]}),
            TypeError,
            "train_indices: .* client 'a' must be .* integers.* float64",
        ),
        (
            dict(train_indices={'a': np.ones(6, bool)}),
            TypeError,
            'must be a list of integers, but have the dtype bool',
        ),
        (
            dict(train_indices={'a': [[0, 1]]}),
            TypeError,
            r'and the shape \(1, 2\)',
        ),
        (
            dict(train_indices={'a': []}),
            ValueError,
            "the client 'a' has no samples",
        ),
        (
            dict(test_indices={}),
            ValueError,
            "the same clients, but only one of them has 'a'",
        ),
    ],
)
def test_positions_of_clients(changes, error, message):
  right = dict(
      dataset=make(), train_indices={'a': [0, 5]}, test_indices={'a': []}
  )
  data = federated.FederatedData(**right)
  assert data.train_indices['a'].dtype == data.test_indices['a'].dtype
  assert data.label_distribution().tolist() == [[1, 0, 1]]
  with pytest.raises(error, match=message):
    federated.FederatedData(**{**right, **changes})
