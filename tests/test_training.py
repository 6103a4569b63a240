"""Tests for the training loop, with processes that need no TFF runtime."""

import asyncio
import collections
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import training_fakes

from tff_bn import checkpoints
from tff_bn import client_state_store
from tff_bn import evaluation
from tff_bn import metrics_log
from tff_bn import runtime
from tff_bn import training
from tff_bn.analysis import communication

_CONFIG = training.TrainingConfig(
    rounds=7,
    batch_size=4,
    local_steps=2,
    clients_per_round=2,
    evaluate_every=3,
    checkpoint_every=2,
)
_both_kinds = pytest.mark.parametrize(
    'stateful', [False, True], ids=['stateless', 'stateful']
)


@pytest.fixture(scope='module')
def model():
  return training_fakes.build_model()


def _train(model, run_dir, stateful=False, config=_CONFIG, **kwargs):
  return training.train(
      training_fakes.build_process(model, stateful),
      model,
      training_fakes.FakeData(),
      config,
      run_dir,
      **kwargs,
  )


def _weights_bits(path):
  keras_model = tf.keras.models.load_model(path)
  return [w.tobytes() for w in keras_model.get_weights()]


def _snapshot(run_dir):
  """What must not depend on how often a run was stopped."""
  models = sorted((run_dir / 'model').rglob('*.keras'))
  assert models
  return (
      (run_dir / 'metrics.csv').read_bytes(),
      {p.relative_to(run_dir).as_posix(): _weights_bits(p) for p in models},
  )


def _run_rounds(model, run_dir, stateful, config=_CONFIG):
  """Trains and returns the numbers of the rounds that were run."""
  process = training_fakes.build_process(model, stateful)
  training.train(process, model, training_fakes.FakeData(), config, run_dir)
  return process.rounds


@pytest.fixture(scope='module')
def uninterrupted(model, tmp_path_factory):
  """Snapshots of uninterrupted runs with `_CONFIG`."""
  snapshots = {}
  for stateful in (False, True):
    run_dir = tmp_path_factory.mktemp('uninterrupted')
    _train(model, run_dir, stateful)
    snapshots[stateful] = _snapshot(run_dir)
  return snapshots


class TestConfig:

  @pytest.mark.parametrize(
      ('changes', 'message'),
      [
          (dict(rounds=0), '--rounds=0'),
          (dict(batch_size=0), '--batch_size=0'),
          (dict(clients_per_round=-1), '--clients_per_round=-1'),
          (dict(local_steps=0), '--local_steps=0'),
          (dict(evaluate_every=0), '--evaluate_every=0'),
          (dict(checkpoint_every=0), '--checkpoint_every=0'),
          (dict(local_steps=None), 'exactly one'),
          (dict(local_epochs=1), 'exactly one'),
          (dict(seed=-1), '--seed=-1'),
          (dict(seed=2**32), '--seed=4294967296'),
      ],
  )
  def test_what_makes_no_sense_is_refused(self, changes, message):
    with pytest.raises(ValueError, match=message):
      dataclasses.replace(_CONFIG, **changes)

  def test_more_clients_than_there_are(self, model, tmp_path):
    config = dataclasses.replace(_CONFIG, clients_per_round=5)

    with pytest.raises(ValueError, match='--clients_per_round=5 .* at most 4'):
      _train(model, tmp_path / 'run', config=config)
    assert not (tmp_path / 'run').exists()

  def test_union_of_clients_that_keep_something(self, model, tmp_path):
    with pytest.raises(ValueError, match='train_on_union'):
      _train(model, tmp_path, stateful=True, train_on_union=True)


