"""Datasets from folders of images."""

import io
import os
import socket
import struct
import zlib

import numpy as np
from PIL import Image
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.common import memory
from tff_bn.data import image_headers

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


def test_files_of_16_bits_are_read_with_8(tmp_path):
  values = RNG.integers(0, 2**16, (4, 4), dtype=np.uint16)
  write(tmp_path, {f'{f}/x': values for f in ('train/a', 'train/b', 'test/a')})
  np.testing.assert_array_equal(load(tmp_path).x_test[0, ..., 0], values // 256)


def test_sizes_that_differ_need_image_size(tmp_path, images):
  uniform = np.full((9, 3, 3), 50, np.uint8)
  write(tmp_path, {**images, 'train/dog/f': uniform})
  check_refused(
      tmp_path,
      r'different sizes.*6x5 .*cat/a.png. and 9x3 .*dog/f.png. pixels;'
      ' pass image_size=HEIGHTxWIDTH',
  )
  dataset = load(tmp_path, image_size=(6, 5))
  assert dataset.input_shape == (6, 5, 3)
  loaded = as_set(dataset.x_train, dataset.y_train)
  assert (images['train/cat/a'].tobytes(), 0) in loaded
  assert (np.full((6, 5, 3), 50, np.uint8).tobytes(), 1) in loaded


def test_sizes_of_training_and_test_images_that_differ(tmp_path):
  write(tmp_path, {'train/a/x': image(4, 4), 'test/a/x': image(5, 4)})
  write(tmp_path, {'train/b/x': image(4, 4)})
  check_refused(tmp_path, r'\(4, 4, 3\), but x_test has \(5, 4, 3\)')


@pytest.mark.parametrize(
    ('paths', 'message'),
    [
        ([], r'splits \(none\)'),
        (
            ['train/cat/a', 'train/dog/b'],
            'has the splits train; it needs train, and test',
        ),
        (['train/cat/a', 'test/cat/b'], 'has a single class'),
        (
            ['train/cat/a', 'train/dog/b', 'test/bird/c'],
            'classes without training images: bird',
        ),
    ],
)
def test_missing_images(tmp_path, paths, message):
  write(tmp_path, {path: image() for path in paths})
  check_refused(tmp_path, message)
  check_refused(tmp_path / 'none', 'there is no folder')


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


@pytest.mark.parametrize('kind', ['text', 'damaged', 'GIF', 'TIFF', 'WEBP'])
@pytest.mark.parametrize('split', ['train', 'test'])
def test_file_that_is_no_image(tmp_path, images, split, kind):
  write(tmp_path, images)
  path = tmp_path / split / 'cat/x.png'
  Image.fromarray(image()).save(path, kind if kind.isupper() else 'PNG')
  if not kind.isupper():
    path.write_bytes(b'no image' if kind == 'text' else path.read_bytes()[:60])
  check_refused(tmp_path, f'{path} is no readable PNG or JPEG image')


@pytest.mark.parametrize('kind', ['pipe', 'socket', 'folder', 'broken link'])
@pytest.mark.parametrize('split', ['train', 'test'])
def test_only_regular_files_are_read(
    tmp_path, images, kind, split, monkeypatch
):
  write(tmp_path, images)
  monkeypatch.chdir(tmp_path / split / 'cat')  # A socket's path is short.
  if kind == 'pipe':
    os.mkfifo('x.png')
  elif kind == 'folder':
    os.mkdir('x.png')
  elif kind == 'broken link':
    os.symlink('none.png', 'x.png')
  else:
    with socket.socket(socket.AF_UNIX) as server:
      server.bind('x.png')
  check_refused(
      tmp_path, f'{tmp_path}/{split}/cat/x.png is no regular file; replace or'
  )


def test_other_files_are_not_opened(tmp_path, images):
  write(tmp_path, images)
  os.mkfifo(tmp_path / 'train/cat/pipe')
  os.mkfifo(tmp_path / 'train/pipe.png')
  (tmp_path / 'extra/cat').mkdir(parents=True)
  os.mkfifo(tmp_path / 'extra/cat/x.png')
  assert len(load(tmp_path).x_train) == 3


def test_links_to_files_and_folders(tmp_path, images):
  write(tmp_path / 'real', images)
  (tmp_path / 'linked').mkdir()
  for split in ('train', 'test'):
    (tmp_path / 'linked' / split).mkdir()
    for label in ('cat', 'dog'):
      (tmp_path / 'linked' / split / label).symlink_to(
          tmp_path / 'real' / split / label
      )
  (tmp_path / 'real/train/dog/link.png').symlink_to('c.png')
  dataset = load(tmp_path / 'linked')
  assert len(dataset.x_train) == 4
  real = load(tmp_path / 'real')
  assert as_set(dataset.x_train, dataset.y_train) == as_set(
      real.x_train, real.y_train
  )


@pytest.mark.parametrize('place', ['train/', 'train/cat/', ''])
@pytest.mark.parametrize('ending', ['', '.png', '.txt'])
def test_names_that_are_not_utf8(tmp_path, images, place, ending):
  write(tmp_path, images)
  path = os.fsencode(f'{tmp_path}/{place}') + b'\xff' + ending.encode()
  os.mkdir(path)
  check_refused(tmp_path, r"name of '.*\\udcff.*' is not UTF-8; rename it")


def test_path_that_is_not_utf8(tmp_path, images):
  path = os.path.join(tmp_path, os.fsdecode(b'\xe9'))
  os.mkdir(path)
  with pytest.raises(
      ValueError, match=r"dataset='folder:.*\\udce9' is not UTF"
  ):
    load(path)


def png(width, height, data=b''):
  """A PNG file whose header may not fit its data."""

  def chunk(name, content):
    code = struct.pack('>I', zlib.crc32(name + content))
    return struct.pack('>I', len(content)) + name + content + code

  size = struct.pack('>IIBBBBB', width, height, 8, 0, 0, 0, 0)
  return (
      b'\x89PNG\r\n\x1a\n'
      + chunk(b'IHDR', size)
      + chunk(b'IDAT', zlib.compress(data))
      + chunk(b'IEND', b'')
  )


def test_header_larger_than_memory(tmp_path, images, monkeypatch):
  write(tmp_path, images)
  monkeypatch.setattr(memory, 'total_bytes', lambda: 10**9)
  # A few kB that unpack to 300 MB, which become 900 MB as RGB.
  path = tmp_path / 'train/cat/large.png'
  path.write_bytes(png(20000, 20000))
  message = f'the 20000x20000 pixels of {path} take 1 GB of memory'
  check_refused(tmp_path, message)
  with pytest.raises(ValueError, match=message):
    load(tmp_path, image_size=(4, 4))
  path.write_bytes(png(20000, 10000))
  check_refused(tmp_path, 'images of different sizes')


def test_images_that_are_together_larger_than_memory(
    tmp_path, images, monkeypatch
):
  write(tmp_path, images)
  monkeypatch.setattr(memory, 'total_bytes', lambda: 3 * 90)
  load(tmp_path)
  monkeypatch.setattr(memory, 'total_bytes', lambda: 3 * 90 - 1)
  check_refused(tmp_path, 'the 3 images of train take 0 GB of memory')


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('PNG', {}),
        ('PNG', {'compress_level': 0}),
        ('BMP', {}),
        ('JPEG', {}),
        ('JPEG', {'progressive': True}),
        ('JPEG', {'comment': b'x' * 3000, 'exif': b'Exif\0\0' + b'x' * 900}),
    ],
)
@pytest.mark.parametrize('mode', ['RGB', 'L'])
def test_sizes_of_headers(kind, options, mode):
  file = io.BytesIO()
  Image.new(mode, (300, 70)).save(file, kind, **options)
  file.seek(0)
  assert image_headers.read_size(file) == (70, 300)
  content = file.getvalue()
  # Every beginning either has the size or is refused.
  for length in range(0, len(content), 1 + len(content) // 200):
    try:
      size = image_headers.read_size(io.BytesIO(content[:length]))
    except ValueError:
      continue
    assert size == (70, 300)


def test_jpeg_with_fill_bytes():
  file = io.BytesIO()
  Image.new('L', (7, 9)).save(file, 'JPEG')
  content = file.getvalue().replace(b'\xff\xc0', b'\xff\xff\xff\xc0', 1)
  assert image_headers.read_size(io.BytesIO(content)) == (9, 7)


def test_jpeg_whose_tables_come_first():
  file = io.BytesIO()
  Image.new('L', (7, 9)).save(file, 'JPEG')
  table = b'\xff\xc4\x00\x0b' + bytes(9)
  content = file.getvalue()[:2] + table + file.getvalue()[2:]
  assert image_headers.read_size(io.BytesIO(content)) == (9, 7)


def test_bmp_with_rows_from_the_top():
  file = io.BytesIO()
  Image.new('L', (7, 9)).save(file, 'BMP')
  content = bytearray(file.getvalue())
  content[22:26] = struct.pack('<i', -9)
  assert image_headers.read_size(io.BytesIO(content)) == (9, 7)


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


class TestClients:

  def test_each_client_has_a_folder(self, tmp_path):
    images = {
        'north/train/cat/a': image(),
        'north/train/dog/b': image(),
        'north/test/dog/c': image(),
        # It lacks a class and test images, and has a grey image.
        'a b/train/dog/d': RNG.integers(0, 256, (6, 5), dtype=np.uint8),
        'west/train/cat/e': image(),
        'west/train/owl/f': image(),
        'west/test/cat/g': image(),
    }
    write(tmp_path, images)
    (tmp_path / 'readme.txt').write_text('No image.')
    (tmp_path / 'north/train/dog/notes.txt').write_text('No image.')
    dataset = load(tmp_path)
    assert dataset.class_names == ('cat', 'dog', 'owl')
    assert not dataset.domain_names
    data = tff_bn_data.split_dataset(dataset, 'natural', None, seed=0)
    assert data.client_ids == ('a b', 'north', 'west')
    np.testing.assert_array_equal(
        data.label_distribution(), [[0, 1, 0], [1, 1, 0], [1, 0, 1]]
    )
    assert [len(data.test_indices[c]) for c in data.client_ids] == [0, 1, 1]
    (position,) = data.train_indices['a b']
    np.testing.assert_array_equal(
        dataset.x_train[position],
        np.repeat(images['a b/train/dog/d'][..., np.newaxis], 3, axis=-1),
    )

  def test_what_is_ignored(self, tmp_path, caplog):
    write(
        tmp_path,
        {f'a/{s}/{n}/i': image() for s in ('train', 'test') for n in 'xy'},
    )
    (tmp_path / 'a/train/x/.DS_Store').write_text('')
    (tmp_path / '.git').mkdir()
    load(tmp_path)
    assert not caplog.messages
    write(tmp_path, {'b/Train/x/i': image(), 'a/train/stray': image()})
    (tmp_path / 'a/test/y/scan.tif').write_text('')
    load(tmp_path)
    files, folders = caplog.messages
    assert f'2 files are ignored, such as {tmp_path}/a/train/stray.png' in files
    assert 'the folders b in ' in folders
    assert 'have no folder train' in folders

  def test_a_client_without_images(self, tmp_path):
    write(tmp_path, {'a/train/x/i': image()})
    (tmp_path / 'b/train/x').mkdir(parents=True)
    check_refused(tmp_path, "b/train has no images.*remove the folder 'b'")

  def test_a_client_that_no_flag_can_name(self, tmp_path):
    write(tmp_path, {'a\nb/train/x/i': image()})
    check_refused(tmp_path, r"the client 'a\\nb'; .* line breaks")

  def test_sizes_that_differ(self, tmp_path):
    write(
        tmp_path,
        {f'a/{s}/{n}/i': image(4, 4) for s in ('train', 'test') for n in 'xy'},
    )
    write(tmp_path, {'b/train/x/i': image(5, 4)})
    check_refused(tmp_path, 'clients .* shapes .a: 4x4x3, b: 5x4x3.*image_size')
    assert load(tmp_path, image_size=(4, 4)).input_shape == (4, 4, 3)

  def test_damaged_image(self, tmp_path):
    write(
        tmp_path,
        {f'a/{s}/{n}/i': image() for s in ('train', 'test') for n in 'xy'},
    )
    (tmp_path / 'a/train/x/text.png').write_text('No image.')
    check_refused(tmp_path, 'a/train/x/text.png is no readable PNG')

  def test_no_client_has_test_images(self, tmp_path):
    write(tmp_path, {f'a/train/{n}/i': image() for n in 'xy'})
    check_refused(tmp_path, 'x_test .* is empty')

  def test_a_class_that_only_test_data_has(self, tmp_path):
    write(tmp_path, {f'a/train/{n}/i': image() for n in 'xy'})
    write(tmp_path, {'b/train/x/i': image(), 'b/test/z/i': image()})
    check_refused(tmp_path, 'no client has training samples of the class z')
