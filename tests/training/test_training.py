"""Tests for the training loop, with processes that need no TFF runtime."""

import asyncio
import collections
import contextlib
import csv
import dataclasses
import errno
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
import types
import zipfile

from absl import logging
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import training_fakes

from tff_bn.analysis import communication
from tff_bn.training import checkpoint_files
from tff_bn.training import checkpoints
from tff_bn.training import client_state_codec
from tff_bn.training import client_state_store
from tff_bn.training import evaluation
from tff_bn.training import folder_lock
from tff_bn.training import manifests
from tff_bn.training import measures
from tff_bn.training import metrics_log
from tff_bn.training import run_identity
from tff_bn.training import sampling

_CONFIG = training_fakes.CONFIG


class F1OfClasses(keras.metrics.F1Score):
  """The F1 score of each of two classes, for labels that are integers."""

  def __init__(self):
    super().__init__(name='f1')

  def update_state(self, y_true, y_pred, sample_weight=None):
    super().update_state(tf.one_hot(y_true, 2), y_pred, sample_weight)


def _config(**changes):
  return dataclasses.replace(_CONFIG, **changes)


def _train(model, run_dir, stateful=False, config=_CONFIG, **kwargs):
  return training_fakes.train(model, run_dir, config, stateful, **kwargs)


def _run_rounds(model, run_dir, stateful, config=_CONFIG):
  """Trains and returns the numbers of the rounds that were run."""
  process = training_fakes.build_process(model, stateful)
  _train(model, run_dir, config=config, process=process)
  return process.rounds


def _observe(process, fn):
  """Calls a function before each round of a process."""
  original = process.next

  def next_fn(*args):
    fn()
    return original(*args)

  process.next = next_fn


@pytest.fixture(scope='module')
def finished(model, tmp_path_factory):
  """Uninterrupted runs, whose folders tests must leave as they are."""
  runs = {}
  for stateful in (False, True):
    folder = tmp_path_factory.mktemp('finished')
    result = _train(model, folder, stateful)
    runs[stateful] = types.SimpleNamespace(
        folder=folder, result=result, snapshot=training_fakes.snapshot(folder)
    )
  return runs


@pytest.fixture
def run(finished, tmp_path):
  """A copy of the run with client states."""
  return shutil.copytree(finished[True].folder, tmp_path / 'run')


class TestConfig:

  @pytest.mark.parametrize(
      ('changes', 'message'),
      [
          (dict(rounds=0), 'rounds=0'),
          (dict(batch_size=0), 'batch_size=0'),
          (dict(clients_per_round=-1), 'clients_per_round=-1'),
          (dict(local_steps=0), 'local_steps=0'),
          (dict(evaluate_every=0), 'evaluate_every=0'),
          (dict(checkpoint_every=0), 'checkpoint_every=0'),
          (dict(local_steps=None), 'exactly one'),
          (dict(local_epochs=1), 'exactly one'),
          (dict(seed=-1), 'seed=-1'),
          (dict(seed=2**32), 'seed=4294967296'),
      ],
  )
  def test_invalid_settings_are_errors(self, changes, message):
    with pytest.raises(ValueError, match=message):
      _config(**changes)

  def test_more_clients_than_there_are(self, model, tmp_path):
    with pytest.raises(ValueError, match='clients_per_round=5 .* at most 4'):
      _train(model, tmp_path / 'run', config=_config(clients_per_round=5))
    assert not (tmp_path / 'run').exists()

  def test_union_of_clients_with_states(self, model, tmp_path):
    with pytest.raises(ValueError, match='train_on_union'):
      _train(model, tmp_path, stateful=True, train_on_union=True)
    config = _config(centralized_batch_size=5)
    with pytest.raises(
        ValueError, match='centralized_batch_size=5 is only for train_on_union'
    ):
      _train(model, tmp_path, config=config)


class TestSampling:

  def _select(self, num_rounds, train_on_union=False, **changes):
    """Returns the data of rounds, and the arguments of their datasets."""
    data = training_fakes.FakeData()
    sampler = sampling.RoundSampler(
        data, _config(**changes), train_on_union=train_on_union
    )
    rounds = [sampler.select(number) for number in range(1, num_rounds + 1)]
    return rounds, data.calls

  def test_distinct_clients_in_the_order_of_the_data(self):
    rounds, calls = self._select(12, clients_per_round=3)

    assert [(call['round_num'], call['client_ids']) for call in calls] == [
        (number, (client_id,))
        for number, selected in enumerate(rounds, start=1)
        for client_id in selected.client_ids
    ]
    all_ids = training_fakes.CLIENT_IDS
    for selected in rounds:
      numbers = selected.client_numbers
      assert numbers == sorted(set(numbers)) and len(numbers) == 3
      assert selected.client_ids == tuple(all_ids[n] for n in numbers)
    assert len({selected.client_ids for selected in rounds}) > 1

  def test_sample_depends_on_seed_and_round_alone(self):
    first, calls = self._select(7)
    again, calls_again = self._select(4)
    other, other_calls = self._select(7, seed=1)

    assert calls[:8] == calls_again
    assert [r.client_ids for r in first[:4]] == [r.client_ids for r in again]
    assert [r.client_ids for r in first] != [r.client_ids for r in other]
    assert {call['seed'] for call in other_calls} == {1}

  def test_all_clients(self):
    _, calls = self._select(1, clients_per_round=None)

    assert calls == [
        dict(
            client_ids=(client_id,),
            seed=0,
            round_num=1,
            batch_size=4,
            local_steps=2,
            local_epochs=None,
            augment=True,
        )
        for client_id in training_fakes.CLIENT_IDS
    ]

  def test_union_is_one_client_with_larger_batches(self):
    _, calls = self._select(
        2,
        train_on_union=True,
        clients_per_round=3,
        local_steps=None,
        local_epochs=2,
    )

    assert [call['round_num'] for call in calls] == [1, 2]
    for call in calls:
      assert len(call['client_ids']) == 3
      assert call['batch_size'] == 12
      assert call['local_epochs'] == 2

  def test_union_has_batches_of_its_own_size(self):
    _, calls = self._select(2, train_on_union=True, centralized_batch_size=5)
    assert [call['batch_size'] for call in calls] == [5, 5]