class TestSampling:

  def _calls(self, model, run_dir, config=_CONFIG, **kwargs):
    data = training_fakes.FakeData()
    training.train(
        training_fakes.build_process(model, False),
        model,
        data,
        config,
        run_dir,
        **kwargs,
    )
    return data.calls

  def test_distinct_clients_in_the_order_of_the_data(self, model, tmp_path):
    config = dataclasses.replace(_CONFIG, rounds=12, clients_per_round=3)
    calls = self._calls(model, tmp_path, config)

    rounds = collections.defaultdict(list)
    for call in calls:
      rounds[call['round_num']].extend(call['client_ids'])
    assert list(rounds) == list(range(1, 13))
    for ids in rounds.values():
      assert len(set(ids)) == 3
      assert ids == [i for i in training_fakes.CLIENT_IDS if i in ids]
    assert len({tuple(ids) for ids in rounds.values()}) > 1

  def test_sample_depends_on_seed_and_round_alone(self, model, tmp_path):
    first = self._calls(model, tmp_path / 'first')
    again = self._calls(model, tmp_path / 'again')
    other = self._calls(
        model, tmp_path / 'other', dataclasses.replace(_CONFIG, seed=1)
    )

    assert first == again
    assert [c['client_ids'] for c in first] != [c['client_ids'] for c in other]
    assert {call['seed'] for call in other} == {1}

  def test_all_clients(self, model, tmp_path):
    config = dataclasses.replace(_CONFIG, rounds=1, clients_per_round=None)

    calls = self._calls(model, tmp_path, config)

    assert calls == [
        dict(
            client_ids=(client_id,),
            seed=0,
            round_num=1,
            batch_size=4,
            local_steps=2,
            local_epochs=None,
        )
        for client_id in training_fakes.CLIENT_IDS
    ]

  def test_union_is_one_client_with_larger_batches(self, model, tmp_path):
    config = dataclasses.replace(
        _CONFIG, rounds=2, clients_per_round=3, local_steps=None, local_epochs=2
    )

    calls = self._calls(model, tmp_path, config, train_on_union=True)

    assert [call['round_num'] for call in calls] == [1, 2]
    for call in calls:
      assert len(call['client_ids']) == 3
      assert call['batch_size'] == 12
      assert call['local_epochs'] == 2


