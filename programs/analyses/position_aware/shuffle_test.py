"""The shuffle test of the models of finished runs.

Figure 3 of Li et al., Federated Learning with Position-Aware Neurons, CVPR
2022.
"""

from collections.abc import Sequence
import dataclasses

import keras
from matplotlib import figure
import numpy as np

from tff_bn.keras_model import keras_copy
from tff_bn.layers import position_encoding
from tff_bn.position_aware import permutation
from tff_bn.position_aware import position_encodings
from tff_bn.programs import cli
from tff_bn.programs import figures
from tff_bn.programs import tables
from tff_bn.programs.analyses.position_aware import analyzed_run
from tff_bn.programs.analyses.position_aware import report

_MODES = {'multiply': 'multiplicative', 'add': 'additive'}


@dataclasses.dataclass(frozen=True)
class Error:
  """A shuffle error.

  Attributes:
    run: The run's name.
    seed: The run's seed.
    mode: The encodings' mode.
    amplitude: Their amplitude A.
    period: Their period T.
    error: The mean error over the permutations.
  """

  run: str
  seed: int
  mode: str
  amplitude: float
  period: float
  error: float


def analyze(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> report.Report:
  """Measures what permuting units changes, with encodings of many amplitudes.

  Args:
    runs: The runs.
    flags: The program's flags.

  Returns:
    The shuffle errors.
  """
  errors = []
  for run in runs:
    x, _ = run.test_examples(flags.num_examples, flags.seed)
    plain = without_encodings(run.keras_model)
    # Encodings stay where they are, so the same permuted weights are for all.
    permuted = [
        permutation.shuffle_units(
            plain, flags.shuffle_probability, flags.seed + repeat
        ).get_weights()
        for repeat in range(flags.repeats)
    ]
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
          errors.append(
              Error(
                  *(run.name, run.seed, mode),
                  *(amplitude, period, float(np.mean(values))),
              )
          )
  return report.Report(
      report.records_csv(errors),
      _markdown(errors, flags),
      dict(
          shuffle_test=error_figure(
              errors,
              f'Shuffle error, P_sf = {flags.shuffle_probability:g}',
          )
      ),
  )


def check(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> None:
  """Raises a `ValueError` if a run's model can't be shuffled."""
  del flags  # Unused.
  for run in runs:
    run.check_units()
    try:
      plain = without_encodings(run.keras_model)
      position_encodings.add_position_encodings(plain)
    except ValueError as error:
      raise ValueError(f'--run={run.folder}: {error}') from error


def without_encodings(model: keras.Model) -> keras.Model:
  """Copies a model, without its position encodings.

  Args:
    model: A functional model.

  Returns:
    The new model, with the same weights.
  """
  copy = _WithoutEncodings()
  plain = copy.layer(model)
  copy.set_state(model)
  return plain


class _WithoutEncodings(keras_copy.PlainCopy):
  """Copies layers; position encodings become layers that do nothing."""

  def _new(self, layer: keras.layers.Layer) -> keras.layers.Layer:
    if isinstance(layer, position_encoding.PositionEncoding):
      return keras.layers.Activation('linear', name=f'{layer.name}_off')
    return super()._new(layer)

  def set_state(self, layer: keras.layers.Layer) -> None:
    # A client's own phase has no meaning for other encodings.
    if not isinstance(layer, position_encoding.PositionEncoding):
      super().set_state(layer)


def error_figure(errors: Sequence[Error], title: str) -> figure.Figure:
  """Draws errors against amplitudes.

  Args:
    errors: The errors. Those of several seeds become their mean.
    title: The title.

  Returns:
    A figure with a row for each run: at the left the multiplicative encodings
    with all periods, at the right both modes with the first period.
  """
  names = list(dict.fromkeys(error.run for error in errors))
  periods = list(dict.fromkeys(error.period for error in errors))
  drawing, all_axes = report.panels(len(names), 2, width=4.2, height=3.4)
  for name, (left, right) in zip(names, all_axes):
    of_run = [error for error in errors if error.run == name]
    for number, period in enumerate(periods):
      report.draw_means(
          left,
          _points(of_run, 'multiply', period),
          label=f'T = {period:g}',
          number=number,
      )
    left.set_title(f'{name}: multiplicative', fontsize='medium')
    for number, (mode, words) in enumerate(_MODES.items()):
      report.draw_means(
          right,
          _points(of_run, mode, periods[0]),
          label=words,
          number=number,
      )
    right.set_title(f'{name}: T = {periods[0]:g}', fontsize='medium')
    left.set_ylabel('Error per output')
    for axes in (left, right):
      axes.set_xlabel('Amplitude A')
      axes.set_ylim(bottom=0)
      axes.legend(frameon=False, fontsize='small')
      figures.tidy(axes)
  drawing.suptitle(title)
  return drawing


def _points(
    errors: Sequence[Error], mode: str, period: float
) -> list[tuple[float, float]]:
  return [
      (e.amplitude, e.error)
      for e in errors
      if (e.mode, e.period) == (mode, period)
  ]


def _markdown(errors: Sequence[Error], flags: cli.ParsedFlags) -> str:
  names = list(dict.fromkeys(error.run for error in errors))
  cells = [['Encodings', 'T', 'A', *names]]
  for mode, words in _MODES.items():
    for period in flags.periods:
      for amplitude in sorted(flags.amplitudes):
        cells.append([words, f'{period:g}', f'{amplitude:g}'])
        for name in names:
          values = [
              e.error
              for e in errors
              if (e.run, e.mode, e.period, e.amplitude)
              == (name, mode, period, amplitude)
          ]
          cells[-1].append(f'{np.mean(values):.3g}')
  return tables.markdown(
      cells,
      [
          'Shuffle error: norm of the change of the outputs, divided by their'
          ' number, when hidden units are permuted with P_sf ='
          f' {flags.shuffle_probability:g}; mean over at most'
          f' {flags.num_examples} test examples and {flags.repeats}'
          ' permutations.',
          'With A = 0 the model is not position-aware, so that the error is'
          ' rounding.',
      ],
  )
