"""Tests of the identity of continued runs, and of the final models."""

import collections
import dataclasses
import shutil

from absl import logging
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import training_fakes

from tff_bn import algorithms
from tff_bn import data as tff_bn_data
from tff_bn import training
from tff_bn.imports import versions
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.training import finished as finished_lib
from tff_bn.training import manifests
from tff_bn.training import run_identity
from tff_bn.training import saved_models

_CONFIG = dataclasses.replace(training_fakes.CONFIG, rounds=4, evaluate_every=2)


@pytest.fixture
def warnings(monkeypatch):
  texts = []
  monkeypatch.setattr(
      logging, 'warning', lambda text, *args: texts.append(text % args)
  )
  return texts


def _config(**changes):
  return dataclasses.replace(_CONFIG, **changes)


def _train(model, run_dir, stateful=False, config=_CONFIG, **kwargs):
  return training_fakes.train(model, run_dir, config, stateful, **kwargs)


@pytest.fixture(scope='module')
def finished(model, tmp_path_factory):
  """The folder of a finished run, which tests must leave as it is."""
  run_dir = tmp_path_factory.mktemp('finished')
  _train(model, run_dir, stateful=True)
  return run_dir


@pytest.fixture
def run(finished, tmp_path):
  """A copy of the finished run."""
  return shutil.copytree(finished, tmp_path / 'run')


class TestSettings:

  @pytest.mark.parametrize(
      ('changes', 'message'),
      [
          (dict(seed=1), r'seed \(0, now 1\)'),
          (dict(batch_size=8), r'batch_size \(4, now 8\)'),
          (dict(local_steps=1), r'local_steps \(2, now 1\)'),
          (
              dict(local_steps=None, local_epochs=2),
              r'local_steps \(2, now not set\), local_epochs \(not set',
          ),
          (dict(clients_per_round=3), r'clients_per_round \(2, now 3\)'),
          (dict(evaluate_every=1), r'evaluate_every \(2, now 1\)'),
          (dict(max_evaluation_clients=1), r'max_evaluation_clients'),
      ],
  )
  def test_other_settings_are_refused_by_name(
      self, model, finished, changes, message
  ):
    before = training_fakes.files(finished)
    other = _config(rounds=6, **changes)
    with pytest.raises(ValueError, match=f'a run that differs in .*{message}'):
      _train(model, finished, True, other)
    assert training_fakes.files(finished) == before

  def test_settings_of_the_caller(self, model, tmp_path):
    def train(rate='0.1', every='2', **kwargs):
      settings = dict(client_learning_rate=rate, checkpoint_every=every)
      config = _config(rounds=1)
      _train(model, tmp_path, config=config, settings=settings, **kwargs)
      return settings

    # Those that may change are no part of the run's identity.
    for every in ('2', '3'):
      # They are saved with the models.
      assert train(every=every) == finished_lib.saved_settings(tmp_path)
      assert training.is_finished(tmp_path)
    with pytest.raises(
        ValueError, match=r'client_learning_rate \(0.1, now 0.2\)'
    ):
      train(rate='0.2')
    with pytest.raises(ValueError, match='train_on_union'):
      train(train_on_union=True)
    (tmp_path / 'model/manifest.json').unlink()
    assert finished_lib.saved_settings(tmp_path) is None

  def test_settings_that_may_change(self, model, run):
    config = _config(rounds=5, checkpoint_every=3, max_failed_rounds=1)
    result = _train(model, run, True, config)
    assert result.resumed_from == 4

  def test_run_without_a_checkpoint_may_start_again(
      self, model, tmp_path, monkeypatch
  ):
    with monkeypatch.context() as context:
      context.setattr(np, 'savez', lambda *args, **kwargs: 1 / 0)
      with pytest.raises(ZeroDivisionError):
        _train(model, tmp_path, stateful=True)
    other = _config(seed=5, rounds=1)
    assert _train(model, tmp_path, True, other).resumed_from is None


