"""Tests for `tff-bn-analyze messages`."""

import csv_rows
import pytest
import tiny_runs

from tff_bn.papers import analyze
from tff_bn.programs.runs import run_folder

_FLAGS = ('--dataset=digits', '--model=small_cnn', '--num_clients=3')
_DOWN, _UP = 'server to clients', 'client to server'
# Three convolutions and a dense layer; 16, 32 and 32 channels.
_CHANNELS = (16, 32, 32)
_NUM_WEIGHTS = (
    3 * 3 * (1 * 16 + 16 * 32 + 32 * 32) + 4 * sum(_CHANNELS) + 33 * 10
)


def _messages(folder, *flags):
  return tiny_runs.analyze('messages', [], *_FLAGS, *flags, folder=folder)


def _num_bytes(rows, direction):
  """Sums the bytes of tensors that are no scalars."""
  return sum(
      int(row['bytes'])
      for row in rows
      if row['direction'] == direction and row['shape'] != 'scalar'
  )


def test_fedavg(tmp_path):
  result = _messages(tmp_path, '--algorithm=fedavg')
  for direction in (_DOWN, _UP):
    assert _num_bytes(result.rows, direction) == 4 * _NUM_WEIGHTS
  assert {row['exchange'] for row in result.rows} == {'1'}
  (kernel,) = (
      row
      for row in result.rows
      if row['variable'] == 'conv_2/kernel' and row['direction'] == _UP
  )
  assert kernel == {
      'round': '',
      'exchange': '1',
      'direction': _UP,
      'variable': 'conv_2/kernel',
      'place': 'update.trainable[3]',
      'shape': '3×3×16×32',
      'dtype': 'float32',
      'bytes': str(4 * 3 * 3 * 16 * 32),
      'for': 'training',
  }
  losses = [r for r in result.rows if r['place'].endswith('loss_sum')]
  assert [row['for'] for row in losses] == ['metrics']
  cells = csv_rows.cells(result.markdown)
  assert cells[0] == [
      *('Exchange', 'Direction', 'Variable', 'Place', 'Shape', 'Dtype'),
      *('Bytes', 'For'),
  ]
  assert len(cells) == 2 + len(result.rows)
  total = sum(int(r['bytes']) for r in result.rows if r['direction'] == _UP)
  assert f'each client sends {total:,} bytes' in result.markdown
  assert '1 exchange; ' in result.markdown
  run_folder.remove(tmp_path)
  assert not list(tmp_path.glob('messages*'))


def test_fedtan_has_an_exchange_for_each_layer_and_direction(tmp_path):
  result = _messages(tmp_path, '--algorithm=fedtan', '--local_steps=1')
  # Of each layer the means, the variances and the gradients; and the update.
  assert {int(row['exchange']) for row in result.rows} == set(range(1, 11))
  assert _num_bytes(result.rows, _UP) == 4 * _NUM_WEIGHTS + 4 * 4 * sum(
      _CHANNELS
  )
  assert '10 exchanges; ' in result.markdown


@pytest.mark.slow
def test_kinds_of_rounds(tmp_path):
  result = _messages(
      tmp_path, '--algorithm=fixbn', '--fixbn_rounds=5', '--rounds=9'
  )
  rounds = dict.fromkeys(row['round'] for row in result.rows)
  assert list(rounds) == ['phase 1', 'phase 2']
  assert csv_rows.cells(result.markdown)[0][0] == 'Round'
  for name in rounds:
    assert f'\n{name.capitalize()}: 1 exchange; ' in result.markdown


@pytest.mark.slow
def test_rounds_between_those_of_fedtan(tmp_path):
  result = _messages(tmp_path, '--algorithm=fedtan', '--fedtan_every=5')
  assert '\nPhase 1: 10 exchanges; ' in result.markdown
  assert '\nPhase 2: 1 exchange; ' in result.markdown


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--algorithm=fedavgg'], '--algorithm'),
        (['--algorithm=fedbn', '--normalization=layer'], 'fedbn'),
    ],
)
def test_wrong_flags(flags, message, tmp_path, capsys):
  arguments = ['messages', f'--output_dir={tmp_path}', *_FLAGS, *flags]
  assert analyze.run(arguments) == 2
  assert message in capsys.readouterr().err
  assert not list(tmp_path.glob('messages*'))
