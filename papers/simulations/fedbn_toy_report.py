"""The table and the figures of FedBN's toy example."""

from matplotlib import figure
import numpy as np

from tff_bn.papers import analysis_report
from tff_bn.papers import figures
from tff_bn.papers.simulations import fedbn_toy
from tff_bn.programs.results import line_styles
from tff_bn.programs.results import tables


def report(
    result: fedbn_toy.Result, settings: fedbn_toy.Settings
) -> analysis_report.Report:
  """Makes the table and the figures.

  Args:
    result: The result of the example.
    settings: Its settings.

  Returns:
    The report.
  """
  rows = [
      (choice.name, client, *map(float, numbers))
      for choice in result.choices
      for client, numbers in enumerate(
          zip(choice.weights, choice.scales, choice.losses), start=1
      )
  ]
  return analysis_report.Report(
      tables.csv_text(('model', 'client', 'weight', 'scale', 'loss'), rows),
      _markdown(result, settings),
      dict(
          local_losses=losses_figure(result, settings),
          error_surface=surface_figure(result),
      ),
  )


def _markdown(result: fedbn_toy.Result, settings: fedbn_toy.Settings) -> str:
  """Returns a table with a row for each way to choose the model."""
  clients = range(1, len(settings.deviations) + 1)
  cells = [['Model', *(f'Loss of client {client}' for client in clients)]]
  cells += [
      [choice.name, *(f'{loss:.4f}' for loss in choice.losses)]
      for choice in result.choices
  ]
  deviations = ' and '.join(f'{d:g}' for d in settings.deviations)
  notes = [
      'Mean squared error of the model cos(w x / γ). Labels are'
      f' cos({settings.weight:g} z) plus noise of deviation'
      f' {settings.noise:g}, and the clients observe z times {deviations}.',
      'Without BN, γ = 1. Local BN: γ is the standard deviation of the'
      " client's inputs. Average BN: γ is the mean over the clients.",
  ]
  return tables.markdown(cells, notes)


def losses_figure(
    result: fedbn_toy.Result, settings: fedbn_toy.Settings
) -> figure.Figure:
  """Draws the clients' losses against the weight, as in figure 1.

  Args:
    result: The result.
    settings: The settings.

  Returns:
    A figure with a panel without BN and one with local BN.
  """
  drawing = figures.new_figure(width=9.5, height=3.6)
  panels = drawing.subplots(1, 2, sharey=True)
  for axes, title, curves in (
      (panels[0], 'Without BN', result.without_bn),
      (panels[1], 'Local BN', result.with_bn),
  ):
    axes.set_title(title, fontsize='medium')
    for client, (deviation, losses) in enumerate(
        zip(settings.deviations, curves.losses)
    ):
      axes.plot(
          curves.weights,
          losses,
          label=f'client {client + 1}, σ = {deviation:g}',
          color=line_styles.COLORS[client % len(line_styles.COLORS)],
      )
    axes.axvline(
        curves.best.mean(), label='average weight', color='grey', dashes=(4, 2)
    )
    axes.set_xlabel('Weight w')
    figures.tidy(axes)
  panels[0].set_ylabel('Squared loss')
  figures.add_legend(drawing)
  return drawing


def surface_figure(result: fedbn_toy.Result) -> figure.Figure:
  """Draws the loss of client 1 over weight and scale, as in figure 2.

  Args:
    result: The result.

  Returns:
    A figure with the local and the averaged models as points.
  """
  drawing = figures.new_figure(width=9.0, height=4.6)
  axes = drawing.subplots()
  surface = result.surface
  colors = axes.pcolormesh(
      surface.weights, surface.scales, surface.losses, cmap='viridis'
  )
  drawing.colorbar(colors, ax=axes, label='Squared loss of client 1')
  for choice, marker in zip(result.choices[2:], 'o^s', strict=True):
    axes.plot(
        np.atleast_1d(choice.weights[0]),
        np.atleast_1d(choice.scales[0]),
        marker,
        label=choice.name,
        markeredgecolor='black',
        markersize=9,
    )
  axes.set_xlabel('Weight w')
  axes.set_ylabel('Scale γ')
  figures.add_legend(drawing)
  return drawing
