"""Tables and figures of the normalization error experiment."""

from collections.abc import Sequence

import matplotlib
from matplotlib import figure

from tff_bn.analysis import normalization_error
from tff_bn.analysis.normalization_error import Result
from tff_bn.papers import analysis_report
from tff_bn.papers import figures
from tff_bn.programs.results import line_styles
from tff_bn.programs.results import tables

# Naive BN is how `fedavg` treats batch normalization.
_STYLES = line_styles.choose(['naive', 'fixbn', 'fbn'], dict(naive='fedavg'))
_MARKERS = dict(naive='s', fixbn='^', fbn='o')


def report(results: Sequence[Result], title: str) -> analysis_report.Report:
  """Makes the tables and figures of the experiment.

  Args:
    results: The heterogeneity levels.
    title: The title of the figures.

  Returns:
    The report. Its figure of points is of the most heterogeneous level.
  """
  rows = [
      (x.gamma, name, x.mean_error(name), x.final_error(name))
      for x in results
      for name in x.errors
  ]
  most_heterogeneous = min(results, key=lambda result: result.gamma)
  return analysis_report.Report(
      tables.csv_text(
          ('gamma', 'algorithm', 'mean_error', 'final_error'), rows
      ),
      results_markdown(results),
      dict(
          normalization_error=error_figure(results, title),
          normalized_points=points_figure(most_heterogeneous, title),
      ),
  )


def rounds_csv(results: Sequence[Result]) -> str:
  """Returns a CSV table of the errors by level, algorithm and round."""
  return tables.csv_text(
      ('gamma', 'algorithm', 'round', 'error'),
      [
          (result.gamma, algorithm, round_num, float(error))
          for result in results
          for algorithm, errors in result.errors.items()
          for round_num, error in enumerate(errors, start=1)
      ],
  )


def results_markdown(results: Sequence[Result]) -> str:
  """Makes a Markdown table of the errors with a row for each level.

  The columns are each algorithm's mean error over all rounds, and its error in
  the last round.
  """
  algorithms = list(results[0].errors)
  titles = ['γ', *algorithms, *(f'{name}, last' for name in algorithms)]
  lines = [titles]
  for result in results:
    errors = [result.mean_error(algorithm) for algorithm in algorithms]
    errors += [result.final_error(algorithm) for algorithm in algorithms]
    lines.append([f'{result.gamma:g}', *(f'{error:.4f}' for error in errors)])
  first = results[0].errors['fbn']
  notes = [
      'Mean Euclidean distance between points normalized by the algorithm and'
      ' by batch normalization with the statistics of all clients together:'
      f' over all {first.size} rounds, and in the last round.',
      *(
          f'{name}: {normalization_error.ALGORITHMS[name]}.'
          for name in algorithms
      ),
      "γ is the share of each client's points that is drawn at random. With 0,"
      ' each client has one class.',
      "fbn's running statistics start with mean 0 and variance 1 for every γ."
      f' The error in the first round is {first[0]:.4f},'
      f' {first[0] / first.sum():.0%} of the sum over all rounds.',
  ]
  return tables.markdown(lines, notes)


def error_figure(results: Sequence[Result], title: str) -> figure.Figure:
  """Draws errors against heterogeneity, as in figure 2c.

  Args:
    results: The levels.
    title: The title.

  Returns:
    A figure with a panel for the mean over all rounds and one for the last
    round. The levels are equidistant, with the most heterogeneous on the right.
  """
  results = sorted(results, key=lambda result: -result.gamma)
  drawing = figures.new_figure(width=9.5, height=4.0)
  panels = drawing.subplots(1, 2, sharex=True, sharey=True)
  for axes, name, error in (
      (panels[0], 'Mean over all rounds', 'mean_error'),
      (panels[1], 'Last round', 'final_error'),
  ):
    axes.set_title(name, fontsize='medium')
    for algorithm in results[0].errors:
      axes.plot(
          range(len(results)),
          [getattr(result, error)(algorithm) for result in results],
          label=algorithm,
          color=_STYLES[algorithm]['color'],
          marker=_MARKERS[algorithm],
      )
    axes.set_yscale('log')
    axes.set_xticks(
        range(len(results)), [f'{result.gamma:g}' for result in results]
    )
    axes.set_xlabel('γ-similarity (right: more heterogeneous)')
    figures.tidy(axes)
  panels[0].set_ylabel('Distance to centralized')
  figures.add_legend(drawing)
  figures.add_title(drawing, f'Normalization error: {title}')
  return drawing


def points_figure(result: Result, title: str) -> figure.Figure:
  """Draws the last round's points, as in figures 1, 2a and 2b.

  Args:
    result: One heterogeneity level.
    title: The title.

  Returns:
    A figure with panels for the points before normalization, and after
    centralized batch normalization and each algorithm, colored by client.
  """
  last_round = result.last_round
  panels = {
      'before': last_round.points,
      'centralized': last_round.centralized,
      **last_round.normalized,
  }
  num_clients = len(last_round.points)
  colors = matplotlib.colormaps['hsv'](
      [client / num_clients for client in range(num_clients)]
  )
  drawing = figures.new_figure(width=3.2 * len(panels), height=4.0)
  all_axes = drawing.subplots(1, len(panels))
  for axes, (name, points) in zip(all_axes, panels.items()):
    axes.set_title(name, fontsize='medium')
    if name in last_round.normalized:
      axes.scatter(*last_round.centralized.reshape(-1, 2).T, s=4, c='#C8C8C8')
    for client_points, color in zip(points, colors):
      axes.scatter(*client_points.T, s=5, color=[color])
    axes.set_aspect('equal', adjustable='datalim')
    axes.grid(alpha=0.3)
  figures.add_title(
      drawing,
      f'Points in round {len(result.errors["fbn"])}, one color for each'
      f' client; grey: centralized ({title}, γ = {result.gamma:g})',
  )
  return drawing