@pytest.fixture
def evaluated(monkeypatch):
  """The ids of the clients of each evaluation, in a list."""
  ids = []
  original = evaluation.Evaluator.evaluate_each_client

  def evaluate_each_client(self, weights, dataset_fn):
    ids.append(tuple(weights))
    return original(self, weights, dataset_fn)

  monkeypatch.setattr(
      evaluation.Evaluator, 'evaluate_each_client', evaluate_each_client
  )
  return ids


class TestMetrics:

  @training_fakes.both_kinds
  def test_rows(self, finished, stateful):
    result = finished[stateful].result
    path = finished[stateful].folder / 'metrics.csv'

    header, *lines = path.read_text().splitlines()
    assert header == (
        'round,train_loss,train_accuracy,test_loss,test_accuracy,'
        'client_test_loss,client_test_accuracy,client_deviation_accuracy,'
        'client_worst_tenth_accuracy,num_clients,'
        'num_dropped_clients,rejected_rounds,max_update_norm_ratio,'
        'exchanges,megabytes'
    )
    # The initial model, every third round and the last round.
    assert [line.split(',')[0] for line in lines] == ['0', '3', '6', '7']
    assert lines[0].split(',')[1:3] == ['', '']
    assert [row['round'] for row in result.rows] == [0, 3, 6, 7]
    assert result.rows[0]['train_loss'] is None
    assert result.rows[0]['num_clients'] == 0
    assert [row['num_clients'] for row in result.rows[1:]] == [2, 2, 2]
    assert all(row['train_accuracy'] == 0.1 for row in result.rows[1:])
    assert result.resumed_from is None
    for line, row in zip(lines, result.rows, strict=True):
      assert [float(x) if x else None for x in line.split(',')] == [
          row[name] for name in header.split(',')
      ]

  @training_fakes.both_kinds
  def test_test_metrics_are_means_over_the_clients_models(
      self, model, finished, stateful
  ):
    result, folder = finished[stateful].result, finished[stateful].folder
    data = training_fakes.FakeData()
    evaluator = evaluation.Evaluator(model)
    test, client_test = [], []
    for client_id in training_fakes.CLIENT_IDS:
      weights = result.model_weights
      if stateful:
        keras_model = training_fakes.load_client(folder, client_id)
        weights = model.from_keras(keras_model)
      test.append(evaluator.evaluate(weights, data.test_dataset(3)))
      own_data = data.client_test_dataset(client_id, 3)
      client_test.append(evaluator.evaluate(weights, own_data))
    row = result.rows[-1]
    # The last client has no test data.
    for prefix, results in (('', test), ('client_', client_test[:3])):
      for name in ('loss', 'accuracy'):
        np.testing.assert_allclose(
            row[f'{prefix}test_{name}'],
            np.mean([r[name] for r in results]),
            rtol=1e-6,
        )
    initial = evaluator.evaluate(model.initial_weights, data.test_dataset(3))
    np.testing.assert_allclose(
        result.rows[0]['test_loss'], initial['loss'], rtol=1e-6
    )
    assert row['test_loss'] != result.rows[0]['test_loss']

  @training_fakes.both_kinds
  def test_number_of_evaluated_clients_is_bounded(
      self, model, tmp_path, stateful, evaluated
  ):
    config = _config(
        clients_per_round=None,
        max_evaluation_clients=2,
        rounds=2,
        evaluate_every=1,
    )
    _train(model, tmp_path, stateful, config)

    *in_means, third, fourth = evaluated
    assert {len(clients) for clients in in_means} == {2}
    assert len(set(in_means)) == 1
    # At the end, the results of the other clients are in a table.
    assert {*in_means[0], *third, *fourth} == set(training_fakes.CLIENT_IDS)
    with open(tmp_path / 'client_metrics.csv', encoding='utf-8') as file:
      rows = list(csv.DictReader(file))
    # The last client has no test data.
    assert [row['client'] for row in rows] == list(
        training_fakes.CLIENT_IDS[:3]
    )
    assert {row['round'] for row in rows} == {'2'}
    data, evaluator = training_fakes.FakeData(), evaluation.Evaluator(model)
    for row in rows:
      if stateful:
        keras_model = training_fakes.load_client(tmp_path, row['client'])
      else:
        keras_model = keras.models.load_model(tmp_path / 'model/model.keras')
      expected = evaluator.evaluate(
          model.from_keras(keras_model),
          data.client_test_dataset(row['client'], 3),
      )
      assert float(row['loss']) == pytest.approx(expected['loss'], rel=1e-6)
      assert int(row['num_examples']) == expected['num_examples']

  def test_of_many_clients_some_are_in_the_table(
      self, model, tmp_path, monkeypatch
  ):
    monkeypatch.setattr(measures, 'MAX_TABLE_CLIENTS', 3)
    config = _config(clients_per_round=None, max_evaluation_clients=2, rounds=1)
    _train(model, tmp_path, config=config)
    with open(tmp_path / 'client_metrics.csv', encoding='utf-8') as file:
      assert 1 <= len(list(csv.DictReader(file))) <= 2

  def test_only_sampled_clients_are_evaluated(self, model, tmp_path, evaluated):
    config = _config(clients_per_round=1, rounds=1, evaluate_every=1)
    data = training_fakes.FakeData()
    _train(model, tmp_path, True, config, data=data)

    # Round 0: all clients; round 1: twice the sampled client.
    sampled = data.calls[0]['client_ids']
    assert evaluated == [training_fakes.CLIENT_IDS, sampled, sampled]

  def test_costs_are_those_of_the_sampled_clients(
      self, model, tmp_path, monkeypatch
  ):
    class FakeTraffic:

      def __init__(self, process):
        assert isinstance(process, training_fakes.FakeProcess)

      def until(self, round_num, num_clients, _):
        return dict(exchanges=3 * round_num, megabytes=num_clients * round_num)

    monkeypatch.setattr(communication, 'ProcessTraffic', FakeTraffic)

    config = _config(rounds=3, evaluate_every=1)
    result = _train(model, tmp_path, config=config)

    assert [row['exchanges'] for row in result.rows] == [0, 3, 6, 9]
    assert [row['megabytes'] for row in result.rows] == [0, 2, 4, 6]

  def test_training_on_the_union_sends_nothing(self, model, tmp_path):
    config = _config(rounds=1)
    result = _train(model, tmp_path, config=config, train_on_union=True)

    assert {row['exchanges'] for row in result.rows} == {0}
    assert {row['megabytes'] for row in result.rows} == {0}

  def test_clients_without_test_data(self, model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        training_fakes.FakeData,
        'client_test_dataset',
        lambda self, client_id, batch_size: self._batches([1], 0, batch_size),
    )

    result = _train(model, tmp_path, config=_config(rounds=1))

    assert {row['client_test_loss'] for row in result.rows} == {None}

  def test_tensorboard(self, finished):
    result, folder = finished[False].result, finished[False].folder
    scalars = collections.defaultdict(dict)
    for path in (folder / 'logdir').iterdir():
      for event in tf.compat.v1.train.summary_iterator(os.fspath(path)):
        for value in event.summary.value:
          scalars[value.tag][event.step] = tf.make_ndarray(value.tensor)
    for tag, column in (
        ('train/loss', 'train_loss'),
        ('test/accuracy', 'test_accuracy'),
        ('client_test/loss', 'client_test_loss'),
    ):
      expected = {
          row['round']: row[column]
          for row in result.rows
          if row[column] is not None
      }
      assert scalars[tag].keys() == expected.keys()
      for step, value in expected.items():
        np.testing.assert_allclose(scalars[tag][step], value, rtol=1e-6)

  def test_vectors_have_a_column_for_each_entry(self, tmp_path, monkeypatch):
    model = training_fakes.build_model(lambda: [F1OfClasses()])
    original = training_fakes._metrics

    def with_vector(*args):
      metrics = original(*args)
      metrics['client_work']['train']['f1'] = np.array([0.25, 0.75])
      return metrics

    monkeypatch.setattr(training_fakes, '_metrics', with_vector)
    hooked = []

    @contextlib.contextmanager
    def hook(run):
      del run
      yield hooked.append

    config = _config(rounds=1)
    result = _train(model, tmp_path, config=config, metrics_hook=hook)

    with open(tmp_path / 'metrics.csv', encoding='utf-8') as file:
      rows = list(csv.DictReader(file))
    assert [name for name in rows[0] if 'f1' in name] == [
        f'{part}_f1_{entry}'
        for part in ('train', 'test', 'client_test')
        for entry in (0, 1)
    ] + ['client_deviation_f1_0', 'client_worst_tenth_f1_0']
    last = rows[-1]
    assert (last['train_f1_0'], last['train_f1_1']) == ('0.25', '0.75')
    assert hooked[-1] == result.rows[-1]
    data = training_fakes.FakeData()
    keras_model = keras.models.load_model(tmp_path / 'model' / 'model.keras')
    metric = F1OfClasses()
    for x, y in data.test_dataset(256):
      metric.update_state(y, keras_model(x))
    assert [float(last[f'test_f1_{entry}']) for entry in (0, 1)] == (
        pytest.approx(metric.result(), rel=1e-6)
    )
    with open(tmp_path / 'client_metrics.csv', encoding='utf-8') as file:
      clients = list(csv.DictReader(file))
    for entry in (0, 1):
      assert np.mean([float(row[f'f1_{entry}']) for row in clients]) == (
          pytest.approx(result.rows[-1][f'client_test_f1_{entry}'], rel=1e-6)
      )
    (events,) = (tmp_path / 'logdir').iterdir()
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(os.fspath(events))
        for value in event.summary.value
    }
    assert {'train/f1_0', 'test/f1_1', 'client_test/f1_1'} <= tags

  def test_plain_progress_lines_and_unknown_costs(
      self, model, tmp_path, capfd, caplog
  ):
    # The process is Python, not TFF.
    result = _train(model, tmp_path)

    assert {row['exchanges'] for row in result.rows[1:]} == {None}
    assert {row['megabytes'] for row in result.rows[1:]} == {None}
    warnings = [r for r in caplog.records if 'megabytes' in r.getMessage()]
    assert len(warnings) == 1
    output = capfd.readouterr()
    lines = output.err.splitlines()
    shown = [line.split()[1] for line in lines if line.startswith('round ')]
    assert shown == ['0/7', '3/7', '6/7', '7/7']
    assert 'train_loss' in lines[-1]
    assert 'test_accuracy' in lines[-1]
    assert not output.out

  def test_no_progress_with_errors_only(self, model, tmp_path, capfd):
    logging.set_verbosity(logging.ERROR)
    _train(model, tmp_path, config=_config(rounds=1))

    assert not capfd.readouterr().err