class TestMetrics:

  @_both_kinds
  def test_rows(self, model, tmp_path, stateful):
    result = _train(model, tmp_path, stateful)

    header, *lines = (tmp_path / 'metrics.csv').read_text().splitlines()
    assert header == (
        'round,train_loss,train_accuracy,test_loss,test_accuracy,'
        'client_test_loss,client_test_accuracy,num_clients,'
        'num_dropped_clients,exchanges,megabytes'
    )
    # Every third round, the initial model, and the last round.
    assert [line.split(',')[0] for line in lines] == ['0', '3', '6', '7']
    assert lines[0].split(',')[1:3] == ['', '']
    assert [row['round'] for row in result.rows] == [0, 3, 6, 7]
    assert result.rows[0]['train_loss'] is None
    assert result.rows[0]['num_clients'] == 0
    assert [row['num_clients'] for row in result.rows[1:]] == [2, 2, 2]
    assert all(row['train_accuracy'] == 0.1 for row in result.rows[1:])
    assert result.resumed_from is None
    read = metrics_log.read_rows(tmp_path / 'metrics.csv', header.split(','))
    assert read == list(result.rows)

  def test_stateless_test_metrics_are_the_servers_models(self, model, tmp_path):
    result = _train(model, tmp_path)

    data = training_fakes.FakeData()
    evaluator = evaluation.Evaluator(model)
    expected = evaluator.evaluate(result.model_weights, data.test_dataset(3))
    per_client = [
        evaluator.evaluate(
            result.model_weights, data.client_test_dataset(client_id, 3)
        )
        for client_id in training_fakes.CLIENT_IDS[:3]
    ]
    row = result.rows[-1]
    np.testing.assert_allclose(row['test_loss'], expected['loss'], rtol=1e-6)
    np.testing.assert_allclose(row['test_accuracy'], expected['accuracy'])
    for name in ('loss', 'accuracy'):
      np.testing.assert_allclose(
          row[f'client_test_{name}'],
          np.mean([r[name] for r in per_client]),
          rtol=1e-6,
      )
    initial = evaluator.evaluate(model.initial_weights, data.test_dataset(3))
    np.testing.assert_allclose(
        result.rows[0]['test_loss'], initial['loss'], rtol=1e-6
    )
    assert row['test_loss'] != result.rows[0]['test_loss']

  def test_stateful_test_metrics_are_means_over_the_clients_models(
      self, model, tmp_path
  ):
    result = _train(model, tmp_path, stateful=True)

    data = training_fakes.FakeData()
    evaluator = evaluation.Evaluator(model)
    test, client_test = [], []
    for client_id in training_fakes.CLIENT_IDS:
      path = tmp_path / 'model/clients' / training.client_file_name(client_id)
      weights = model.from_keras(tf.keras.models.load_model(path))
      test.append(evaluator.evaluate(weights, data.test_dataset(3)))
      client_test.append(
          evaluator.evaluate(weights, data.client_test_dataset(client_id, 3))
      )
    row = result.rows[-1]
    for name in ('loss', 'accuracy'):
      np.testing.assert_allclose(
          row[f'test_{name}'], np.mean([r[name] for r in test]), rtol=1e-6
      )
      np.testing.assert_allclose(
          row[f'client_test_{name}'],
          np.mean([r[name] for r in client_test[:3]]),
          rtol=1e-6,
      )
    initial = evaluator.evaluate(model.initial_weights, data.test_dataset(3))
    np.testing.assert_allclose(
        result.rows[0]['test_loss'], initial['loss'], rtol=1e-6
    )

  @_both_kinds
  def test_number_of_evaluated_clients_is_bounded(
      self, model, tmp_path, stateful, monkeypatch
  ):
    evaluated = []
    original = evaluation.Evaluator.evaluate_clients

    def evaluate_clients(self, weights, dataset_fn):
      evaluated.append(tuple(weights))
      return original(self, weights, dataset_fn)

    monkeypatch.setattr(
        evaluation.Evaluator, 'evaluate_clients', evaluate_clients
    )
    config = dataclasses.replace(
        _CONFIG, clients_per_round=None, max_evaluation_clients=2, rounds=4
    )
    _train(model, tmp_path, stateful, config)

    assert {len(clients) for clients in evaluated} == {2}
    assert len(set(evaluated)) == 1

  def test_only_sampled_clients_have_a_model_of_their_own(
      self, model, tmp_path, monkeypatch
  ):
    evaluated = []
    original = evaluation.Evaluator.evaluate_clients

    def evaluate_clients(self, weights, dataset_fn):
      evaluated.append(tuple(weights))
      return original(self, weights, dataset_fn)

    monkeypatch.setattr(
        evaluation.Evaluator, 'evaluate_clients', evaluate_clients
    )
    config = dataclasses.replace(
        _CONFIG, clients_per_round=1, rounds=1, evaluate_every=1
    )
    data = training_fakes.FakeData()
    training.train(
        training_fakes.build_process(model, True), model, data, config, tmp_path
    )

    # Round 0: all; round 1: twice the one that was sampled.
    sampled = data.calls[0]['client_ids']
    assert evaluated == [training_fakes.CLIENT_IDS, sampled, sampled]

  def test_costs_are_those_of_the_sampled_clients(
      self, model, tmp_path, monkeypatch
  ):
    class FakeTraffic:

      def __init__(self, process):
        assert isinstance(process, training_fakes.FakeProcess)

      def until(self, round_num, num_clients):
        return dict(exchanges=3 * round_num, megabytes=num_clients * round_num)

    monkeypatch.setattr(communication, 'ProcessTraffic', FakeTraffic)

    result = _train(model, tmp_path)

    assert [row['exchanges'] for row in result.rows] == [0, 9, 18, 21]
    assert [row['megabytes'] for row in result.rows] == [0, 6, 12, 14]

  def test_training_on_the_union_sends_nothing(self, model, tmp_path):
    result = _train(model, tmp_path, train_on_union=True)

    assert {row['exchanges'] for row in result.rows} == {0}
    assert {row['megabytes'] for row in result.rows} == {0}

  def test_costs_that_can_not_be_counted(self, model, tmp_path, caplog):
    # The process is Python, not TFF.
    result = _train(model, tmp_path)

    assert [row['round'] for row in result.rows] == [0, 3, 6, 7]
    assert {row['exchanges'] for row in result.rows[1:]} == {None}
    assert {row['megabytes'] for row in result.rows[1:]} == {None}
    warnings = [r for r in caplog.records if 'megabytes' in r.getMessage()]
    assert len(warnings) == 1

  def test_clients_without_test_data(self, model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        training_fakes.FakeData,
        'client_test_dataset',
        lambda self, client_id, batch_size: self._batches([1], 0, batch_size),
    )

    result = _train(model, tmp_path)

    assert {row['client_test_loss'] for row in result.rows} == {None}

  def test_tensorboard(self, model, tmp_path):
    result = _train(model, tmp_path)

    scalars = collections.defaultdict(dict)
    for path in (tmp_path / 'logdir').iterdir():
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

  def test_plain_progress_lines(self, model, tmp_path, capfd):
    _train(model, tmp_path)

    output = capfd.readouterr()
    lines = output.err.splitlines()
    shown = [line.split()[1] for line in lines if line.startswith('round ')]
    assert shown == ['0/7', '3/7', '6/7', '7/7']
    assert 'train_loss' in lines[-1]
    assert 'test_accuracy' in lines[-1]
    assert not output.out

  def test_bar_on_a_terminal(self, model, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)

    _train(model, tmp_path)

    error = capfd.readouterr().err
    assert '7/7' in error
    assert 'test_accuracy' in error


