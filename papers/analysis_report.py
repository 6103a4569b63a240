"""The results of an analysis, and the files that it writes."""

from collections.abc import Mapping
import dataclasses
import pathlib

from matplotlib import figure

from tff_bn.common import files
from tff_bn.papers import figures
from tff_bn.programs.results import html_report
from tff_bn.programs.runs import run_folder


@dataclasses.dataclass(frozen=True)
class Report:
  """The results of an analysis.

  Attributes:
    csv: The text of a CSV file with all numbers.
    markdown: The text of a Markdown file with a table of means.
    drawings: The figures by the names of their files.
  """

  csv: str
  markdown: str
  drawings: Mapping[str, figure.Figure]


def write(folder: pathlib.Path, name: str, report: Report) -> None:
  """Writes and prints a report.

  Args:
    folder: The folder for the files; it is made if needed.
    name: The name of the analysis, for the names of its tables.
    report: The report.
  """
  folder.mkdir(parents=True, exist_ok=True)
  files.replace(folder / f'{name}.csv', report.csv)
  files.replace(folder / f'{name}.md', report.markdown)
  figures.save(folder / run_folder.PLOTS, report.drawings)
  html_report.refresh_figures(folder)
  print(report.markdown)
  print(f'Table: {folder / name}.md, {folder / name}.csv')
  for drawing in report.drawings:
    print(f'Plot:  {folder / run_folder.PLOTS / drawing}.png')