class TestFinalModel:

  def test_clients_models_and_their_merger(self, model, finished):
    result, folder = finished[True].result, finished[True].folder
    clients = [
        model.from_keras(training_fakes.load_client(folder, client_id))
        for client_id in training_fakes.CLIENT_IDS
    ]
    merged = model.from_keras(
        keras.models.load_model(folder / 'model/model.keras')
    )
    means = np.array([c.non_trainable[0] for c in clients], np.float64)
    variances = np.array([c.non_trainable[1] for c in clients], np.float64)
    assert len({mean.tobytes() for mean in means}) == len(clients)
    np.testing.assert_allclose(
        merged.non_trainable[0], means.mean(0), rtol=1e-6
    )
    np.testing.assert_allclose(
        merged.non_trainable[1],
        variances.mean(0) + means.var(0),
        rtol=1e-6,
    )
    for merged_value, value in zip(
        merged.trainable, result.state['weights'].trainable
    ):
      np.testing.assert_array_equal(merged_value, value)


def _states(run_dir):
  """Returns the bytes of the clients' states."""
  with client_state_store.ClientStateStore(
      run_dir / 'client_states.sqlite'
  ) as store:
    return {
        client_id: client_state_codec.encode_state(store.get(client_id))
        for client_id in store.client_ids()
    }


