"""The table of `tff-bn-analyze messages`."""

from collections.abc import Sequence

from tff_bn.analysis import communication
from tff_bn.analysis import sent_variables
from tff_bn.common import csv_files
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.papers import analysis_report
from tff_bn.processes.stateful_process import Process
from tff_bn.programs.results import tables

# The columns of the CSV file, and their titles in the Markdown file.
_COLUMNS = {
    'round': 'Round',
    'exchange': 'Exchange',
    'direction': 'Direction',
    'variable': 'Variable',
    'place': 'Place',
    'shape': 'Shape',
    'dtype': 'Dtype',
    'bytes': 'Bytes',
    'for': 'For',
}
_DIRECTIONS = {
    communication.Direction.DOWN: 'server to clients',
    communication.Direction.UP: 'client to server',
}


def report(
    process: Process, model: BatchNormModel, title: str
) -> analysis_report.Report:
  """Lists what a process sends.

  Args:
    process: The process.
    model: Its model.
    title: The process and the model, for the heading.
  """
  rows: list[list[str]] = []
  lines = [f'# Messages: {title}', '']
  for kind in communication.kinds_of_rounds(process):
    found = communication.messages(kind.computation)
    rows += _rows(kind.title, found, model)
    lines += [_summary(kind.title, found), '']
  # A column without entries says nothing.
  used = [
      place
      for place, name in enumerate(_COLUMNS)
      if name != 'round' or any(row[place] for row in rows)
  ]
  cells = [list(_COLUMNS.values()), *rows]
  table = tables.markdown(
      [[row[place] for place in used] for row in cells], num_labels=len(used)
  )
  return analysis_report.Report(
      csv_files.to_csv(list(_COLUMNS), rows),
      '\n'.join([*lines, table]) + '\n',
      {},
  )


def _rows(
    title: str,
    messages: Sequence[communication.Message],
    model: BatchNormModel,
) -> list[list[str]]:
  return [
      [
          title,
          str(message.exchange),
          _DIRECTIONS[message.direction],
          variable,
          message.name,
          _shape(message),
          message.dtype.name,
          _num_bytes(message),
          'metrics' if message.metrics_only else 'training',
      ]
      for message, variable in zip(
          messages,
          sent_variables.sent_variables(model, messages),
          strict=True,
      )
  ]


def _shape(message: communication.Message) -> str:
  if message.shape is None:
    return '?'
  sizes = ('?' if size is None else str(size) for size in message.shape)
  return '×'.join(sizes) or 'scalar'


def _num_bytes(message: communication.Message) -> str:
  """Returns the size; empty if it is known only when the round runs."""
  try:
    return str(message.num_bytes)
  except ValueError:
    return ''


def _summary(title: str, messages: Sequence[communication.Message]) -> str:
  """Says how much a kind of round sends."""
  sums = dict.fromkeys(communication.Direction, 0)
  for message in messages:
    sums[message.direction] += int(_num_bytes(message) or 0)
  exchanges = max((message.exchange for message in messages), default=0)
  text = (
      f'{exchanges} {"exchange" if exchanges == 1 else "exchanges"}; the server'
      f' sends {sums[communication.Direction.DOWN]:,} bytes to all clients, and'
      f' each client sends {sums[communication.Direction.UP]:,} bytes.'
  )
  return f'{title[:1].upper()}{title[1:]}: {text}' if title else text
