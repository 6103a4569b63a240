"""Tests of docs/experiments.md and of the script that writes it."""

import experiments_page
import pytest

from tff_bn.papers.experiments import experiment_files


@pytest.mark.slow
def test_page_is_up_to_date():
  text = experiments_page.PAGE.read_text(encoding='utf-8')

  # After a change, run scripts/experiments_page.py.
  assert text == experiments_page.page()


_TOML = """
title = "FedTAN, table 1: accuracy"
place = "section 5"
finding = "Good."
[flags]
dataset = "digits"
num_clients = 10
clients_per_round = 4
rounds = 100000
local_steps = 5
batch_size = 16
model = "mlp3"
seeds = "0,1"
[axes.method]
"a" = { algorithm = "fedavg" }
"b" = { algorithm = "fedtan" }
[show]
kind = "table"
rows = "method"
value = "test_accuracy"
[digits]
[smoke.flags]
dataset = "digits"
"""


@pytest.fixture(name='page')
def fixture_page(tmp_path, monkeypatch):
  """Writes files, and returns the page."""
  monkeypatch.setattr(experiment_files, 'FOLDER', tmp_path)
  monkeypatch.setattr(experiments_page, 'RESULTS', tmp_path)
  monkeypatch.setattr(experiments_page, '_ROOT', tmp_path.parent)
  monkeypatch.setattr(experiments_page, 'SECONDS', tmp_path / 'seconds.csv')
  (tmp_path / 'seconds.csv').write_text(
      'model,shape,seconds_per_example\nmlp3,8x8x1,0.001\n'
  )

  def page(toml=_TOML, result=None):
    (tmp_path / 'fedtan').mkdir()
    (tmp_path / 'fedtan' / 'table_1.toml').write_text(toml)
    if result is not None:
      (tmp_path / 'fedtan_table_1.md').write_text(result)
    return experiments_page.page()

  page.folder = tmp_path.name
  return page


def _row(text):
  (line,) = [x for x in text.splitlines() if x.startswith('| `fedtan/table_1`')]
  return [cell.strip() for cell in line.strip('|').split('|')]


def test_row_of_an_experiment(page):
  # 4 runs of 100,000 rounds, 4 clients, 5 steps and 16 examples.
  hours = 4 * 100_000 * 4 * 5 * 16 * 0.001 / 50 / 3600
  text = page()

  assert _row(text) == [
      '`fedtan/table_1`',
      'FedTAN, table 1: accuracy',
      '`digits`',
      '4',
      f'{hours:.1f}',
      'not run',
  ]
  assert '| `digits` | part of scikit-learn |' in text
  assert '## FedTAN' in text


def test_hours_of_epochs(page):
  toml = _TOML.replace('local_steps = 5', 'local_epochs = 2').replace(
      'dataset = "digits"', 'dataset = "tfds:mnist"', 1
  )
  toml = toml.replace('"mlp3"', '"mlp4"')

  # The time of this model is not measured.
  assert _row(page(toml))[4] == '–'


@pytest.mark.parametrize(
    'flags, expected',
    [
        (dict(local_steps=5, batch_size=16), 10 * 4 * 5 * 16),
        (dict(local_steps=5, centralized_batch_size=100), 10 * 5 * 100),
        (dict(local_epochs=2), 10 * 2 * 60_000 * 4 / 8),
        (dict(local_epochs=1, samples_per_client=100), 10 * 8 * 100 * 4 / 8),
        (dict(local_epochs=1, train_share=0.1), 10 * 6000 * 4 / 8),
        (dict(local_epochs=1, dataset='tfds:new'), None),
    ],
)
def test_number_of_examples(flags, expected):
  class Settings:
    dataset = 'tfds:mnist'
    num_clients = 8
    clients_per_round = 4
    rounds = 10
    local_steps = None
    local_epochs = None
    samples_per_client = None
    samples_per_domain = None
    train_share = None
    centralized_batch_size = None

  for name, value in flags.items():
    setattr(Settings, name, value)

  assert experiments_page.num_examples(Settings) == expected


@pytest.mark.parametrize(
    'rounds, expected', [(10, 'less than 0.1'), (5_000_000, '36')]
)
def test_hours_are_rounded(page, rounds, expected):
  toml = _TOML.replace('rounds = 100000', f'rounds = {rounds}')

  assert _row(page(toml))[4] == expected


def test_domains_of_a_dataset_are_one(page):
  toml = _TOML.replace(
      'dataset = "digits"',
      'dataset = "npz:abide/nyu.npz"\nmodel = "mlp3"',
      1,
  ).replace('model = "mlp3"\nseeds', 'seeds')

  text = page(toml)

  assert _row(text)[2] == '`npz:abide/*`'
  assert '| `npz:abide/*` | a file that you put into the working' in text


@pytest.mark.parametrize(
    'lines, expected',
    [
        (['iid: a 2 > b 1.', 'skewed: b 2 > a 1.'], [0, 1]),
        (
            ['Here: x.', 'Result, as claimed: a.', 'iid: a 2 > b 1.'],
            [1],
        ),
        (
            ['Result: a.', "iid: the paper's order.", 'skewed: a 2 > b 1.'],
            [0, 1],
        ),
        ([], []),
    ],
)
def test_result_of_the_digits_scale(page, lines, expected):
  lines = ['The paper, section 5: a.', *lines]
  text = page(
      result='# FedTAN, table 1\n\n| method |\n\n'
      + ''.join(f'- {line}\n' for line in lines)
      + '\n## Analysis a\n\n- Not this.\n'
  )

  link = f'../{page.folder}/fedtan_table_1.md'
  assert _row(text)[5] == f'[digits]({link})'
  end = text.partition('## Results\n')[2]
  shown = [lines[0], *(lines[1 + number] for number in expected)]
  assert end.partition('\n- ')[2] == f'[`fedtan/table_1`]({link})\n' + ''.join(
      f'    - {line}\n' for line in shown
  )


def test_results_at_two_scales(page, tmp_path):
  (tmp_path / 'fedtan_table_1_fashion.md').write_text('# A\n\n- Result: b.\n')
  text = page(
      _TOML
      + '[fashion]\ncore_hours = 1.5\n'
      + '[fashion.flags]\ndataset = "fashion_mnist"\n',
      result='# A\n\n- Result: a.\n',
  )

  digits = f'../{page.folder}/fedtan_table_1.md'
  fashion = f'../{page.folder}/fedtan_table_1_fashion.md'
  assert _row(text)[5] == (
      f'[digits]({digits}), [fashion]({fashion}) (1.5 core hours)'
  )
  assert text.endswith(
      f'- [`fedtan/table_1`]({digits})\n    - Result: a.\n'
      f'- [`fedtan/table_1`]({fashion}), `--scale=fashion`\n    - Result: b.\n'
  )
