"""The base class of analyses of finished runs."""

import abc
from collections.abc import Iterator, Sequence

from tff_bn.catalog import tasks
from tff_bn.common import progress
from tff_bn.papers import analysis_report
from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.programs.cli import command_line


class RunAnalysis(abc.ABC):
  """An analysis of finished runs: what it needs, measures and reports.

  The module of each analysis has a subclass of the name `Analysis`.

  Attributes:
    needs_classes: Whether each sample must have one of several classes.
    needs_accuracy: Whether the runs must have measured the accuracy.
    runs: The runs.
    flags: The program's flags.
  """

  needs_classes = False
  needs_accuracy = False

  def __init__(
      self,
      runs: Sequence[analyzed_run.AnalyzedRun],
      flags: command_line.ParsedFlags,
  ):
    self.runs = runs
    self.flags = flags

  @property
  def algorithms(self) -> dict[str, str]:
    """The algorithm of each run, by the run's name in tables and figures."""
    return {run.name: run.settings.algorithm for run in self.runs}

  def check(self) -> None:
    """Checks that the flags can be used with the runs.

    Raises:
      ValueError: If they can't. The message names the run or the flag.
    """
    for run in self.runs:
      try:
        self._check_task(run)
        self.check_run(run)
      except ValueError as error:
        raise ValueError(f'--run={run.folder}: {error}') from error

  def _check_task(self, run: analyzed_run.AnalyzedRun) -> None:
    """Raises a `ValueError` if a run has another task than needed."""
    task = run.data.task
    if self.needs_classes and task != tasks.CLASSIFICATION:
      raise ValueError(
          f'the task of the run is {task}, but this analysis needs'
          f' {tasks.CLASSIFICATION}.'
      )
    metrics = list(run.model.metric_shapes)
    if self.needs_accuracy and 'accuracy' not in metrics:
      raise ValueError(
          'this analysis reports the accuracy, but the run, whose task is'
          f' {task}, has the metrics {", ".join(metrics)}.'
      )

  def check_run(self, run: analyzed_run.AnalyzedRun) -> None:
    """Raises a `ValueError` if the flags cannot be used with a run."""
    del run  # By default, every run is allowed.

  def each_run(self) -> Iterator[analyzed_run.AnalyzedRun]:
    """Yields the runs, and says which one is analyzed."""
    for number, run in enumerate(self.runs, start=1):
      progress.say(
          f'[{number}/{len(self.runs)}] Analyzing {run.name}, seed {run.seed} …'
      )
      yield run

  @abc.abstractmethod
  def analyze(self) -> analysis_report.Report:
    """Measures, and reports the results."""
