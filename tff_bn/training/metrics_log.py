"""A run's metrics: `metrics.csv`, TensorBoard, and progress on the terminal."""

from collections.abc import Callable, Mapping, Sequence
import math
import os
import pathlib
import sys
import types
from typing import Any, Optional, Union

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tqdm
from typing_extensions import override

from tff_bn.common import csv_files
from tff_bn.common import files
from tff_bn.common import progress
from tff_bn.keras_model import model_metrics
from tff_bn.training import measures
from tff_bn.training import run_entries
from tff_bn.training.metrics_hook import Row

# What the bar shows besides itself fits in 80 columns.
_BAR_FORMAT = (
    '{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rounds, {rate_inv_fmt},'
    ' {remaining} left{postfix}'
)

_TRAIN = measures.TRAIN
_TEST = measures.TEST
_CLIENT_TEST = measures.CLIENT_TEST
_VALIDATION = measures.VALIDATION
_CLIENT_TRAIN = measures.CLIENT_TRAIN
# Further columns by name: functions of the round and its metrics.
RoundColumns = Mapping[
    str, Callable[[int, Mapping[str, Any]], Optional[Union[int, float]]]
]
_EVALUATION = 'evaluation/'  # The prefix in TFF's training loop.


def column_names(
    metric_names: Sequence[str],
    correction_names: Sequence[str] = (),
    *,
    has_validation: bool = False,
    has_train_loss: bool = False,
    more: Sequence[str] = (),
) -> tuple[str, ...]:
  """Returns the columns of `metrics.csv`, see `train`.

  Args:
    metric_names: The names of the metrics' numbers, such as `accuracy`; see
      `Evaluator.metric_names`.
    correction_names: The names of the metrics of a correction of the clients'
      drift.
    has_validation: Whether there is validation data.
    has_train_loss: Whether models are evaluated on training data.
    more: The names of further columns.
  """
  measured = ('loss', *metric_names)
  main_name = main_metric(metric_names)
  prefixes = [_TRAIN, _TEST, _CLIENT_TEST]
  if has_validation:
    prefixes.append(_VALIDATION)
  return (
      'round',
      *(f'{prefix}{name}' for prefix in prefixes for name in measured),
      *((f'{_CLIENT_TRAIN}loss',) if has_train_loss else ()),
      *(f'{prefix}{main_name}' for prefix in measures.SPREAD),
      *('num_clients', 'num_dropped_clients', 'rejected_rounds'),
      *('max_update_norm_ratio', 'exchanges', 'megabytes'),
      *correction_names,
      *more,
  )


def main_metric(metric_names: Sequence[str]) -> str:
  """Returns the first metric; the loss of a model without metrics."""
  return [*metric_names, 'loss'][0]


def is_broken(loss: Optional[float]) -> bool:
  """Whether a loss is known and not finite."""
  return loss is not None and not math.isfinite(loss)


def _round_of(row: Row) -> int:
  return int(row['round'] or 0)


