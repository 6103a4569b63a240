"""`evaluation.csv`: the evaluations of runs on several datasets."""

from collections.abc import Sequence
import csv
import dataclasses
import io
import pathlib
from typing import Optional

from tff_bn.common import csv_files
from tff_bn.common import files
from tff_bn.programs.flags import data_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.results import report
from tff_bn.training import manifests

# The values of `Subject.statistics`.
SAVED = 'saved'
REESTIMATED = 'reestimated'
_RUN_SCALING = 'pixel_scaling'


@dataclasses.dataclass(frozen=True)
class Subject:
  """What an evaluation is about: the first columns of evaluation.csv.

  Attributes:
    run: The run's folder.
    rounds: The number of rounds that the run has trained.
    dataset: The dataset.
    data_flags: The other flags of the data and its split, as one writes them.
    statistics: Which BN statistics are used, `saved` or `reestimated`.
  """

  run: str
  rounds: int
  dataset: str
  data_flags: str
  statistics: str

  @classmethod
  def of(
      cls,
      settings: settings_lib.RunSettings,
      run: pathlib.Path,
      *,
      reestimates_statistics: bool,
  ) -> 'Subject':
    """Returns the subject of the evaluation of a run.

    The settings are the run's, with the flags of the data.
    """
    texts = settings.to_flags()
    return cls(
        str(run.resolve()),
        settings.rounds,
        texts['dataset'],
        ' '.join(
            f'--{name}={texts[name]}'
            for name in data_flags.DataFlags.specs()
            if name in texts and name not in ('dataset', _RUN_SCALING)
        ),
        REESTIMATED if reestimates_statistics else SAVED,
    )

  def describe(self) -> str:
    """Returns a line for the table of the evaluation."""
    statistics = ''
    if self.statistics == REESTIMATED:
      statistics = ', with BN statistics that are computed again'
    return (
        f'{self.run} after {self.rounds} rounds, on --dataset={self.dataset}'
        f' {self.data_flags}{statistics}:'
    )


_CHECKSUM = 'checksum'
_COLUMNS = (
    *(
        field.name
        for row in (Subject, report.Evaluation)
        for field in dataclasses.fields(row)
    ),
    # Of all rows with the same subject.
    _CHECKSUM,
)
_Contents = dict[Subject, list[report.Evaluation]]


def read(path: pathlib.Path) -> _Contents:
  """Reads the evaluations in a file by their subject, if there is such a file.

  Raises:
    ValueError: If the file was changed, or written by an earlier version.
  """
  if not path.exists():
    return {}
  try:
    return _parse(path.read_bytes().decode())
  except (ValueError, TypeError, csv.Error) as error:
    raise ValueError(
        f'{path} is damaged: it was changed, or is of an earlier version of'
        ' tff_bn. Move it to another folder.'
    ) from error


def _parse(text: str) -> _Contents:
  """Returns the evaluations by their subject."""
  header, *rows = csv.reader(io.StringIO(text, newline=''), strict=True)
  found: _Contents = {}
  if tuple(header) != _COLUMNS:
    raise ValueError('The columns are wrong.')
  for run, rounds, dataset, flags, statistics, model, client, *numbers in rows:
    subject = Subject(run, int(rounds), dataset, flags, statistics)
    num_examples, accuracy, loss, _ = numbers
    evaluation = report.Evaluation(
        model, client, int(num_examples), _number(accuracy), _number(loss)
    )
    found.setdefault(subject, []).append(evaluation)
  if not found or text != _to_text(found):
    raise ValueError('The text is not as it was written.')
  return found


def _to_text(contents: _Contents) -> str:
  """Returns the text of the file."""
  cells = []
  for subject, evaluations in contents.items():
    about = dataclasses.astuple(subject)
    rows = [dataclasses.astuple(evaluation) for evaluation in evaluations]
    checksum = manifests.checksum([about, *rows])
    cells += [(*about, *row, checksum) for row in rows]
  return csv_files.to_csv(_COLUMNS, cells)


def add(
    path: pathlib.Path,
    subject: Subject,
    evaluations: Sequence[report.Evaluation],
) -> int:
  """Adds evaluations of a subject to a file, or replaces its earlier ones.

  The file need not exist. Evaluations of other subjects stay in it.

  Returns:
    The number of other subjects in the file.
  """
  contents = {**read(path), subject: list(evaluations)}
  files.replace(path, _to_text(contents))
  return len(contents) - 1


def _number(text: str) -> Optional[float]:
  return float(text) if text else None
