"""One sentence on each row of a comparison's table, from its numbers."""

from collections.abc import Mapping, Sequence
import math
import types
from typing import Optional

import pandas as pd

from tff_bn.catalog import algorithms
from tff_bn.catalog import columns
from tff_bn.programs.results import report
from tff_bn.training import measures

_REFERENCE = 'centralized'
_LOCAL_LAYERS = algorithms.LOCAL_LAYERS.name
# The main metric on the whole test set, and on the clients' own test data.
_WHOLE = 'whole'
_OWN = 'own'
# Differences of accuracies, in points, that count as none and as large.
_NO_POINTS = 0.5
_MANY_POINTS = 5.0
# Relative differences of other metrics, in percent, that count as none.
_NO_PERCENT = 2.0


def describe(
    results: pd.DataFrame,
    varied: Sequence[str],
    flags: Sequence[str] = (),
    names: Mapping[str, str] = types.MappingProxyType({}),
    local_layers: Optional[str] = None,
) -> list[str]:
  """Describes each row of a table of algorithms.

  Args:
    results: What `report.results` returned.
    varied: The names of the table's labels.
    flags: The names of further flags in which the rows can differ.
    names: The names that `--algorithm` takes by the labels of the rows, where
      they differ.
    local_layers: The value of `--local_layers`, of the algorithms that have it.

  Returns:
    For each algorithm, what it does with batch normalization and against the
    drift of the clients' models, the further flags, how far it is from
    centralized training in the main metric if that is in the table, and how its
    clients' own models differ from a common model. Nothing if other flags are
    swept.
  """
  if list(varied) != [report.ALGORITHM]:
    return []
  kind = report.main_kind(report.columns_of_table(results))
  numbers = {
      f'{measures.TEST}{kind.name}': _WHOLE,
      f'{measures.CLIENT_TEST}{kind.name}': _OWN,
      **{name: name for name in ('exchanges', 'rounds')},
  }
  found = report.means(results, varied, list(numbers)).rename(columns=numbers)
  means = found.to_dict('index')
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
    if local_layers is not None and algorithm.has(_LOCAL_LAYERS):
      what += f'; the layers {local_layers} stay with the clients'
    sentences.append(
        f'{name}: {what}{settings}'
        + ''.join(
            f'; {fact}' for fact in _facts(name, means[name], reference, kind)
        )
        + '.'
    )
  return sentences


def _facts(
    name: str,
    row: Mapping[str, float],
    reference: Mapping[str, float],
    kind: columns.Kind,
) -> list[str]:
  """Says what the numbers of a row show."""
  whole, own = row[_WHOLE], row[_OWN]
  distances = {
      column: _distance(kind, row[column], reference.get(column, math.nan))
      for column in (_WHOLE, _OWN)
  }
  facts = []
  if name != _REFERENCE and distances[_WHOLE]:
    facts.append(distances[_WHOLE] + _cost(row))
  if kind.is_share and 100 * (own - whole) >= _MANY_POINTS:
    distance = f', {distances[_OWN]},' if distances[_OWN] else ''
    if kind.name == 'accuracy':
      facts.append(
          f"the clients' own models classify {own:.1%} of their own test data"
          f'{distance} but only {whole:.1%} of the whole test set correctly'
      )
    else:
      facts.append(
          f"the {kind.word} of the clients' own models is {own:.1%} on their"
          f' own test data{distance} but only {whole:.1%} on the whole test set'
      )
  return facts


def _distance(kind: columns.Kind, number: float, reference: float) -> str:
  """Describes a difference; empty if it is no number."""
  difference = number - reference
  if not math.isfinite(difference):
    return ''
  side = 'below' if difference < 0 else 'above'
  if kind.is_share:
    points = 100 * abs(difference)
    if points < _NO_POINTS:
      return f'within half a point of {_REFERENCE}'
    return f'{points:.1f} points {side} {_REFERENCE}'
  if reference <= 0:
    return ''  # A percentage of it says nothing.
  percent = 100 * abs(difference) / reference
  if percent < _NO_PERCENT:
    return f'{kind.word} within {_NO_PERCENT:g} % of {_REFERENCE}'
  return f'{kind.word} {percent:.0f} % {side} {_REFERENCE}'


def _cost(row: Mapping[str, float]) -> str:
  """Describes the exchanges of a round, if they are counted."""
  exchanges = row['exchanges'] / row['rounds']
  if not math.isfinite(exchanges):
    return ''
  plural = '' if exchanges == 1 else 's'
  return f', with {exchanges:.3g} exchange{plural} a round'
