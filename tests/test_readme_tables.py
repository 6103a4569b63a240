"""Tests what README concludes from its tables.

Accuracies differ in the last digits between processors. So these tests check
the order and the distances, with margins that leave room for that.
"""

import csv
import pathlib
import re

import pytest

from tff_bn.programs import compare
from tff_bn.programs.cli import command_line

_README = (pathlib.Path(__file__).parents[1] / 'README.md').read_text(
    encoding='utf-8'
)
_FIRST = ()
_DOMAINS = ('--flagfile=digits_domains', '--algorithms=fedavg,fedbn,single')


def _check_first(accuracy, client_accuracy):
  """Checks percentages by algorithm, of clients with one digit each."""
  # With one local step, FedTAN equals centralized training.
  assert abs(accuracy['centralized'] - accuracy['fedtan']) < 1.5
  # FBN is a little worse after 200 rounds, FedAvg much worse.
  assert 0 < accuracy['centralized'] - accuracy['fbn'] < 5
  assert accuracy['fbn'] - accuracy['fedavg'] > 20
  # A client of FedBN knows its own one of ten digits.
  assert abs(accuracy['fedbn'] - 10) < 1
  assert client_accuracy['fedbn'] > 99


def _check_domains(accuracy, client_accuracy):
  """Checks the same for clients whose images look different."""
  assert client_accuracy['fedbn'] - client_accuracy['fedavg'] > 15
  assert client_accuracy['fedbn'] - client_accuracy['single'] > 0.5
  assert accuracy['fedavg'] - accuracy['fedbn'] > 5
  assert accuracy['fedbn'] - accuracy['single'] > 15


_CHECKS = {_FIRST: _check_first, _DOMAINS: _check_domains}


def _tables():
  """Returns (accuracy, client accuracy) of README's tables, in percent."""
  tables = []
  for table in re.findall(r'^\| Algorithm .*\n(?:\|.*\n)+', _README, re.M):
    rows = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in table.splitlines()
    ]
    assert [name.split(',')[0] for name in rows[0][1:3]] == [
        'Accuracy',
        'Client accuracy',
    ]
    tables.append(
        tuple(
            {row[0]: float(row[column].split()[0]) for row in rows[2:]}
            for column in (1, 2)
        )
    )
  return tables


def test_readme_follows_from_its_tables():
  first, domains = _tables()
  _check_first(*first)
  _check_domains(*domains)
  # The margins leave room for the other processor.
  others = {
      name: float(value)
      for value, name in re.findall(r'(\d\d\.\d) for\s+(\w+)', _README)
  }
  assert set(others) == {'centralized', 'fedavg', 'fbn'}
  assert others.items().isdisjoint(first[0].items())
  _check_first({**first[0], **others}, first[1])


@pytest.mark.slow
@pytest.mark.parametrize('arguments', _CHECKS)
def test_tables_come_out_on_this_processor(arguments, tmp_path):
  assert all(argument in _README for argument in arguments)
  command = [*arguments, '--seeds=0', f'--output_dir={tmp_path}']
  assert compare.run(command) == command_line.OK
  with open(tmp_path / 'results.csv', encoding='utf-8', newline='') as file:
    rows = list(csv.DictReader(file))
  _CHECKS[arguments](
      *(
          {row['algorithm']: 100 * float(row[column]) for row in rows}
          for column in ('test_accuracy', 'client_test_accuracy')
      )
  )
