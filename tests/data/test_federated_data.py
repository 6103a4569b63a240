"""Tests of split datasets and the clients' batches."""

import dataclasses

import numpy as np
import parts as parts_lib
import pytest
import tensorflow as tf

from tff_bn import data as tff_bn_data
from tff_bn.common import seeding
from tff_bn.data import augmentation
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import splits


def split(dataset=None, split_name='iid', num_clients=3, seed=0, **arguments):
  return tff_bn_data.split_dataset(
      dataset or parts_lib.numbered(),
      split_name,
      num_clients,
      seed,
      **arguments,
  )


def positions(batches, scale=1):
  """The samples' positions in each batch of `parts.numbered`."""
  result = []
  for x, y in batches.as_numpy_iterator():
    x = np.round(x[:, 0] * scale).astype(int)
    np.testing.assert_array_equal(y, x % 4)
    result.append(x)
  return result


ARGUMENTS = dict(seed=3, round_num=7, batch_size=10)


class TestClientDataset:

  @pytest.mark.parametrize('dtype,scale', [(np.float32, 1), (np.uint8, 255)])
  # A client has 33 samples: fewer than one pass, and more.
  @pytest.mark.parametrize('local_steps', [1, 3, 12])
  def test_local_steps_are_full_batches_of_reshuffled_passes(
      self, dtype, scale, local_steps
  ):
    data = split(parts_lib.numbered(dtype=dtype))
    client = data.client_ids[0]
    own = data.train_indices[client]
    assert len(own) == 33
    batches = data.client_dataset(
        [client], **ARGUMENTS, local_steps=local_steps
    )
    assert batches.element_spec == data.element_spec
    got = positions(batches, scale)
    assert [len(batch) for batch in got] == [10] * local_steps
    order = np.concatenate(got)
    passes = [order[start : start + 33] for start in range(0, len(order), 33)]
    for one_pass in passes:
      assert len(set(one_pass)) == len(one_pass)
      assert set(one_pass) <= set(own)
      assert (np.diff(one_pass) < 0).any()
    for one_pass in passes[:-1]:
      assert set(one_pass) == set(own)
    if len(passes) > 1:
      assert (passes[0] != passes[1]).any()

  def test_local_steps_of_a_client_smaller_than_a_batch(self):
    data = split(parts_lib.numbered(num_train=9))
    client = data.client_ids[1]
    got = positions(data.client_dataset([client], **ARGUMENTS, local_steps=2))
    assert [len(batch) for batch in got] == [10, 10]
    counts = np.bincount(np.concatenate(got), minlength=9)
    # 3 samples fill 20 places: each 6 or 7 times.
    assert set(counts[data.train_indices[client]]) <= {6, 7}
    assert counts.sum() == 20

  @pytest.mark.parametrize('dtype,scale', [(np.float32, 1), (np.uint8, 255)])
  @pytest.mark.parametrize('local_epochs', [1, 3])
  def test_local_epochs_are_reshuffled_passes(self, dtype, scale, local_epochs):
    data = split(parts_lib.numbered(dtype=dtype))
    client = data.client_ids[2]
    batches = data.client_dataset(
        [client], **ARGUMENTS, local_epochs=local_epochs
    )
    assert batches.element_spec == data.element_spec
    got = positions(batches, scale)
    assert [len(batch) for batch in got] == [10, 10, 10, 2] * local_epochs
    passes = [
        np.concatenate(got[start : start + 4])
        for start in range(0, len(got), 4)
    ]
    for one_pass in passes:
      np.testing.assert_array_equal(
          np.sort(one_pass), data.train_indices[client]
      )
    orders = {tuple(one_pass) for one_pass in passes}
    assert len(orders) == local_epochs

  @pytest.mark.parametrize('amount', [{'local_steps': 5}, {'local_epochs': 2}])
  def test_order_depends_only_on_the_arguments(self, amount):
    def order(clients=(0,), split_seed=0, **changes):
      data = split(seed=split_seed)
      batches = data.client_dataset(
          [data.client_ids[n] for n in clients],
          **{**ARGUMENTS, **amount, **changes},
      )
      return np.concatenate(positions(batches)).tolist()

    first = order()
    np.random.seed(1)
    tf.random.set_seed(1)
    assert order() == first
    assert order(seed=4) != first
    assert order(round_num=8) != first
    # Two clients use different orders of their samples.
    data = split()
    ranks = [
        np.searchsorted(data.train_indices[f'client_{n}'], order((n,)))[:30]
        for n in (1, 2)
    ]
    assert ranks[0].tolist() != ranks[1].tolist()

  def test_several_clients_are_their_union(self):
    data = split()
    clients = data.client_ids[:2]
    union = np.concatenate([data.train_indices[c] for c in clients])
    got = positions(data.client_dataset(clients, **ARGUMENTS, local_epochs=1))
    np.testing.assert_array_equal(np.sort(np.concatenate(got)), np.sort(union))
    # Batches have samples of both clients.
    own = set(data.train_indices[clients[0]])
    assert 0 < len(own & set(got[0])) < 10

  def test_goes_through_tff_with_each_sample_once(self, native_runtime):
    import tensorflow_federated as tff

    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 80, 100), dtype=np.uint8)
    dataset = dataset_lib.create_dataset(
        'images', x, np.arange(60) % 2, x[:2], np.arange(2)
    )
    data = split(dataset, num_clients=2)
    clients = [
        data.client_dataset(
            [c], seed=0, round_num=1, batch_size=8, local_epochs=5
        )
        for c in data.client_ids
    ]
    batch_type = tff.SequenceType(
        (
            tff.TensorType(np.float32, [None, 80, 100, 1]),
            tff.TensorType(np.int32, [None]),
        )
    )

    @tff.tensorflow.computation(batch_type)
    def total(batches):
      return batches.reduce(0.0, lambda s, batch: s + tf.reduce_sum(batch[0]))

    @tff.federated_computation(tff.FederatedType(batch_type, tff.CLIENTS))
    def federated_total(batches):
      return tff.federated_sum(tff.federated_map(total, batches))

    np.testing.assert_allclose(
        federated_total(clients), 5 * x.sum(dtype=np.float64) / 255, rtol=1e-5
    )
    serialized, _ = tff.framework.serialize_value(clients[0], batch_type)
    # 30 images of 8,000 bytes; five passes of float32 would be 20 times more.
    assert serialized.ByteSize() < 1.5 * 30 * 8000

  @pytest.mark.parametrize(
      'arguments,message',
      [
          ({}, 'local_steps=None and local_epochs=None: give exactly'),
          ({'local_steps': 1, 'local_epochs': 1}, 'give exactly one'),
          ({'local_steps': 0}, 'local_steps=0'),
          ({'local_epochs': 0}, 'local_epochs=0'),
          ({'local_steps': 1, 'batch_size': 0}, 'batch_size=0'),
          ({'local_steps': 1, 'seed': -1}, 'seed=-1'),
          ({'local_steps': 1, 'client_ids': ['nobody']}, "no client 'nobody'"),
          ({'local_steps': 1, 'client_ids': []}, 'client_ids is empty'),
      ],
  )
  def test_invalid_arguments_are_errors(self, arguments, message):
    data = split()
    with pytest.raises(ValueError, match=message):
      data.client_dataset(
          **{'client_ids': data.client_ids[:1], **ARGUMENTS, **arguments}
      )


