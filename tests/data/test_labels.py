"""Tests of the labels of each task: forms, errors, counts and splits."""

import dataclasses
import types

import numpy as np
import parts
import pytest
import tensorflow as tf

from tff_bn import data as tff_bn_data
from tff_bn.catalog import datasets
from tff_bn.catalog import tasks
from tff_bn.data import batches as batches_lib
from tff_bn.data import classes
from tff_bn.data import label_counts
from tff_bn.data import label_forms
from tff_bn.data import labels
from tff_bn.data import splits
from tff_bn.training import round_data

RNG = np.random.default_rng(0)
NUM_TRAIN, NUM_TEST = 24, 8
IMAGES = RNG.random((NUM_TRAIN + NUM_TEST, 4, 5, 1), np.float32)
WHOLE = np.arange(NUM_TRAIN + NUM_TEST)
SEVERAL = RNG.integers(0, 2, (NUM_TRAIN + NUM_TEST, 3))
SEVERAL[:2] = [[1, 1, 0], [0, 0, 1]]
NUMBERS = RNG.normal(size=(NUM_TRAIN + NUM_TEST, 2))
MASKS = RNG.integers(0, 3, (NUM_TRAIN + NUM_TEST, 4, 5))
# Labels of each task, and the form in which they are stored.
LABELS = {
    'classification': (WHOLE % 4, np.int32(WHOLE % 4)),
    'binary': (WHOLE % 2 == 0, np.int32(WHOLE % 2 == 0)),
    'multilabel': (SEVERAL, SEVERAL.astype(np.int32)),
    'regression': (NUMBERS, NUMBERS.astype(np.float32)),
    'segmentation': (MASKS, MASKS.astype(np.int32)),
}
# The numbers of classes and of outputs.
SIZES = {
    'classification': (4, 4),
    'binary': (2, 1),
    'multilabel': (3, 3),
    'regression': (None, 2),
    'segmentation': (3, 3),
}


def make(y, x=IMAGES, **attributes):
  return tff_bn_data.Dataset(
      'mine',
      x[:NUM_TRAIN],
      y[:NUM_TRAIN],
      x[NUM_TRAIN:],
      y[NUM_TRAIN:],
      **attributes,
  )


def of_task(task, **attributes):
  return make(LABELS[task][0], **attributes)


def refused(message, y, **attributes):
  with pytest.raises(ValueError, match=message) as caught:
    make(y, **attributes)
  text = str(caught.value)
  assert text.startswith('dataset=mine: ')
  assert '\n' not in text


@pytest.mark.parametrize('task', LABELS)
def test_task_is_found_and_labels_are_stored(task):
  given, stored = LABELS[task]
  dataset = make(given)
  assert dataset.task == task
  assert (dataset.num_classes, dataset.num_outputs) == SIZES[task]
  for y, expected in (
      (dataset.y_train, stored[:NUM_TRAIN]),
      (dataset.y_test, stored[NUM_TRAIN:]),
  ):
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)
  assert dataset.has_classes == (task in ('classification', 'binary'))
  again = make(given, task=task)
  assert again.fingerprint() == dataset.fingerprint()
  # Arrays in the stored form are not copied.
  copied = dataclasses.replace(dataset, name='other')
  assert copied.y_train is dataset.y_train


