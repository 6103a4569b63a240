"""Tests for `tff_bn.training.metrics_log`."""

import asyncio
import contextlib
import os
import pty
import re
import termios

from absl import logging
import pytest
import tensorflow as tf

from tff_bn.training import metrics_log


def _log(folder, **changes):
  arguments = dict(
      metric_names=[],
      is_due=lambda round_num: True,
      num_rounds=5,
      costs_fn=lambda round_num, _: {},
  )
  return metrics_log.MetricsLog(folder, **{**arguments, **changes})


@pytest.mark.parametrize(
    ('num_dropped', 'failed_rounds', 'warns'),
    # The other clients can be without data.
    [(3, 1, True), (2, 4, True), (2, 0, False), (0, 0, False)],
)
def test_warns_of_a_round_without_clients(
    tmp_path, caplog, num_dropped, failed_rounds, warns
):
  log = _log(tmp_path)
  value = dict(
      client_work=dict(num_clients=3, num_dropped_clients=num_dropped),
      finalizer=dict(failed_rounds=failed_rounds, rejected_rounds=0),
  )
  logger = logging.get_absl_logger()
  logger.addHandler(caplog.handler)
  try:
    asyncio.run(log.release(value, 4))
  finally:
    logger.removeHandler(caplog.handler)
    log.close()
  assert any('Round 4 changed nothing' in m for m in caplog.messages) == warns
  assert log.rows[0]['num_dropped_clients'] == num_dropped


def _shown_on_a_terminal(columns, tmp_path, monkeypatch):
  """Returns what a log writes on a terminal with so many columns."""
  terminal, other_end = pty.openpty()
  termios.tcsetwinsize(other_end, (24, columns))
  with open(other_end, 'w', encoding='utf-8') as stream:
    monkeypatch.setattr('sys.stderr', stream)
    log = _log(
        tmp_path,
        metric_names=['accuracy', 'top3'],
        is_due=lambda round_num: round_num != 1234,
        num_rounds=1500,
    )
    value = {'evaluation/test_loss': 1.5, 'evaluation/test_accuracy': 0.8125}
    asyncio.run(log.release(value, 1233))
    asyncio.run(log.release({}, 1234))
    log.close()
    monkeypatch.undo()
  written = b''
  # It may come in several parts; an error is the end.
  with contextlib.suppress(OSError):
    while part := os.read(terminal, 10**5):
      written += part
  os.close(terminal)
  return re.split('[\r\n]+', written.decode().strip())[-1]


@pytest.mark.parametrize('columns', [80, 100])
def test_bar_shows_everything(columns, tmp_path, monkeypatch):
  bar = _shown_on_a_terminal(columns, tmp_path, monkeypatch)
  assert len(bar) <= columns
  assert re.fullmatch(
      r' 82%\|.+\| 1234/1500 rounds, .*s/round, .* left, test_accuracy 0\.8125',
      bar,
  )


def test_rounds_without_a_finite_loss(tmp_path):
  log = _log(tmp_path)
  for losses, since in (
      ([], None),
      ([1.0, float('nan'), 2.0], None),
      ([1.0, float('nan'), 2.0, float('inf'), float('nan')], 3),
      # Without test data there is no loss.
      ([float('nan'), float('nan')], None),
      ([1.0, None], None),
  ):
    log.rows = [dict(round=i, test_loss=x) for i, x in enumerate(losses)]
    assert log.not_finite_since() == since


def test_tensorboard_describes_the_columns(tmp_path):
  log = _log(tmp_path, metric_names=['accuracy'], has_client_models=True)
  value = {
      f'evaluation/{column}': 0.5
      for column in ('test_accuracy', 'client_test_accuracy')
  }
  asyncio.run(log.release(value, 1))
  log.close()
  (path,) = (tmp_path / 'logdir').iterdir()
  described = {
      value.tag: value.metadata.summary_description
      for record in tf.data.TFRecordDataset(str(path))
      for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value
  }
  assert described['test/accuracy'] == (
      "clients' own models on the whole test set (mean)"
  )
  assert described['client_test/accuracy'] == (
      "each client's model on its own test data (mean)"
  )
