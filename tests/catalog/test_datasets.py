"""Tests of the names of datasets and of their options."""

import pytest

from tff_bn.catalog import datasets


@pytest.mark.parametrize(
    'name, expected',
    [
        ('generated:4x5x3:7', ((4, 5, 3), 7, 200, 100)),
        ('generated:12:2', ((12,), 2, 200, 100)),
        ('generated:12:2:30', ((12,), 2, 30, 100)),
        ('generated:12:2:30:9', ((12,), 2, 30, 9)),
        # At least one example of each class.
        ('generated:12:1000', ((12,), 1000, 1000, 1000)),
    ],
)
def test_generated(name, expected):
  assert datasets.parse_generated(name) == expected


@pytest.mark.parametrize(
    'name, message',
    [
        ('generated:', 'must be generated:SHAPE:CLASSES'),
        ('generated:4x5:2', 'must be generated:SHAPE:CLASSES'),
        ('generated:4x5x3', 'must be generated:SHAPE:CLASSES'),
        ('generated:4:2:a', 'must be generated:SHAPE:CLASSES'),
        ('generated:4:2:8:8:8', 'must be generated:SHAPE:CLASSES'),
        ('generated:0:2', 'sizes of at least 1'),
        ('generated:4x0x3:2', 'sizes of at least 1'),
        ('generated:4:1', 'at least 2 classes'),
        ('generated:4:2:8:0', 'sizes of at least 1'),
        ('generated:4:5:4', '4 training examples of 5 classes'),
    ],
)
def test_wrong_generated(name, message):
  with pytest.raises(ValueError, match=message):
    datasets.parse_generated(name)


@pytest.mark.parametrize(
    'name, expected',
    [
        (
            'domains:a=tfds:mnist,b=npz:/x/y.npz',
            {'a': 'tfds:mnist', 'b': 'npz:/x/y.npz'},
        ),
        (
            'domains:tfds:svhn_cropped,npz:/x/y.npz,/x/z.npz,folder:/data/art/,'
            'digits,generated:4:2',
            {
                'svhn_cropped': 'tfds:svhn_cropped',
                'y': 'npz:/x/y.npz',
                'z': '/x/z.npz',
                'art': 'folder:/data/art/',
                'digits': 'digits',
                'generated:4:2': 'generated:4:2',
            },
        ),
        # A name has no slash.
        (
            'domains:/a=b/c.npz,two=digits',
            {'c': '/a=b/c.npz', 'two': 'digits'},
        ),
    ],
)
def test_domains(name, expected):
  assert datasets.parse_domains(name) == expected
  assert list(datasets.parse_domains(name)) == list(expected)


@pytest.mark.parametrize(
    'name, message',
    [
        ('domains:', 'has no dataset for the domain'),
        ('domains:a=,b=digits', "no dataset for the domain 'a'"),
        ('domains:digits', 'a single domain; .* digits without'),
        ('domains:digits,digits', "two domains 'digits'; name them"),
        ('domains:a=digits,a=emnist', "two domains 'a'"),
        (
            'domains:a=digits,b=domains:c=digits',
            "a list of domains as the domain 'b'",
        ),
    ],
)
def test_wrong_domains(name, message):
  with pytest.raises(ValueError, match=message):
    datasets.parse_domains(name)


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('domains:paris=folder:/a/b', ('paris', 'folder:/a/b')),
        ('domains:npz:/a/oslo.npz', ('oslo', 'npz:/a/oslo.npz')),
        ('domains:a=digits,b=emnist', None),
        ('folder:/a/b', None),
        ('digits_domains', None),
    ],
)
def test_single_domain(name, expected):
  assert datasets.single_domain(name) == expected


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('digits', 'digits'),
        ('tfds:cifar10', 'cifar10'),
        ('folder:/data/x y/paris/', 'paris'),
        ('folder:paris', 'paris'),
        ('npz:/data/mine.npz', 'mine'),
        ('/data/mine.npz', 'mine'),
        ('folder:/', 'folder:/'),
        ('generated:8x8x1:10', 'generated:8x8x1:10'),
        ('domains:a=folder:/x/y,npz:/z/b.npz', 'domains a, b'),
        ('domains:a=folder:/x/y', 'domains a'),
        (
            'domains:' + ','.join(f'{c}=folder:/x' for c in 'abcdefgh'),
            'domains a, b, c, d, …, h',
        ),
    ],
)
def test_short_name(name, expected):
  assert datasets.short_name(name) == expected


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('digits', True),
        ('generated:4:2', True),
        ('domains:a=digits,b=generated:4:2', True),
        ('domains:a=digits,b=x.npz', False),
        ('emnist', False),
        ('emnist_synthetic', True),
        ('tfds:mnist', False),
        ('folder:x', False),
        ('npz:x', False),
        ('x.npz', False),
        ('my_module:load', False),
    ],
)
def test_quick_datasets(name, expected):
  assert datasets.is_quick(name) == expected


def test_map_sources():
  assert datasets.map_sources('digits', str.upper) == 'DIGITS'
  assert datasets.map_sources('domains:x=a,b', str.upper) == 'domains:x=A,b=B'


@pytest.mark.parametrize(
    ('name', 'is_code'),
    [
        ('tfds:kaggle:mnist', True),
        ('tfds:huggingface:mnist/a:1.0.0', True),
        ('domains:a=digits,b=tfds:space:x', True),
        ('tfds:mnist', False),
        ('tfds:mnist:3.0.1', False),
        ('tfds:domainnet/real:*.*.*', False),
        ('domains:a=digits,b=tfds:mnist', False),
        ('digits', False),
        ('folder:a:b', False),
        ('npz:tfds:a:b.npz', False),
        ('my_module:load', True),
        ('domains:a=digits,b=my_module:load', True),
        ('my:module.npz', False),
    ],
)
def test_datasets_with_code_of_others(name, is_code):
  assert datasets.DATASET.values.names_code(name) == is_code


def test_image_size():
  assert datasets.parse_image_size('32x48') == (32, 48)


@pytest.mark.parametrize(
    'text', ['', '32', '0x32', '32x-1', '32x0', '8x8x3', 'axb', '+8x8', '8_0x8']
)
def test_wrong_image_size(text):
  with pytest.raises(ValueError, match='HEIGHTxWIDTH'):
    datasets.parse_image_size(text)


@pytest.mark.parametrize('text', ['10001x1', '1x10001'])
def test_too_large_image_size(text):
  assert datasets.parse_image_size('10000x10000') == (10000, 10000)
  with pytest.raises(ValueError, match='at most 10000 pixels'):
    datasets.parse_image_size(text)
