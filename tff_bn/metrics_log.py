"""A run's metrics: `metrics.csv`, TensorBoard, and progress on the terminal."""

from collections.abc import Callable, Mapping, Sequence
import csv
import io
import os
import pathlib
import sys
from typing import Any, Optional, Union

from absl import logging
import tensorflow as tf
import tensorflow_federated as tff
import tqdm
from typing_extensions import override

Row = dict[str, Union[int, float, None]]

_TRAIN = 'train_'
_TEST = 'test_'
_CLIENT_TEST = 'client_test_'
_INT_COLUMNS = (
    'round',
    'num_clients',
    'num_dropped_clients',
    'exchanges',
    'switched_to_fedprox',
)
_EVALUATION = 'evaluation/'  # How TFF's training loop marks such metrics.


def column_names(
    metric_names: Sequence[str], correction_names: Sequence[str] = ()
) -> tuple[str, ...]:
  """Returns the columns of `metrics.csv`.

  Args:
    metric_names: The names of the model's metrics, such as `accuracy`.
    correction_names: The names of the metrics that a correction of the clients'
      drift adds.

  Returns:
    `round`; `loss` and the metrics, each with the prefixes `train_`, `test_`
    and `client_test_`; `num_clients`, `num_dropped_clients`, `exchanges`,
    `megabytes`; those that a correction adds.
  """
  measured = ('loss', *metric_names)
  return (
      'round',
      *(
          f'{prefix}{name}'
          for prefix in (_TRAIN, _TEST, _CLIENT_TEST)
          for name in measured
      ),
      *('num_clients', 'num_dropped_clients', 'exchanges', 'megabytes'),
      *correction_names,
  )


def read_rows(path: pathlib.Path, columns: Sequence[str]) -> list[Row]:
  """Reads `metrics.csv`.

  Args:
    path: The file.
    columns: The columns that it should have.

  Returns:
    The rows up to the first one that is damaged, such as a last line that was
    only written in part. None if there is no file.

  Raises:
    ValueError: If the file has other columns.
  """
  try:
    text = path.read_text(encoding='utf-8', errors='replace')
  except FileNotFoundError:
    return []
  # What follows the last line break was cut.
  lines = text.split('\n')[:-1]
  if not lines:
    return []
  if lines[0] != ','.join(columns):
    raise ValueError(
        f'{path} has other columns than this run writes; move it away, or use'
        ' another folder.'
    )
  rows = []
  for line in lines[1:]:
    fields = line.split(',')
    if len(fields) != len(columns):
      break
    try:
      rows.append(
          {name: _parse(name, text) for name, text in zip(columns, fields)}
      )
    except ValueError:
      break
  return rows


def _parse(name: str, text: str) -> Union[int, float, None]:
  if not text:
    return None
  return int(text) if name in _INT_COLUMNS else float(text)


def write_rows(
    path: pathlib.Path, columns: Sequence[str], rows: Sequence[Row]
) -> None:
  """Replaces `metrics.csv`; nobody ever sees half of it.

  Args:
    path: The file.
    columns: The columns.
    rows: The rows. Numbers are written so that reading gives the same bits.
  """
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(columns)
  for row in rows:
    writer.writerow(['' if row[c] is None else repr(row[c]) for c in columns])
  temporary = path.with_name(f'.{path.name}.part')
  temporary.write_text(text.getvalue(), encoding='utf-8')
  os.replace(temporary, path)