@pytest.mark.parametrize('task', LABELS)
@pytest.mark.parametrize('is_transformed', [False, True])
def test_batches_have_the_type_of_the_task(task, is_transformed):
  dataset = of_task(task)
  data = tff_bn_data.split_dataset(dataset, 'iid', 2, seed=0)
  data = dataclasses.replace(
      data, augmentation='flip_crop' if is_transformed else 'none'
  )
  assert data.task == task
  assert data.num_outputs == dataset.num_outputs
  expected_spec = {
      'classification': tf.TensorSpec((None,), tf.int32),
      'binary': tf.TensorSpec((None,), tf.int32),
      'multilabel': tf.TensorSpec((None, 3), tf.int32),
      'regression': tf.TensorSpec((None, 2), tf.float32),
      'segmentation': tf.TensorSpec((None, 4, 5), tf.int32),
  }[task]
  assert data.element_spec[1] == expected_spec
  assert (
      labels.label_spec(task, dataset.input_shape, dataset.num_outputs)
      == expected_spec
  )
  client = data.client_ids[0]
  draw = dict(seed=0, round_num=1, batch_size=5, local_epochs=1)
  batches = data.client_dataset([client], **draw)
  assert batches.element_spec == data.element_spec
  variant = round_data.RoundDataset(data, [client], **draw).build()
  sent = tf.data.experimental.from_variant(variant, data.element_spec)
  order = np.concatenate(data.client_batches([client], **draw).passes)
  for built in (batches, sent):
    y = np.concatenate([y for _, y in built.as_numpy_iterator()])
    if task != 'segmentation' or not is_transformed:
      np.testing.assert_array_equal(y, dataset.y_train[order])
  test = np.concatenate(
      [y for _, y in data.test_dataset(3).as_numpy_iterator()]
  )
  np.testing.assert_array_equal(test, dataset.y_test)


@pytest.mark.parametrize('name', ['flip_crop', 'flip_rotate'])
def test_masks_move_with_their_images(name):
  """Each pixel of an image is its class, so both stay equal."""
  masks = np.random.default_rng(2).integers(0, 9, (20, 12, 12), np.int32)
  images = masks[..., np.newaxis].astype(np.float32)
  dataset = tff_bn_data.Dataset('mine', images, masks, images, masks)
  data = dataclasses.replace(
      tff_bn_data.split_dataset(dataset, 'iid', 1, 0), augmentation=name
  )
  ((x, y),) = data.client_dataset(
      data.client_ids, seed=0, round_num=0, batch_size=20, local_epochs=1
  ).as_numpy_iterator()
  np.testing.assert_array_equal(x[..., 0], y)
  assert (y == 0).mean() > (masks == 0).mean()  # The border is background.


def test_large_masks_are_gathered(monkeypatch):
  monkeypatch.setattr(batches_lib, '_MAX_COPIED_VALUES', 0)
  ((_, y),) = (
      batches_lib.Batches([np.array([3, 1, 3])], 3)
      .dataset(IMAGES, np.int32(MASKS))
      .as_numpy_iterator()
  )
  np.testing.assert_array_equal(y, MASKS[[3, 1, 3]])


@pytest.mark.parametrize(
    ('y', 'attributes', 'task'),
    [
        # A number of classes makes one label a class, whatever its dtype is.
        (WHOLE % 2 == 0, dict(num_classes=2), 'classification'),
        (WHOLE % 3 * 1.0, dict(num_classes=3), 'classification'),
        (WHOLE % 3 * 1.0, dict(), 'regression'),
        (WHOLE % 3 * 1.0, dict(task='classification'), 'classification'),
        (WHOLE % 2, dict(), 'classification'),
        (WHOLE % 2, dict(task='binary'), 'binary'),
        ((WHOLE % 2)[:, None] * 1.0, dict(task='binary'), 'binary'),
        (WHOLE, dict(task='regression'), 'regression'),
        (SEVERAL.astype(bool), dict(), 'multilabel'),
        (SEVERAL * 1.0, dict(task='multilabel'), 'multilabel'),
        (SEVERAL * 1.0, dict(task='regression'), 'regression'),
        (SEVERAL, dict(num_classes=3), 'multilabel'),
        (np.eye(4)[WHOLE % 4], dict(task='multilabel'), 'multilabel'),
        (np.eye(4)[WHOLE % 4], dict(task='regression'), 'regression'),
        (MASKS[..., None], dict(), 'segmentation'),
        (MASKS * 1.0, dict(task='segmentation'), 'segmentation'),
        (MASKS > 0, dict(), 'segmentation'),
        (MASKS, dict(num_classes=7), 'segmentation'),
    ],
)
def test_chosen_tasks(y, attributes, task):
  dataset = make(y, **attributes)
  assert dataset.task == task
  stored = dataset.y_train
  np.testing.assert_allclose(
      stored, np.reshape(y[:NUM_TRAIN], stored.shape), rtol=1e-6
  )
  if 'num_classes' in attributes:
    assert dataset.num_classes == attributes['num_classes']


def changed(array, place, value):
  array = array.copy()
  array[place] = value
  return array


