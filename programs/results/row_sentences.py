"""One sentence on each row of a comparison's table, from its numbers."""

from collections.abc import Mapping, Sequence
import math
import types

import pandas as pd

from tff_bn.catalog import algorithms
from tff_bn.programs.results import report

_REFERENCE = 'centralized'
# Differences of accuracies, in points, that count as none and as large.
_NO_POINTS = 0.5
_MANY_POINTS = 5.0
_ACCURACY = 'test_accuracy'
_CLIENT_ACCURACY = 'client_test_accuracy'


def describe(
    results: pd.DataFrame,
    varied: Sequence[str],
    flags: Sequence[str] = (),
    names: Mapping[str, str] = types.MappingProxyType({}),
) -> list[str]:
  """Describes each row of a table of algorithms.

  Args:
    results: What `report.results` returned.
    varied: The names of the table's labels.
    flags: The names of further flags in which the rows can differ.
    names: The names that `--algorithm` takes by the labels of the rows, where
      they differ.

  Returns:
    For each algorithm, what it does with batch normalization and against the
    drift of the clients' models, the further flags, how far it is from
    centralized training if that is in the table, and how its clients' own
    models differ from a common model. Nothing if other flags are swept.
  """
  if list(varied) != [report.ALGORITHM]:
    return []
  numbers = (_ACCURACY, _CLIENT_ACCURACY, 'exchanges', 'rounds')
  means = report.means(results, varied, numbers).to_dict('index')
  reference = means.get(_REFERENCE, {})
  sentences = []
  for first in results.drop_duplicates(report.ALGORITHM).to_dict('records'):
    name = first[report.ALGORITHM]
    own = [f'--{flag}={first[flag]}' for flag in flags if first.get(flag)]
    settings = f', with {" ".join(own)}' if own else ''
    algorithm = algorithms.find(names.get(name, name))
    what = algorithm.description
    if algorithm.correction is not None:
      what += f'; {algorithm.correction.description}'
    sentences.append(
        f'{name}: {what}{settings}'
        + ''.join(f'; {fact}' for fact in _facts(name, means[name], reference))
        + '.'
    )
  return sentences


def _facts(
    name: str, row: Mapping[str, float], reference: Mapping[str, float]
) -> list[str]:
  """Says what the numbers of a row show."""
  accuracy, own = row[_ACCURACY], row[_CLIENT_ACCURACY]
  distances = {
      column: _distance(100 * (row[column] - reference.get(column, math.nan)))
      for column in (_ACCURACY, _CLIENT_ACCURACY)
  }
  facts = []
  if name != _REFERENCE and distances[_ACCURACY]:
    facts.append(distances[_ACCURACY] + _cost(row))
  if 100 * (own - accuracy) >= _MANY_POINTS:
    distance = distances[_CLIENT_ACCURACY]
    facts.append(
        f"the clients' own models classify {own:.1%} of their own test data"
        f'{f", {distance}," if distance else ""} but only {accuracy:.1%} of the'
        ' whole test set correctly'
    )
  return facts


def _distance(points: float) -> str:
  """Describes a difference; empty if it is no number."""
  if not math.isfinite(points):
    return ''
  if abs(points) < _NO_POINTS:
    return f'within half a point of {_REFERENCE}'
  side = 'below' if points < 0 else 'above'
  return f'{abs(points):.1f} points {side} {_REFERENCE}'


def _cost(row: Mapping[str, float]) -> str:
  """Describes the exchanges of a round, if they are counted."""
  exchanges = row['exchanges'] / row['rounds']
  if not math.isfinite(exchanges):
    return ''
  plural = '' if exchanges == 1 else 's'
  return f', with {exchanges:.3g} exchange{plural} a round'