class TestTestDatasets:

  def test_test_dataset_is_all_test_data_in_order(self):
    data = split()
    batches = data.test_dataset(16)
    assert batches.element_spec == data.element_spec
    got = positions(batches)
    assert [len(batch) for batch in got] == [16, 16, 8]
    np.testing.assert_array_equal(np.concatenate(got), np.arange(40))

  @pytest.mark.parametrize('dtype,scale', [(np.float32, 1), (np.uint8, 255)])
  def test_client_test_dataset_is_the_clients_own(self, dtype, scale):
    data = split(parts_lib.numbered(dtype=dtype))
    for client in data.client_ids:
      batches = data.client_test_dataset(client, 5)
      assert batches.element_spec == data.element_spec
      np.testing.assert_array_equal(
          np.concatenate(positions(batches, scale)), data.test_indices[client]
      )
      lazy = data.lazy_client_test_dataset(client, 5)
      assert lazy.element_spec == data.element_spec
      for pair in zip(lazy.build(), batches, strict=True):
        for part in zip(*pair, strict=True):
          np.testing.assert_array_equal(*part)
      parts = list(zip(*batches.as_numpy_iterator()))
      for found, part in zip(lazy.arrays.load(), parts, strict=True):
        np.testing.assert_array_equal(found, np.concatenate(part))
      assert lazy.arrays.sizes.tolist() == [len(y) for y in parts[1]]

  def test_client_without_test_data_gets_an_empty_dataset(self):
    data = split(parts_lib.numbered(num_test=4), num_clients=20)
    empty = [c for c in data.client_ids if not data.test_indices[c].size]
    assert empty
    batches = data.client_test_dataset(empty[0], 5)
    assert batches.element_spec == data.element_spec
    assert not list(batches)

  def test_unknown_client_and_invalid_batch_size(self):
    data = split()
    with pytest.raises(ValueError, match="no client 'nobody'"):
      data.client_test_dataset('nobody', 5)
    with pytest.raises(ValueError, match="no client 'nobody'"):
      data.lazy_client_test_dataset('nobody', 5)
    with pytest.raises(ValueError, match='batch_size=0'):
      data.lazy_client_test_dataset(data.client_ids[0], 0)
    with pytest.raises(ValueError, match='batch_size=0'):
      data.test_dataset(0)


