"""Fashion-MNIST from each of its places."""

import idx_folder
import numpy as np
import pytest

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
