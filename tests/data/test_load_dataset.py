"""Tests of loading by name, resizing and lazy imports."""

import subprocess
import sys

import numpy as np
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.catalog import datasets
from tff_bn.common import memory


@pytest.mark.slow
def test_names_need_no_tensorflow_and_digits_no_tff():
  code = """
import sys
import tff_bn.data
from tff_bn.catalog import datasets
assert 'digits' in datasets.DATASETS
assert 'tensorflow' not in sys.modules
tff_bn.data.load_dataset('digits')
tff_bn.data.split_dataset
assert 'tensorflow' in sys.modules
assert 'tensorflow_federated' not in sys.modules
assert 'tensorflow_datasets' not in sys.modules
"""
  subprocess.run([sys.executable, '-c', code], check=True)


def test_package_has_all_names_in_all():
  for name in tff_bn_data.__all__:
    assert getattr(tff_bn_data, name) is not None
  with pytest.raises(AttributeError, match='nothing'):
    tff_bn_data.nothing  # noqa: B018


@pytest.mark.parametrize(
    'name,known',
    [
        ('tfds:mnist', True),
        ('npz:a', True),
        ('a/b.npz', True),
        ('folder:a', True),
        ('digits', False),
        ('mnist', False),
    ],
)
def test_kinds(name, known):
  assert (datasets.find_kind(name) is not None) is known


def test_offline_datasets_are_always_the_same_and_names_tell_of_domains():
  offline = [n for n in datasets.DATASETS if not datasets.is_downloaded(n)]
  assert len(offline) > 3
  for name in (*offline, 'generated:4:2', 'domains:digits,a=digits'):
    dataset = tff_bn_data.load_dataset(name)
    assert datasets.has_domains(name) == bool(dataset.domain_names), name
    np.random.seed(3)
    again = tff_bn_data.load_dataset(name)
    assert again.fingerprint() == dataset.fingerprint(), name
    for of in ('domain_train', 'domain_test'):
      np.testing.assert_array_equal(getattr(again, of), getattr(dataset, of))


def test_unknown_dataset():
  with pytest.raises(
      ValueError,
      match=(
          r"dataset='digitts' must be one of digits, .*tfds:NAME.*Did you mean"
          r' digits\?'
      ),
  ):
    tff_bn_data.load_dataset('digitts')


class TestImageSize:

  def test_upscaled_constant_images_stay_constant(self, tmp_path):
    x = np.repeat(np.array([0, 100, 255], np.uint8), 16).reshape(3, 4, 4)
    path = tmp_path / 'constant.npz'
    np.savez(path, x_train=x, y_train=[0, 1, 2], x_test=x, y_test=[0, 1, 2])
    dataset = tff_bn_data.load_dataset(str(path), image_size=(6, 5))
    assert dataset.x_train.shape == dataset.x_test.shape == (3, 6, 5, 1)
    assert dataset.x_train.dtype == np.uint8
    for image, value in zip(dataset.x_train, (0, 100, 255)):
      assert (image == value).all()

  def test_halving_is_near_the_mean_of_four_pixels(self):
    plain = tff_bn_data.load_dataset('digits')
    small = tff_bn_data.load_dataset('digits', image_size=(4, 4))
    assert small.x_train.shape == (1437, 4, 4, 1)
    assert small.x_train.dtype == np.float32
    means = plain.x_train.reshape(-1, 4, 2, 4, 2, 1).mean(axis=(2, 4))
    # The antialiasing filter is wider than four pixels.
    correlation = np.corrcoef(means.ravel(), small.x_train.ravel())[0, 1]
    assert correlation > 0.95
    np.testing.assert_allclose(small.x_train.mean(), means.mean(), rtol=0.05)

  def test_same_size_changes_nothing(self):
    plain = tff_bn_data.load_dataset('digits')
    same = tff_bn_data.load_dataset('digits', image_size=(8, 8))
    np.testing.assert_array_equal(plain.x_train, same.x_train)

  def test_refuses_vectors(self, tmp_path):
    path = tmp_path / 'vectors.npz'
    x = np.zeros((2, 3))
    np.savez(path, x_train=x, y_train=[0, 1], x_test=x, y_test=[0, 1])
    with pytest.raises(
        ValueError, match='image_size=4x4 .* vectors of 3 features'
    ):
      tff_bn_data.load_dataset(str(path), image_size=(4, 4))

  def test_refuses_images_larger_than_memory(self, monkeypatch):
    monkeypatch.setattr(memory, 'total_bytes', lambda: 8 * 10**9)
    # 1437 images of 2000x2000 pixels of 4 bytes.
    message = (
        '^image_size=2000x2000 is too large for dataset=digits: its 1437 images'
        ' take 22 GB of memory, but this machine has 8 GB.$'
    )
    with pytest.raises(ValueError, match=message):
      tff_bn_data.load_dataset('digits', image_size=(2000, 2000))

  def test_refuses_size_zero(self):
    with pytest.raises(ValueError, match='image_size=0x4'):
      tff_bn_data.load_dataset('digits', image_size=(0, 4))
