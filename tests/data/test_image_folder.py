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


def test_classes_are_the_folders_in_order(tmp_path, images):
  write(tmp_path, images)
  dataset = load(tmp_path)
  assert dataset.num_classes == 2
  assert dataset.class_names == ('cat', 'dog')
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


# The gray value of the images of each class, in all domains.
_GRAY = {'benign': 10, 'cyst': 20, 'malignant': 30, 'normal': 40}


def write_classes(folder, **classes):
  """Writes an image of each class into each split."""
  for split, labels in classes.items():
    for label in labels:
      uniform = np.full((4, 4), _GRAY[label], np.uint8)
      write(folder, {f'{split}/{label}/x': uniform})


def names_of(dataset, x, y):
  """Returns the names of the labels, which must be right for the images."""
  names = [dataset.class_names[label] for label in y]
  assert [_GRAY[name] for name in names] == x[:, 0, 0, 0].tolist()
  return names


@pytest.fixture
def clinics(tmp_path):
  """Domains that lack classes, or have empty folders for them."""
  write_classes(
      tmp_path / 'rome',
      train=['benign', 'malignant', 'normal'],
      test=['benign', 'normal'],
  )
  write_classes(
      tmp_path / 'wien',
      train=['benign', 'cyst', 'normal'],
      test=['cyst', 'malignant'],
  )
  (tmp_path / 'wien/train/malignant').mkdir()
  (tmp_path / 'wien/train/.ipynb_checkpoints').mkdir()
  write_classes(tmp_path / 'oslo', train=['cyst'], test=['cyst'])
  return tmp_path


def test_classes_of_domains_are_matched_by_name(clinics):
  dataset = tff_bn_data.load_dataset(
      'domains:'
      + ','.join(f'folder:{clinics}/{d}' for d in ('rome', 'wien'))
      + f',folder:{clinics}/oslo'
  )
  assert dataset.class_names == tuple(_GRAY)
  assert dataset.domain_names == ('rome', 'wien', 'oslo')
  found = names_of(dataset, dataset.x_train, dataset.y_train)
  assert sorted(found[:3]) == ['benign', 'malignant', 'normal']
  assert sorted(found[3:6]) == ['benign', 'cyst', 'normal']
  assert found[6:] == ['cyst']
  found = names_of(dataset, dataset.x_test, dataset.y_test)
  assert sorted(found[:2]) == ['benign', 'normal']
  assert sorted(found[2:4]) == ['cyst', 'malignant']
  data = tff_bn_data.split_dataset(dataset, 'domains', None, 0)
  np.testing.assert_array_equal(
      data.label_distribution(), [[1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 0, 0]]
  )


def test_each_class_needs_training_images_in_some_domain(clinics):
  name = f'domains:folder:{clinics}/wien,folder:{clinics}/oslo'
  with pytest.raises(ValueError, match='training samples of the class malig'):
    tff_bn_data.load_dataset(name)
  # A single folder still needs images of all classes.
  check_refused(
      clinics / 'wien', 'without training images: .ipynb_checkpoints, malignant'
  )


def test_folders_for_a_trained_model(clinics):
  """A model has its own order of classes, and more of them."""
  names = ['normal', 'other', 'malignant', 'cyst', 'benign']
  for folder, domain in (('wien', False), ('oslo', False), ('wien', True)):
    name = f'folder:{clinics}/{folder}'
    if domain:
      name = f'domains:{name},folder:{clinics}/oslo'
    dataset = tff_bn_data.load_dataset(name, class_names=names)
    assert dataset.class_names == tuple(names)
    assert names_of(dataset, dataset.x_train, dataset.y_train)
    assert names_of(dataset, dataset.x_test, dataset.y_test)
  with pytest.raises(ValueError, match='does not know: cyst. Its classes are'):
    tff_bn_data.load_dataset(
        f'folder:{clinics}/wien', class_names=names[:3] + names[4:]
    )