LABEL_SPLITS = {
    'iid': {},
    'classes': {'classes_per_client': 2},
    'dirichlet': {'dirichlet_alpha': 0.3},
    'gamma': {'gamma': 0.2},
    'unbalanced': {'imbalance': 1.0},
}


class TestSplitDataset:

  @pytest.mark.parametrize('name', LABEL_SPLITS)
  def test_test_data_has_the_label_distribution_of_training_data(self, name):
    dataset = parts_lib.numbered(num_train=400, num_test=400)
    data = split(dataset, name, 4, **LABEL_SPLITS[name])
    counts = data.label_distribution()
    expected = counts / np.maximum(counts.sum(axis=0), 1) * 100
    got = np.array(
        [
            np.bincount(dataset.y_test[data.test_indices[c]], minlength=4)
            for c in data.client_ids
        ]
    )
    assert (np.abs(got - expected) < 1).all()
    chosen = np.concatenate(list(data.test_indices.values()))
    assert len(np.unique(chosen)) == len(chosen) == 400

  @pytest.mark.parametrize('name', LABEL_SPLITS)
  def test_split_depends_only_on_the_seed(self, name):
    first, same, other = (
        split(split_name=name, seed=seed, **LABEL_SPLITS[name])
        for seed in (0, 0, 1)
    )
    for kind in ('train_indices', 'test_indices'):
      a, b, c = (
          [part.tolist() for part in getattr(data, kind).values()]
          for data in (first, same, other)
      )
      assert a == b
      assert a != c

  def test_label_distribution(self):
    dataset = parts_lib.numbered()
    data = split(dataset, 'dirichlet', dirichlet_alpha=0.3)
    for client, counts in zip(data.client_ids, data.label_distribution()):
      labels = dataset.y_train[data.train_indices[client]]
      assert counts.tolist() == [(labels == c).sum() for c in range(4)]
    assert data.num_classes == 4

  def test_default_number_of_clients(self):
    assert len(split(num_clients=None).client_ids) == 10

  def test_zero_clients(self):
    with pytest.raises(ValueError, match='num_clients=0 is too small'):
      split(num_clients=0)

  def test_client_ids_sort_like_the_clients(self):
    ids = split(num_clients=11).client_ids
    assert ids[0] == 'client_00'
    assert ids[10] == 'client_10'
    assert list(ids) == sorted(ids)

  def test_unknown_split(self):
    with pytest.raises(
        ValueError,
        match=r"split='dirichlett' must be .*iid.*Did you mean dirichlet\?",
    ):
      split(split_name='dirichlett')

  @pytest.mark.parametrize('name', ['classes', 'dirichlet', 'unbalanced'])
  def test_arguments_have_the_defaults_of_the_flags(self, name):
    defaults = {
        option.name: option.default for option in splits.SPLITS[name].options
    }
    expected = split(split_name=name, **defaults)
    assert split(split_name=name).fingerprint() == expected.fingerprint()

  def test_more_clients_than_samples(self):
    with pytest.raises(
        ValueError,
        match=(
            'num_clients=98 asks for more clients than the 97 training'
            ' samples in numbers; use at most 97'
        ),
    ):
      split(num_clients=98)


