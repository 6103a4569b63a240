"""Datasets of TensorFlow Datasets, written by the tests in its own format."""

import json

import numpy as np
import pytest
import requests
import tensorflow as tf
import tensorflow_datasets as tfds

from tff_bn import data as tff_bn_data

RNG = np.random.default_rng(0)
GRAY = {
    split: [
        {
            'image': RNG.integers(0, 256, (6, 5, 1), dtype=np.uint8),
            'label': n % 3,
        }
        for n in range(size)
    ]
    for split, size in (('train', 7), ('test', 4))
}


def store(data_dir, name, splits, features=None, keys=('image', 'label')):
  """Writes a prepared dataset; `splits` are lists of examples."""

  class Stored(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      return tfds.core.DatasetInfo(
          builder=self,
          features=tfds.features.FeaturesDict(
              features
              or {
                  'image': tfds.features.Image(shape=(None, None, 1)),
                  'label': tfds.features.ClassLabel(num_classes=4),
              }
          ),
          supervised_keys=keys,
          # Examples stay in their order.
          disable_shuffling=True,
      )

    def _split_generators(self, dl_manager):
      return {
          split: iter(enumerate(examples)) for split, examples in splits.items()
      }

    def _generate_examples(self):
      raise NotImplementedError

  Stored.name = name
  Stored(data_dir=data_dir).download_and_prepare()


def load(tmp_path, name='tfds:tiny', **arguments):
  return tff_bn_data.load_dataset(name, data_dir=str(tmp_path), **arguments)


def check_refused(tmp_path, message, name='tfds:tiny'):
  with pytest.raises(ValueError, match=message) as error:
    load(tmp_path, name)
  assert str(error.value).startswith(f'dataset={name}')
  assert '\n' not in str(error.value)


def test_a_host_that_cannot_be_reached_is_an_error_at_once(
    tmp_path, monkeypatch, capsys
):
  asked = []

  def head(url, timeout):
    asked.append(url)
    raise requests.ConnectionError('no route')

  monkeypatch.setattr(requests, 'head', head)
  check_refused(
      tmp_path,
      rf'not prepared in {tmp_path}/mnist.*\(storage.googleapis.com cannot be',
      'tfds:mnist',
  )
  assert len(asked) == 1 and asked[0].endswith('.gz')
  captured = capsys.readouterr()
  assert not captured.out
  assert captured.err.startswith(f'Downloading tfds:mnist to {tmp_path}/mnist')


def test_grayscale_images(tmp_path):
  store(tmp_path, 'tiny', GRAY)
  dataset = load(tmp_path)
  assert dataset.name == 'tfds:tiny'
  assert dataset.num_classes == 4
  for x, y, split in (
      (dataset.x_train, dataset.y_train, 'train'),
      (dataset.x_test, dataset.y_test, 'test'),
  ):
    assert x.dtype == np.uint8
    np.testing.assert_array_equal(x, [e['image'] for e in GRAY[split]])
    np.testing.assert_array_equal(y, [e['label'] for e in GRAY[split]])


def test_names_of_classes(tmp_path):
  store(tmp_path, 'tiny', GRAY)
  # They are only the numbers 0 to 3.
  assert load(tmp_path).class_names == ()
  names = ['dress', 'bag', 'coat']
  features = {
      'image': tfds.features.Image(shape=(None, None, 1)),
      'label': tfds.features.ClassLabel(names=names),
  }
  store(tmp_path, 'named', GRAY, features)
  dataset = load(tmp_path, 'tfds:named')
  assert dataset.class_names == tuple(names)
  np.testing.assert_array_equal(
      dataset.y_train, [example['label'] for example in GRAY['train']]
  )


def test_validation_takes_the_place_of_test_where_it_is_missing(tmp_path):
  splits = {'train': GRAY['train'], 'validation': GRAY['test'][:2]}
  store(tmp_path, 'without', splits)
  store(tmp_path, 'with', {**splits, 'test': GRAY['test']})
  assert len(load(tmp_path, 'tfds:without').y_test) == 2
  assert len(load(tmp_path, 'tfds:with').y_test) == 4


def test_no_test_data(tmp_path):
  store(tmp_path, 'tiny', {'train': GRAY['train'], 'dev': GRAY['test']})
  check_refused(tmp_path, 'splits .*dev.*; it needs train, and test or valid')


def test_images_of_different_sizes(tmp_path):
  other = {'image': np.full((3, 9, 1), 77, np.uint8), 'label': 0}
  store(tmp_path, 'tiny', {**GRAY, 'train': GRAY['train'] + [other]})
  check_refused(tmp_path, '6x5 and 3x9 pixels; pass image_size=HEIGHTxWIDTH')
  dataset = load(tmp_path, image_size=(6, 5))
  assert dataset.x_train.shape == (8, 6, 5, 1)
  assert dataset.x_train.dtype == np.uint8
  assert (dataset.x_train[-1] == 77).all()
  np.testing.assert_array_equal(dataset.x_train[0], GRAY['train'][0]['image'])


def test_no_images_with_labels(tmp_path):
  features = {
      'image': tfds.features.Tensor(shape=(2,), dtype=tf.float32),
      'label': tfds.features.ClassLabel(num_classes=4),
  }
  examples = [{'image': np.zeros(2, np.float32), 'label': 0}]
  splits = {'train': examples, 'test': examples}
  store(tmp_path, 'vectors', splits, features)
  check_refused(tmp_path, 'not a dataset of images', 'tfds:vectors')
  store(tmp_path, 'unsupervised', GRAY, keys=None)
  check_refused(tmp_path, 'not a dataset of images', 'tfds:unsupervised')


def test_classes_of_others_are_not_imported(tmp_path, monkeypatch):
  store(tmp_path, 'tiny', GRAY)
  path = tmp_path / 'tiny/1.0.0/features.json'
  content = path.read_text()
  (tmp_path / 'evil_features.py').write_text('1 / 0\n')
  monkeypatch.syspath_prepend(tmp_path)
  label = json.loads(content)['featuresDict']['features']['label']
  for key in ('type', 'pythonClassName', 'python_class_name'):
    path.write_text(
        content.replace(
            f'"pythonClassName": "{label["pythonClassName"]}"',
            f'"{key}": "evil_features.Label"',
        )
    )
    for name in ('tiny', 'tiny/1.0.0', 'tiny:1.0.0', 'Tiny', 'tiny:*.*.*'):
      with pytest.raises(ValueError, match=f'{path} names the class evil_fea'):
        load(tmp_path, f'tfds:{name}')
  path.write_text('{')
  with pytest.raises(ValueError, match=f'{path} is damaged'):
    load(tmp_path)
  with pytest.raises(ValueError, match='has a dataset'):
    load(tmp_path, 'tfds:tin')  # Another one.


def test_unknown_name(tmp_path):
  check_refused(
      tmp_path,
      r"has a dataset 'fashion_mnst'.*Did you mean fashion_mnist\?",
      'tfds:fashion_mnst',
  )


def test_unknown_configuration(tmp_path):
  check_refused(tmp_path, 'nowhere', 'tfds:domainnet/nowhere')


class NeedsNetwork(tfds.core.GeneratorBasedBuilder):
  """A dataset that can't be downloaded."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    return tfds.core.DatasetInfo(builder=self)

  def _split_generators(self, dl_manager):
    raise ConnectionError('the network is unreachable\nand so on')

  def _generate_examples(self):
    raise NotImplementedError


def test_not_prepared_and_offline(tmp_path):
  check_refused(
      tmp_path,
      rf'not prepared in {tmp_path}.*could not be downloaded \(the network is'
      r' unreachable\).*tfds build needs_network.*`data_dir`',
      'tfds:needs_network',
  )
