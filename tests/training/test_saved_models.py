"""Tests of the models that a run leaves, and of reading them."""

import dataclasses
import os
import shutil
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import training_fakes

from tff_bn import data as tff_bn_data
from tff_bn import training
from tff_bn.data import dataset as dataset_lib
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.training import client_state_store
from tff_bn.training import manifests
from tff_bn.training import saved_models

# One of the four clients takes no part.
_CONFIG = dataclasses.replace(
    training_fakes.CONFIG, rounds=1, clients_per_round=3, evaluate_every=1
)


def _train(model, run_dir, process=None, stateful=True, **changes):
  config = dataclasses.replace(_CONFIG, **changes)
  return training_fakes.train(model, run_dir, config, stateful, process=process)


@pytest.fixture(scope='module')
def finished(model, tmp_path_factory):
  """The folder and the results of a run, which tests must leave as they are."""
  folder = tmp_path_factory.mktemp('finished')
  return folder, _train(model, folder)


@pytest.fixture
def run(finished, tmp_path):
  """A copy of the run's folder."""
  return shutil.copytree(finished[0], tmp_path / 'run')


def _names(folder):
  return sorted(os.listdir(folder))


def _assert_same(weights, expected):
  for a, b in zip(
      tf.nest.flatten(weights), tf.nest.flatten(expected), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def _client_weights(run_dir, state, process):
  """The weights of the clients that the store has, by id."""
  path = run_dir / 'client_states.sqlite'
  with client_state_store.ClientStateStore(path) as store:
    return {
        client_id: process.get_client_model_weights(state, store.get(client_id))
        for client_id in store.client_ids()
    }


def test_weights_of_the_clients(model, finished):
  folder, result = finished
  assert _names(folder / 'model') == [
      'clients.npy',
      'manifest.json',
      'model.keras',
      'weights.npz',
  ]
  saved = saved_models.SavedModels(folder / 'model')
  saved.check()
  process = training_fakes.build_process(model, stateful=True)
  expected = _client_weights(folder, result.state, process)
  assert list(saved.client_ids) == list(expected)
  assert len(expected) == 3
  for client_id, weights in expected.items():
    _assert_same(saved.weights(model, client_id), weights)
    found = training_fakes.load_client(folder, client_id)
    _assert_same(model.from_keras(found), weights)
  _assert_same(saved.weights(model), result.model_weights)
  # Shared variables are not stored again.
  records = np.load(folder / 'model/clients.npy')
  assert records.dtype.names == ('moving_mean_4', 'moving_variance_5')


def test_keras_models_of_clients_are_saved_by_the_same_run(
    model, run, finished
):
  folder = run / 'model'
  records = (folder / 'clients.npy').read_bytes()
  sampled = list(saved_models.SavedModels(folder).client_ids)
  for choice, ids in (
      ('all', training_fakes.CLIENT_IDS),
      ('none', ()),
      ('sampled', sampled),
  ):
    result = _train(model, run, save_client_models=choice)

    assert result.resumed_from == 1
    _assert_same(result.model_weights, finished[1].model_weights)
    assert (folder / 'clients.npy').read_bytes() == records
    assert training.is_finished(run)
    saved = saved_models.SavedModels(folder)
    assert list(saved.client_ids) == sampled
    stems = {c: saved_models.client_file_stem(c) for c in ids}
    assert saved.manifest['keras_clients'] == stems
    assert {path.stem for path in folder.glob('clients/*')} == set(
        stems.values()
    )
    for client_id, stem in stems.items():
      path = folder / f'clients/{stem}.keras'
      found = model.from_keras(keras.models.load_model(path))
      expected = result.model_weights
      if client_id in sampled:
        expected = saved.weights(model, client_id)
      _assert_same(found, expected)

  result = _train(model, run, rounds=2)

  # The continued run replaces the models.
  assert not (folder / 'clients').exists()
  assert (folder / 'clients.npy').read_bytes() != records
  saved = saved_models.SavedModels(folder)
  saved.check()
  _assert_same(saved.weights(model), result.model_weights)


def _federated_data():
  """Clients whose features were divided by 4, and are standardized."""
  rng = np.random.default_rng(0)
  x = rng.normal([3, 0, -2], [1, 2, 0.5], (80, 3)).astype(np.float32) / 4
  y = np.arange(80) % 2
  dataset = dataset_lib.create_dataset('mine', x, y, x, y, divisor=4)
  data = tff_bn_data.split_dataset(dataset, 'iid', 4, 0)
  return data.scaled('standardized').with_validation(0.25, 0)


@pytest.mark.slow
def test_inputs_of_the_keras_files_are_chosen_by_the_same_run(model, tmp_path):
  data = _federated_data()
  raw = 4 * data.dataset.x_test
  scaling = data.dataset.scaling
  scaled = (data.dataset.x_test - scaling.mean) / scaling.deviation
  outputs = {}
  for export in ('raw', 'training', 'raw'):
    result = training_fakes.train(
        model,
        tmp_path,
        dataclasses.replace(
            _CONFIG, export=export, save_client_models='all', keep_best='loss'
        ),
        stateful=True,
        data=data,
    )
    assert result.resumed_from == (1 if outputs else None)
    manifest = manifests.read(tmp_path / 'model', saved_models.FORMAT)
    assert manifest['keras_inputs'] == export
    paths = sorted((tmp_path / 'model').rglob('*.keras'))
    assert len(paths) == 2 * (1 + 4)  # Of the best round too.
    for path in paths:
      loaded = keras.models.load_model(path)
      found = loaded.predict(raw if export == 'raw' else scaled, verbose=0)
      expected = outputs.setdefault(path, found)
      np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  assert len(set(map(bytes, outputs.values()))) > 1


def test_inputs_of_data_that_is_not_described(finished):
  manifest = manifests.read(finished[0] / 'model', saved_models.FORMAT)
  assert (manifest['export'], manifest['keras_inputs']) == ('raw', 'training')


def test_unknown_inputs():
  with pytest.raises(ValueError, match="export='best' .* one of raw, training"):
    dataclasses.replace(_CONFIG, export='best')


@pytest.mark.parametrize('choice', ['some', ''])
def test_unknown_choice_of_clients(choice):
  with pytest.raises(
      ValueError,
      match=f'save_client_models={choice!r} .* one of none, sampled, all',
  ):
    dataclasses.replace(_CONFIG, save_client_models=choice)


def test_algorithm_without_client_models(model, tmp_path):
  result = _train(model, tmp_path, stateful=False, save_client_models='all')

  assert _names(tmp_path / 'model') == [
      'manifest.json',
      'model.keras',
      'weights.npz',
  ]
  saved = saved_models.SavedModels(tmp_path / 'model')
  assert not saved.client_ids
  loaded = keras.models.load_model(tmp_path / 'model/model.keras')
  for weights in (saved.weights(model), model.from_keras(loaded)):
    _assert_same(weights, result.model_weights)


class _Copying(training_fakes.FakeStatefulProcess):
  """Returns new arrays, also of the server's variables."""

  def get_client_model_weights(self, state, client_state):
    weights = super().get_client_model_weights(state, client_state)
    return ModelWeights(*([np.array(v) for v in part] for part in weights))


def test_process_that_returns_new_arrays(model, tmp_path):
  process = _Copying(model)
  result = _train(model, tmp_path, process)

  saved = saved_models.SavedModels(tmp_path / 'model')
  records = np.load(tmp_path / 'model/clients.npy')
  assert list(records.dtype.names) == [v.name for v in model.variables]
  expected = _client_weights(tmp_path, result.state, process)
  for client_id, weights in expected.items():
    _assert_same(saved.weights(model, client_id), weights)


class _Sharing(training_fakes.FakeStatefulProcess):
  """Gives all clients the server's statistics."""

  def get_client_model_weights(self, state, client_state):
    return state['weights']


def test_process_whose_clients_share_everything(model, tmp_path):
  result = _train(model, tmp_path, _Sharing(model))

  saved = saved_models.SavedModels(tmp_path / 'model')
  assert len(saved.client_ids) == 3
  for client_id in saved.client_ids:
    _assert_same(saved.weights(model, client_id), result.model_weights)


class _Uneven(training_fakes.FakeStatefulProcess):
  """Every second client has an own kernel."""

  num_calls = 0

  def get_client_model_weights(self, state, client_state):
    weights = super().get_client_model_weights(state, client_state)
    self.num_calls += 1
    if self.num_calls % 2:
      weights.trainable[0] = weights.trainable[0] + 1
    return weights


def test_clients_with_different_own_variables_are_an_error(model, tmp_path):
  with pytest.raises(ValueError, match='own variables of client'):
    _train(model, tmp_path, _Uneven(model))
  assert not (tmp_path / 'model').exists()
  assert not list(tmp_path.glob('.*'))


def test_a_model_without_use_leaves_nothing(model, tmp_path, monkeypatch):
  encode = training_fakes.FakeStatefulProcess.get_client_model_weights

  def spoiled(self, state, client_state):
    weights = encode(self, state, client_state)
    if self.rounds:
      weights.non_trainable[0] = weights.non_trainable[0] * np.nan
    return weights

  monkeypatch.setattr(
      training_fakes.FakeStatefulProcess, 'get_client_model_weights', spoiled
  )
  with pytest.raises(training.UnusableModelError, match='not finite'):
    _train(model, tmp_path)
  assert not (tmp_path / 'model').exists()
  assert not list(tmp_path.glob('.*'))


def test_models_of_the_best_round_need_no_second_keras_model(model, tmp_path):
  """Building one takes as long as saving it."""
  first, best = (
      model.to_model_weights(
          [np.full(v.shape, number, v.dtype.name) for v in model.variables]
      )
      for number in (1, 2)
  )
  folder = tmp_path / 'model'
  with (
      mock.patch.object(model, 'to_keras', wraps=model.to_keras) as build,
      saved_models.writing(folder, model, first, 0, {}) as writer,
  ):
    writer.add_global(first)
    with saved_models.writing(
        writer.best_folder, model, best, 0, {}, like=writer
    ) as best_writer:
      best_writer.add_global(best)
  assert build.call_count == 1
  for path, expected in ((folder, first), (folder / 'best', best)):
    loaded = keras.models.load_model(path / 'model.keras', compile=False)
    _assert_same(model.from_keras(loaded), expected)
    _assert_same(saved_models.SavedModels(path).weights(model), expected)


def test_export(model, tmp_path, monkeypatch):
  path = tmp_path / 'new/client.keras'
  weights = model.initial_weights
  saved_models.export(model, weights, path)
  assert _names(path.parent) == ['client.keras']
  _assert_same(model.from_keras(keras.models.load_model(path)), weights)

  def fail(self, path):
    path.write_bytes(b'half of it')
    raise OSError(28, 'No space left on device')

  content = path.read_bytes()
  monkeypatch.setattr(keras.Model, 'save', fail)
  with pytest.raises(OSError, match='No space left'):
    saved_models.export(model, weights, path)
  assert _names(path.parent) == ['client.keras']
  assert path.read_bytes() == content


def test_weights_of_another_model_are_an_error(model, finished):
  other = BatchNormModel(
      lambda: keras.Sequential(
          [keras.layers.Input([3]), keras.layers.Dense(2)]
      ),
      model.input_spec,
      model.loss_fn,
  )
  with pytest.raises(ValueError, match='kernel_0 is .*but should be'):
    saved_models.SavedModels(finished[0] / 'model').weights(other)


def test_pickles_are_an_error(model, run, tmp_path):
  path = run / 'model/weights.npz'

  class Evil:

    def __reduce__(self):
      return (open, (str(tmp_path / 'evil'), 'w'))

  np.savez(path, kernel_0=np.array([Evil()], dtype=object))
  saved = saved_models.SavedModels(run / 'model')
  # An attacker would store the matching checksum.
  saved.manifest['files'].update(saved_models._checksums(run / 'model'))
  with pytest.raises(manifests.DamagedError, match='weights.npz'):
    saved.weights(model)
  assert not (tmp_path / 'evil').exists()