class MetricsLog(tff.program.ReleaseManager):
  """Writes the metrics that a training loop releases, and shows progress.

  Losses and metrics are rounded to seven digits.

  A run that continues from a checkpoint takes over the rows of the checkpoint,
  see `restore`, and not the rows of `metrics.csv`.
  """

  def __init__(
      self,
      run_dir: pathlib.Path,
      *,
      metric_names: Sequence[str],
      correction_names: Sequence[str] = (),
      is_due: Callable[[int], bool],
      num_rounds: int,
      costs_fn: Callable[
          [int, Mapping[str, Any]], Mapping[str, Union[int, float]]
      ],
      round_columns: RoundColumns = types.MappingProxyType({}),
      on_rows: Callable[[Sequence[Row]], None] = lambda rows: None,
      has_client_models: Optional[bool] = None,
      has_validation: bool = False,
      has_train_loss: bool = False,
  ):
    """Initializes the log, and reads and writes nothing.

    Args:
      run_dir: The run's folder.
      metric_names: See `column_names`.
      correction_names: The names of the metrics of a correction of the clients'
        drift.
      is_due: Returns whether a round has a row.
      num_rounds: The number of rounds.
      costs_fn: Returns the `exchanges` and `megabytes` up to a round, given its
        number and the metrics of the drift correction; or an empty mapping if
        they are unknown.
      round_columns: See `train`.
      on_rows: Called with all rows when there is a new one, after it is
        written.
      has_client_models: Whether the clients have own models; None if it is
        unknown.
      has_validation: Whether there is validation data.
      has_train_loss: See `column_names`.
    """
    self._path = run_dir / run_entries.METRICS
    self._logdir = run_dir / run_entries.LOGDIR
    self._columns = column_names(
        metric_names,
        correction_names,
        has_validation=has_validation,
        has_train_loss=has_train_loss,
        more=list(round_columns),
    )
    self._round_columns = round_columns
    # The column of the last evaluation that the bar shows.
    self._shown_column = f'{_TEST}{main_metric(metric_names)}'
    self._correction_names = correction_names
    self._is_due = is_due
    self._num_rounds = num_rounds
    self._costs_fn = costs_fn
    self._on_rows = on_rows
    self._has_client_models = has_client_models
    self.rows: list[Row] = []
    self._summary_writer: Optional[tf.summary.SummaryWriter] = None
    self._bar: Optional[tqdm.tqdm] = None

  def _text(self, rows: Sequence[Row]) -> str:
    """Returns the text of `metrics.csv`."""
    cells = ([row[column] for column in self._columns] for row in rows)
    return csv_files.to_csv(self._columns, cells)

  def has_rows_after(self, round_num: int) -> bool:
    """Whether `metrics.csv` has rows of later rounds, or is damaged.

    That is, the file exists and a row does not start with the number of an
    earlier round or of this one.
    """
    try:
      lines = self._path.read_bytes().splitlines()
    except FileNotFoundError:
      return False
    rounds = [line.split(b',')[0] for line in lines[1:]]
    return not all(r.isdigit() and int(r) <= round_num for r in rounds)

  def rows_until(self, round_num: int) -> list[Row]:
    """Returns the rows up to a round, for `restore`."""
    return [row for row in self.rows if _round_of(row) <= round_num]

  def not_finite_since(self) -> Optional[int]:
    """Returns the round since which the model is not finite.

    It is the first of the evaluated rounds at the end whose test loss is not
    finite; `None` if the last one is finite, or if none is, as without test
    data.
    """
    since = None
    for row in reversed(self.rows):
      if not is_broken(row['test_loss']):
        return since
      since = _round_of(row)
    return None

  def restore(self, rows: Sequence[Row]) -> None:
    """Continues after the rows of a checkpoint, see `rows_until`.

    `metrics.csv` is written again if it does not have these rows alone.
    """
    # If the number of rounds has grown, the row of the former last round may no
    # longer be due.
    self.rows = [dict(row) for row in rows if self._is_due(_round_of(row))]
    text = self._text(rows).encode()
    try:
      found = self._path.read_bytes()
    except FileNotFoundError:
      found = b''
    if found == text:
      return
    # A program that was killed may have added rows after the checkpoint.
    if not found.startswith(text):
      logging.warning(
          '%s is missing or was changed; it is written again, from the'
          ' checkpoint.',
          self._path,
      )
    files.replace(self._path, text)

  @override
  async def release(self, value: Mapping[str, Any], key: int) -> None:
    """Shows that a round is finished, and adds its row if it has one.

    Args:
      value: The round's metrics. The metrics of training are in `client_work`,
        and the names of evaluation metrics are columns with the prefix
        `evaluation/`.
      key: The round.
    """
    if self._summary_writer is None:
      self._summary_writer = self._open(key)
    self._warn(value, key)
    row = self._row(value, key) if self._is_due(key) else None
    if row is not None:
      self.rows.append(row)
      files.replace(self._path, self._text(self.rows))
      self._on_rows(self.rows)
    seconds = value.get(tff.simulation.TRAINING_TIME_KEY)
    self._write_summary(self._summary_writer, key, row, seconds)
    self._show(key, row)

  def _warn(self, value: Mapping[str, Any], round_num: int) -> None:
    """Warns if the round failed."""
    if not _part(value, 'finalizer').get('failed_rounds', 0):
      return
    since = self.not_finite_since()
    if since is not None:
      reason = f'the model is not finite since round {since}.'
    elif _part(value, 'client_work').get('num_participants', 0):
      reason = (
          "the server's new model, statistics or optimizer state were not"
          ' finite, so it kept the old ones. A smaller learning rate of the'
          ' server or of the clients may help.'
      )
    else:
      reason = (
          'the loss or the update of every client was not finite. A smaller'
          ' learning rate of the clients may help.'
      )
    logging.warning('Round %d changed nothing: %s', round_num, reason)

  def _row(self, value: Mapping[str, Any], round_num: int) -> Row:
    row: Row = dict.fromkeys(self._columns)
    row['round'] = round_num
    client_work = _part(value, 'client_work')
    train = model_metrics.entries(client_work.get('train', {}))
    for name, number in train.items():
      if f'{_TRAIN}{name}' in row:
        row[f'{_TRAIN}{name}'] = _rounded(number)
    for name in ('num_clients', 'num_dropped_clients'):
      row[name] = int(client_work.get(name, 0))
    finalizer = _part(value, 'finalizer')
    row['rejected_rounds'] = int(finalizer.get('rejected_rounds', 0))
    ratio = float(client_work.get('max_update_norm_ratio', math.nan))
    if not math.isnan(ratio):
      row['max_update_norm_ratio'] = _rounded(ratio)
    correction_metrics = client_work.get('correction', {})
    for name in self._correction_names:
      if name in correction_metrics:
        number = correction_metrics[name]
        is_int = np.issubdtype(np.asarray(number).dtype, np.integer)
        row[name] = int(number) if is_int else _rounded(number)
    row.update(self._costs_fn(round_num, correction_metrics))
    for name, of_round in self._round_columns.items():
      number = of_round(round_num, value)
      if number is not None:
        row[name] = number if isinstance(number, int) else _rounded(number)
    for name in self._columns:
      number = value.get(f'{_EVALUATION}{name}')
      if number is not None:
        row[name] = _rounded(number)
    return row

  def _open(self, first_round: int) -> tf.summary.SummaryWriter:
    num_done = max(first_round - 1, 0)
    if num_done:
      progress.say(f'continuing after round {num_done}')
    if progress.is_shown() and sys.stderr.isatty():
      self._bar = tqdm.tqdm(
          total=self._num_rounds,
          initial=num_done,
          unit='round',
          bar_format=_BAR_FORMAT,
          dynamic_ncols=True,
      )
    return tf.summary.create_file_writer(os.fspath(self._logdir))

  def _write_summary(
      self,
      writer: tf.summary.SummaryWriter,
      round_num: int,
      row: Optional[Row],
      seconds: Optional[float],
  ) -> None:
    with writer.as_default(step=round_num):
      if seconds is not None:
        tf.summary.scalar('round/seconds', seconds)
      for name, number in (row or {}).items():
        if number is not None and name != 'round':
          tf.summary.scalar(
              _summary_tag(name),
              number,
              description=measures.name(name, self._has_client_models),
          )
    if row is not None:
      writer.flush()

  def _show(self, round_num: int, row: Optional[Row]) -> None:
    if self._bar is not None:
      self._bar.update(round_num - self._bar.n)
      number = (row or {}).get(self._shown_column)
      if number is not None:
        self._bar.set_postfix_str(f'{self._shown_column} {number:.4f}')
    elif row is not None:
      shown = '  '.join(
          f'{name} {number:.4f}'
          for name, number in row.items()
          if name.startswith((_TRAIN, _TEST, _VALIDATION))
          and number is not None
      )
      progress.say(f'round {round_num}/{self._num_rounds}  {shown}')

  def close(self) -> None:
    """Closes TensorBoard's file and the progress bar."""
    if self._summary_writer is not None:
      try:
        self._summary_writer.close()
      # Raising it would hide the error that ends the run.
      except tf.errors.OpError as error:
        logging.warning(
            'The files for TensorBoard in %s are incomplete: %s',
            self._logdir,
            error,
        )
    if self._bar is not None:
      self._bar.close()


def _part(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  """Returns the metrics of a part of the round; none before round 1."""
  part = value.get(name)
  # Processes of other packages may lack these metrics.
  return part if isinstance(part, Mapping) else {}


def _rounded(number: Any) -> float:
  """Rounds to the seven digits of a float32."""
  return float(f'{float(number):.7g}')


def _summary_tag(column: str) -> str:
  """Returns a column's tag, which TensorBoard groups by the part before `/`."""
  for prefix in (
      *(_CLIENT_TEST, _CLIENT_TRAIN, _TRAIN, _TEST, _VALIDATION),
      *measures.SPREAD,
  ):
    if column.startswith(prefix):
      return f'{prefix[:-1]}/{column.removeprefix(prefix)}'
  return f'round/{column}'