class MetricsLog(tff.program.ReleaseManager):
  """Turns what a training loop releases into rows, and shows them.

  Losses and metrics are rounded to seven digits.

  Of the rows that an earlier part of the run has written, those before the
  first released round stay.
  """

  def __init__(
      self,
      run_dir: pathlib.Path,
      *,
      metric_names: Sequence[str],
      correction_names: Sequence[str] = (),
      is_due: Callable[[int], bool],
      num_rounds: int,
      costs_fn: Callable[[int], Row],
  ):
    """Reads the existing rows.

    Args:
      run_dir: The run's folder.
      metric_names: The names of the model's metrics.
      correction_names: Those of a correction of the clients' drift.
      is_due: Whether a round has a row.
      num_rounds: The number of rounds.
      costs_fn: What was sent up to a round: `exchanges` and `megabytes`, or
        nothing if that is unknown.
    """
    self._path = run_dir / 'metrics.csv'
    self._logdir = run_dir / 'logdir'
    self._columns = column_names(metric_names, correction_names)
    self._correction_names = correction_names
    self._is_due = is_due
    self._num_rounds = num_rounds
    self._costs_fn = costs_fn
    self.rows = [
        row
        for row in read_rows(self._path, self._columns)
        if is_due(row['round'])
    ]
    self._summary_writer: Optional[tf.summary.SummaryWriter] = None
    self._bar: Optional[tqdm.tqdm] = None

  def is_complete_up_to(self, round_num: int) -> bool:
    """Whether every round up to this one that should have a row has one."""
    rounds = [row['round'] for row in self.rows if row['round'] <= round_num]
    return rounds == [r for r in range(round_num + 1) if self._is_due(r)]

  @override
  async def release(self, value: Mapping[str, Any], key: int) -> None:
    """Shows that a round is done, and adds its row if it has one.

    Args:
      value: The round's metrics: those of training under `client_work`, those
        of evaluation under the columns' names with the prefix `evaluation/`.
      key: The round.
    """
    if self._summary_writer is None:
      self._open(key)
    client_work = value.get('client_work', {})  # None before round 1.
    if client_work.get('failed_rounds', 0):
      logging.warning(
          'Round %d changed nothing: the loss or the update of every client was'
          ' not finite. A smaller --client_learning_rate may help.',
          key,
      )
    row = self._row(value, key) if self._is_due(key) else None
    if row is not None:
      self.rows.append(row)
      write_rows(self._path, self._columns, self.rows)
    seconds = value.get(tff.simulation.TRAINING_TIME_KEY)
    self._write_summary(key, row, seconds)
    self._show(key, row)

  def _row(self, value: Mapping[str, Any], round_num: int) -> Row:
    row = dict.fromkeys(self._columns)
    row['round'] = round_num
    client_work = value.get('client_work', {})  # None before round 1.
    for name, number in client_work.get('train', {}).items():
      if f'{_TRAIN}{name}' in row:
        row[f'{_TRAIN}{name}'] = _rounded(number)
    for name in ('num_clients', 'num_dropped_clients'):
      row[name] = int(client_work.get(name, 0))
    for name in self._correction_names:
      if name in client_work.get('correction', {}):
        number = client_work['correction'][name]
        row[name] = int(number) if name in _INT_COLUMNS else _rounded(number)
    row.update(self._costs_fn(round_num))
    for name in self._columns:
      number = value.get(f'{_EVALUATION}{name}')
      if number is not None:
        row[name] = _rounded(number)
    return row

  def _open(self, first_round: int) -> None:
    self.rows = [row for row in self.rows if row['round'] < first_round]
    self._summary_writer = tf.summary.create_file_writer(
        os.fspath(self._logdir)
    )
    num_done = max(first_round - 1, 0)
    if num_done:
      print(f'continuing after round {num_done}', file=sys.stderr)
    if sys.stderr.isatty():
      self._bar = tqdm.tqdm(
          total=self._num_rounds, initial=num_done, unit='round'
      )

  def _write_summary(
      self, round_num: int, row: Optional[Row], seconds: Optional[float]
  ) -> None:
    with self._summary_writer.as_default(step=round_num):
      if seconds is not None:
        tf.summary.scalar('round/seconds', seconds)
      for name, number in (row or {}).items():
        if number is not None and name != 'round':
          tf.summary.scalar(_summary_tag(name), number)
    if row is not None:
      self._summary_writer.flush()

  def _show(self, round_num: int, row: Optional[Row]) -> None:
    shown = ''
    if row is not None:
      shown = '  '.join(
          f'{name} {number:.4f}'
          for name, number in row.items()
          if name.startswith((_TRAIN, _TEST)) and number is not None
      )
    if self._bar is not None:
      self._bar.update(round_num - self._bar.n)
      if shown:
        self._bar.set_postfix_str(shown)
    elif shown:
      print(
          f'round {round_num}/{self._num_rounds}  {shown}',
          file=sys.stderr,
          flush=True,
      )

  def close(self) -> None:
    """Closes TensorBoard's file and the progress bar."""
    if self._summary_writer is not None:
      self._summary_writer.close()
    if self._bar is not None:
      self._bar.close()


def _rounded(number: Any) -> float:
  """Drops the digits that a float32 does not have."""
  return float(f'{float(number):.7g}')


def _summary_tag(column: str) -> str:
  """TensorBoard groups by what is before the slash."""
  for prefix in (_CLIENT_TEST, _TRAIN, _TEST):
    if column.startswith(prefix):
      return f'{prefix[:-1]}/{column.removeprefix(prefix)}'
  return f'round/{column}'
