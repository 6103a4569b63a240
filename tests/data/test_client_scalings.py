"""Images scaled with the statistics of random clients, against NumPy."""

import collections
import dataclasses

import numpy as np
import pytest

from tff_bn.data import batches as batches_lib
from tff_bn.data import client_scalings
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import federated

_CLIENTS = {'a': [0, 1, 2], 'b': [3, 4], 'c': [5, 6, 7, 8]}
_TEST = {'a': [0, 3], 'b': [1], 'c': []}
_DRAW = dict(seed=3, batch_size=2, local_epochs=1)


def _images(number, dtype=np.float32):
  x = np.random.default_rng(number).uniform(0, 1, (number, 4, 5, 2))
  # Clients differ in brightness and contrast.
  x = x * np.linspace(0.2, 0.8, number)[:, None, None, None] + 0.1
  return (255 * x).astype(dtype) if dtype == np.uint8 else x.astype(dtype)


def _data(dtype=np.float32, **more):
  return federated.FederatedData(
      dataset_lib.Dataset(
          'mine',
          _images(9, dtype),
          np.arange(9) % 3,
          _images(4, dtype),
          np.arange(4) % 3,
      ),
      _CLIENTS,
      _TEST,
      **more,
  )


def _unit(x):
  return x / np.float32(255) if x.dtype == np.uint8 else x


def _statistics(x, positions):
  """The means of the images' means and deviations, image by image."""
  means, deviations = [], []
  for position in positions:
    image = np.float64(_unit(x[position]))
    mean = image.sum((0, 1)) / 20
    means.append(mean)
    deviations.append(np.sqrt(((image - mean) ** 2).sum((0, 1)) / 20))
  return np.mean(means, 0), np.mean(deviations, 0)


def _candidates(data, x):
  """How each client's statistics scale images."""
  return {
      client: (_unit(x) - mean) / deviation
      for client, positions in _CLIENTS.items()
      for mean, deviation in [_statistics(data.dataset.x_train, positions)]
  }


def _rows(dataset):
  return np.concatenate([x for x, _ in dataset.as_numpy_iterator()])


@pytest.mark.parametrize('dtype', [np.float32, np.uint8])
def test_statistics(dtype):
  data = _data(dtype).scaled('random_client')
  assert data.client_scalings.are_drawn
  found = data.client_scalings.by_client
  assert list(found) == list(_CLIENTS)
  expected = {
      c: _statistics(data.dataset.x_train, p) for c, p in _CLIENTS.items()
  }
  for client, (mean, deviation) in expected.items():
    np.testing.assert_allclose(found[client].mean, mean, rtol=1e-6)
    np.testing.assert_allclose(found[client].deviation, deviation, rtol=1e-6)
  # A model without a client has the mean over the clients.
  for name, number in (('mean', 0), ('deviation', 1)):
    np.testing.assert_allclose(
        getattr(data.dataset.scaling, name),
        np.mean([values[number] for values in expected.values()], 0),
        rtol=1e-6,
    )


@pytest.mark.parametrize('dtype', [np.float32, np.uint8])
@pytest.mark.parametrize('clients', [['a'], ['c'], ['a', 'b', 'c']])
def test_each_training_image_has_the_scaling_of_some_client(dtype, clients):
  data = _data(dtype).scaled('random_client')
  candidates = _candidates(data, data.dataset.x_train)
  chosen = collections.Counter()
  for round_num in range(30):
    draw = dict(_DRAW, round_num=round_num)
    batches = data.client_batches(clients, **draw)
    order = np.concatenate(batches.passes)
    found = _rows(data.client_dataset(clients, **draw))
    for row, position in zip(found, order, strict=True):
      (client,) = (
          c
          for c, scaled in candidates.items()
          if np.allclose(row, scaled[position], atol=1e-4)
      )
      chosen[client] += 1
  # The same draw gives the same numbers.
  np.testing.assert_array_equal(
      _rows(data.client_dataset(clients, **draw)), found
  )
  total = sum(chosen.values())
  assert chosen.keys() == _CLIENTS.keys()
  for count in chosen.values():
    # Three standard deviations.
    assert abs(count / total - 1 / 3) < 3 * np.sqrt(2 / 9 / total)


def test_passes_draw_again_and_order_does_not_change():
  data = _data().scaled('random_client')
  draw = dict(seed=1, round_num=0, batch_size=3, local_steps=4)
  plain = _data().client_batches(['a'], **draw)
  batches = data.client_batches(['a'], **draw)
  np.testing.assert_array_equal(batches.passes, plain.passes)
  (order,) = batches.passes
  found = _rows(data.client_dataset(['a'], **draw))
  for position in _CLIENTS['a']:
    # Four passes of one image: not all have the same scaling.
    assert len(np.unique(found[order == position], axis=0)) > 1


def test_arrays_of_the_bulk_path_equal_the_dataset():
  data = _data(np.uint8).scaled('random_client')
  dataset = data.dataset
  batches = data.client_batches(['c'], round_num=5, **_DRAW)
  arrays = batches.to_arrays(dataset.x_train, dataset.y_train, dataset.scaling)
  x, y = arrays.load()
  np.testing.assert_array_equal(
      x, _rows(data.client_dataset(['c'], round_num=5, **_DRAW))
  )
  np.testing.assert_array_equal(
      y, dataset.y_train[np.concatenate(batches.passes)]
  )