@pytest.mark.parametrize(
    ('y', 'attributes', 'message'),
    [
        (
            changed(NUMBERS, (3, 1), np.nan),
            {},
            'y_train has 1 values that are NaN.* in sample 3;',
        ),
        (changed(NUMBERS, 30, np.inf), {}, 'y_test has 2 values that are NaN'),
        (NUMBERS, dict(num_classes=2), 'num_classes=2, but task=regression'),
        (
            changed(SEVERAL, (2, 1), 5),
            {},
            r'y_train .*int64, the shape \(24, 3\) and the value 5; with'
            ' task=multilabel, labels must be 0 or 1',
        ),
        (SEVERAL, dict(num_classes=4), r'num_classes=4, .* is 3 labels'),
        (
            WHOLE % 3,
            dict(task='binary'),
            r'the value 2; with task=binary, labels must be 0 or 1',
        ),
        (
            WHOLE % 2,
            dict(task='binary', num_classes=3),
            'num_classes=3, but task=binary has 2 classes',
        ),
        (0 * WHOLE, dict(task='binary'), 'y_train has the label 0 only'),
        (
            NUMBERS,
            dict(task='classification'),
            r'y_train has the dtype float64 and the shape \(24, 2\); with'
            r' task=classification .*must be \[samples\].*Such labels fit'
            ' task=multilabel or task=regression',
        ),
        (
            NUMBERS[:, 0],
            dict(task='classification'),
            'has the label -1.3752; classes must be whole',
        ),
        (
            MASKS[:, :3],
            {},
            r'y_train .*shape \(24, 3, 5\); with task=segmentation and samples'
            r' of shape \(4, 5, 1\), it must be \[samples, height, width\]',
        ),
        (
            MASKS,
            dict(x=IMAGES.reshape(32, 20)),
            r'task=segmentation and samples of shape \(20,\)',
        ),
        (MASKS, dict(num_classes=2), r'outside the 2 classes 0\.\.1: 2\.'),
        (changed(MASKS, (0, 1, 2), -1), {}, 'the negative label -1'),
        (changed(MASKS, 30, 3), {}, 'y_test has labels that do not occur'),
        (
            MASKS * 1.0,
            {},
            r'y_train have .*no task has. Masks .*astype\(np.int32\)',
        ),
        (SEVERAL, dict(task='segmentation'), 'Such labels fit task=multilabel'),
        (
            np.zeros((32, 2, 2, 2, 2), int),
            {},
            r'the labels y_train have .*\(2, 2, 2, 2\).*no task has',
        ),
    ],
)
def test_wrong_labels(y, attributes, message):
  refused(message, y, **attributes)


def test_wrong_tasks_and_columns():
  with pytest.raises(ValueError, match="task='sorting' must be one of classif"):
    make(NUMBERS, task='sorting')
  with pytest.raises(ValueError, match='y_train has 2 columns but y_test has'):
    tff_bn_data.Dataset(
        'mine', IMAGES[:5], NUMBERS[:5], IMAGES[:5], NUMBERS[:5, :1]
    )
  with pytest.raises(ValueError, match='has 1 names, but there are 3 classes'):
    of_task('multilabel', class_names=['a'])
  with pytest.raises(ValueError, match='has 2 names, but there are 0 classes'):
    of_task('regression', class_names=['a', 'b'])


def test_constant_labels_are_warned_of(monkeypatch):
  found = []
  monkeypatch.setattr(
      label_forms.logging,
      'warning',
      lambda text, *args: found.append(text % args),
  )
  of_task('multilabel')
  assert not found
  make(changed(SEVERAL, (slice(None), 1), 1))
  assert found == [
      'dataset=mine: all samples of y_train have the same value for the labels'
      ' 1, so that a model cannot learn them.'
  ]


