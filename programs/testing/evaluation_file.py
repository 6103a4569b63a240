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
    rounds: The number of rounds that its models have trained.
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
      round_num: int,
      *,
      reestimates_statistics: bool,
  ) -> 'Subject':
    """Returns the subject of the evaluation of a run.

    The settings are the run's, with the flags of the data. The models are those
    after the round `round_num`.
    """
    texts = settings.to_flags()
    return cls(
        str(run.resolve()),
        round_num,
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


# Of all rows with the same subject.
_CHECKSUM = 'checksum'
# The columns before the metrics.
_LABELS = (
    *(field.name for field in dataclasses.fields(Subject)),
    *('model', 'client', 'num_examples'),
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
  labels, names = tuple(header[: len(_LABELS)]), header[len(_LABELS) : -1]
  if labels != _LABELS or header[-1] != _CHECKSUM:
    raise ValueError('The columns are wrong.')
  for run, rounds, dataset, flags, statistics, model, client, *numbers in rows:
    subject = Subject(run, int(rounds), dataset, flags, statistics)
    num_examples, *metrics, _ = numbers
    evaluation = report.Evaluation(
        model,
        client,
        int(num_examples),
        dict(zip(names, map(_number, metrics), strict=True)),
    )
    found.setdefault(subject, []).append(evaluation)
  if not found or text != _to_text(found):
    raise ValueError('The text is not as it was written.')
  return found


def _to_text(contents: _Contents) -> str:
  """Returns the text of the file."""
  cells = []
  header: tuple[str, ...] = ()
  for subject, evaluations in contents.items():
    about = dataclasses.astuple(subject)
    rows = [
        (row.model, row.client, row.num_examples, *row.metrics.values())
        for row in evaluations
    ]
    names = tuple(evaluations[0].metrics)
    header = (*_LABELS, *names, _CHECKSUM)
    checksum = manifests.checksum([about, names, *rows])
    cells += [(*about, *row, checksum) for row in rows]
  return csv_files.to_csv(header, cells)


def check(path: pathlib.Path, metrics: Sequence[str]) -> None:
  """Checks that evaluations with these metrics can be added to a file.

  Raises:
    ValueError: If the file was changed, or if it has other metrics.
  """
  for evaluations in read(path).values():
    names = list(evaluations[0].metrics)
    if names != list(metrics):
      raise ValueError(
          f'{path} has evaluations with the numbers {", ".join(names)}, but'
          f' this run has {", ".join(metrics)}; use another --output_dir.'
      )


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