class TestSharedSamples:

  def test_more_clients_than_samples(self):
    data = split(num_clients=500, samples_per_client=12)
    assert len(data.client_ids) == 500
    assert data.client_ids[-1] == 'client_499'
    for indices_of, num_samples, number in (
        (data.train_indices, 97, 12),
        (data.test_indices, 40, 5),  # 12 · 40 / 97 is 4.9.
    ):
      for indices in indices_of.values():
        assert len(np.unique(indices)) == len(indices) == number
      together = np.concatenate(list(indices_of.values()))
      np.testing.assert_array_equal(np.unique(together), np.arange(num_samples))

  def test_each_client_has_test_data(self):
    data = split(num_clients=3, samples_per_client=1)
    assert {len(part) for part in data.test_indices.values()} == {1}

  def test_all_samples(self):
    data = split(num_clients=3, samples_per_client=97)
    for client in data.client_ids:
      np.testing.assert_array_equal(data.train_indices[client], np.arange(97))
      np.testing.assert_array_equal(data.test_indices[client], np.arange(40))

  def test_training_and_test_samples_are_drawn_independently(self):
    dataset = parts_lib.numbered(num_test=97)
    data = split(dataset, num_clients=20, samples_per_client=12)
    for client in data.client_ids:
      assert set(data.train_indices[client]) != set(data.test_indices[client])

  @pytest.mark.parametrize(
      'samples_per_client, reason',
      [
          (0, 'a whole number, at least 1'),
          (98, 'between 1 and the 97 training samples in numbers'),
      ],
  )
  def test_impossible_numbers(self, samples_per_client, reason):
    with pytest.raises(
        ValueError,
        match=f'samples_per_client={samples_per_client} must be {reason}',
    ):
      split(num_clients=3, samples_per_client=samples_per_client)

  def test_no_clients(self):
    with pytest.raises(ValueError, match='num_clients=0 is too small'):
      split(num_clients=0, samples_per_client=3)

  def test_other_splits_do_not_share(self):
    with pytest.raises(ValueError, match='num_clients=98 asks for more'):
      split(split_name='gamma', num_clients=98, gamma=0.5, samples_per_client=3)

  def test_numbers_of_clients(self):
    data = split(num_clients=500, samples_per_client=12)
    assert data.client_number('client_007') == 7
    with pytest.raises(ValueError, match="no client 'client_7'"):
      data.client_number('client_7')


