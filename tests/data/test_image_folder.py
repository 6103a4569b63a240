"""Datasets from folders of images."""

import numpy as np
from PIL import Image
import pytest

from tff_bn import data as tff_bn_data

RNG = np.random.default_rng(0)


def write(folder, images):
  """Writes images, given by their path without the ending."""
  for path, image in images.items():
    path = folder / f'{path}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def image(height=6, width=5):
  return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def images():
  return {
      'train/cat/a': image(),
      'train/cat/b': image(),
      'train/dog/c': image(),
      'test/dog/d': image(),
      'test/cat/e': image(),
  }


def load(folder, **arguments):
  return tff_bn_data.load_dataset(f'folder:{folder}', **arguments)


def check_refused(folder, message):
  with pytest.raises(ValueError, match=message) as error:
    load(folder)
  assert str(error.value).startswith(f'dataset=folder:{folder}')
  assert '\n' not in str(error.value)


def as_set(x, y):
  return {(image.tobytes(), int(label)) for image, label in zip(x, y)}


def test_labels_follow_the_sorted_names(tmp_path):
  names = ['b', 'B', '2', '10', 'a']
  images = {name: image() for name in names}
  write(
      tmp_path,
      {f'{s}/{n}/i': images[n] for s in ('train', 'test') for n in names},
  )
  dataset = load(tmp_path)
  for label, name in enumerate(['10', '2', 'B', 'a', 'b']):
    (found,) = dataset.x_train[dataset.y_train == label]
    np.testing.assert_array_equal(found, images[name])


def test_classes_are_the_folders_in_order(tmp_path, images):
  write(tmp_path, images)
  dataset = load(tmp_path)
  assert dataset.num_classes == 2
  assert dataset.input_shape == (6, 5, 3)
  assert dataset.x_train.dtype == np.uint8
  for x, y, split in (
      (dataset.x_train, dataset.y_train, 'train/'),
      (dataset.x_test, dataset.y_test, 'test/'),
  ):
    expected = {
        (array.tobytes(), int('dog' in path))
        for path, array in images.items()
        if path.startswith(split)
    }
    assert as_set(x, y) == expected
    assert len(x) == len(expected)


def test_grayscale_files_have_three_equal_channels(tmp_path):
  gray = RNG.integers(0, 256, (4, 4), dtype=np.uint8)
  write(tmp_path, {f'{f}/x': gray for f in ('train/a', 'train/b', 'test/a')})
  dataset = load(tmp_path)
  assert dataset.x_train.shape == (2, 4, 4, 3)
  for channel in range(3):
    np.testing.assert_array_equal(dataset.x_train[0, :, :, channel], gray)


def test_sizes_that_differ_need_image_size(tmp_path, images):
  uniform = np.full((9, 3, 3), 50, np.uint8)
  write(tmp_path, {**images, 'train/dog/f': uniform})
  check_refused(tmp_path, 'different sizes.*9x3.*image_size=HEIGHTxWIDTH')
  dataset = load(tmp_path, image_size=(6, 5))
  assert dataset.input_shape == (6, 5, 3)
  loaded = as_set(dataset.x_train, dataset.y_train)
  assert (images['train/cat/a'].tobytes(), 0) in loaded
  assert (np.full((6, 5, 3), 50, np.uint8).tobytes(), 1) in loaded


def test_sizes_of_training_and_test_images_that_differ(tmp_path):
  write(tmp_path, {'train/a/x': image(4, 4), 'test/a/x': image(5, 4)})
  write(tmp_path, {'train/b/x': image(4, 4)})
  check_refused(tmp_path, r'\(4, 4, 3\), but x_test has \(5, 4, 3\)')


def test_no_such_folder(tmp_path):
  check_refused(tmp_path / 'none', 'there is no folder')


def test_empty_folder(tmp_path):
  check_refused(tmp_path, r'splits \(none\)')


def test_no_test_images(tmp_path, images):
  write(tmp_path, {p: i for p, i in images.items() if p.startswith('train')})
  check_refused(tmp_path, 'has the splits train; it needs train, and test')


def test_class_without_images(tmp_path, images):
  write(tmp_path, {**images, 'test/bird/g': image()})
  check_refused(tmp_path, 'classes without training images: bird')


def test_empty_class_folder(tmp_path, images):
  write(tmp_path, images)
  (tmp_path / 'train/.ipynb_checkpoints').mkdir()
  (tmp_path / 'test/bird').mkdir()
  (tmp_path / 'test/bird/readme.txt').write_text('no image')
  check_refused(
      tmp_path,
      'classes without training images: .ipynb_checkpoints, bird. Each folder'
      f' in {tmp_path}/test and {tmp_path}/train is a class; add PNG or JPEG'
      ' files to train, or remove the folders.',
  )


def test_single_class(tmp_path):
  write(tmp_path, {'train/cat/a': image(), 'test/cat/b': image()})
  check_refused(tmp_path, 'has a single class')


def test_file_that_is_no_image(tmp_path, images):
  write(tmp_path, images)
  (tmp_path / 'train/cat/broken.png').write_bytes(b'no image')
  check_refused(
      tmp_path, f'{tmp_path}/train/cat/broken.png is no readable PNG or JPEG'
  )


def test_damaged_image(tmp_path, images):
  write(tmp_path, images)
  path = tmp_path / 'test/dog/d.png'
  path.write_bytes(path.read_bytes()[:60])
  check_refused(tmp_path, f'{path} is no readable PNG or JPEG')
