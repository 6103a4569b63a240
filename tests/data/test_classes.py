"""Tests of the classes of several datasets, which are matched by name."""

import dataclasses
import hashlib
import re

from absl import logging
import numpy as np
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import domains


def part(y_train, names=(), y_test=None, num_classes=None):
  """Returns a part whose samples have the number of their position."""
  y_test = y_train if y_test is None else y_test
  x_train, x_test = (
      np.arange(len(y), dtype=np.float32)[:, np.newaxis]
      for y in (y_train, y_test)
  )
  return dataset_lib.create_dataset(
      'part',
      x_train,
      np.array(y_train),
      x_test,
      np.array(y_test),
      num_classes or len(names) or None,
      is_part=True,
      class_names=names,
  )


def join(**parts):
  name = 'domains:' + ','.join(f'{domain}={domain}' for domain in parts)
  return domains.join_domains(name, parts)


def named_labels(dataset, labels):
  names = dataset.class_names or classes.numbers(dataset.num_classes)
  return [names[label] for label in labels]


def test_labels_are_the_union_of_the_names():
  rome = part([0, 1, 2, 1], ['benign', 'malignant', 'normal'])
  wien = part([0, 1, 2], ['benign', 'cyst', 'normal'], y_test=[1])
  dataset = join(rome=rome, wien=wien)
  assert dataset.class_names == ('benign', 'cyst', 'malignant', 'normal')
  assert dataset.num_classes == 4
  assert named_labels(dataset, dataset.y_train) == (
      ['benign', 'malignant', 'normal', 'malignant']
      + ['benign', 'cyst', 'normal']
  )
  assert named_labels(dataset, dataset.y_test) == (
      ['benign', 'malignant', 'normal', 'malignant', 'cyst']
  )
  assert classes.missing_by_domain(dataset) == {
      'rome': ['cyst'],
      'wien': ['malignant'],
  }
  # The order of the domains does not matter.
  assert join(wien=wien, rome=rome).class_names == dataset.class_names


def test_a_common_order_is_kept():
  names = ['shirt', 'bag', 'coat']
  dataset = join(a=part([0, 1, 2], names), b=part([2, 1], names))
  assert dataset.class_names == tuple(names)
  np.testing.assert_array_equal(dataset.y_train, [0, 1, 2, 2, 1])
  other = join(a=part([0, 1, 2], names), b=part([0, 1], ['bag', 'coat']))
  assert other.class_names == ('bag', 'coat', 'shirt')
  np.testing.assert_array_equal(other.y_train, [2, 0, 1, 0, 1])


def test_a_domain_may_have_a_single_class():
  dataset = join(
      a=part([0, 0], ['x']), b=part([0, 0], ['y']), c=part([0, 1], ['x', 'y'])
  )
  np.testing.assert_array_equal(dataset.y_train, [0, 0, 1, 1, 0, 1])


@pytest.mark.parametrize('names', [['x'], []])
def test_all_domains_together_need_two_classes(names):
  with pytest.raises(ValueError, match='at least two'):
    join(a=part([0, 0], names), b=part([0, 0], names))


def test_each_tested_class_is_trained_in_some_domain():
  a = part([0, 0], ['cat', 'dog'], y_test=[0, 1])
  dataset = join(a=a, b=part([0, 1], ['cat', 'dog']))
  np.testing.assert_array_equal(dataset.y_test, [0, 1, 0, 1])
  with pytest.raises(
      ValueError, match='domains:a=a,b=b: .* training samples of the class dog'
  ):
    join(a=a, b=part([0, 1], ['cat', 'eel']))
  with pytest.raises(ValueError, match='labels that do not occur.*: 2'):
    join(a=part([0, 1], y_test=[2]), b=part([0, 1]))
  with pytest.raises(ValueError, match='training samples of the class 2'):
    join(a=part([0, 1], y_test=[2], num_classes=4), b=part([0, 1]))


def test_numbers_mean_the_same_in_all_domains(monkeypatch):
  warnings = []
  monkeypatch.setattr(
      logging, 'warning', lambda text, *args: warnings.append(text % args)
  )
  dataset = join(a=part([0, 1, 4]), b=part([2, 2]), c=part([0, 1, 2, 4]))
  assert dataset.num_classes == 5 and dataset.class_names == ()
  np.testing.assert_array_equal(dataset.y_train, [0, 1, 4, 2, 2, 0, 1, 2, 4])
  # Only what no domain has is suspicious.
  (warning,) = warnings
  assert 'no sample of y_train has one of the labels 3.' in warning
  assert classes.missing_by_domain(dataset) == {
      'a': ['2', '3'],
      'b': ['0', '1', '3', '4'],
      'c': ['3'],
  }
  # A declared number of classes counts, too.
  assert join(a=part([0, 1], num_classes=7), b=part([0])).num_classes == 7


def test_a_sparse_number_is_an_error():
  with pytest.raises(ValueError, match='makes 1000000001 classes'):
    join(a=part([0, 10**9]), b=part([0, 1]))


@pytest.mark.parametrize(
    'names, num_numbered, expected',
    [
        # Positions that are the numbers.
        (['0', '1', '2'], 3, ['0', '1', '2']),
        (['0', '1', '2'], 2, ['0', '1', '2']),
        # A part of the numbers.
        (['0', '2'], 3, ['0', '2']),
        (['10', '2', '9'], 11, ['10', '2', '9']),
    ],
)
def test_names_that_are_numbers(names, num_numbered, expected):
  labels = range(num_numbered)
  dataset = join(a=part(range(len(names)), names), b=part(labels))
  assert dataset.class_names == ()
  assert named_labels(dataset, dataset.y_train) == [
      *expected,
      *map(str, labels),
  ]
  assert dataset.num_classes == max(num_numbered, 1 + max(map(int, names)))


