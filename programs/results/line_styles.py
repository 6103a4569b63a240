"""Colors and dashes of lines: an algorithm has the same ones everywhere."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Optional

from tff_bn.catalog import algorithms as algorithms_lib

# Okabe and Ito's colors, which color-blind people can distinguish; without
# their yellow, which is too light for lines on white.
COLORS = (
    '#0072B2',
    '#D55E00',
    '#009E73',
    '#CC79A7',
    '#E69F00',
    '#56B4E9',
    '#000000',
)
DASHES = ('-', '--', '-.', ':')
# An algorithm has the same color in all figures.
_ALGORITHM_COLORS = {
    'centralized': '#000000',
    'fedavg': '#D55E00',
    'fedbn': '#0072B2',
    'silobn': '#56B4E9',
    'local_affine': '#8C564B',
    'fedtan': '#009E73',
    'fedtan_forward_only': '#A6A000',
    'fedtan_ii': '#B5336A',
    'fbn': '#9457EB',
    'fixbn': '#E377C2',
    'hbn': '#E69F00',
    'dsgd': '#17A2A2',
    'dsgd_fbn': '#B9A0E8',
    'dsgd_fixbn': '#43B843',
    'single': '#7F7F7F',
    'fedprox': '#C49C5A',
    'scaffold': '#3B5BDB',
    'moon': '#FF8A80',
    'greg': '#E6002E',
    'fedbs': '#4F7942',
    'fedper': '#E100D2',
    'fedrep': '#780000',
    'lg_fedavg': '#0000FF',
    'fedbabu': '#006900',
    'ditto': '#2D0078',
    'fedstein': '#004854',
    'fedap': '#6BE600',
    'bn_scaffold': '#6C00CC',
    'fednova': '#00E0A0',
    'feddyn': '#00D800',
}


def by_number(number: int) -> dict[str, str]:
  """Returns the color and the dashes of a line; the first 28 lines differ."""
  return dict(
      color=COLORS[number % len(COLORS)],
      linestyle=DASHES[number % len(DASHES)],
  )


def of_algorithm(name: str) -> Optional[dict[str, str]]:
  """Returns the color and the dashes of an algorithm's lines.

  Args:
    name: A name that `--algorithm` takes. A combination such as `fedbn+moon`
      has the color of the algorithm, and other dashes.

  Returns:
    Arguments of `plot`; None if there is no such algorithm.
  """
  base, _, correction = name.partition('+')
  if base == algorithms_lib.DEFAULT and correction:
    base, correction = correction, ''
  if base not in _ALGORITHM_COLORS or (
      correction and correction not in algorithms_lib.CORRECTIONS
  ):
    return None
  dashes = list(_ALGORITHM_COLORS).index(base)
  if correction:
    dashes += 1 + list(algorithms_lib.CORRECTIONS).index(correction)
  return dict(
      color=_ALGORITHM_COLORS[base], linestyle=DASHES[dashes % len(DASHES)]
  )


def choose(
    names: Sequence[str], algorithms: Optional[Mapping[str, str]] = None
) -> dict[str, dict[str, str]]:
  """Chooses the colors and the dashes of lines.

  Args:
    names: The names of the lines, all different.
    algorithms: The algorithms that the lines show, by name. Default: the names.

  Returns:
    Arguments of `plot` for each name. A line has its algorithm's style if it is
    the only one of this algorithm, and an unused color otherwise.
  """
  shown = {name: (algorithms or {}).get(name, name) for name in names}
  counts = Counter(shown.values())
  styles = {}
  for name, algorithm in shown.items():
    style = of_algorithm(algorithm)
    if style is not None and counts[algorithm] == 1:
      styles[name] = style
  used = {style['color'] for style in styles.values()}
  known = dict.fromkeys((*COLORS, *_ALGORITHM_COLORS.values()))
  unused = [color for color in known if color not in used] or COLORS
  others = [name for name in names if name not in styles]
  for index, name in enumerate(others):
    styles[name] = dict(by_number(index), color=unused[index % len(unused)])
  return styles
