"""The model of each client of finished runs on the test data of each source.

Figures 8 and 13 of Wang et al., Why Batch Normalization Damage Federated
Learning on Non-IID Data?, arXiv:2301.02982 (FedTAN).
"""

from collections.abc import Mapping, Sequence

from matplotlib import figure
import numpy as np
from typing_extensions import override

from tff_bn.catalog import columns
from tff_bn.papers import analysis_report
from tff_bn.papers import figures
from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.papers.run_analyses import run_analysis
from tff_bn.programs.results import report
from tff_bn.programs.results import tables
from tff_bn.programs.testing import model_evaluation
from tff_bn.programs.testing import source_evaluation
from tff_bn.training import measures

# Inches.
_CELL_WIDTH = 0.8
_CELL_HEIGHT = 0.3
_MARGIN = 2.4
# The main metric of the seeds, by the name of the row and of the column.
_Values = Mapping[str, Mapping[str, Sequence[float]]]


class Analysis(run_analysis.RunAnalysis):
  """Tests each client's model on the test data of each source."""

  @override
  def check(self) -> None:
    super().check()
    names = {self._metrics(run)[0] for run in self.runs}
    if len(names) > 1:
      raise ValueError(
          '--run names runs whose main metrics differ:'
          f' {", ".join(sorted(names))}.'
      )

  @override
  def check_run(self, run: analyzed_run.AnalyzedRun) -> None:
    numbers = {
        'own models of clients': len(run.saved.client_ids),
        # Without the whole test set.
        'sources': len(source_evaluation.sources(run.data)) - 1,
    }
    for what, number in numbers.items():
      if number > measures.MAX_TABLE_CLIENTS:
        raise ValueError(
            f'the run has {number} {what}, but the table of this analysis shows'
            f' at most {measures.MAX_TABLE_CLIENTS}; use tff-bn-evaluate'
            ' --each_source.'
        )

  def _metrics(self, run: analyzed_run.AnalyzedRun) -> list[str]:
    """Returns the names of a run's numbers, the main metric first."""
    return model_evaluation.numbers(run.model)

  @override
  def analyze(self) -> analysis_report.Report:
    main = self._metrics(self.runs[0])[0]
    kind = report.evaluated_kind(main)
    rows = []
    values: dict[str, dict[str, list[float]]] = {}
    for run in self.each_run():
      for found in source_evaluation.evaluate(run.saved, run.model, run.data):
        number = found.metrics[main]
        rows.append((run.name, run.seed, *found[:-1], number))
        # The models of clients are compared, not what is merged from them.
        if number is None or (run.has_client_models and not found.client):
          continue
        name = f'{run.name}: {found.client}' if found.client else run.name
        of_model = values.setdefault(name, {})
        of_model.setdefault(found.column, []).append(kind.factor * number)
    title = (
        f"{kind.heading}{kind.unit} of each client's model on the test data of"
        ' each source'
    )
    return analysis_report.Report(
        tables.csv_text(('run', 'seed', *source_evaluation.LABELS, main), rows),
        _markdown(values, kind, title),
        dict(sources=_figure(values, kind, title)),
    )


def _shown(values: _Values) -> list[str]:
  """Returns the columns: the sources of all runs, the whole test set last."""
  found = dict.fromkeys(c for of_model in values.values() for c in of_model)
  found.pop(measures.WHOLE_TEST_SET)
  return [*found, measures.WHOLE_TEST_SET]


def _markdown(values: _Values, kind: columns.Kind, title: str) -> str:
  shown = _shown(values)
  cells = [['Model', *shown]]
  for name, of_model in values.items():
    cells.append(
        [
            name,
            *(
                tables.mean_and_deviation(of_model.get(c, []), kind.digits)
                for c in shown
            ),
        ]
    )
  notes = [f'{title}.']
  if any(len(n) > 1 for of_model in values.values() for n in of_model.values()):
    notes.append('Mean ± standard deviation over the seeds.')
  return tables.markdown(cells, notes)


def _figure(values: _Values, kind: columns.Kind, title: str) -> figure.Figure:
  """Draws a heat map of the means over the seeds; better cells are lighter."""
  shown = _shown(values)
  means = np.array(
      [
          [np.mean(of_model.get(column, np.nan)) for column in shown]
          for of_model in values.values()
      ]
  )
  drawing = figures.new_figure(
      _MARGIN + _CELL_WIDTH * len(shown), _MARGIN + _CELL_HEIGHT * len(values)
  )
  axes = drawing.subplots()
  is_better = kind.higher_is_better is not False
  image = axes.imshow(
      means, cmap='viridis' if is_better else 'viridis_r', aspect='auto'
  )
  figures.write_cells(
      axes,
      means,
      lambda mean: f'{mean:.{kind.digits}f}',
      # The dark half of the colors has the worse cells.
      is_dark=lambda mean: bool(image.norm(np.array(mean)) < 0.5) == is_better,
      fontsize='small',
  )
  axes.set_xticks(range(len(shown)), shown, rotation=40, ha='right')
  axes.set_yticks(range(len(values)), list(values))
  for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
    label.set_parse_math(False)  # Names are no formulas.
  axes.set_xlabel('Test data of')
  axes.set_ylabel('Model of')
  drawing.colorbar(image, ax=axes)
  figures.add_title(drawing, title)
  return drawing
