"""Sentences on what agrees with a paper, computed from the numbers."""

from collections.abc import Mapping
import itertools
import math
from typing import Optional

from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_numbers
from tff_bn.papers.experiments import paper_form
from tff_bn.papers.experiments.experiment_numbers import Number
from tff_bn.papers.experiments.experiment_numbers import Numbers

_MAX_PAIRS = 5
# How the sentences begin.
CLAIM = 'The paper'
DIFFERENCES = 'Here'
FOUND = 'Result'
# At another scale than the paper's.
ONLY_ORDER = (
    "The paper's numbers are of other data and models, so only the order can be"
    ' compared.'
)
# These depend on the model only, which may be the paper's at every scale.
_TRAFFIC = ('exchanges', 'megabytes')


def sentences(
    numbers: Numbers, experiment: experiment_files.Experiment
) -> list[str]:
  """Returns what the paper says, what is different here, and what comes out.

  Args:
    numbers: The numbers.
    experiment: The experiment.

  Returns:
    Sentences: the paper's claim, the different settings, the result, the order
    of what is compared, and at the paper's scale the largest difference.
  """
  result = findings(experiment)
  if experiment.scale == experiment_files.SMOKE:
    return result
  assert experiment.shown is not None
  for name, ours, paper in columns(numbers, experiment.shown):
    result.append(_order(name, ours, paper))
  infinite = [
      f'{numbers.describe(numbers.dimensions, labels)},'
      f' {experiment_numbers.title(column)}'
      for (labels, column), number in numbers.ours.items()
      if math.isnan(number.mean)
  ]
  if infinite:
    result.append(f'Without a finite number: {"; ".join(infinite)}.')
  if experiment.scale == experiment_files.PAPER:
    difference = largest_difference(numbers)
    if difference is not None:
      result.append(difference)
  elif any(column not in _TRAFFIC for _, column in numbers.paper):
    result.append(ONLY_ORDER)
  return result


def findings(experiment: experiment_files.Experiment) -> list[str]:
  """Returns the paper's claim, the different settings and what is found."""
  if experiment.scale == experiment_files.SMOKE:
    return [
        'These numbers mean nothing: the data is random, and each run has two'
        ' rounds.'
    ]
  if experiment_files.is_ours(experiment.name):
    result = [f'What follows: {experiment.finding}']
  elif experiment.finding is None:
    result = [f'{CLAIM}: it says nothing about this result.']
  else:
    result = [f'{CLAIM}, {experiment.place}: {experiment.finding}']
  if experiment.differences:
    result.append(f'{DIFFERENCES}: {"; ".join(experiment.differences)}.')
  if experiment.found is not None:
    start = FOUND
    if experiment.agrees is not None:
      start += f', {experiment_files.AGREES[experiment.agrees]}'
    result.append(f'{start}: {experiment.found}')
  return result


def start(sentence: str) -> str:
  """Returns with which word or words a sentence begins, such as `FOUND`."""
  return sentence.partition(':')[0].partition(',')[0]


def is_comparison(sentence: str) -> bool:
  """Whether a sentence compares our order with the order in the paper."""
  return "the paper's" in sentence


def columns(
    numbers: Numbers, show: paper_form.Show
) -> list[tuple[str, dict[str, Number], dict[str, Number]]]:
  """Returns the numbers that are compared with each other.

  Args:
    numbers: The numbers.
    show: What is shown.

  Returns:
    What they have in common, our numbers, and the paper's, by the names of what
    is compared. Numbers that are not finite, and groups without numbers, are
    left out.
  """
  row_axes, column_axes = experiment_numbers.compared_and_others(show)
  result = []
  for labels in numbers.combinations(column_axes):
    for column in numbers.columns:
      found: tuple[dict[str, Number], dict[str, Number]] = {}, {}
      for row in numbers.combinations(row_axes):
        by_name = {
            **dict(zip(row_axes, row)),
            **dict(zip(column_axes, labels)),
        }
        key = numbers.key(by_name, column)
        for target, source in zip(found, (numbers.ours, numbers.paper)):
          if key in source and math.isfinite(source[key].mean):
            target[numbers.describe(row_axes, row)] = source[key]
      if found[0]:
        title = experiment_numbers.title(column)
        panel = numbers.describe(column_axes, labels)
        name = ', '.join(filter(None, [panel, title]))
        result.append((name, *found))
  return result


def _order(
    name: str, ours: Mapping[str, Number], paper: Mapping[str, Number]
) -> str:
  """Compares the order of some numbers with the order in the paper."""
  common = [row for row in ours if row in paper]
  if len(common) < 2:
    ranked = sorted(ours, key=lambda row: -ours[row].mean)
    values = ' > '.join(f'{row} {ours[row].mean:.4g}' for row in ranked)
    return f'{name}: {values}.'
  swapped: list[str] = []
  close: list[str] = []
  num_ordered = 0
  for first, second in itertools.combinations(common, 2):
    # In the paper, `higher` is not below `lower`.
    higher, lower = sorted(
        (first, second), key=lambda row: paper[row].mean, reverse=True
    )
    expected = paper[higher].mean - paper[lower].mean
    if expected <= _spread(paper[higher], paper[lower]):
      continue  # They are alike in the paper.
    num_ordered += 1
    difference = ours[higher].mean - ours[lower].mean
    if difference >= 0:
      continue
    pair = (
        f'{lower} is above {higher} by {-difference:.4g} (in the paper, below'
        f' it by {expected:.4g})'
    )
    is_clear = -difference > _spread(ours[higher], ours[lower])
    (swapped if is_clear else close).append(pair)
  if not num_ordered:
    return f"{name}: the paper's numbers are within its deviations."
  if swapped:
    more = len(swapped) - _MAX_PAIRS
    pairs = '; '.join(swapped[:_MAX_PAIRS])
    end = f'; and {more} more' if more > 0 else ''
    return f"{name}: another order than the paper's: {pairs}{end}."
  if close:
    return (
        f"{name}: the paper's order, up to differences within our deviations:"
        f' {"; ".join(close[:_MAX_PAIRS])}.'
    )
  return f"{name}: the paper's order."


def _spread(first: Number, second: Number) -> float:
  """Returns the deviation of a difference."""
  return math.hypot(first.deviation or 0.0, second.deviation or 0.0)


def largest_difference(numbers: Numbers) -> Optional[str]:
  """Describes the largest difference from the paper in each column.

  Args:
    numbers: The numbers.

  Returns:
    The sentence; None if no number is both measured and printed.
  """
  texts = []
  for column in numbers.columns:
    differences = {
        key: abs(ours.mean - numbers.paper[key].mean)
        for key, ours in numbers.ours.items()
        if key[1] == column
        and key in numbers.paper
        and math.isfinite(ours.mean)
    }
    if differences:
      key = max(differences, key=lambda k: differences[k])
      unit = ' points' if experiment_numbers.is_share(column) else ''
      texts.append(
          f'{differences[key]:.4g}{unit}'
          f' ({numbers.describe(numbers.dimensions, key[0])}:'
          f' {numbers.ours[key].text(column)}, in the paper'
          f' {numbers.paper[key].text(column)})'
      )
  if not texts:
    return None
  return f'The largest difference from the paper is {"; ".join(texts)}.'
