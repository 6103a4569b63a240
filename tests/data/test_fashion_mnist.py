"""Fashion-MNIST from each of its places."""

import idx_folder
import numpy as np
import pytest
from scipy import ndimage

from tff_bn import data as tff_bn_data
from tff_bn.data import fashion_mnist
from tff_bn.data import tfds_source

_CLASSES = list(range(10))
# Their sizes differ, to tell the places apart.
_PLACES = {
    'data_dir': idx_folder.random_arrays(_CLASSES, [1], (2, 2)),
    'debian': idx_folder.random_arrays(_CLASSES, [1], (3, 3)),
    'tfds': idx_folder.random_arrays(_CLASSES, [1], (4, 4)),
}


@pytest.fixture
def places(monkeypatch, tmp_path):
  """Returns a function that puts the data into some of the places."""

  def put(*names):
    for name in names:
      (tmp_path / name).mkdir()
      idx_folder.save(_PLACES[name], tmp_path / name, compressed=True)

    def load_tfds(name, data_dir):
      if 'tfds' not in names:
        raise ValueError(f'dataset={name} is not prepared in {data_dir}.')
      return tff_bn_data.load_dataset(f'idx:{tmp_path}/tfds')

    monkeypatch.setattr(tfds_source, 'load_tfds', load_tfds)
    monkeypatch.setattr(
        fashion_mnist, '_DEBIAN_FOLDER', str(tmp_path / 'debian')
    )
    return str(tmp_path / 'data_dir')

  return put


@pytest.mark.parametrize(
    ('present', 'gives_data_dir', 'expected'),
    [
        (['data_dir', 'debian', 'tfds'], True, 'data_dir'),
        (['data_dir', 'debian', 'tfds'], False, 'debian'),
        (['debian', 'tfds'], True, 'debian'),
        (['tfds'], True, 'tfds'),
        (['tfds'], False, 'tfds'),
    ],
)
def test_the_first_place_that_has_it(places, present, gives_data_dir, expected):
  data_dir = places(*present)
  dataset = tff_bn_data.load_dataset(
      'fashion_mnist', data_dir=data_dir if gives_data_dir else None
  )
  np.testing.assert_array_equal(
      dataset.x_train[..., 0], _PLACES[expected]['x_train']
  )
  assert dataset.name == 'fashion_mnist'
  assert dataset.class_names[9] == 'Ankle boot'


@pytest.mark.parametrize('gives_data_dir', [False, True])
def test_no_place_has_it(places, gives_data_dir):
  data_dir = places()
  with pytest.raises(ValueError, match='^dataset=fashion_mnist') as error:
    tff_bn_data.load_dataset(
        'fashion_mnist', data_dir=data_dir if gives_data_dir else None
    )
  message = str(error.value)
  for place in ('data_dir with', 'apt-get install', 'TensorFlow Datasets'):
    assert place in message
  assert ('not given' in message) != gives_data_dir


def test_damaged_files_are_no_reason_to_look_elsewhere(places, tmp_path):
  data_dir = places('data_dir', 'debian', 'tfds')
  (tmp_path / 'data_dir' / 't10k-labels-idx1-ubyte.gz').unlink()
  with pytest.raises(ValueError, match='has no file t10k-labels'):
    tff_bn_data.load_dataset('fashion_mnist', data_dir=data_dir)


@pytest.fixture
def domains(places, tmp_path):
  """Returns a function that loads 600 pictures in domains."""
  data_dir = places('data_dir')
  arrays = idx_folder.random_arrays(60 * _CLASSES, 12 * _CLASSES, (28, 28))
  idx_folder.save(arrays, tmp_path / 'data_dir', compressed=True)

  def load(strength=None):
    dataset = tff_bn_data.load_dataset(
        'fashion_mnist_domains', data_dir=data_dir, domain_strength=strength
    )
    return arrays, dataset

  return load


def test_sizes_of_domains(domains):
  _, dataset = domains()
  assert dataset.name == 'fashion_mnist_domains'
  assert dataset.class_names[9] == 'Ankle boot'
  # Table 15 of the FedBN paper has 5600, 7943, 743, 39116 and 5600 images.
  sizes = np.bincount(dataset.domain_train)
  expected = 600 * np.array([5600, 7943, 743, 39116, 5600]) / 59002
  np.testing.assert_allclose(sizes, expected, atol=1)
  counts = [
      np.bincount(dataset.y_test[dataset.domain_test == d], minlength=10)
      for d in range(5)
  ]
  assert (np.ptp(counts, axis=0) <= 1).all()
  # Not in the order of the file.
  assert np.count_nonzero(np.diff(dataset.domain_train)) > 100


@pytest.mark.parametrize('part', ['train', 'test'])
def test_appearances(domains, part):
  arrays, dataset = domains()
  before = arrays[f'x_{part}'].astype(np.float64) / 255
  after = getattr(dataset, f'x_{part}')
  domain = getattr(dataset, f'domain_{part}')
  assert after.dtype == np.uint8
  assert after.shape == (*before.shape, 1)
  after = after[..., 0] / 255
  pairs = [(before[domain == d], after[domain == d]) for d in range(5)]
  rounding = 0.51 / 255
  for number, change in enumerate(
      [lambda x: x, lambda x: 1 - x, lambda x: 0.4 + 0.2 * x]
  ):
    plain, shown = pairs[number]
    np.testing.assert_allclose(shown, change(plain), atol=rounding)
  plain, shown = pairs[3]
  assert ((shown - plain) > -rounding).all()
  assert ((shown - plain) < 0.7 * (1 - plain) + rounding).all()
  np.testing.assert_allclose(
      (shown - plain).mean(), 0.35 * (1 - plain).mean(), rtol=0.05
  )
  plain, shown = pairs[4]
  # 28 pixels are 3.5 times the 8 of the digits.
  for image, changed in zip(plain, shown):
    blurred = ndimage.gaussian_filter(image, 3.5 * 0.7, mode='constant')
    np.testing.assert_allclose(
        changed[4:, 4:], blurred[:-4, :-4], atol=rounding
    )
    assert not changed[:4].any()
    assert not changed[:, :4].any()


def test_without_strength_the_pictures_are_plain(domains):
  arrays, dataset = domains(0.0)
  np.testing.assert_array_equal(dataset.x_train[..., 0], arrays['x_train'])
  np.testing.assert_array_equal(dataset.x_test[..., 0], arrays['x_test'])
