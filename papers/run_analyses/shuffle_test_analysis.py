"""The shuffle test of the models of finished runs.

Figures 3 and 4 of Li et al., Federated Learning with Position-Aware Neurons,
CVPR 2022.
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras
from matplotlib import axes as mpl_axes
from matplotlib import figure
import numpy as np
from typing_extensions import override

from tff_bn.common import seeding
from tff_bn.keras_model import keras_copy
from tff_bn.layers import position_encoding
from tff_bn.papers import analysis_report
from tff_bn.papers import figures
from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.papers.run_analyses import run_analysis
from tff_bn.papers.run_analyses import run_tables
from tff_bn.papers.run_analyses import shuffled_accuracy
from tff_bn.position_aware import permutation
from tff_bn.position_aware import position_encodings
from tff_bn.programs.results import line_styles
from tff_bn.programs.results import tables

_COLUMNS = (
    *('run', 'seed', 'mode', 'amplitude', 'period'),
    *('shuffle_probability', 'error', 'accuracy'),
)
_MODES = {'multiply': 'multiplicative', 'add': 'additive'}


class Error(NamedTuple):
  """The shuffle error with a kind of encodings, the mean over permutations."""

  run: str
  seed: int
  mode: str
  amplitude: float
  period: float
  error: float


class Analysis(run_analysis.RunAnalysis):
  """Measures shuffle errors with many encodings, and accuracies."""

  needs_classes = True

  @override
  def check_run(self, run: analyzed_run.AnalyzedRun) -> None:
    run.check_units()
    plain = without_encodings(run.keras_model)
    position_encodings.add_position_encodings(plain)

  @override
  def analyze(self) -> analysis_report.Report:
    flags = self.flags
    accuracies = [
        accuracy
        for run in self.each_run()
        for accuracy in shuffled_accuracy.measure(
            run,
            flags.shuffle_probabilities,
            num_examples=flags.num_examples,
            repeats=flags.repeats,
            seed=flags.seed,
        )
    ]
    errors = [error for run in self.each_run() for error in self._measure(run)]
    table = run_tables.means_markdown(
        ['Encodings', 'T', 'A'],
        [
            (
                (_MODES[e.mode], f'{e.period:g}', f'{e.amplitude:g}'),
                e.run,
                e.error,
            )
            for e in errors
        ],
        '.3g',
        [
            'Shuffle error: norm of the change of the outputs, divided by their'
            ' number, if the hidden units are permuted with P_sf ='
            f' {flags.shuffle_probability:g}; mean over {self._inputs()} and'
            f' {flags.repeats} permutations.',
            'With A = 0 the model is not position-aware, and the error is'
            ' rounding.',
        ],
    )
    title = (
        'Shuffle error, units are swapped with probability'
        f' {flags.shuffle_probability:g}'
    )
    rows: list[tuple] = [
        (*e[:5], flags.shuffle_probability, e.error, '') for e in errors
    ]
    rows += [
        (a.run, a.seed, '', '', '', *a[2:4], a.accuracy) for a in accuracies
    ]
    return analysis_report.Report(
        tables.csv_text(_COLUMNS, rows),
        table + '\n' + shuffled_accuracy.markdown(accuracies),
        dict(
            shuffle_test=error_figure(errors, title),
            shuffled_accuracy=shuffled_accuracy.accuracy_figure(
                accuracies, self.algorithms
            ),
        ),
    )

  def _inputs(self) -> str:
    flags = self.flags
    if flags.inputs == 'gaussian':
      return f'{flags.num_examples} random inputs, all values from N(0, 1),'
    return f'at most {flags.num_examples} test examples'

  def _draw_inputs(self, run: analyzed_run.AnalyzedRun) -> np.ndarray:
    flags = self.flags
    x, _ = run.test_examples(flags.num_examples, flags.seed)
    if flags.inputs == 'test':
      return x
    rng = seeding.generator(seeding.Stream.ANALYZED_INPUTS, flags.seed)
    return rng.standard_normal(
        (flags.num_examples, *x.shape[1:]), dtype=np.float32
    )

  def _measure(self, run: analyzed_run.AnalyzedRun) -> list[Error]:
    flags = self.flags
    x = self._draw_inputs(run)
    plain = without_encodings(run.keras_model)
    # Encodings don't move with units, so all share the same permuted weights.
    permuted = [
        permutation.shuffle_units(
            plain, flags.shuffle_probability, flags.seed + repeat
        ).get_weights()
        for repeat in range(flags.repeats)
    ]
    errors = []
    for mode in _MODES:
      for period in flags.periods:
        for amplitude in sorted(flags.amplitudes):
          model = position_encodings.add_position_encodings(
              plain, mode, amplitude, period
          )
          before = permutation.outputs(model, x)
          values = []
          for weights in permuted:
            model.set_weights(weights)
            after = permutation.outputs(model, x)
            values.append(permutation.output_change(before, after))
          error = float(np.mean(values))
          errors.append(
              Error(run.name, run.seed, mode, amplitude, period, error)
          )
    return errors


def without_encodings(model: keras.Model) -> keras.Model:
  """Copies a functional model without its position encodings."""
  copy = _WithoutEncodings()
  plain = copy.layer(model)
  copy.set_state(model)
  return plain


class _WithoutEncodings(keras_copy.PlainCopy):
  """Copies layers, and replaces position encodings by identity layers."""

  def _new(self, layer: keras.layers.Layer) -> keras.layers.Layer:
    if isinstance(layer, position_encoding.PositionEncoding):
      return keras.layers.Activation('linear', name=f'{layer.name}_off')
    return super()._new(layer)

  def set_state(self, layer: keras.layers.Layer) -> None:
    # Identity layers have no personal phase.
    if not isinstance(layer, position_encoding.PositionEncoding):
      super().set_state(layer)


def error_figure(errors: Sequence[Error], title: str) -> figure.Figure:
  """Draws errors against amplitudes.

  Args:
    errors: The errors; the lines are means over seeds.
    title: The title.

  Returns:
    A figure with a row for each run: multiplicative encodings with all periods
    on the left, both modes with the first period on the right.
  """
  names = list(dict.fromkeys(error.run for error in errors))
  periods = list(dict.fromkeys(error.period for error in errors))
  drawing, all_axes = run_tables.panels(len(names), 2, width=4.2, height=3.4)

  def draw(axes: mpl_axes.Axes, mode: str, period: float, label: str) -> None:
    points = [
        (e.amplitude, e.error)
        for e in errors
        if (e.run, e.mode, e.period) == (name, mode, period)
    ]
    style = line_styles.by_number(len(axes.get_lines()))
    run_tables.draw_means(axes, points, label=label, **style)

  for name, (left, right) in zip(names, all_axes):
    for period in periods:
      draw(left, 'multiply', period, f'T = {period:g}')
    left.set_title(f'{name}: multiplicative', fontsize='medium')
    for mode, words in _MODES.items():
      draw(right, mode, periods[0], words)
    right.set_title(f'{name}: T = {periods[0]:g}', fontsize='medium')
    left.set_ylabel('Error per output')
    for axes in (left, right):
      axes.set_xlabel('Amplitude A')
      axes.set_ylim(bottom=0)
      axes.legend(frameon=False, fontsize='small')
      figures.tidy(axes)
  figures.add_title(drawing, title)
  return drawing
