"""The pictures and the pixel values of domains (FedBN, appendix D.1)."""

import dataclasses
from typing import Any

from matplotlib import figure
import numpy as np

from tff_bn.data import dataset as dataset_lib
from tff_bn.papers import analysis_report
from tff_bn.papers import figures
from tff_bn.programs.results import line_styles
from tff_bn.programs.results import tables


@dataclasses.dataclass(frozen=True)
class _Domain:
  """The training images of a domain.

  Attributes:
    name: Its name.
    images: Its images, of shape `[n, height, width, channels]`.
    labels: Their labels.
    shares: The share of the pixel values in each interval.
  """

  name: str
  images: np.ndarray
  labels: np.ndarray
  shares: np.ndarray


def report(
    dataset: dataset_lib.Dataset, *, num_pictures: int, num_bins: int
) -> analysis_report.Report:
  """Makes the table and the figures.

  Args:
    dataset: A dataset of images with domains.
    num_pictures: The number of pictures of a domain.
    num_bins: The number of intervals of the histograms. They have the same
      length, from the smallest value of all domains to the largest.

  Returns:
    The report.

  Raises:
    ValueError: If the dataset has no images.
  """
  if dataset.x_train.ndim != 4:
    raise ValueError(
        f'--dataset={dataset.name} has samples of shape'
        f' {dataset.input_shape}; use a dataset of images.'
    )
  # In batches, uint8 becomes values from 0 to 1.
  divisor = 255 if dataset.x_train.dtype == np.uint8 else 1
  limits = dataset.x_train.min() / divisor, dataset.x_train.max() / divisor
  edges = np.linspace(*limits, num_bins + 1)
  domains = []
  for number, name in enumerate(dataset.domain_names):
    chosen = dataset.domain_train == number
    images = dataset.x_train[chosen] / divisor
    counts, _ = np.histogram(images, edges)
    domains.append(
        _Domain(name, images, dataset.y_train[chosen], counts / images.size)
    )
  rows = [
      (domain.name, float(low), float(high), float(share))
      for domain in domains
      for low, high, share in zip(edges, edges[1:], domain.shares)
  ]
  cells = [['Domain', 'Images', 'Mean', 'Standard deviation']]
  for domain in domains:
    moments = domain.images.mean(dtype=float), domain.images.std(dtype=float)
    cells.append(
        [domain.name, str(len(domain.images)), *(f'{x:.3f}' for x in moments)]
    )
  return analysis_report.Report(
      tables.csv_text(('domain', 'from', 'to', 'share'), rows),
      tables.markdown(
          cells, ['Pixel values of the training images, over all channels.']
      ),
      dict(
          pixel_histograms=_histograms(domains, edges),
          pictures=_pictures(domains, limits, num_pictures),
      ),
  )


def _histograms(domains: list[_Domain], edges: np.ndarray) -> figure.Figure:
  """Draws a line for each domain."""
  drawing = figures.new_figure(width=6.5, height=3.6)
  axes = drawing.subplots()
  styles = line_styles.choose([domain.name for domain in domains])
  for domain in domains:
    style: dict[str, Any] = styles[domain.name]
    axes.stairs(
        100 * domain.shares, edges, label=domain.name, baseline=None, **style
    )
  axes.set_xlabel('Pixel value')
  axes.set_ylabel('Share of the pixels, %')
  # Most pixels of digits have the color of the background.
  axes.set_yscale('log')
  figures.tidy(axes)
  figures.add_legend(drawing)
  return drawing


def _pictures(
    domains: list[_Domain], limits: tuple[float, float], num_pictures: int
) -> figure.Figure:
  """Draws a row of pictures for each domain."""
  drawing = figures.new_figure(
      width=1.5 + 0.6 * num_pictures, height=0.6 * len(domains)
  )
  grid = drawing.subplots(len(domains), num_pictures, squeeze=False)
  for domain, row in zip(domains, grid):
    chosen = _different(domain.labels)[:num_pictures]
    for axes in row:
      axes.set_axis_off()
    for axes, image in zip(row, domain.images[chosen]):
      picture = (image - limits[0]) / (limits[1] - limits[0] or 1)
      is_gray = picture.shape[-1] == 1
      axes.imshow(
          picture[..., 0] if is_gray else picture[..., :3],
          cmap='gray',
          vmin=0,
          vmax=1,
      )
    row[0].set_title(domain.name, fontsize='small', loc='left')
  return drawing


def _different(labels: np.ndarray) -> np.ndarray:
  """Returns all positions, one of each label first, then a second one, …."""
  if labels.ndim > 1:
    return np.arange(len(labels))
  rank: np.ndarray = np.zeros(len(labels), int)
  for label in np.unique(labels):
    positions = np.flatnonzero(labels == label)
    rank[positions] = np.arange(len(positions))
  return np.lexsort((labels, rank))