class TestHoldOut:

  def test_clients_are_separated(self):
    data = split(num_clients=4)
    training, held_out = data.hold_out(['client_3', 'client_1'])
    assert training.client_ids == ('client_0', 'client_2')
    assert held_out.client_ids == ('client_1', 'client_3')
    for part in (training, held_out):
      assert part.dataset is data.dataset
      for client_id in part.client_ids:
        for of in ('train_indices', 'test_indices'):
          np.testing.assert_array_equal(
              getattr(part, of)[client_id], getattr(data, of)[client_id]
          )
      assert part.test_indices.keys() == part.train_indices.keys()

  def test_unknown_client(self):
    with pytest.raises(
        ValueError,
        match=(
            'held_out_clients=client_1,clint_2: there is no client clint_2. The'
            ' 9 clients are client_0, client_1, client_2, client_3, …,'
            r' client_8\. Did you mean client_2\?'
        ),
    ):
      split(num_clients=9).hold_out(['client_1', 'clint_2'])

  def test_all_clients(self):
    with pytest.raises(
        ValueError, match='held_out_clients=client_0,client_1 leaves no client'
    ):
      split(num_clients=2).hold_out(['client_0', 'client_1'])


class TestAugmentation:

  @pytest.fixture
  def data(self):
    dataset = tff_bn_data.load_dataset('generated:6x5x1:4:40')
    return dataclasses.replace(
        split(dataset, num_clients=2), augmentation='flip_crop'
    )

  def _images(self, data, client_ids=('client_0',), **changes):
    arguments = {**ARGUMENTS, 'local_steps': 3, **changes}
    dataset = data.client_dataset(client_ids, **arguments)
    return np.concatenate([x for x, _ in dataset.as_numpy_iterator()])

  def test_draws_depend_on_seed_round_client_and_batch(self, data):
    plain = dataclasses.replace(data, augmentation='none')
    images = self._images(data)
    assert (images != self._images(plain)).any(axis=(1, 2, 3)).mean() > 0.9
    np.testing.assert_array_equal(images, self._images(data))
    for changes in (
        {},
        dict(seed=4),
        dict(round_num=8),
        dict(client_ids=('client_1',)),
        dict(client_ids=('client_0', 'client_1')),
    ):
      arguments = {**ARGUMENTS, 'local_steps': 3, **changes}
      client_ids = arguments.pop('client_ids', ('client_0',))
      batches = data.client_batches(client_ids, **arguments)
      clients = [data.client_number(c) for c in client_ids]
      expected = augmentation.draw_transforms(
          'flip_crop',
          30,
          (6, 5, 1),
          seeding.generator(
              seeding.Stream.AUGMENTATION,
              arguments['seed'],
              arguments['round_num'],
              *clients,
          ),
      )
      np.testing.assert_array_equal(batches.transforms, expected)
      if changes:
        first = data.client_batches(['client_0'], **ARGUMENTS, local_steps=3)
        assert (batches.transforms != first.transforms).any()
    # No two batches have the same draws.
    transforms = expected.reshape(3, -1)
    assert len(np.unique(transforms, axis=0)) == 3

  def test_order_of_the_samples_stays_the_same(self, data):
    plain = dataclasses.replace(data, augmentation='none')
    a, b = (
        d.client_batches(['client_0'], **ARGUMENTS, local_epochs=2)
        for d in (data, plain)
    )
    np.testing.assert_array_equal(a.passes, b.passes)
    assert len(a.transforms) == 40
    assert b.transforms is None

  def test_evaluation_has_the_images_themselves(self, data):
    plain = dataclasses.replace(data, augmentation='none')
    np.testing.assert_array_equal(
        self._images(data, augment=False), self._images(plain)
    )
    for of in (
        lambda d: d.test_dataset(100),
        lambda d: d.client_test_dataset('client_1', 100),
    ):
      ((a, _),), ((b, _),) = (list(of(d)) for d in (data, plain))
      np.testing.assert_array_equal(a, b)

  def test_is_part_of_the_fingerprint(self, data):
    prints = {
        dataclasses.replace(data, augmentation=name).fingerprint()
        for name in ('none', 'flip_crop', 'flip_rotate')
    }
    assert len(prints) == 3
    assert split(data.dataset, num_clients=2).fingerprint() in prints

  def test_is_for_images(self):
    with pytest.raises(ValueError, match='augment=flip_crop is for images'):
      dataclasses.replace(split(), augmentation='flip_crop')


