"""The tables and figures of `tff-bn-analyze leakage`."""

from collections.abc import Sequence

from matplotlib import figure
import numpy as np

from tff_bn.papers import analysis_report
from tff_bn.papers import figures
from tff_bn.papers.privacy import leakage
from tff_bn.programs.results import tables

_COLUMNS = (
    'attack',
    'algorithm',
    'noise',
    'source',
    'batch_size',
    'client',
    'value',
    'chance',
)
_SOURCES = ('update', 'statistics', 'everything')
# The number of pictures in a row of a figure.
_MAX_SHOWN = 8


def report(
    result: leakage.Result, settings: leakage.Settings
) -> analysis_report.Report:
  """Makes the tables, and a figure for each batch size.

  Args:
    result: The result of the analysis.
    settings: Its settings.
  """
  sizes = dict.fromkeys(pictures.batch_size for pictures in result.pictures)
  return analysis_report.Report(
      tables.csv_text(_COLUMNS, _rows(result)),
      '\n'.join(
          [
              _labels_markdown(result.labels),
              _pictures_markdown(result, settings),
          ]
      ),
      {
          f'leakage_batch_{size}': pictures_figure(
              [p for p in result.pictures if p.batch_size == size]
          )
          for size in sizes
      },
  )


def _rows(result: leakage.Result) -> list[tuple[object, ...]]:
  """Returns a row for each client and attack."""
  rows: list[tuple[object, ...]] = [
      (
          'labels',
          labels.algorithm,
          _noise(labels.has_noise),
          labels.source,
          leakage.LABEL_BATCH_SIZE,
          client,
          float(error),
          float(chance),
      )
      for labels in result.labels
      for client, (error, chance) in enumerate(
          zip(labels.errors, labels.chance), start=1
      )
  ]
  return rows + [
      (
          'pictures',
          pictures.algorithm,
          _noise(pictures.has_noise),
          'everything',
          pictures.batch_size,
          client,
          float(psnr),
          float(chance),
      )
      for pictures in result.pictures
      for client, (psnr, chance) in enumerate(
          zip(pictures.psnr.mean(1), pictures.baseline.mean(1)), start=1
      )
  ]


def _noise(has_noise: bool) -> str:
  return 'yes' if has_noise else 'no'


def _labels_markdown(results: Sequence[leakage.LabelResult]) -> str:
  """Returns the table of the attack on labels."""
  cells = [['Labels', 'DP', *map(str.capitalize, _SOURCES), 'Chance']]
  for algorithm, has_noise in dict.fromkeys(r[:2] for r in results):
    errors = {r.source: r for r in results if r[:2] == (algorithm, has_noise)}
    cells.append(
        [
            algorithm,
            _noise(has_noise),
            *(
                f'{errors[source].errors.mean():.3f}'
                if source in errors
                else '–'
                for source in _SOURCES
            ),
            f'{errors["update"].chance.mean():.3f}',
        ]
    )
  notes = [
      'Total variation distance between the true shares of labels of a client'
      ' and the shares inferred from its message, 0 to 1, mean of'
      f' {len(results[0].errors)} clients with'
      f' {leakage.LABEL_BATCH_SIZE} examples.',
      'Update: the gradient of the last bias. Statistics: the means and'
      " variances of the layers, and all of FedTAN's exchanges. Chance: the"
      ' mean shares of all clients.',
  ]
  return tables.markdown(cells, notes, num_labels=2)


def _pictures_markdown(
    result: leakage.Result, settings: leakage.Settings
) -> str:
  """Returns the table of the attack on pictures."""
  sizes = list(dict.fromkeys(p.batch_size for p in result.pictures))
  cells = [
      ['PSNR, dB', 'DP', *(f'Batch of {size}' for size in sizes)],
      [
          'mean picture of the label',
          '–',
          *(
              _mean_of(
                  next(p for p in result.pictures if p.batch_size == s).baseline
              )
              for s in sizes
          ),
      ],
  ]
  for algorithm, has_noise in dict.fromkeys(p[:2] for p in result.pictures):
    by_size = {
        p.batch_size: p
        for p in result.pictures
        if p[:2] == (algorithm, has_noise)
    }
    cells.append(
        [
            algorithm,
            _noise(has_noise),
            *(_mean_of(by_size[size].psnr) for size in sizes),
        ]
    )
  noise = settings.noise
  notes = [
      'Reconstructed pictures of clients whose labels are known: mean ±'
      f' standard deviation over {settings.num_attacked} clients. An attack'
      ' finds something if it is better than the mean picture of each label,'
      ' which the attacker knows from other pictures.',
      'First round of small_cnn with random weights and one step of SGD, with'
      f' {settings.num_clients} clients; the best of {settings.num_starts}'
      f' searches with {settings.num_steps} steps; seed {settings.seed}.',
      f'DP: the update is clipped to the norm {noise.clip_norm:g}, the'
      " statistics, and the values of each of FedTAN's exchanges, to"
      f' {noise.statistics_clip_norm:g}, and Gaussian noise with the noise'
      f' multiplier {noise.multiplier:g} for a round is added. The observer'
      " knows all other clients' messages.",
  ]
  return tables.markdown(cells, notes, num_labels=2)


def _mean_of(psnr: np.ndarray) -> str:
  """Returns the mean and the deviation of the means of clients."""
  return tables.mean_and_deviation(psnr.mean(1))


def pictures_figure(
    results: Sequence[leakage.PictureResult],
) -> figure.Figure:
  """Draws the pictures of the first clients.

  Args:
    results: Results for one batch size.

  Returns:
    A figure with the true pictures in the first row, and a row for each result.
  """
  rows = [('true', np.concatenate(results[0].true_pictures), None)] + [
      (
          f'{r.algorithm}, DP' if r.has_noise else r.algorithm,
          np.concatenate(r.pictures),
          np.concatenate(r.psnr),
      )
      for r in results
  ]
  num_columns = min(len(rows[0][1]), _MAX_SHOWN)
  drawing = figures.new_figure(
      width=1.4 + 0.85 * max(3, num_columns), height=0.6 + 0.85 * len(rows)
  )
  panels = drawing.subplots(len(rows), num_columns, squeeze=False)
  for line, (name, pictures, psnr) in zip(panels, rows, strict=True):
    for number, axes in enumerate(line):
      axes.imshow(pictures[number, ..., 0], cmap='gray_r', vmin=0, vmax=1)
      axes.set_xticks([])
      axes.set_yticks([])
      if psnr is not None:
        axes.set_xlabel(f'{psnr[number]:.0f} dB', fontsize='small')
    line[0].set_ylabel(name, rotation=0, ha='right', va='center')
  figures.add_title(
      drawing, f'Reconstructed from a batch of {results[0].batch_size}'
  )
  return drawing
