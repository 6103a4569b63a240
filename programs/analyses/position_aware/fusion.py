"""Fusion of two independently trained models by optimal transport.

Appendix F.2 and figure 31 of Li et al., Federated Learning with Position-Aware
Neurons, CVPR 2022.
"""

from collections.abc import Sequence
import dataclasses

from matplotlib import figure
from matplotlib import ticker
import numpy as np

from tff_bn import position_aware
from tff_bn.programs import cli
from tff_bn.programs import figures
from tff_bn.programs import tables
from tff_bn.programs.analyses.position_aware import analyzed_run
from tff_bn.programs.analyses.position_aware import report
from tff_bn.training import evaluation

_BATCH_SIZE = 256
_METHODS = {'average': 'average', 'transport': 'optimal transport'}


@dataclasses.dataclass(frozen=True)
class Fused:
  """A model between two others.

  Attributes:
    run: The run's name.
    seed: The run's seed.
    method: `average` or `transport`.
    coefficient: μ, from 0 for the first model to 1 for the second.
    accuracy: Its accuracy on the test set.
    loss: Its loss on the test set.
  """

  run: str
  seed: int
  method: str
  coefficient: float
  accuracy: float
  loss: float


def analyze(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> report.Report:
  """Trains two models for each run, and evaluates models between them.

  Args:
    runs: The runs.
    flags: The program's flags.

  Returns:
    Accuracies and losses.
  """
  fused = [result for run in runs for result in _fuse(run, flags)]
  return report.Report(
      report.records_csv(fused),
      _markdown(fused, flags),
      dict(
          fusion=accuracy_figure(
              fused, 'Models between two that were trained independently'
          )
      ),
  )


def check(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> None:
  """Raises a `ValueError` if the models of a run can't be fused."""
  for run in runs:
    num_examples = sum(map(len, run.data.train_indices.values()))
    if num_examples < 2:
      raise ValueError(
          f'--run={run.folder} has {num_examples} training examples; two models'
          ' need at least 2.'
      )
    x, _ = run.test_examples(2, flags.seed)
    try:
      position_aware.align(run.keras_model, run.keras_model, x)
    except ValueError as error:
      raise ValueError(f'--run={run.folder}: {error}') from error
    if flags.reestimate_statistics and not run.model.has_batch_norm:
      raise ValueError(
          '--reestimate_statistics has no effect: the model of'
          f' --run={run.folder} has no batch normalization.'
      )


def _fuse(run: analyzed_run.AnalyzedRun, flags: cli.ParsedFlags) -> list[Fused]:
  first, second = (
      run.model.to_keras(weights)
      for weights in run.train_halves(flags.epochs, flags.seed)
  )
  x, _ = run.test_examples(flags.num_examples, flags.seed)
  others = dict(
      average=second, transport=position_aware.align(first, second, x)
  )
  evaluator = evaluation.Evaluator(run.model)
  test = run.data.test_dataset(_BATCH_SIZE)
  results = []
  for method in _METHODS:
    for coefficient in sorted(flags.coefficients):
      between = position_aware.interpolate(first, others[method], coefficient)
      weights = run.model.from_keras(between)
      if flags.reestimate_statistics:
        weights = evaluation.reestimate_batch_norm_statistics(
            run.model,
            weights,
            run.data.client_dataset(
                run.data.client_ids,
                seed=flags.seed,
                round_num=0,
                batch_size=run.settings.batch_size,
                local_epochs=1,
            ),
        )
      metrics = evaluator.evaluate(weights, test)
      results.append(
          Fused(
              *(run.name, run.seed, method, coefficient),
              *(metrics['accuracy'], metrics['loss']),
          )
      )
  return results


def accuracy_figure(fused: Sequence[Fused], title: str) -> figure.Figure:
  """Draws accuracy against the interpolation coefficient.

  Args:
    fused: The models. Those of several seeds become their mean.
    title: The title.

  Returns:
    A figure with two lines for each run.
  """
  drawing = figures.new_figure(width=9.0, height=4.2)
  axes = drawing.subplots()
  for number, name in enumerate(dict.fromkeys(f.run for f in fused)):
    for method, style in zip(_METHODS, ('--', '-')):
      report.draw_means(
          axes,
          [
              (f.coefficient, f.accuracy)
              for f in fused
              if (f.run, f.method) == (name, method)
          ],
          label=f'{name}: {_METHODS[method]}',
          number=number,
          linestyle=style,
      )
  axes.set_xlabel('μ, the share of the second model')
  axes.set_ylabel('Test accuracy')
  axes.set_ylim(0, 1.02)
  axes.yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1))
  figures.tidy(axes)
  figures.add_legend(drawing)
  axes.set_title(title, fontsize='medium')
  return drawing


def _markdown(fused: Sequence[Fused], flags: cli.ParsedFlags) -> str:
  names = list(dict.fromkeys(f.run for f in fused))
  pairs = [(name, method) for name in names for method in _METHODS]
  cells = [['μ', *(f'{name}: {_METHODS[method]}' for name, method in pairs)]]
  for coefficient in sorted(flags.coefficients):
    cells.append([f'{coefficient:g}'])
    for pair in pairs:
      values = [
          100 * f.accuracy
          for f in fused
          if (f.run, f.method, f.coefficient) == (*pair, coefficient)
      ]
      cells[-1].append(f'{np.mean(values):.1f}')
  epochs = 'epoch' if flags.epochs == 1 else 'epochs'
  statistics = (
      'computed anew for each model'
      if flags.reestimate_statistics
      else 'interpolated as the weights'
  )
  return tables.markdown(
      cells,
      [
          'Test accuracy, %, of models between two that were trained'
          f' independently for {flags.epochs} {epochs}, each on a half of the'
          " run's training data and from other initial weights.",
          "Optimal transport first permutes the second model's units so that"
          " they fit the first one's.",
          f'Running statistics of batch normalization are {statistics}.',
      ],
  )