def test_fingerprints_tell_tasks_apart():
  y = WHOLE % 2
  as_classes, as_binary = make(y), make(y, task='binary')
  np.testing.assert_array_equal(as_classes.y_train, as_binary.y_train)
  assert as_classes.fingerprint() != as_binary.fingerprint()


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ('classification', 'regression'),
        ('binary', 'classification'),
        ('binary', 'regression'),
        ('multilabel', 'regression'),
    ],
)
def test_with_task(old, new):
  dataset = of_task(old)
  names = tuple('abcd'[: dataset.num_classes])
  changed_task = dataclasses.replace(dataset, class_names=names).with_task(new)
  assert changed_task.task == new
  assert changed_task.class_names == (() if new == 'regression' else names)
  np.testing.assert_array_equal(
      changed_task.y_train.reshape(-1), dataset.y_train.reshape(-1)
  )
  assert dataset.with_task(old) is dataset
  with pytest.raises(ValueError, match='Such labels fit task='):
    dataset.with_task('segmentation')


def test_label_distributions():
  def counts(task, **attributes):
    dataset = of_task(task, **attributes)
    data = of_two_clients(dataset)
    return data, data.label_distribution().tolist()

  def of_two_clients(dataset):
    indices = {'a': [0, 1, 5], 'b': [2]}
    return tff_bn_data.FederatedData(dataset, indices, {'a': [], 'b': []})

  data, found = counts('binary')
  assert found == [[2, 1], [0, 1]]
  assert data.label_names == ('0', '1')
  data, found = counts('multilabel', class_names=['x', 'y', 'z'])
  assert found == [SEVERAL[[0, 1, 5]].sum(0).tolist(), SEVERAL[2].tolist()]
  assert data.label_names == ('x', 'y', 'z')
  assert data.class_counts().tolist() == np.sum(found, axis=0).tolist()
  data, found = counts('segmentation')
  assert found == [
      [int((MASKS[indices] == label).sum()) for label in range(3)]
      for indices in ([0, 1, 5], [2])
  ]
  data, found = counts('regression')
  first = NUMBERS[:NUM_TRAIN, 0].astype(np.float32)
  edges = np.linspace(first.min(), first.max(), 11)
  bins = np.clip(np.searchsorted(edges, first, side='right') - 1, 0, 9)
  assert found == [
      np.bincount(bins[indices], minlength=10).tolist()
      for indices in ([0, 1, 5], [2])
  ]
  assert len(data.label_names) == 10
  assert data.label_names[0].startswith(f'{first.min():.3g} to ')
  with pytest.raises(ValueError, match='no classes, because its task is regr'):
    data.class_counts()


def test_names_of_close_targets_differ():
  dataset = make(1000 + WHOLE / 1000)
  assert len(set(label_counts.column_names(dataset))) == 10
  # All bins have a width, even if all targets are the same.
  constant = make(np.full(len(WHOLE), 2.0))
  counts = label_counts.count(constant, [np.arange(NUM_TRAIN)])
  assert counts.sum() == NUM_TRAIN


_WITHOUT_CLASSES = ('multilabel', 'regression', 'segmentation')


@pytest.mark.parametrize('task', _WITHOUT_CLASSES)
@pytest.mark.parametrize('split', ['classes', 'dirichlet', 'gamma'])
def test_splits_by_class_need_classes(task, split):
  with pytest.raises(
      ValueError,
      match=(
          f'split={split} needs one class for each sample, but dataset=mine has'
          f' the task {task}; use split=iid or split=unbalanced.$'
      ),
  ):
    tff_bn_data.split_dataset(of_task(task), split, 2, 0)


@pytest.mark.parametrize('task', _WITHOUT_CLASSES)
@pytest.mark.parametrize('split', ['iid', 'unbalanced', 'domains', 'natural'])
def test_other_splits(task, split):
  groups = dict(
      **{f'{g}_train': WHOLE[:NUM_TRAIN] % 2 for g in ('domain', 'client')},
      **{f'{g}_test': WHOLE[:NUM_TEST] % 2 for g in ('domain', 'client')},
      domain_names=('a', 'b'),
      client_names=('a', 'b'),
  )
  dataset = of_task(task, **groups)
  data = tff_bn_data.split_dataset(
      dataset, split, 4 if split == 'domains' else 2, 0
  )
  for indices, number in (
      (data.train_indices, NUM_TRAIN),
      (data.test_indices, NUM_TEST),
  ):
    parts.assert_cover(list(indices.values()), number)
    if split == 'domains':
      for client, positions in indices.items():
        assert len(positions) == number / 4
        assert {n % 2 for n in positions} == {'ab'.index(client[0])}
  # Test samples are in proportion to training samples.
  for client in data.client_ids:
    share = len(data.train_indices[client]) / NUM_TRAIN
    assert abs(len(data.test_indices[client]) - share * NUM_TEST) < 1
  with pytest.raises(ValueError, match='iid or split=domains or .*natural.$'):
    tff_bn_data.split_dataset(dataset, 'gamma', 2, 0)