def test_client_that_is_not_sampled_keeps_its_state_to_the_bit(model, run):
  before, data = _states(run), training_fakes.FakeData()

  _train(model, run, True, _config(rounds=8), data=data)

  after = _states(run)
  sampled = {i for call in data.calls for i in call['client_ids']}
  assert len(sampled) == 2
  assert before.keys() == after.keys() == set(training_fakes.CLIENT_IDS)
  changed = {c for c in before if before[c] != after[c]}
  assert changed == sampled


# All functions that change a run's folder.
_WRITES = (
    (client_state_store.ClientStateStore, 'put_many'),
    (client_state_store.ClientStateStore, 'commit'),
    (client_state_store.ClientStateStore, 'prune'),
    (keras.Model, 'save'),
    (np, 'savez'),
    (os, 'replace'),
    (os, 'rename'),
    (os, 'mkdir'),
    (shutil, 'rmtree'),
)


def _call_after_every_write(monkeypatch, fn):
  def wrap(owner, name):
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
      result = original(*args, **kwargs)
      fn()
      return result

    monkeypatch.setattr(owner, name, wrapper)

  for owner, name in _WRITES:
    wrap(owner, name)


class TestResume:

  @training_fakes.both_kinds
  def test_finished_run_returns_its_results(
      self, model, tmp_path, stateful, finished
  ):
    first = finished[stateful].result
    run = shutil.copytree(finished[stateful].folder, tmp_path / 'run')
    files = {
        path: path.stat().st_mtime_ns
        for path in run.rglob('*')
        if path.is_file() and path.name != 'client_states.sqlite'
    }
    process = training_fakes.build_process(model, stateful)

    again = _train(model, run, process=process)

    assert process.rounds == []
    assert again.resumed_from == 7
    assert again.rows == first.rows
    for a, b in zip(
        tf.nest.flatten((first.state, first.model_weights)),
        tf.nest.flatten((again.state, again.model_weights)),
    ):
      assert type(a) is type(b)
      assert np.asarray(a).dtype == np.asarray(b).dtype
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for path, modified in files.items():
      assert path.stat().st_mtime_ns == modified
    assert training_fakes.snapshot(run) == finished[stateful].snapshot

  @pytest.mark.parametrize(
      ('stateful', 'fail_in_round'), [(True, 1), (False, 4), (True, 7)]
  )
  def test_interrupted_run_continues_after_its_last_checkpoint(
      self, model, tmp_path, stateful, fail_in_round, finished
  ):
    process = training_fakes.build_process(
        model, stateful, fail_in_round=fail_in_round
    )
    with pytest.raises(KeyboardInterrupt):
      _train(model, tmp_path, process=process)
    assert not (tmp_path / 'model').exists()

    result = _train(model, tmp_path, stateful)

    # The last round was saved although no checkpoint was due.
    assert result.resumed_from == fail_in_round - 1
    assert training_fakes.snapshot(tmp_path) == finished[stateful].snapshot

  def test_death_after_every_write(self, model, tmp_path):
    config = _config(rounds=3, evaluate_every=2, save_client_models='sampled')
    run_dir = tmp_path / 'run'
    copies = []
    copytree = shutil.copytree
    is_copying = False
    num_writes = 0

    def copy():
      # The files that a killed process would leave.
      nonlocal is_copying, num_writes
      if is_copying or not run_dir.exists():
        return
      num_writes += 1
      # Writes that follow each other leave the same, but for one file.
      if num_writes % 3 != 2:
        return
      is_copying = True
      copies.append(tmp_path / f'copy {len(copies)}')
      copytree(run_dir, copies[-1])
      is_copying = False

    with pytest.MonkeyPatch.context() as monkeypatch:
      _call_after_every_write(monkeypatch, copy)
      _train(model, run_dir, True, config)
    assert num_writes > 40

    expected = training_fakes.snapshot(run_dir)
    for path in copies:
      _train(model, path, True, config)

      assert not list(path.rglob('*.part'))
      assert training_fakes.snapshot(path) == expected

  def test_more_rounds_later(self, model, tmp_path, finished):
    run_dir = tmp_path / 'lr[0.1]*?{a,b}'
    fewer = _config(rounds=4)
    assert _run_rounds(model, run_dir, True, fewer) == [1, 2, 3, 4]

    assert _run_rounds(model, run_dir, True) == [5, 6, 7]

    # Round 4 is no longer the last round and has no row.
    assert training_fakes.snapshot(run_dir) == finished[True].snapshot

  def test_fewer_rounds_later(self, model, run):
    with pytest.raises(ValueError, match='rounds=6'):
      _train(model, run, True, _config(rounds=6))

  def test_missing_model_is_saved_again(self, model, run, finished):
    shutil.rmtree(run / 'model')

    assert _run_rounds(model, run, stateful=True) == []

    assert training_fakes.snapshot(run) == finished[True].snapshot

  def test_metrics_are_restored_from_the_checkpoint(
      self, model, run, finished, caplog
  ):
    (run / 'metrics.csv').write_bytes(bytes(range(256)))

    assert _run_rounds(model, run, stateful=True) == []

    assert 'is written again, from the checkpoint' in caplog.text
    assert training_fakes.snapshot(run) == finished[True].snapshot

  def test_metrics_of_another_run_are_not_overwritten(self, model, tmp_path):
    path = tmp_path / 'metrics.csv'
    path.write_text('round,mine\n1,2\n')

    with pytest.raises(ValueError, match='none of its checkpoints'):
      _train(model, tmp_path)
    assert path.read_text() == 'round,mine\n1,2\n'

  def test_checkpoints_of_another_model_are_an_error(self, model, finished):
    folder = finished[False].folder
    other = training_fakes.FakeStatelessProcess(model)
    other.initialize = lambda: dict(x=np.zeros([3]))
    before = training_fakes.files(folder)

    with pytest.raises(ValueError, match='another model or algorithm'):
      _train(model, folder, process=other)
    assert training_fakes.files(folder) == before

  def test_run_in_progress_is_an_error(self, model, tmp_path):
    process = training_fakes.build_process(model, False)
    errors = []

    def train_again():
      with pytest.raises(ValueError, match='in progress') as error:
        _train(model, tmp_path)
      errors.append(error)

    _observe(process, train_again)
    _train(model, tmp_path, config=_config(rounds=1), process=process)

    assert len(errors) == 1