def test_augmented_and_long_batches(monkeypatch):
  """TensorFlow gathers them, and scales after the augmentation."""
  data = _data().scaled('random_client')
  draw = dict(_DRAW, round_num=2)
  copied = _rows(data.client_dataset(['a'], **draw))
  monkeypatch.setattr(batches_lib, '_MAX_COPIED_PARTS', 0)
  np.testing.assert_array_equal(
      _rows(data.client_dataset(['a'], **draw)), copied
  )
  augmented = dataclasses.replace(data, augmentation='flip_crop')
  batches = augmented.client_batches(['a'], **draw)
  dataset = data.dataset
  plain = _rows(
      dataclasses.replace(batches, scaling=None).dataset(
          dataset.x_train, dataset.y_train
      )
  )
  scaling = batches.scaling
  np.testing.assert_array_equal(
      _rows(augmented.client_dataset(['a'], **draw)),
      (plain - scaling.mean) / scaling.deviation,
  )


def test_other_data_has_the_scaling_of_its_client():
  data = _data().with_validation(0.5, 0).scaled('random_client')
  own = data.client_scalings.by_client

  def assert_scaled(dataset, x, scaling):
    np.testing.assert_array_equal(
        _rows(dataset), (x - scaling.mean) / scaling.deviation
    )

  x_train, x_test = data.dataset.x_train, data.dataset.x_test
  for client in _CLIENTS:
    test = x_test[np.array(_TEST[client], int)]
    if len(test):
      assert_scaled(data.client_test_dataset(client, 2), test, own[client])
      lazy = data.lazy_client_test_dataset(client, 2)
      assert_scaled(lazy.build(), test, own[client])
    assert_scaled(data.test_dataset(3, client), x_test, own[client])
    assert_scaled(
        data.client_validation_dataset(client, 2),
        x_train[data.validation_indices[client]],
        own[client],
    )
    batches = data.client_batches([client], round_num=0, augment=False, **_DRAW)
    assert_scaled(
        data.client_dataset([client], round_num=0, augment=False, **_DRAW),
        x_train[np.concatenate(batches.passes)],
        own[client],
    )
  mean = data.dataset.scaling
  assert_scaled(data.test_dataset(3), x_test, mean)
  positions = np.array([2, 0])
  assert_scaled(
      data.lazy_test_dataset(positions, 2).build(), x_test[positions], mean
  )
  batches = data.client_batches(['a', 'b'], round_num=0, augment=False, **_DRAW)
  assert_scaled(
      data.client_dataset(['a', 'b'], round_num=0, augment=False, **_DRAW),
      x_train[np.concatenate(batches.passes)],
      mean,
  )


def test_new_clients_have_their_own_scaling():
  data = _data()
  known = data.scaled('random_client').client_scalings.by_client
  other = dataset_lib.Scaling(np.ones(2, 'f'), np.full(2, 2, 'f'))
  found = data.with_client_scalings(
      {'a': other}, are_drawn=False, default=other
  )
  own = found.client_scalings.by_client
  assert own['a'] is other and found.dataset.scaling is other
  np.testing.assert_array_equal(own['b'].mean, known['b'].mean)
  x = _rows(found.client_dataset(['a'], round_num=1, **_DRAW))
  order = np.concatenate(
      found.client_batches(['a'], round_num=1, **_DRAW).passes
  )
  np.testing.assert_array_equal(x, (data.dataset.x_train[order] - 1) / 2)


def test_fingerprints():
  data = _data()
  scaled = data.scaled('random_client')
  mean = data.with_scaling(scaled.dataset.scaling)
  fixed = data.with_client_scalings({}, are_drawn=False)
  prints = {d.fingerprint() for d in (data, scaled, mean, fixed)}
  assert len(prints) == 4
  assert data.scaled('random_client').fingerprint() == scaled.fingerprint()


def test_errors():
  vectors = federated.FederatedData(
      dataset_lib.Dataset(
          'mine', np.ones((2, 5)), np.arange(2), np.ones((2, 5)), np.arange(2)
      ),
      {'a': [0, 1]},
      {'a': []},
  )
  with pytest.raises(
      ValueError,
      match='pixel_scaling=random_client is for images, but dataset=mine has',
  ):
    vectors.scaled('random_client')
  data = _data()
  x = data.dataset.x_train.copy()
  x[3:5, :, :, 1] = np.arange(2)[:, None, None]
  constant = dataclasses.replace(
      data, dataset=dataclasses.replace(data.dataset, x_train=x)
  )
  with pytest.raises(
      ValueError,
      match='=random_client: channel 1 of each training image of a client of'
      ' mine is constant, .*use pixel_scaling=standardized',
  ):
    constant.scaled('random_client')
  with pytest.raises(
      ValueError, match="client_scalings has no scaling of the client 'a'"
  ):
    _data(client_scalings=client_scalings.ClientScalings({}))