def test_users_splits_get_the_task(tmp_path, monkeypatch):
  (tmp_path / 'my_halves.py').write_text(
      'import numpy as np\n'
      'def halves(task):\n'
      "  assert task.task == 'regression' and task.num_classes is None\n"
      '  order = np.argsort(task.labels[:, 0])\n'
      '  return np.array_split(order, task.num_clients)\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  data = tff_bn_data.split_dataset(
      of_task('regression'), 'my_halves:halves', 2, 0
  )
  low, high = (
      data.dataset.y_train[part, 0] for part in data.train_indices.values()
  )
  assert low.max() <= high.min()


@pytest.mark.parametrize('task', ['binary', 'multilabel', 'segmentation'])
def test_flipped_labels(task):
  data = tff_bn_data.split_dataset(of_task(task), 'iid', 2, 0)
  flipped = tff_bn_data.with_flipped_labels(data, 1).dataset.y_train
  first, second = data.train_indices.values()
  y = data.dataset.y_train
  highest = 2 if task == 'segmentation' else 1
  np.testing.assert_array_equal(flipped[first], highest - y[first])
  np.testing.assert_array_equal(flipped[second], y[second])


def test_targets_cannot_be_flipped():
  data = tff_bn_data.split_dataset(of_task('regression'), 'iid', 2, 0)
  with pytest.raises(ValueError, match='task regression, .*needs classes'):
    tff_bn_data.with_flipped_labels(data, 1)


@pytest.mark.parametrize('task', LABELS)
def test_training_samples_and_clients_keep_the_task(task):
  dataset = tff_bn_data.draw_training_samples(of_task(task), 0, 0.5)
  assert dataset.task == task
  assert len(dataset.y_train) == NUM_TRAIN // 2
  assert dataset.y_train.shape[1:] == LABELS[task][1].shape[1:]


def save(path, y, x=IMAGES):
  np.savez(
      path,
      x_train=x[:NUM_TRAIN],
      y_train=y[:NUM_TRAIN],
      x_test=x[NUM_TRAIN:],
      y_test=y[NUM_TRAIN:],
  )
  return f'npz:{path}'


@pytest.mark.parametrize('task', LABELS)
def test_npz(tmp_path, task):
  given, stored = LABELS[task]
  name = save(tmp_path / 'mine.npz', given)
  for chosen in (None, task):
    dataset = tff_bn_data.load_dataset(name, task=chosen)
    assert dataset.task == task
    assert (dataset.num_classes, dataset.num_outputs) == SIZES[task]
    np.testing.assert_array_equal(dataset.y_train, stored[:NUM_TRAIN])
  domains = f'domains:a={name},b={name}'
  joined = tff_bn_data.load_dataset(domains)
  assert joined.task == task
  assert (joined.num_classes, joined.num_outputs) == SIZES[task]
  np.testing.assert_array_equal(
      joined.y_train, np.concatenate(2 * [stored[:NUM_TRAIN]])
  )


def test_npz_with_a_chosen_task(tmp_path):
  path = tmp_path / 'mine.npz'
  # As classes, these numbers would be an error.
  name = save(path, WHOLE * 1000)
  dataset = tff_bn_data.load_dataset(name, task='regression')
  np.testing.assert_array_equal(dataset.y_train[:, 0], 1000 * WHOLE[:NUM_TRAIN])
  with pytest.raises(ValueError, match='task=segmentation and samples of'):
    tff_bn_data.load_dataset(name, task='segmentation')
  with pytest.raises(ValueError, match="task='none' must be one of"):
    tff_bn_data.load_dataset(name, task='none')
  hot = save(path, np.eye(2)[WHOLE % 2])
  with pytest.raises(ValueError, match='one-hot vectors of classes'):
    tff_bn_data.load_dataset(hot)
  assert tff_bn_data.load_dataset(hot, task='multilabel').num_classes == 2