class TestFinalModel:

  def test_servers_model(self, model, tmp_path):
    result = _train(model, tmp_path)

    assert sorted(os.listdir(tmp_path / 'model')) == ['model.keras']
    assert _weights_bits(tmp_path / 'model/model.keras') == [
        np.asarray(v).tobytes()
        for v in model.from_model_weights(result.model_weights)
    ]

  def test_clients_models_and_their_merger(self, model, tmp_path):
    result = _train(model, tmp_path, stateful=True)

    folder = tmp_path / 'model/clients'
    assert sorted(os.listdir(folder)) == [
        '%C3%A7a.keras',
        'anna.keras',
        'bert%2F...keras',
        'dora.keras',
    ]
    clients = [
        model.from_keras(tf.keras.models.load_model(path))
        for path in folder.iterdir()
    ]
    merged = model.from_keras(
        tf.keras.models.load_model(tmp_path / 'model/model.keras')
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

  def test_file_names_are_safe_and_different(self):
    ids = ['a', 'a/b', 'a%2Fb', '..', 'ä', 'A b', '']
    names = [training.client_file_name(i) for i in ids]

    assert len(set(names)) == len(ids)
    assert not any('/' in name or name in ('.', '..') for name in names)


class TestClientStates:

  def _states(self, run_dir, config, model):
    _train(model, run_dir, True, config)
    with client_state_store.SqliteClientStateStore(
        run_dir / 'client_states.sqlite'
    ) as store:
      return {c: store.get(c) for c in store.client_ids()}

  def test_client_that_is_not_sampled_keeps_its_state_to_the_bit(
      self, model, tmp_path
  ):
    config = dataclasses.replace(_CONFIG, rounds=6)
    before = self._states(tmp_path, config, model)
    data = training_fakes.FakeData()
    more = dataclasses.replace(config, rounds=7)
    training.train(
        training_fakes.build_process(model, True), model, data, more, tmp_path
    )
    sampled = {i for call in data.calls for i in call['client_ids']}

    after = self._states(tmp_path, more, model)

    assert len(sampled) == 2
    assert before.keys() == after.keys() == set(training_fakes.CLIENT_IDS)
    for client_id in before:
      same = client_state_store.encode_state(
          before[client_id]
      ) == client_state_store.encode_state(after[client_id])
      assert same == (client_id not in sampled)

  def test_state_counts_the_clients_own_rounds(self, model, tmp_path):
    states = self._states(tmp_path, _CONFIG, model)

    # Two clients in each of seven rounds.
    assert sum(int(state['rounds']) for state in states.values()) == 14


# Everything through which a run changes its folder.
_WRITES = (
    (client_state_store.SqliteClientStateStore, 'put_many'),
    (client_state_store.SqliteClientStateStore, 'commit'),
    (client_state_store.SqliteClientStateStore, 'prune'),
    (tff.program.FileProgramStateManager, 'save'),
    (tf.keras.Model, 'save'),
    (os, 'replace'),
)


def _call_after_every_write(monkeypatch, fn):
  def wrap(owner, name):
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
      result = original(*args, **kwargs)
      fn()
      return result

    async def async_wrapper(*args, **kwargs):
      await original(*args, **kwargs)
      fn()

    is_async = asyncio.iscoroutinefunction(original)
    monkeypatch.setattr(owner, name, async_wrapper if is_async else wrapper)

  for owner, name in _WRITES:
    wrap(owner, name)


class TestResume:

  @_both_kinds
  def test_finished_run_returns_its_results(
      self, model, tmp_path, stateful, uninterrupted
  ):
    first = _train(model, tmp_path, stateful)
    files = {
        path: path.stat().st_mtime_ns
        for path in tmp_path.rglob('*')
        if path.is_file() and path.name != 'client_states.sqlite'
    }
    process = training_fakes.build_process(model, stateful)

    again = training.train(
        process, model, training_fakes.FakeData(), _CONFIG, tmp_path
    )

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
    assert _snapshot(tmp_path) == uninterrupted[stateful]

  @_both_kinds
  @pytest.mark.parametrize('fail_in_round', [1, 4, 7])
  def test_interrupted_run_continues_after_its_last_checkpoint(
      self, model, tmp_path, stateful, fail_in_round, uninterrupted
  ):
    process = training_fakes.build_process(
        model, stateful, fail_in_round=fail_in_round
    )
    with pytest.raises(KeyboardInterrupt):
      training.train(
          process, model, training_fakes.FakeData(), _CONFIG, tmp_path
      )
    assert not (tmp_path / 'model').exists()

    result = _train(model, tmp_path, stateful)

    assert result.resumed_from == (fail_in_round - 1) // 2 * 2
    assert _snapshot(tmp_path) == uninterrupted[stateful]

  @_both_kinds
  def test_death_after_every_write(self, model, tmp_path, stateful):
    config = dataclasses.replace(_CONFIG, rounds=3, evaluate_every=2)
    run_dir = tmp_path / 'run'
    copies = []

    def copy():
      # What a process that is killed now leaves.
      copies.append(tmp_path / f'copy {len(copies)}')
      shutil.copytree(run_dir, copies[-1])

    with pytest.MonkeyPatch.context() as monkeypatch:
      _call_after_every_write(monkeypatch, copy)
      _train(model, run_dir, stateful, config)
    assert len(copies) == (20 if stateful else 8)

    for path in copies:
      _train(model, path, stateful, config)

      assert (path / 'metrics.csv').read_bytes() == (
          run_dir / 'metrics.csv'
      ).read_bytes()
      assert not list(path.rglob('*.part'))
    # Loading models takes most of the time.
    for path in copies[2::5]:
      assert _snapshot(path) == _snapshot(run_dir)

  @_both_kinds
  def test_more_rounds_later(self, model, tmp_path, stateful, uninterrupted):
    fewer = dataclasses.replace(_CONFIG, rounds=4)
    assert _run_rounds(model, tmp_path, stateful, fewer) == [1, 2, 3, 4]

    assert _run_rounds(model, tmp_path, stateful) == [5, 6, 7]

    # Round 4, which was the last one, has no row any more.
    assert _snapshot(tmp_path) == uninterrupted[stateful]

  def test_fewer_rounds_later(self, model, tmp_path):
    _train(model, tmp_path)

    with pytest.raises(ValueError, match='--rounds=6'):
      _train(model, tmp_path, config=dataclasses.replace(_CONFIG, rounds=6))

  def test_missing_model_is_saved_again(self, model, tmp_path, uninterrupted):
    _train(model, tmp_path, stateful=True)
    shutil.rmtree(tmp_path / 'model')

    assert _run_rounds(model, tmp_path, stateful=True) == []

    assert _snapshot(tmp_path) == uninterrupted[True]

  # The last line without its end, in part, and gone but for one cell.
  @pytest.mark.parametrize('cut', [1, 20, -1])
  def test_torn_last_line_of_the_metrics(
      self, model, tmp_path, cut, uninterrupted
  ):
    _train(model, tmp_path)
    path = tmp_path / 'metrics.csv'
    if cut > 0:
      os.truncate(path, path.stat().st_size - cut)
    else:
      *lines, _ = path.read_text().splitlines(keepends=True)
      path.write_text(''.join([*lines, '7\n']))

    _train(model, tmp_path)

    assert _snapshot(tmp_path) == uninterrupted[False]

  def test_lost_metrics_are_computed_again(
      self, model, tmp_path, uninterrupted
  ):
    _train(model, tmp_path)
    (tmp_path / 'metrics.csv').unlink()

    _train(model, tmp_path)

    assert _snapshot(tmp_path) == uninterrupted[False]

  def test_metrics_of_another_run_are_not_overwritten(self, model, tmp_path):
    path = tmp_path / 'metrics.csv'
    path.write_text('round,mine\n1,2\n')

    with pytest.raises(ValueError, match='other columns'):
      _train(model, tmp_path)
    assert path.read_text() == 'round,mine\n1,2\n'

  def test_other_models_checkpoints_are_refused(self, model, tmp_path):
    _train(model, tmp_path)
    other = training_fakes.FakeStatelessProcess(model)
    other.initialize = lambda: dict(x=np.zeros([3]))

    with pytest.raises(ValueError, match='another model or algorithm'):
      training.train(other, model, training_fakes.FakeData(), _CONFIG, tmp_path)
    assert (tmp_path / 'checkpoints/round_7').exists()

  def test_run_in_progress_is_refused(self, model, tmp_path):
    process = training_fakes.build_process(model, False)
    errors = []

    def next_fn(state, datasets):
      try:
        _train(model, tmp_path)
      except ValueError as e:
        errors.append(str(e))
      return type(process).next(process, state, datasets)

    process.next = next_fn
    training.train(process, model, training_fakes.FakeData(), _CONFIG, tmp_path)

    assert len(errors) == 7
    assert 'in progress' in errors[0]


class _Context(runtime.InProcessContext):
  """A context that has lost a worker, or has not."""

  def __init__(self, has_lost_one):
    super().__init__()
    self._has_lost_one = has_lost_one
    self.errors = []

  def recover(self, error):
    self.errors.append(error)
    if not self._has_lost_one:
      raise error


class TestLostWorker:
  """TensorFlow code of this process fails, too, when a worker is lost."""

  @pytest.fixture
  def fail_once(self, monkeypatch):
    """Lets the fourth evaluation fail, in the middle of the run."""
    calls = []
    evaluate = evaluation.Evaluator.evaluate

    def fail(self, *args):
      calls.append(args)
      if len(calls) == 4:
        raise tf.errors.UnavailableError(None, None, 'gone')
      return evaluate(self, *args)

    monkeypatch.setattr(evaluation.Evaluator, 'evaluate', fail)

  @pytest.fixture
  def use(self):
    """Makes a context the default one."""
    previous = tff.framework.get_context_stack().current
    yield lambda context: tff.framework.set_default_context(context) or context
    tff.framework.set_default_context(previous)

  @pytest.mark.usefixtures('fail_once')
  @_both_kinds
  def test_run_goes_on_from_its_last_checkpoint(
      self, model, tmp_path, stateful, uninterrupted, use
  ):
    context = use(_Context(has_lost_one=True))
    _train(model, tmp_path, stateful)
    assert [error.message for error in context.errors] == ['gone']
    assert _snapshot(tmp_path) == uninterrupted[stateful]

  @pytest.mark.usefixtures('fail_once')
  def test_other_errors_end_the_run(self, model, tmp_path, use):
    context = use(_Context(has_lost_one=False))
    with pytest.raises(tf.errors.UnavailableError, match='gone'):
      _train(model, tmp_path)
    assert len(context.errors) == 1

  @pytest.mark.usefixtures('fail_once')
  def test_other_runtimes_have_no_workers(self, model, tmp_path, use):
    use(tff.framework.get_context_stack().current)
    with pytest.raises(tf.errors.UnavailableError, match='gone'):
      _train(model, tmp_path)


def _damage_by_truncation(checkpoint):
  path = next(checkpoint.glob('variables/variables.data*'))
  os.truncate(path, path.stat().st_size // 2)


def _damage_by_emptying(checkpoint):
  (checkpoint / 'saved_model.pb').write_bytes(b'')


def _damage_by_removal(checkpoint):
  shutil.rmtree(checkpoint / 'variables')


def _damage_by_flipped_bits(checkpoint):
  path = next(checkpoint.glob('variables/variables.data*'))
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def _damage_completely(checkpoint):
  shutil.rmtree(checkpoint)
  checkpoint.mkdir()


_DAMAGES = (
    _damage_by_truncation,
    _damage_by_emptying,
    _damage_by_removal,
    _damage_by_flipped_bits,
    _damage_completely,
)


class TestDamagedCheckpoints:

  @pytest.mark.parametrize('damage', _DAMAGES)
  def test_previous_one_is_used(
      self, model, tmp_path, damage, uninterrupted, caplog
  ):
    _train(model, tmp_path, stateful=True)
    damage(tmp_path / 'checkpoints/round_7')

    result = _train(model, tmp_path, stateful=True)

    assert result.resumed_from == 6
    assert 'round_7' in caplog.text
    assert 'the one before it is used' in caplog.text
    assert _snapshot(tmp_path) == uninterrupted[True]
    assert (tmp_path / 'checkpoints/unusable_round_7').exists()

  @_both_kinds
  def test_all_are_damaged(
      self, model, tmp_path, stateful, uninterrupted, caplog
  ):
    _train(model, tmp_path, stateful)
    saved = sorted(os.listdir(tmp_path / 'checkpoints'))
    assert saved == ['round_4', 'round_6', 'round_7']
    for name in saved:
      _damage_by_truncation(tmp_path / 'checkpoints' / name)

    result = _train(model, tmp_path, stateful)

    assert result.resumed_from is None
    assert 'starts over' in caplog.text
    assert _snapshot(tmp_path) == uninterrupted[stateful]

  def test_half_written_one_is_removed(self, model, tmp_path, uninterrupted):
    _train(model, tmp_path, config=dataclasses.replace(_CONFIG, rounds=4))
    folder = tmp_path / 'checkpoints'
    shutil.copytree(folder / 'round_4', folder / 'round_6_temp1234')

    _train(model, tmp_path)

    assert sorted(os.listdir(folder)) == ['round_4', 'round_6', 'round_7']
    assert _snapshot(tmp_path) == uninterrupted[False]


class TestServerAndClientsTogether:
  """A crash between the two writes of a checkpoint, in both orders."""

  def test_client_states_without_their_checkpoint_are_forgotten(
      self, model, tmp_path, uninterrupted
  ):
    _train(model, tmp_path, stateful=True)
    shutil.rmtree(tmp_path / 'checkpoints/round_7')

    result = _train(model, tmp_path, stateful=True)

    assert result.resumed_from == 6
    assert _snapshot(tmp_path) == uninterrupted[True]

  def test_checkpoint_without_its_client_states_is_not_used(
      self, model, tmp_path, uninterrupted, caplog
  ):
    _train(model, tmp_path, True, config=dataclasses.replace(_CONFIG, rounds=6))
    # The file as it was before the commit of round 7.
    states = (tmp_path / 'client_states.sqlite').read_bytes()
    _train(model, tmp_path, stateful=True)
    (tmp_path / 'client_states.sqlite').write_bytes(states)

    result = _train(model, tmp_path, stateful=True)

    assert result.resumed_from == 6
    assert "the clients' states of its round are missing" in caplog.text
    assert _snapshot(tmp_path) == uninterrupted[True]

  def test_lost_client_states_mean_starting_over(
      self, model, tmp_path, uninterrupted
  ):
    _train(model, tmp_path, stateful=True)
    (tmp_path / 'client_states.sqlite').unlink()

    result = _train(model, tmp_path, stateful=True)

    assert result.resumed_from is None
    assert _snapshot(tmp_path) == uninterrupted[True]

  def test_damaged_client_states_are_an_error(self, model, tmp_path):
    _train(model, tmp_path, stateful=True)
    path = tmp_path / 'client_states.sqlite'
    path.write_bytes(b'garbage' * 1000)

    with pytest.raises(
        client_state_store.ClientStateStoreError, match='client_states.sqlite'
    ):
      _train(model, tmp_path, stateful=True)
    assert path.read_bytes() == b'garbage' * 1000

  def test_every_kept_checkpoint_has_its_client_states(self, model, tmp_path):
    config = dataclasses.replace(_CONFIG, rounds=20, checkpoint_every=3)
    history = {}

    class Recording(training_fakes.FakeStatefulProcess):

      def next(self, state, client_states, datasets):
        output = super().next(state, client_states, datasets)
        history[len(self.rounds)] = output.client_states
        return output

    data = training_fakes.FakeData()
    training.train(Recording(model), model, data, config, tmp_path)
    sampled = collections.defaultdict(list)
    for call in data.calls:
      sampled[call['round_num']] += call['client_ids']

    kept = sorted(
        int(name.removeprefix('round_'))
        for name in os.listdir(tmp_path / 'checkpoints')
    )
    assert kept == [15, 18, 20]
    with client_state_store.SqliteClientStateStore(
        tmp_path / 'client_states.sqlite'
    ) as store:
      for round_num in kept:
        expected = {}
        for r in range(1, round_num + 1):
          expected.update(zip(sampled[r], history[r]))
        for client_id, state in expected.items():
          assert client_state_store.encode_state(
              store.get(client_id, round_num)
          ) == client_state_store.encode_state(state)
      # Not more than one version for each checkpoint.
      for client_id in store.client_ids():
        versions = {
            client_state_store.encode_state(store.get(client_id, r))
            for r in range(15, 21)
        }
        assert len(versions) <= 3


@pytest.fixture
def interruptible():
  """Ctrl-C raises KeyboardInterrupt, also where it is ignored (`nohup`)."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


class TestEventLoops:

  def test_inside_a_running_event_loop(self, model, tmp_path, uninterrupted):
    async def notebook_cell():
      return _train(model, tmp_path, stateful=True)

    result = asyncio.run(notebook_cell())

    assert result.rows[-1]['round'] == 7
    assert _snapshot(tmp_path) == uninterrupted[True]
    for path in (tmp_path / 'model').rglob('*.keras'):
      assert zipfile.is_zipfile(path)  # And not HDF5.

  @pytest.mark.usefixtures('interruptible')
  def test_interrupt_inside_a_running_event_loop(self, model, tmp_path):
    config = dataclasses.replace(_CONFIG, rounds=2_000)
    process = training_fakes.build_process(model, False)
    original = process.next
    main_thread = threading.get_ident()

    def next_fn(*args):
      if len(process.rounds) == 2:
        signal.pthread_kill(main_thread, signal.SIGINT)
      return original(*args)

    process.next = next_fn

    async def notebook_cell():
      training.train(
          process, model, training_fakes.FakeData(), config, tmp_path
      )

    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
      loop.run_until_complete(notebook_cell())
    loop.close()

    assert 3 <= len(process.rounds) < 2_000

  def test_callers_event_loop_stays(self, model, tmp_path):
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
      _train(model, tmp_path)

      assert asyncio.get_event_loop() is loop
    finally:
      asyncio.set_event_loop(None)
      loop.close()

  @pytest.mark.usefixtures('interruptible')
  def test_interrupted_checkpoint_is_finished_first(
      self, model, tmp_path, monkeypatch
  ):
    """Else it would be written while the next call looks for it."""
    original = tf.saved_model.save
    saved = []

    def slow_save(*args, **kwargs):
      if len(saved) == 1:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.5)
      original(*args, **kwargs)
      saved.append(args)

    monkeypatch.setattr(tf.saved_model, 'save', slow_save)
    with pytest.raises(KeyboardInterrupt):
      _train(model, tmp_path)

    assert len(saved) == 2
    assert (tmp_path / 'checkpoints/round_2').exists()

  def test_after_another_event_loop_was_closed(self, model, tmp_path):
    async def nothing():
      pass

    asyncio.run(nothing())

    assert _train(model, tmp_path).rows[-1]['round'] == 7

  def test_context_is_the_callers(self, model, tmp_path):
    class Context(tff.framework.SyncContext):

      def invoke(self, comp, arg):
        raise NotImplementedError

    contexts = []
    process = training_fakes.build_process(model, False)
    original = process.next

    def next_fn(state, datasets):
      contexts.append(tff.framework.get_context_stack().current)
      return original(state, datasets)

    process.next = next_fn
    context = Context()

    async def notebook_cell():
      with tff.framework.get_context_stack().install(context):
        training.train(
            process, model, training_fakes.FakeData(), _CONFIG, tmp_path
        )

    asyncio.run(notebook_cell())

    assert set(contexts) == {context}


class TestCheckpointManager:

  @pytest.mark.parametrize('version', [0, 3, 6, 7])
  def test_due_rounds_are_saved_and_others_not(self, tmp_path, version):
    manager = checkpoints.CheckpointManager(tmp_path, every=3, last_round=7)
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

  def test_nothing_saved(self, tmp_path):
    manager = checkpoints.CheckpointManager(tmp_path, every=3, last_round=7)

    assert asyncio.run(manager.load_latest([np.int32(5)])) == (None, 0)
    assert manager.resumed_from is None


class TestKill:

  @pytest.mark.slow
  def test_kill_at_random_moments(self, model, tmp_path):
    config = dataclasses.replace(
        _CONFIG, rounds=24, evaluate_every=2, checkpoint_every=1
    )
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
    assert _snapshot(run_dir) == _snapshot(tmp_path / 'uninterrupted')
    assert not [
        path
        for path in run_dir.rglob('*')
        if 'temp' in path.name or path.name.endswith('.part')
    ]
