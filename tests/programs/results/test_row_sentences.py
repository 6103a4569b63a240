"""Tests for the sentences on the rows of a table."""

import math

import pandas as pd
import pytest

from tff_bn.catalog import algorithms
from tff_bn.programs.results import row_sentences


def _row(algorithm, accuracy, own='', exchanges=20, seed=0):
  return dict(
      algorithm=algorithm,
      seed=seed,
      rounds=20,
      exchanges=exchanges,
      test_accuracy=accuracy,
      client_test_accuracy=own,
  )


def _describe(rows, *arguments):
  table = pd.DataFrame(rows, dtype=object)
  return row_sentences.describe(table, *arguments)


def _facts(*rows):
  """Returns what the sentences say besides the algorithms' descriptions."""
  facts = {}
  for sentence in _describe(rows, ['algorithm']):
    name, _, rest = sentence.partition(': ')
    description = algorithms.find(name).description
    assert rest.startswith(description) and rest.endswith('.')
    facts[name] = rest.removeprefix(description)[:-1].removeprefix('; ')
  return facts


def test_distance_to_centralized_training():
  assert _facts(
      _row('fedavg', 0.40, exchanges=20, seed=0),
      _row('fedavg', 0.50, exchanges=20, seed=1),
      _row('centralized', 0.90, exchanges=0, seed=0),
      _row('centralized', 1.00, exchanges=0, seed=1),
      _row('fedtan', 0.954, exchanges=200, seed=0),
      _row('fbn', 0.967, exchanges=21, seed=0),
  ) == {
      'fedavg': '50.0 points below centralized, with 1 exchange a round',
      'centralized': '',
      'fedtan': (
          'within half a point of centralized, with 10 exchanges a round'
      ),
      'fbn': '1.7 points above centralized, with 1.05 exchanges a round',
  }


def test_local_layers():
  rows = [_row('fedavg', 0.5), _row('fedper', 0.5)]
  fedavg, fedper = _describe(rows, ['algorithm'], (), {}, 'top.*')
  assert '; the layers top.* stay with the clients' in fedavg
  # It has a head instead.
  assert 'top.*' not in fedper


def test_models_that_know_their_own_data_only():
  own = (
      "the clients' own models classify 100.0% of their own test data but"
      ' only 10.0% of the whole test set correctly'
  )
  assert _facts(_row('fedbn', 0.1, 1.0)) == {'fedbn': own}
  assert _facts(_row('fedbn', 0.96, 1.0)) == {'fedbn': ''}
  facts = _facts(_row('fedbn', 0.1, 0.8), _row('centralized', 0.9, 0.74))
  assert facts['fedbn'] == (
      '80.0 points below centralized, with 1 exchange a round; the'
      " clients' own models classify 80.0% of their own test data, 6.0 points"
      ' above centralized, but only 10.0% of the whole test set correctly'
  )


def _with_metric(name, algorithm, value, own=''):
  row = _row(algorithm, value, own, exchanges='')
  return {k.replace('accuracy', name): v for k, v in row.items()}


def test_other_shares():
  facts = _facts(
      _with_metric('dice', 'centralized', 0.9),
      _with_metric('dice', 'fedbn', 0.6, 0.8),
  )
  assert facts['fedbn'] == (
      "30.0 points below centralized; the Dice of the clients' own models is"
      ' 80.0% on their own test data but only 60.0% on the whole test set'
  )


@pytest.mark.parametrize(
    'value,fact',
    [
        (2.5, 'MAE 25 % above centralized'),
        (1.0, 'MAE 50 % below centralized'),
        (2.03, 'MAE within 2 % of centralized'),
        (math.inf, ''),
    ],
)
def test_numbers(value, fact):
  facts = _facts(
      _with_metric('mae', 'centralized', 2.0),
      _with_metric('mae', 'fedbn', value, own=10.0),
  )
  assert facts['fedbn'] == fact


def test_a_percentage_of_nothing():
  facts = _facts(
      _with_metric('r2', 'centralized', -0.1), _with_metric('r2', 'fbn', 0.5)
  )
  assert facts['fbn'] == ''


@pytest.mark.parametrize('accuracy', ['', math.nan])
def test_no_accuracy(accuracy):
  rows = _row('centralized', 0.9), _row('fedavg', accuracy, own=0.5)
  assert _facts(*rows) == {'centralized': '', 'fedavg': ''}


def test_no_count_of_exchanges():
  row = _row('fedavg', 0.4, exchanges='')
  assert _facts(_row('centralized', 0.9), row)['fedavg'] == (
      '50.0 points below centralized'
  )


def test_sweeps_have_no_sentences():
  row = dict(_row('fedavg', 0.4), gamma='0')
  assert not _describe([row], ['gamma', 'algorithm'])


def test_further_flags():
  rows = [
      {**_row('fedavg', 0.4), 'fbn_backward': '', 'server_clip_norm': ''},
      {**_row('fbn', 0.4), 'fbn_backward': 'mean', 'server_clip_norm': '0.3'},
  ]
  flags = ['fbn_backward', 'server_clip_norm']
  fedavg, fbn = _describe(rows, ['algorithm'], flags)
  assert 'with' not in fedavg
  assert fbn.endswith(', with --fbn_backward=mean --server_clip_norm=0.3.')


def test_a_correction_is_described():
  (sentence,) = _describe([_row('fedbn+fedprox', 0.5)], ['algorithm'])
  assert sentence == (
      f"fedbn+fedprox: {algorithms.find('fedbn').description};"
      f" {algorithms.CORRECTIONS['fedprox'].description}."
  )