def test_built_in_data_with_a_chosen_task():
  digits = tff_bn_data.load_dataset('digits', task='regression')
  assert digits.num_outputs == 1
  assert digits.num_classes is None
  with pytest.raises(ValueError, match='labels must be 0 or 1'):
    tff_bn_data.load_dataset('digits', task='binary')
  binary = tff_bn_data.load_dataset('fedbn_synthetic', task='binary')
  assert binary.num_outputs == 1


@pytest.mark.parametrize('task', ['binary', 'segmentation'])
def test_data_for_a_trained_model_may_lack_classes(tmp_path, task):
  stored = LABELS[task][0]
  name = save(tmp_path / 'mine.npz', 0 * stored)
  with pytest.raises(ValueError, match='y_train has the label'):
    tff_bn_data.load_dataset(name, task=task)
  names = [str(n) for n in range(SIZES[task][0])]
  dataset = tff_bn_data.load_dataset(name, task=task, class_names=names)
  assert dataset.num_classes == len(names)


def test_labels_must_be_those_of_a_trained_model():
  names = ['x', 'y', 'z']
  dataset = of_task('multilabel', class_names=names)
  assert classes.matched(dataset, names) is dataset
  with pytest.raises(ValueError, match='x, y, z, but the model has x, z, y;'):
    classes.matched(dataset, ['x', 'z', 'y'])
  with pytest.raises(ValueError, match='regression, which has no classes'):
    classes.matched(of_task('regression'), ['0'])


def test_domains_need_the_same_labels(tmp_path):
  names = {
      task: save(tmp_path / f'{task}.npz', given)
      for task, (given, _) in LABELS.items()
  }
  with pytest.raises(ValueError, match='different tasks .a: binary, b: multil'):
    tff_bn_data.load_dataset(
        f'domains:a={names["binary"]},b={names["multilabel"]}'
    )
  other = save(tmp_path / 'other.npz', NUMBERS[:, :1])
  with pytest.raises(ValueError, match='numbers of columns .*a: 2, b: 1'):
    tff_bn_data.load_dataset(f'domains:a={names["regression"]},b={other}')
  fewer = save(tmp_path / 'fewer.npz', np.minimum(MASKS, 1))
  joined = tff_bn_data.load_dataset(
      f'domains:a={fewer},b={names["segmentation"]}'
  )
  assert joined.num_classes == 3
  assert classes.missing_by_domain(joined) == {'a': ['2']}
  assert not classes.missing_by_domain(
      tff_bn_data.load_dataset(f'domains:a={other},b={other}')
  )


def test_masks_are_resized_to_the_nearest_pixel(tmp_path):
  name = save(tmp_path / 'mine.npz', MASKS)
  dataset = tff_bn_data.load_dataset(name, image_size=(8, 10))
  assert dataset.input_shape == (8, 10, 1)
  np.testing.assert_array_equal(
      dataset.y_train, MASKS[:NUM_TRAIN].repeat(2, axis=1).repeat(2, axis=2)
  )
  assert dataset.y_test.dtype == np.int32


@pytest.mark.parametrize(
    ('dataset', 'task', 'split'),
    [
        ('digits', None, 'classes'),
        ('breast_cancer', None, 'classes'),
        ('diabetes', None, 'iid'),
        ('discs', None, 'domains'),
        ('npz:a', None, 'classes'),
        ('npz:a', 'segmentation', 'iid'),
        ('npz:a', 'binary', 'classes'),
    ],
)
def test_default_split(dataset, task, split):
  options = types.SimpleNamespace(split=None, dataset=dataset, task=task)
  assert splits.chosen_split(options) == split


def test_built_in_datasets_have_the_task_of_their_entries():
  for name, source in datasets.DATASETS.items():
    if not datasets.is_downloaded(name):
      task = tff_bn_data.load_dataset(name).task
      assert task == (source.task or tasks.CLASSIFICATION), name


def test_every_task_has_a_form():
  assert [*label_forms.FORMS] == [*tasks.TASKS]
