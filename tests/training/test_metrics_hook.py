"""Tests that a metrics hook gets each row of a run once."""

import contextlib
import dataclasses
import json
import logging

import pytest
import training_fakes

from tff_bn import training
from tff_bn.training import metrics_hook

_CONFIG = training.TrainingConfig(
    rounds=5,
    batch_size=4,
    local_steps=1,
    clients_per_round=2,
    evaluate_every=1,
    checkpoint_every=3,
)


class _Hook:
  """Records what it is given, and fails when it is told to."""

  def __init__(self, fail_in=None):
    self.runs = []
    self.rows = []
    self.ends = []
    self._fail_in = fail_in

  @contextlib.contextmanager
  def __call__(self, run):
    self.runs.append(run)
    self._fail('start')
    try:
      yield self._add
    except BaseException as error:
      self.ends.append(type(error))
      self._fail('error')
      raise
    self.ends.append(None)
    self._fail('end')

  def _add(self, row):
    self._fail(row['round'])
    self.rows.append(row)

  def _fail(self, when):
    if when == self._fail_in:
      raise OSError('no connection')

  @property
  def rounds(self):
    return [row['round'] for row in self.rows]


def _train(model, folder, hook, rounds=5, fail_in_round=None, **kwargs):
  process = training_fakes.FakeStatelessProcess(model, fail_in_round)
  config = dataclasses.replace(_CONFIG, rounds=rounds)
  return training_fakes.train(
      model, folder, config, process=process, metrics_hook=hook, **kwargs
  )


def test_hook_gets_the_settings_and_all_rows(model, tmp_path):
  hook = _Hook()
  result = _train(model, tmp_path, hook, settings={'algorithm': 'fedavg'})
  assert hook.rows == list(result.rows)
  with open(tmp_path / 'metrics.csv', encoding='utf-8') as file:
    assert [int(line.split(',')[0]) for line in list(file)[1:]] == hook.rounds
  (run,) = hook.runs
  assert run.folder == tmp_path
  assert run.last_round is None
  assert run.settings == {'algorithm': 'fedavg', **dataclasses.asdict(_CONFIG)}
  assert hook.ends == [None]
  # The finished run goes on with more rounds.
  _train(model, tmp_path, hook, 7, settings={'algorithm': 'fedavg'})
  assert hook.rounds == list(range(8))


def test_stopped_run_continues_without_giving_a_row_twice(model, tmp_path):
  whole, hook = _Hook(), _Hook()
  _train(model, tmp_path / 'whole', whole)
  # Round 5 is interrupted. Without the checkpoint of round 4, the run goes on
  # from round 3, as after a kill.
  with pytest.raises(KeyboardInterrupt):
    _train(model, tmp_path / 'stopped', hook, fail_in_round=5)
  assert hook.rounds == [0, 1, 2, 3, 4]
  for path in (tmp_path / 'stopped' / 'checkpoints' / 'round_4').iterdir():
    path.unlink()
  (tmp_path / 'stopped' / 'checkpoints' / 'round_4').rmdir()

  result = _train(model, tmp_path / 'stopped', hook)

  assert result.resumed_from == 3
  assert hook.rows == whole.rows
  assert hook.ends == [KeyboardInterrupt, None]
  first, second = hook.runs
  assert (first.last_round, second.last_round) == (None, 4)
  assert first.run_id == second.run_id != whole.runs[0].run_id


def test_hook_that_is_added_later_gets_earlier_rows(model, tmp_path):
  _train(model, tmp_path, None, 1)
  assert not (tmp_path / 'metrics_hook.json').exists()
  hook = _Hook()
  _train(model, tmp_path, hook, 2)
  assert hook.rounds == [0, 1, 2]


@pytest.mark.parametrize(
    ('when', 'message', 'rounds'),
    [
        ('start', 'at the start', []),
        (2, 'in round 2', [0, 1]),
        ('end', 'at the end', [0, 1, 2, 3]),
    ],
)
def test_failing_hook_is_named_and_gets_the_row_later(
    model, tmp_path, when, message, rounds
):
  hook = _Hook(when)
  with pytest.raises(
      training.MetricsHookError,
      match=rf'hook test_metrics_hook:_Hook failed {message}: OSError: no conn',
  ):
    _train(model, tmp_path, hook, 3)
  assert hook.rounds == rounds
  second = _Hook()
  result = _train(model, tmp_path, second, 3)
  assert [*hook.rows, *second.rows] == list(result.rows)


def test_error_of_the_training_is_not_hidden_by_the_hook(
    model, tmp_path, caplog
):
  with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
    _train(model, tmp_path, _Hook('error'), fail_in_round=2)
  assert 'failed at the end: OSError' in caplog.text


@pytest.mark.parametrize(
    ('hook', 'error', 'message'),
    [
        ('mlflow', TypeError, "metrics_hook must be a function .* 'mlflow'"),
        (
            lambda run: print,
            training.MetricsHookError,
            'must return a context manager.*contextlib.contextmanager',
        ),
        (
            lambda run: contextlib.nullcontext(),
            training.MetricsHookError,
            'must yield a function that takes a row, but yielded None',
        ),
    ],
)
def test_wrong_hooks(model, tmp_path, hook, error, message):
  with pytest.raises(error, match=message):
    _train(model, tmp_path, hook)
  assert not (tmp_path / 'metrics.csv').exists()


def test_a_hook_cannot_change_the_rows(tmp_path):
  rows = [dict(round=1, test_loss=0.5)]
  hooked = metrics_hook.HookedRows(
      lambda run: contextlib.nullcontext(dict.clear), tmp_path, {}
  )
  with hooked.open():
    hooked.update(rows)
  assert rows == [dict(round=1, test_loss=0.5)]


def test_damaged_record(tmp_path):
  def give(*rows):
    hooked = metrics_hook.HookedRows(_Hook(), tmp_path, {})
    with hooked.open():
      hooked.update(rows)

  give(dict(round=5))
  path = tmp_path / 'metrics_hook.json'
  content = path.read_text()
  assert json.loads(content)['last_rounds'] == {'test_metrics_hook:_Hook': 5}
  for damaged in (
      *('{', '{}', '[]', '{"run_id": "a", "last_rounds": []}'),
      '{"run_id": "a"}',
      content[:-20],
      # Any other round would give the hook a row twice, or leave some out.
      content.replace(': 5', ': 4'),
  ):
    assert damaged != content
    path.write_text(damaged)
    with pytest.raises(ValueError, match='metrics_hook.json is damaged'):
      give()