def _truncate(path):
  os.truncate(path, path.stat().st_size // 2)


def _empty(path):
  path.write_bytes(b'')


def _remove(path):
  path.unlink()


def _flip_bits(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def _change_a_value(path):
  """Writes a valid file, but with another array."""
  with np.load(path) as arrays:
    values = dict(arrays)
  name = next(iter(values))
  np.savez(path, **{**values, name: values[name] + 1})


def _remove_folder(path):
  shutil.rmtree(path.parent)
  path.parent.mkdir()


def _execute(statement, run):
  """Changes the client states of a run."""
  with contextlib.closing(
      sqlite3.connect(run / 'client_states.sqlite')
  ) as connection:
    assert connection.execute(statement).rowcount
    connection.commit()


def _truncate_all(run):
  for path in run.glob('checkpoints/*/state.npz'):
    _truncate(path)


def _replace_format(run):
  path = run / 'checkpoints/round_7/manifest.json'
  path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


# What is done to a run's folder, and why the run cannot be continued.
_UNUSABLE = {
    'all checkpoints damaged': (
        _truncate_all,
        'No checkpoint .* another folder',
    ),
    'lost checkpoints': (
        lambda run: shutil.rmtree(run / 'checkpoints'),
        'none of its checkpoints',
    ),
    'newer format': (_replace_format, 'has the format 2'),
    'lost client states': (
        lambda run: (run / 'client_states.sqlite').unlink(),
        'No checkpoint .* can be used',
    ),
    **{
        statement: (
            functools.partial(_execute, statement),
            'No checkpoint .* can be used',
        )
        for statement in (
            "DELETE FROM states WHERE client_id = 'anna'",
            "UPDATE states SET client_id = 'emil' WHERE client_id = 'anna'",
            "UPDATE OR REPLACE states SET round = 1 WHERE client_id = 'anna'",
            "UPDATE states SET state = CAST(substr(state, 1, 40) || x'00' ||"
            " substr(state, 42) AS BLOB) WHERE client_id = 'anna'",
        )
    },
}


def _fails(model, run, match):
  """Checks that a run cannot be continued, and that no checkpoint is lost."""
  before = training_fakes.files(run / 'checkpoints')
  metrics = (run / 'metrics.csv').read_bytes()
  with pytest.raises(
      (ValueError, client_state_store.ClientStateStoreError), match=match
  ):
    _train(model, run, stateful=True)
  assert training_fakes.files(run / 'checkpoints') == before
  assert (run / 'metrics.csv').read_bytes() == metrics


class TestDamagedCheckpoints:

  @pytest.mark.parametrize(
      ('file', 'damage'),
      [
          ('state.npz', _truncate),
          ('state.npz', _flip_bits),
          ('state.npz', _remove),
          ('state.npz', _change_a_value),
          ('manifest.json', _empty),
          ('manifest.json', _flip_bits),
          ('manifest.json', _remove_folder),
      ],
  )
  def test_damage_is_found(self, run, damage, file):
    folder = checkpoint_files.CheckpointFolder(run / 'checkpoints')
    folder.read(7)
    damage(run / 'checkpoints/round_7' / file)
    with pytest.raises(manifests.DamagedError, match='round_7'):
      folder.read(7)

  def test_no_changed_byte_is_overlooked(self, tmp_path):
    folder = checkpoint_files.CheckpointFolder(tmp_path)
    arrays = [np.arange(3.0), np.array(True), np.zeros([0, 2], np.float32)]
    folder.write(4, arrays, {'answer': 42})
    path = tmp_path / 'round_4/state.npz'
    content = path.read_bytes()
    num_damaged = 0
    for place in range(len(content)):
      for change in (0x01, 0x80):
        data = bytearray(content)
        data[place] ^= change
        path.write_bytes(data)
        try:
          found, _ = folder.read(4)
        except manifests.DamagedError:
          num_damaged += 1
        else:  # Such as the time at which the archive was made.
          for a, b in zip(found, arrays, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert num_damaged > len(content) / 2

  def test_large_arrays_are_in_memory_once(self, tmp_path):
    folder = checkpoint_files.CheckpointFolder(tmp_path)
    arrays = [np.full(2**22, number, np.float64) for number in range(4)]
    num_bytes = sum(array.nbytes for array in arrays)
    tracemalloc.start()
    try:
      folder.write(0, arrays, {})
      _, most_in_writing = tracemalloc.get_traced_memory()
      tracemalloc.reset_peak()
      found, _ = folder.read(0)
      _, most_in_reading = tracemalloc.get_traced_memory()
    finally:
      tracemalloc.stop()
    assert most_in_writing < 0.5 * num_bytes
    assert num_bytes <= most_in_reading < 1.4 * num_bytes
    np.testing.assert_array_equal(found, arrays)

  @pytest.mark.parametrize('file', ['state.npz', 'manifest.json'])
  def test_previous_checkpoint_is_used(
      self, model, run, finished, caplog, file
  ):
    _flip_bits(run / 'checkpoints/round_7' / file)

    result = _train(model, run, stateful=True)

    assert result.resumed_from == 6
    assert 'round_7' in caplog.text
    assert 'the one before it is used' in caplog.text
    assert training_fakes.snapshot(run) == finished[True].snapshot
    assert (run / 'checkpoints/unusable_round_7').exists()

  @pytest.mark.parametrize('case', _UNUSABLE)
  def test_unusable_runs_are_left_alone(self, model, run, case):
    damage, message = _UNUSABLE[case]
    damage(run)
    _fails(model, run, message)

  @pytest.mark.parametrize('name', ['state.npz', 'manifest.json', 'metrics'])
  def test_files_that_can_not_be_read_now_are_kept(
      self, model, run, name, finished, monkeypatch
  ):
    """A file that can't be read at present may be intact."""
    before = training_fakes.files(run)
    read_bytes = pathlib.Path.read_bytes

    def fail(path):
      if name in path.name and 'model' not in path.parts[-2]:
        raise OSError(errno.EIO, 'Input/output error', str(path))
      return read_bytes(path)

    open_member = zipfile.ZipFile.open

    def fail_in_archive(archive, member, mode='r', **options):
      if mode == 'r' and name in archive.filename:
        raise OSError(errno.EIO, 'Input/output error')
      return open_member(archive, member, mode, **options)

    with monkeypatch.context() as context:
      context.setattr(pathlib.Path, 'read_bytes', fail)
      context.setattr(zipfile.ZipFile, 'open', fail_in_archive)
      with pytest.raises(OSError, match=f'Input/output error: .*{name}'):
        _train(model, run, stateful=True)

    assert training_fakes.files(run) == before
    assert _run_rounds(model, run, stateful=True) == []
    assert training_fakes.snapshot(run) == finished[True].snapshot

  def test_older_format_is_an_error(self, model, tmp_path):
    checkpoint = tmp_path / 'checkpoints/round_4'
    checkpoint.mkdir(parents=True)
    (checkpoint / 'saved_model.pb').write_bytes(b'graph')

    with pytest.raises(ValueError, match='earlier version .* another folder'):
      _train(model, tmp_path)
    assert (checkpoint / 'saved_model.pb').read_bytes() == b'graph'


class TestServerAndClientsTogether:
  """A crash between the two writes of a checkpoint, in both orders."""

  def test_client_states_without_their_checkpoint_are_forgotten(
      self, model, run, finished
  ):
    shutil.rmtree(run / 'checkpoints/round_7')

    result = _train(model, run, stateful=True)

    assert result.resumed_from == 6
    assert training_fakes.snapshot(run) == finished[True].snapshot

  def test_checkpoint_without_its_client_states_is_not_used(
      self, model, run, finished, caplog
  ):
    # As before the commit of round 7.
    with client_state_store.ClientStateStore(
        run / 'client_states.sqlite'
    ) as store:
      store.forget_after(6)

    result = _train(model, run, stateful=True)

    assert result.resumed_from == 6
    assert "the clients' states do not belong to its round" in caplog.text
    assert training_fakes.snapshot(run) == finished[True].snapshot

  def test_older_checkpoints_beside_newer_client_states(
      self, model, run, tmp_path
  ):
    _train(model, tmp_path / 'older', True, _config(rounds=3))
    shutil.rmtree(run / 'checkpoints')
    shutil.copytree(tmp_path / 'older/checkpoints', run / 'checkpoints')

    _fails(model, run, 'No checkpoint .* can be used')

  def test_client_states_of_another_run(self, model, run, tmp_path):
    _train(model, tmp_path / 'other', True, _config(rounds=1, seed=1))
    shutil.copy(tmp_path / 'other/client_states.sqlite', run)

    _fails(model, run, 'a run with other settings')

  def test_every_kept_checkpoint_has_its_client_states(self, model, tmp_path):
    config = _config(rounds=20, checkpoint_every=3, evaluate_every=20)
    history = {}

    class Recording(training_fakes.FakeStatefulProcess):

      def next(self, state, client_states, datasets):
        output = super().next(state, client_states, datasets)
        history[len(self.rounds)] = output.client_states
        return output

    data = training_fakes.FakeData()
    _train(model, tmp_path, config=config, data=data, process=Recording(model))
    sampled = collections.defaultdict(list)
    for call in data.calls:
      sampled[call['round_num']] += call['client_ids']

    kept = sorted(
        int(name.removeprefix('round_'))
        for name in os.listdir(tmp_path / 'checkpoints')
    )
    assert kept == [15, 18, 20]
    with client_state_store.ClientStateStore(
        tmp_path / 'client_states.sqlite'
    ) as store:
      for round_num in kept:
        expected = {}
        for r in range(1, round_num + 1):
          expected.update(zip(sampled[r], history[r]))
        for client_id, state in expected.items():
          assert client_state_codec.encode_state(
              store.get(client_id, round_num)
          ) == client_state_codec.encode_state(state)
      # Not more than one version for each checkpoint.
      for client_id in store.client_ids():
        versions = {
            client_state_codec.encode_state(store.get(client_id, r))
            for r in range(15, 21)
        }
        assert len(versions) <= 3


@pytest.fixture
def interruptible():
  """Makes Ctrl-C raise KeyboardInterrupt, even under `nohup`."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


class TestEventLoops:

  def test_inside_a_running_event_loop(self, model, tmp_path, finished):
    class Context(tff.framework.SyncContext):

      def invoke(self, comp, arg):
        raise NotImplementedError

    context, contexts = Context(), []
    process = training_fakes.build_process(model, stateful=True)
    _observe(
        process,
        lambda: contexts.append(tff.framework.get_context_stack().current),
    )

    async def notebook_cell():
      with tff.framework.get_context_stack().install(context):
        return _train(model, tmp_path, process=process)

    result = asyncio.run(notebook_cell())

    assert result.rows[-1]['round'] == 7
    assert training_fakes.snapshot(tmp_path) == finished[True].snapshot
    for path in (tmp_path / 'model').rglob('*.keras'):
      assert zipfile.is_zipfile(path)  # Not HDF5.
    # The context is the caller's.
    assert set(contexts) == {context}

  @pytest.mark.usefixtures('interruptible')
  def test_claimed_folder_inside_a_running_event_loop(self, model, tmp_path):
    """As a program that is called in a notebook claims it."""

    async def call():
      with folder_lock.claim(tmp_path):
        return _train(model, tmp_path, config=_config(rounds=1))

    assert asyncio.run(call()).rows[-1]['round'] == 1

  @pytest.mark.usefixtures('interruptible')
  def test_interrupt_inside_a_running_event_loop(self, model, tmp_path):
    process = training_fakes.build_process(model, False)
    main_thread = threading.get_ident()

    def interrupt():
      if len(process.rounds) == 2:
        signal.pthread_kill(main_thread, signal.SIGINT)

    _observe(process, interrupt)

    async def notebook_cell():
      _train(model, tmp_path, config=_config(rounds=2_000), process=process)

    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
      loop.run_until_complete(notebook_cell())
    loop.close()

    assert 3 <= len(process.rounds) < 2_000

  def test_event_loop_of_the_caller_is_kept(self, model, tmp_path):
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
      _train(model, tmp_path, config=_config(rounds=1))

      assert asyncio.get_event_loop() is loop
    finally:
      asyncio.set_event_loop(None)
      loop.close()

  @pytest.mark.usefixtures('interruptible')
  def test_interrupted_checkpoint_is_written_again(
      self, model, tmp_path, monkeypatch
  ):
    original = np.savez
    saved = []

    def interrupted_save(*args, **kwargs):
      saved.append(args)
      if len(saved) == 2:
        signal.raise_signal(signal.SIGINT)
      original(*args, **kwargs)

    monkeypatch.setattr(np, 'savez', interrupted_save)
    with pytest.raises(KeyboardInterrupt):
      _train(model, tmp_path)

    assert sorted(os.listdir(tmp_path / 'checkpoints')) == [
        'round_0',
        'round_2',
    ]
    assert len(saved) == 3

  def test_after_another_event_loop_was_closed(self, model, tmp_path):
    async def nothing():
      pass

    asyncio.run(nothing())

    result = _train(model, tmp_path, config=_config(rounds=1))
    assert result.rows[-1]['round'] == 1


def _log(folder):
  return metrics_log.MetricsLog(
      folder,
      metric_names=[],
      is_due=lambda round_num: True,
      num_rounds=100,
      costs_fn=lambda *_: {},
  )


def _manager(folder, last_round=7, every=3, **kwargs):
  return checkpoints.CheckpointManager(
      folder / 'checkpoints',
      every=every,
      last_round=last_round,
      identity=run_identity.RunIdentity(
          {}, 'data', {'types': 'types', 'initial': 'initial'}
      ),
      log=_log(folder),
      **kwargs,
  )


class TestCheckpointManager:

  @pytest.mark.parametrize('version', [0, 3, 6, 7])
  def test_only_due_rounds_are_saved(self, tmp_path, version):
    manager = _manager(tmp_path)
    for round_num in range(version + 1):
      asyncio.run(manager.save([np.int32(round_num)], round_num))

    versions = asyncio.run(manager.get_versions())
    assert versions[-1] == version
    assert set(versions) <= {0, 3, 6, 7}
    assert len(versions) <= 3
    state, round_num = asyncio.run(manager.load_latest([np.int32(5)]))
    assert round_num == version
    assert state[0] == version
    assert isinstance(state[0], np.int32)

  def _saved(self, folder, states, **kwargs):
    """Saves all rounds, and returns the rounds whose checkpoints are kept."""
    manager = _manager(folder, last_round=100, every=1, **kwargs)
    for round_num, state in enumerate(states):
      asyncio.run(manager.save([np.int32(state)], round_num))
    return asyncio.run(manager.get_versions())

  def test_last_usable_checkpoint_is_kept(self, tmp_path):
    # All rounds after round 5 fail, so the model of round 5 is not usable. The
    # last usable checkpoint is from round 4.
    failed = [0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5]
    kept = self._saved(
        tmp_path, failed, failed_rounds=lambda state: int(state[0])
    )
    assert kept == [4, 8, 9, 10]

  def test_last_finite_checkpoint_is_kept(self, tmp_path):
    is_finite = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    kept = self._saved(
        tmp_path, is_finite, is_finite=lambda state: bool(state[0])
    )
    assert kept == [3, 7, 8, 9]

  def test_nothing_saved(self, tmp_path):
    manager = _manager(tmp_path)

    assert asyncio.run(manager.load_latest([np.int32(5)])) == (None, 0)
    assert manager.resumed_from is None


class TestKill:

  @pytest.mark.slow
  def test_kill_at_random_moments(self, model, tmp_path):
    config = _config(rounds=24, evaluate_every=2, checkpoint_every=1)
    _train(model, tmp_path / 'uninterrupted', True, config)
    run_dir = tmp_path / 'killed'
    command = [
        sys.executable,
        training_fakes.__file__,
        os.fspath(run_dir),
        'stateful',
        json.dumps(dataclasses.asdict(config)),
    ]
    delays = random.Random(0)
    num_killed = 0
    for _ in range(2):
      process = subprocess.Popen(
          command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
      )
      try:
        for line in process.stderr:
          if line.startswith('round '):
            break
        time.sleep(delays.uniform(0.0, 0.7))
      finally:
        process.kill()
        num_killed += process.wait() == -signal.SIGKILL
        process.stderr.close()
    assert num_killed

    result = _train(model, run_dir, True, config)

    assert result.resumed_from is not None
    assert training_fakes.snapshot(run_dir) == training_fakes.snapshot(
        tmp_path / 'uninterrupted'
    )
    assert not [
        path for path in run_dir.rglob('*') if path.name.endswith('.part')
    ]