class TestDomains:

  @pytest.fixture
  def dataset(self):
    return parts_lib.numbered(
        num_train=120,
        num_test=60,
        # Each domain has two of the four classes.
        domain_train=(np.arange(120) % 4 // 2).astype(np.int32),
        domain_test=(np.arange(60) % 4 // 2).astype(np.int32),
        domain_names=('day', 'night'),
    )

  @pytest.mark.parametrize('num_clients', [None, 2])
  def test_client_ids_are_domains(self, dataset, num_clients):
    data = split(dataset, 'domains', num_clients)
    assert data.client_ids == ('day', 'night')
    np.testing.assert_array_equal(
        data.train_indices['night'], np.flatnonzero(dataset.domain_train)
    )
    np.testing.assert_array_equal(
        data.test_indices['night'], np.flatnonzero(dataset.domain_test)
    )

  def test_several_clients_share_a_domain(self, dataset):
    data = split(dataset, 'domains', 4)
    assert data.client_ids == ('day_0', 'night_0', 'day_1', 'night_1')
    for client, indices in data.test_indices.items():
      expected = ('day', 'night').index(client.split('_')[0])
      assert set(dataset.domain_test[indices]) == {expected}

  def test_dataset_without_domains(self):
    with pytest.raises(
        ValueError, match='split=domains .* dataset=numbers has none'
    ):
      split(split_name='domains')


class TestNatural:

  @pytest.fixture
  def dataset(self):
    return parts_lib.numbered(
        num_train=80,
        num_test=120,
        client_train=(np.arange(80) % 40).astype(np.int32),
        client_test=(np.arange(120) % 40).astype(np.int32),
        client_names=tuple(f'w{n:02}' for n in range(40)),
    )

  def test_clients_of_the_dataset(self, dataset):
    data = split(dataset, 'natural', None)
    assert data.client_ids == dataset.client_names
    np.testing.assert_array_equal(data.train_indices['w07'], [7, 47])
    np.testing.assert_array_equal(data.test_indices['w07'], [7, 47, 87])

  def test_fewer_clients_are_some_of_them(self, dataset):
    data = split(dataset, 'natural', 10)
    assert len(data.client_ids) == 10
    for client in data.client_ids:
      number = int(client[1:])
      np.testing.assert_array_equal(
          data.train_indices[client], [number, number + 40]
      )
      # The values are the positions in the whole dataset.
      np.testing.assert_array_equal(
          data.dataset.x_test[data.test_indices[client]].ravel(),
          dataset.x_test[[number, number + 40, number + 80]].ravel(),
      )

  def test_only_chosen_clients_test(self, dataset):
    data = split(dataset, 'natural', 10)
    chosen = [int(client[1:]) for client in data.client_ids]
    is_chosen = np.isin(dataset.client_test, chosen)
    np.testing.assert_array_equal(
        data.dataset.x_test, dataset.x_test[is_chosen]
    )
    np.testing.assert_array_equal(
        data.dataset.y_test, dataset.y_test[is_chosen]
    )
    assert sorted(np.concatenate(list(data.test_indices.values()))) == list(
        range(30)
    )

  def test_dataset_without_clients(self):
    with pytest.raises(
        ValueError, match='split=natural .* dataset=numbers has none'
    ):
      split(split_name='natural')


class TestValidation:

  def test_parts_of_each_client(self):
    data = split(num_clients=3)
    parts = data.with_validation(0.2, seed=0)
    for client in data.client_ids:
      train, validation = (
          indices[client]
          for indices in (parts.train_indices, parts.validation_indices)
      )
      own = data.train_indices[client]
      assert len(validation) == round(0.2 * len(own))
      assert sorted([*train, *validation]) == sorted(own)
      # Some order is kept, and every draw is of the remaining samples.
      (got,) = positions(parts.client_validation_dataset(client, 256))
      assert sorted(got) == sorted(validation)
      batches = parts.client_dataset([client], **ARGUMENTS, local_steps=9)
      assert set(np.concatenate(positions(batches))) <= set(train)
    assert parts.test_indices.keys() == data.test_indices.keys()
    assert parts.fingerprint() != data.fingerprint()

  def test_seed_decides(self):
    data = split()
    first, again, other = (
        data.with_validation(0.3, seed).validation_indices['client_1'].tolist()
        for seed in (0, 0, 1)
    )
    assert first == again != other

  @pytest.mark.parametrize('seed', range(5))
  def test_no_client_trains_on_validation_data(self, seed):
    """Clients share samples, and have some several times."""
    data = tff_bn_data.FederatedData(
        parts_lib.numbered(),
        {
            'a': [*range(20), *range(10)],
            'b': list(range(10, 30)),
            'c': [50],
        },
        {'a': [], 'b': [], 'c': []},
    ).with_validation(0.25, seed)
    used = np.concatenate(list(data.train_indices.values()))
    validation = np.concatenate(list(data.validation_indices.values()))
    assert not set(used) & set(validation)
    # What they validate on together counts for both.
    assert set(data.validation_indices['a']) & set(data.validation_indices['b'])
    assert len(data.validation_indices['a']) == 5
    assert len(data.validation_indices['b']) == 5

  def test_client_with_one_example_trains_on_it(self):
    data = tff_bn_data.FederatedData(
        parts_lib.numbered(), {'a': [1, 2, 3], 'c': [50]}, {'a': [], 'c': []}
    ).with_validation(0.9, seed=3)
    assert len(data.train_indices['a']) == 1
    assert data.train_indices['c'].tolist() == [50]
    assert not data.validation_indices['c'].size
    assert not list(data.client_validation_dataset('c', 8))

  def test_held_out_clients_keep_their_part(self):
    data = split().with_validation(0.2, seed=0)
    training, held_out = data.hold_out(['client_1'])
    assert set(held_out.validation_indices) == {'client_1'}
    assert set(training.validation_indices) == {'client_0', 'client_2'}

  def test_scaling_does_not_see_validation_data(self):
    data = split().with_validation(0.5, seed=0)
    scaling = data.scaled('standardized').dataset.scaling
    used = np.concatenate(list(data.train_indices.values()))
    np.testing.assert_allclose(
        scaling.mean, data.dataset.x_train[used].mean(axis=0), rtol=1e-5
    )

  @pytest.mark.parametrize('share', [0, 1, -0.1, np.nan])
  def test_impossible_shares(self, share):
    with pytest.raises(ValueError, match=f'share={share} must be'):
      split().with_validation(share, seed=0)

  def test_too_little_data(self):
    with pytest.raises(ValueError, match='share=0.01 leaves no validation'):
      split().with_validation(0.01, seed=0)
    with pytest.raises(ValueError, match='validation_indices already'):
      split().with_validation(0.2, seed=0).with_validation(0.2, seed=0)
    data = tff_bn_data.FederatedData(
        parts_lib.numbered(),
        {'a': [1, 2], 'b': [1], 'c': [2]},
        {'a': [], 'b': [], 'c': []},
    )
    with pytest.raises(ValueError, match='leaves the client .* no training'):
      data.with_validation(0.5, seed=0)

  def test_unknown_client(self):
    with pytest.raises(ValueError, match="validation_indices has .* 'x'"):
      dataclasses.replace(split(), validation_indices={'x': [1]})
