"""Fusion of two independently trained models by optimal transport.

Appendix F.2 and figure 31 of Li et al., Federated Learning with Position-Aware
Neurons, CVPR 2022.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from matplotlib import figure
from matplotlib import ticker
from typing_extensions import override

from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.papers import analysis_report
from tff_bn.papers import figures
from tff_bn.papers import units
from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.papers.run_analyses import run_analysis
from tff_bn.papers.run_analyses import run_tables
from tff_bn.programs.results import line_styles
from tff_bn.programs.results import tables
from tff_bn.training import evaluation

_BATCH_SIZE = 256
_METHODS = {'average': 'average', 'transport': 'optimal transport'}


class Fused(NamedTuple):
  """The test results of a model between two others, with coefficient μ."""

  run: str
  seed: int
  method: str
  coefficient: float
  accuracy: float
  loss: float


class Analysis(run_analysis.RunAnalysis):
  """Trains two models for each run, and evaluates models between them."""

  needs_accuracy = True

  @override
  def check_run(self, run: analyzed_run.AnalyzedRun) -> None:
    num_examples = sum(map(len, run.data.train_indices.values()))
    if num_examples < 2:
      raise ValueError(
          f'the run has {num_examples} training examples; two models need at'
          ' least 2.'
      )
    if self.flags.reestimate_statistics and not run.model.has_batch_norm:
      raise ValueError(
          '--reestimate_statistics has no effect: the model has no batch'
          ' normalization.'
      )
    x, _ = run.test_examples(2, self.flags.seed)
    units.align(run.keras_model, run.keras_model, x)

  @override
  def analyze(self) -> analysis_report.Report:
    fused = [result for run in self.each_run() for result in self._fuse(run)]
    title = 'Models between two that were trained independently'
    return analysis_report.Report(
        tables.csv_text(Fused._fields, fused),
        self._markdown(fused),
        dict(fusion=accuracy_figure(fused, title, self.algorithms)),
    )

  def _fuse(self, run: analyzed_run.AnalyzedRun) -> list[Fused]:
    first, second = (
        run.model.to_keras(weights)
        for weights in run.train_halves(self.flags.epochs, self.flags.seed)
    )
    x, _ = run.test_examples(self.flags.num_examples, self.flags.seed)
    others = dict(average=second, transport=units.align(first, second, x))
    evaluator = evaluation.Evaluator(run.model)
    test = run.data.test_dataset(_BATCH_SIZE)
    results = []
    for method in _METHODS:
      for coefficient in sorted(self.flags.coefficients):
        between = units.interpolate(first, others[method], coefficient)
        weights = run.model.from_keras(between)
        if self.flags.reestimate_statistics:
          weights = self._reestimated(run, weights)
        metrics = evaluator.evaluate(weights, test)
        results.append(
            Fused(
                *(run.name, run.seed, method, coefficient),
                *(metrics['accuracy'], metrics['loss']),
            )
        )
    return results

  def _reestimated(
      self, run: analyzed_run.AnalyzedRun, weights: ModelWeights
  ) -> ModelWeights:
    training_data = run.data.client_dataset(
        run.data.client_ids,
        seed=self.flags.seed,
        round_num=0,
        batch_size=run.settings.batch_size,
        local_epochs=1,
        augment=False,
    )
    return evaluation.reestimate_batch_norm_statistics(
        run.model, weights, training_data
    )

  def _markdown(self, fused: Sequence[Fused]) -> str:
    epochs = 'epoch' if self.flags.epochs == 1 else 'epochs'
    statistics = (
        'recomputed for each model'
        if self.flags.reestimate_statistics
        else 'interpolated like the weights'
    )
    return run_tables.means_markdown(
        ['μ'],
        [
            (
                [f'{x.coefficient:g}'],
                f'{x.run}: {_METHODS[x.method]}',
                100 * x.accuracy,
            )
            for x in fused
        ],
        '.1f',
        [
            'Test accuracy, %, of models between two that were trained'
            f' independently for {self.flags.epochs} {epochs}, each on a half'
            " of the run's training data and from different initial weights.",
            "Optimal transport first permutes the second model's units to match"
            " the first model's units.",
            f'Running statistics of batch normalization are {statistics}.',
        ],
    )


def accuracy_figure(
    fused: Sequence[Fused],
    title: str,
    algorithms: Optional[Mapping[str, str]] = None,
) -> figure.Figure:
  """Draws accuracy against the interpolation coefficient.

  Args:
    fused: The models; the lines are means over seeds.
    title: The title.
    algorithms: The algorithm of each run, which gives its color.

  Returns:
    A figure with two lines for each run.
  """
  drawing = figures.new_figure(width=9.0, height=4.2)
  axes = drawing.subplots()
  names = list(dict.fromkeys(f.run for f in fused))
  styles = line_styles.choose(names, algorithms)
  for name in names:
    for method, linestyle in zip(_METHODS, ('--', '-')):
      run_tables.draw_means(
          axes,
          [
              (f.coefficient, f.accuracy)
              for f in fused
              if (f.run, f.method) == (name, method)
          ],
          label=f'{name}: {_METHODS[method]}',
          color=styles[name]['color'],
          linestyle=linestyle,
      )
  axes.set_xlabel('μ, the share of the second model')
  axes.set_ylabel('Test accuracy')
  axes.yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1))
  figures.tidy(axes)
  figures.add_legend(drawing)
  figures.add_title(drawing, title)
  return drawing