@pytest.mark.parametrize(
    'names, num_numbered',
    [
        (['cat', 'dog'], 2),
        (['1', '2', '3'], 3),  # It could count from 1.
        (['0', '2'], 2),  # 1 could be the second one.
        (['00', '01'], 2),
        (['0', 'one'], 2),
        (['-1', '0'], 2),
    ],
)
def test_names_that_no_number_has(names, num_numbered):
  with pytest.raises(ValueError, match='cannot be matched') as error:
    join(a=part(range(num_numbered)), b=part(range(len(names)), names))
  assert str(error.value) == (
      'dataset=domains:a=a,b=b: the classes of the domain b have names'
      f' ({", ".join(names)}), but the classes of a have only the numbers 0 to'
      f' {num_numbered - 1}, so they cannot be matched. Use datasets whose'
      ' classes have names for all domains, such as folder:PATH.'
  )


def test_labels_of_a_trained_model():
  names = ['benign', 'cyst', 'normal']
  dataset = classes.matched(
      part([0, 1], ['normal', 'benign'], y_test=[1, 1, 0]), names
  )
  assert dataset.class_names == tuple(names) and dataset.num_classes == 3
  np.testing.assert_array_equal(dataset.y_train, [2, 0])
  np.testing.assert_array_equal(dataset.y_test, [0, 0, 2])
  assert dataset.y_test.dtype == np.int32
  # Without samples, a class need not be known.
  classes.matched(part([0, 0], ['cyst', 'other']), names)
  numbered = part([0, 1, 0])
  assert classes.matched(numbered, ['0', '1', '2']) is numbered
  by_number = classes.matched(part([0, 1], ['2', '0']), ['0', '1', '2'])
  np.testing.assert_array_equal(by_number.y_train, [2, 0])
  # A folder of digits without the 1, and a file with numbers.
  by_name = classes.matched(part([0, 2, 3]), ['0', '2', '3'])
  np.testing.assert_array_equal(by_name.y_train, [0, 1, 2])


@pytest.mark.parametrize(
    'names, dataset, message',
    [
        (
            ['benign', 'cyst'],
            part([0, 1], ['benign', 'cysts']),
            'has classes that the model does not know: cysts. Its classes are'
            ' benign, cyst. Did you mean cyst?',
        ),
        (
            ['benign', 'cyst'],
            part([0, 0], ['benign', 'other'], y_test=[1]),
            'does not know: other.',
        ),
        (
            ['benign', 'cyst'],
            part([0, 1]),
            'cannot be matched with the model: the classes of the model have'
            ' names (benign, cyst), but its classes have only numbers. Use a'
            ' dataset whose classes have names.',
        ),
        (
            ['0', '1'],
            part([0, 1], ['cat', 'dog']),
            'cannot be matched with the model: its classes have names (cat,'
            ' dog), but the classes of the model have only numbers. Use a'
            ' dataset whose classes have numbers.',
        ),
        (['0', '1'], part([0, 2]), 'does not know: 2. Its classes are 0, 1.'),
        (['0', '2'], part([0, 1]), 'does not know: 1. Its classes are 0, 2.'),
    ],
)
def test_classes_that_a_model_does_not_know(names, dataset, message):
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    classes.matched(dataset, names)
  assert str(error.value).startswith('dataset=part ')


@pytest.mark.parametrize(
    'names, error, message',
    [
        (('a', 'b'), ValueError, 'class_names has 2 names, but .* 3 classes'),
        (('a', 'b', 'a'), ValueError, "class_names has the name 'a' twice"),
        (('a', 'b', 3), TypeError, 'class_names has 3, but must have strings'),
        ('abc', TypeError, "class_names must be a list .* the string 'abc'"),
    ],
)
def test_names_that_fit_no_dataset(names, error, message):
  with pytest.raises(error, match=f'dataset=part: {message}'):
    part([0, 1, 2], names, num_classes=3)


def test_a_list_of_names_becomes_a_tuple():
  dataset = dataclasses.replace(part([0, 1]), class_names=['a', 'b'])
  assert dataset.class_names == ('a', 'b')


@pytest.mark.parametrize('names', [['0', '0'], '01', [0, 1], []])
def test_wrong_names_of_a_trained_model(names):
  with pytest.raises((TypeError, ValueError), match='dataset=digits: class_na'):
    tff_bn_data.load_dataset('digits', class_names=names)


def test_names_belong_to_the_identity_of_data():
  numbered = part([0, 1])
  named = part([0, 1], ['a', 'b'])
  other = part([0, 1], ['a', 'c'])
  assert len({d.fingerprint() for d in (numbered, named, other)}) == 3


def test_runs_on_digits_of_earlier_versions_can_be_continued():
  digits = tff_bn_data.load_dataset('digits')
  digest = hashlib.sha256(b'10 classes;')
  for array in (digits.x_train, digits.y_train, digits.x_test, digits.y_test):
    digest.update(f'{array.dtype.str}{array.shape}'.encode() + array.tobytes())
  assert digits.fingerprint() == digest.hexdigest()


def test_relabeling_does_not_check_samples_again(monkeypatch):
  dataset = part([0, 1, 1], names=['a', 'b'])
  monkeypatch.setattr(dataset_lib.Dataset, '__post_init__', None)
  found = classes.relabeled(dataset, ['c', 'b', 'a'])
  assert found.x_train is dataset.x_train
  assert found.class_names == ('c', 'b', 'a') and found.num_classes == 3
  np.testing.assert_array_equal(found.y_train, [2, 1, 1])