class TestData:

  def _data(self, **changes):
    data = tff_bn_data.split_dataset(
        tff_bn_data.load_dataset('digits'), 'iid', 4, seed=0
    )
    return dataclasses.replace(data, **changes) if changes else data

  def test_fingerprint(self):
    data = self._data()
    dataset = data.dataset
    assert data.fingerprint() == self._data().fingerprint()

    def changed(name, position):
      array = getattr(dataset, name).copy()
      array.flat[position] += 1
      return dataclasses.replace(dataset, **{name: array})

    reverse = dict(reversed(data.train_indices.items()))
    others = [
        self._data(train_indices=reverse),
        self._data(test_indices=dict(reversed(data.test_indices.items()))),
        self._data(
            train_indices={k + 'x': v for k, v in data.train_indices.items()},
            test_indices={k + 'x': v for k, v in data.test_indices.items()},
        ),
        *(
            self._data(dataset=changed(name, position))
            for name in ('x_train', 'y_train', 'x_test', 'y_test')
            for position in (0, -1)
        ),
        self._data(
            dataset=dataclasses.replace(dataset, num_classes=11),
        ),
    ]
    indices = {k: v[::-1] for k, v in data.train_indices.items()}
    others.append(self._data(train_indices=indices))
    prints = {d.fingerprint() for d in [data, *others]}
    assert len(prints) == len(others) + 1

  def test_other_data_is_refused(self, model, finished):
    other = training_fakes.FakeData()
    other.fingerprint = lambda: 'other'
    before = training_fakes.files(finished)
    with pytest.raises(ValueError, match="differs in the clients' data"):
      _train(model, finished, True, data=other)
    assert training_fakes.files(finished) == before

  @pytest.mark.parametrize('bad', [3, None, b'a', ('a',)])
  def test_ids_must_be_strings(self, model, tmp_path, bad):
    data = training_fakes.FakeData()
    data.client_ids = ('anna', bad)
    with pytest.raises(TypeError, match='client ids are strings'):
      _train(model, tmp_path / 'run', data=data)
    assert not (tmp_path / 'run').exists()
    whole = self._data()
    with pytest.raises(TypeError, match='client ids are strings'):
      dataclasses.replace(
          whole, train_indices={bad: np.arange(3)}, test_indices={}
      )

  def test_ids_must_be_valid_unicode(self):
    with pytest.raises(ValueError, match='cannot be encoded as UTF-8'):
      self._data(train_indices={'\ud800': np.arange(3)})

  def test_ids_of_any_form(self, model, tmp_path, monkeypatch):
    ids = ('x' * 250, '汉' * 100, 'a\0b', '')
    monkeypatch.setattr(training_fakes, 'CLIENT_IDS', ids)
    data = training_fakes.FakeData()
    data.client_ids = ids
    config = _config(rounds=1, clients_per_round=None)
    result = _train(model, tmp_path, True, config, data=data)
    saved = saved_models.SavedModels(tmp_path / 'model')
    assert set(saved.client_ids) == set(ids)
    assert result.rows[-1]['client_test_loss'] is not None
    ids += ('x' * 249 + 'y', '汉' * 99 + '字', '.', '..', '/', 'a/b', 'a_b')
    ids += ('a\nb', 'A', 'a', ' a', 'a ')
    names = [saved_models.client_file_stem(i) for i in ids]
    assert len({name.lower() for name in names}) == len(ids)
    assert all(len(name) < 100 and name.isascii() for name in names)


def test_other_hyperparameters_and_algorithms(model, in_process_runtime):
  del in_process_runtime

  def build(rate):
    process = algorithms.build_fed_avg(
        model, tff.learning.optimizers.build_sgdm(rate)
    )
    return process, process.initialize()

  def identity(process, state):
    description = run_identity.describe_process(process, state, model)
    return run_identity.RunIdentity({}, 'data', description)

  process, state = build(0.1)
  manifest = identity(process, state).to_manifest()
  (difference,) = identity(*build(0.2)).differences(manifest)
  assert difference.startswith('hyperparameters of the algorithm')
  other = training_fakes.build_process(model, stateful=True)
  assert identity(other, other.initialize()).differences(manifest) == [
      'the model or the algorithm'
  ]
  # Other initial weights are not used, so they may differ.
  weights = training_fakes.build_model(seed=1).initial_weights
  state = state._replace(global_model_weights=weights)
  assert not identity(process, state).differences(manifest)


def test_changed_code_gives_a_warning(model, run, warnings, monkeypatch):
  _train(model, run, stateful=True)
  assert not any('another version' in text for text in warnings)
  changed = {**versions.versions(), 'keras': '3.0.0'}
  monkeypatch.setattr(versions, 'versions', lambda: changed)
  _train(model, run, stateful=True)
  (text,) = [t for t in warnings if 'another version' in t]
  change = f'keras {keras.__version__} → 3.0.0'
  assert f'started with another version: {change}' in text


class TestFinalModel:

  @training_fakes.both_kinds
  def test_changed_results_are_written_again(
      self, model, tmp_path, stateful, warnings
  ):
    config = _config(rounds=1)
    _train(model, tmp_path, stateful, config)
    names = ('metrics.csv', 'client_metrics.csv')
    contents = [(tmp_path / name).read_bytes() for name in names]
    for name, content in zip(names, contents):
      path = tmp_path / name
      for damaged in (
          content[:-3],
          b'',
          content + content.splitlines(True)[-1],
          content.replace(b'0.', b'0.9', 1),
      ):
        assert damaged != content
        path.write_bytes(damaged)
        assert not training.is_finished(tmp_path)
      _train(model, tmp_path, stateful, config)
      assert path.read_bytes() == content
      path.unlink()
      assert not training.is_finished(tmp_path)
    _train(model, tmp_path, stateful, config)
    assert [(tmp_path / name).read_bytes() for name in names] == contents
    assert training.is_finished(tmp_path)
    assert any('client_metrics.csv is missing' in text for text in warnings)
    assert any('client_metrics.csv was changed' in text for text in warnings)

  def test_clients_results_are_of_the_last_round(self, model, run):
    process = training_fakes.build_process(model, True, fail_in_round=6)
    with pytest.raises(KeyboardInterrupt):
      _train(model, run, config=_config(rounds=6), process=process)
    # Round 5 is done, so these would be of another model.
    assert not (run / 'client_metrics.csv').exists()
    assert not (run / 'model').exists()

  def _spoil(self, monkeypatch, name, value):
    original = training_fakes.FakeProcess._update

    def update(process, state, means):
      state = original(process, state, means)
      weights = state['weights']
      if len(process.rounds) == 4:
        kernel, *rest = weights.trainable
        parts = {
            'kernel': ModelWeights(
                [kernel * np.float32(value), *rest], weights.non_trainable
            ),
            'statistics': ModelWeights(
                weights.trainable,
                [np.full_like(weights.non_trainable[0], value)] * 2,
            ),
        }
        state['weights'] = parts[name]
      return state

    monkeypatch.setattr(training_fakes.FakeProcess, '_update', update)

  @pytest.mark.parametrize(
      ('name', 'value'), [('kernel', np.nan), ('statistics', np.inf)]
  )
  def test_weights_that_are_not_finite(
      self, model, tmp_path, monkeypatch, name, value
  ):
    self._spoil(monkeypatch, name, value)
    for _ in range(2):  # The second call fails too.
      with pytest.raises(
          training.UnusableModelError, match='weights are not finite'
      ):
        _train(model, tmp_path)
      assert not (tmp_path / 'model').exists()
    # The last finite state is kept.
    assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir()) == [
        'round_0',
        'round_2',
        'round_4',
    ]

  def test_finite_weights_with_an_infinite_loss(
      self, model, tmp_path, monkeypatch
  ):
    self._spoil(monkeypatch, 'kernel', 1e38)
    with pytest.raises(
        training.UnusableModelError,
        match=r'loss on the test data is (nan|inf)\. .* since round 4\.',
    ):
      _train(model, tmp_path)
    assert not (tmp_path / 'model').exists()

  def test_run_without_test_data(self, model, tmp_path):
    data = training_fakes.FakeData()
    empty = data.test_dataset(4).take(0)
    data.test_dataset = lambda batch_size: empty
    result = _train(model, tmp_path, config=_config(rounds=1), data=data)
    assert np.isnan(result.rows[-1]['test_loss'])
    assert (tmp_path / 'model/model.keras').exists()

  @pytest.mark.parametrize(
      ('file', 'damage'),
      [
          ('model.keras', 'remove'),
          ('weights.npz', 'change'),
          ('manifest.json', 'cut'),
          ('manifest.json', 'remove'),
      ],
  )
  def test_damaged_files_are_written_again(
      self, model, run, file, damage, warnings
  ):
    weights = saved_models.SavedModels(run / 'model').weights(model)
    path = run / 'model' / file
    data = bytearray(path.read_bytes())
    match damage:
      case 'cut':
        path.write_bytes(data[: len(data) // 2])
      case 'change':
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
      case 'remove':
        path.unlink()
    assert not training.is_finished(run)

    _train(model, run, stateful=True)

    assert any('written again' in text for text in warnings)
    assert training.is_finished(run)
    keras.models.load_model(run / 'model/model.keras')
    again = saved_models.SavedModels(run / 'model').weights(model)
    for a, b in zip(tf.nest.flatten(again), tf.nest.flatten(weights)):
      np.testing.assert_array_equal(a, b)

  def test_a_clients_damaged_model_is_written_again(self, model, tmp_path):
    config = _config(rounds=1, save_client_models='sampled')
    _train(model, tmp_path, True, config)
    folder = tmp_path / 'model'
    records, client = folder / 'clients.npy', next(folder.glob('clients/*'))
    expected = records.read_bytes()
    for path in (records, client):
      content = path.read_bytes()
      for damaged in (content[:-1], content[:-1] + b'x', None):
        path.unlink()
        if damaged is not None:
          path.write_bytes(damaged)
        assert not training.is_finished(tmp_path)
        with pytest.raises(manifests.DamagedError, match=path.name):
          saved_models.SavedModels(folder).check()
      _train(model, tmp_path, True, config)
      assert training.is_finished(tmp_path)
      assert records.read_bytes() == expected

  def test_models_of_an_earlier_version_are_written_again(
      self, model, run, warnings
  ):
    folder = run / 'model'
    manifest = manifests.read(folder, saved_models.FORMAT)
    manifests.write(folder, {**manifest, 'format': 1})
    assert not training.is_finished(run)

    _train(model, run, stateful=True)

    assert any('format 1' in t and 'written again' in t for t in warnings)
    again = manifests.read(folder, saved_models.FORMAT)
    assert again['clients'] == manifest['clients']

  def test_models_of_another_run(self, model, tmp_path, warnings):
    config = _config(rounds=1)
    _train(model, tmp_path / 'a', config=config)
    _train(model, tmp_path / 'b', config=_config(rounds=1, seed=1))
    other = training_fakes.files(tmp_path / 'b/model')
    shutil.rmtree(tmp_path / 'a/model')
    shutil.copytree(tmp_path / 'b/model', tmp_path / 'a/model')

    result = _train(model, tmp_path / 'a', config=config)

    saved = saved_models.SavedModels(tmp_path / 'a/model').weights(model)
    np.testing.assert_array_equal(
        saved.trainable[0], result.model_weights.trainable[0]
    )
    assert training_fakes.files(tmp_path / 'b/model') == other


class _Ratios(training_fakes.FakeStatelessProcess):
  """Reports the norms of updates, as the algorithms of this package do."""

  def next(self, state, datasets):
    output = super().next(state, datasets)
    number = len(self.rounds)
    output.metrics['client_work'].update(
        max_update_norm_ratio=np.float32([3.0, 12.0, 30.0, np.nan][number - 1]),
        max_update_norm_client=np.int32([0, 1, 1, 0][number - 1]),
        num_participants=np.int32(2),
    )
    output.metrics['finalizer'] = collections.OrderedDict(
        failed_rounds=np.int32(0), rejected_rounds=np.int32(number)
    )
    return output


def test_large_updates_are_reported_once_for_each_client(
    model, tmp_path, warnings
):
  config = _config(clients_per_round=None, evaluate_every=1)
  result = _train(model, tmp_path, config=config, process=_Ratios(model))
  (text,) = [t for t in warnings if 'median' in t]
  assert 'Round 2: the update of client bert/.. (number 1) is 12 times' in text
  assert [row['max_update_norm_ratio'] for row in result.rows] == [
      *(None, 3.0, 12.0, 30.0, None),
  ]
  assert [row['rejected_rounds'] for row in result.rows] == [0, 1, 2, 3, 4]
