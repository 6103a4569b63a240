"""Tests of the analyses of permutations: shuffle errors and kept shares."""

import re

import csv_rows
import numpy as np
import pytest
import random_models
import tiny_runs

from tff_bn import models
from tff_bn import position_aware
from tff_bn.papers.run_analyses import shuffle_test_analysis
from tff_bn.position_aware import position_encodings

pytestmark = pytest.mark.slow


def _without_encodings(run):
  """Puts the run's weights into a model without encodings."""
  trained = tiny_runs.load(run)
  model = models.build_model_fn('mlp3', (8, 8, 1), 10)()
  for layer in model.layers:
    if layer.weights:
      layer.set_weights(trained.get_layer(layer.name).get_weights())
  return model


@pytest.fixture(scope='module')
def permuted(fedavg, encoded, tmp_path_factory):
  return tiny_runs.analyze(
      'permutation',
      [fedavg, encoded],
      '--shuffle_probability=0.5',
      '--num_examples=20',
      '--seed=3',
      folder=tmp_path_factory.mktemp('permuted'),
  )


def test_permutation(fedavg, encoded, permuted):
  columns = ['run', 'seed', 'group', 'units', 'weights', 'kept_share']
  assert list(permuted.rows[0]) == columns
  # The weights of the hidden layer, its normalization, and the output layer.
  assert [list(row.values())[:5] for row in permuted.rows] == [
      [run.name, '0', 'hidden', '30', '6'] for run in (fedavg, encoded)
  ]
  axes_of_runs = permuted.drawings['permutation'].axes
  changes = []
  for run, row, axes in zip(
      (fedavg, encoded), permuted.rows, axes_of_runs, strict=True
  ):
    positions, p = axes.collections[0].get_offsets().T.astype(int)
    assert list(positions) == list(range(30)) == sorted(p)
    kept = float(row['kept_share'])
    assert kept == pytest.approx(np.mean(p == positions), rel=1e-6)
    assert 0 < kept < 0.8
    assert axes.get_title() == f'hidden [{kept:.3f}]'

    model = tiny_runs.load(run)
    after = position_aware.permute_units(model, {'hidden': p})
    x = tiny_runs.split().dataset.x_test
    difference = np.abs(after(x).numpy() - model(x).numpy()).max(axis=1)
    found = re.search(
        rf'{run.name}, seed 0: .* at most (\S+);', permuted.markdown
    )
    changes.append(float(found[1]))
    assert changes[-1] <= max(difference.max(), 1e-5) * 1.05
    if run == encoded:
      # The 20 examples are some of these.
      assert np.isclose(difference, changes[-1], rtol=0.06).any()
  assert changes[0] < 1e-5 < 1e-2 < changes[1]
  cells = csv_rows.cells(permuted.markdown)
  assert cells[0] == ['Units of', 'Run', 'Seed', 'Units', 'Weights', 'Kept']
  assert [line[:5] for line in cells[2:]] == [
      ['hidden', run.name, '0', '30', '6'] for run in (fedavg, encoded)
  ]
  assert 'for 20 test examples' in permuted.markdown


@pytest.fixture(scope='module')
def shuffled(fedavg, encoded, tmp_path_factory):
  return tiny_runs.analyze(
      'shuffle_test',
      [fedavg, encoded],
      '--amplitudes=0.4,0',
      '--periods=2,1',
      '--repeats=2',
      '--seed=5',
      '--shuffle_probability=0.3',
      '--shuffle_probabilities=0.9,0',
      folder=tmp_path_factory.mktemp('shuffled'),
  )


def test_shuffle_errors(fedavg, encoded, shuffled):
  x = tiny_runs.split().dataset.x_test
  expected = []
  for run in (fedavg, encoded):
    model = _without_encodings(run)
    for mode in ('multiply', 'add'):
      for period in (2, 1):
        for amplitude in (0, 0.4):
          new = position_encodings.add_position_encodings(
              model, mode, amplitude, period
          )
          error = np.mean(
              [
                  position_aware.shuffle_error(new, x, 0.3, seed)
                  for seed in (5, 6)
              ]
          )
          key = (run.name, '0', mode, str(amplitude), str(period), '0.3')
          expected.append((key, error))
  columns = ['run', 'seed', 'mode', 'amplitude', 'period']
  columns += ['shuffle_probability', 'error', 'accuracy']
  assert list(shuffled.rows[0]) == columns
  rows = [row for row in shuffled.rows if row['mode']]
  for row, (key, error) in zip(rows, expected, strict=True):
    *found, value, accuracy = row.values()
    assert tuple(found) == key and not accuracy
    if key[3] == '0':
      # Rounding; logits are about 1.
      assert float(value) < 2e-7
    else:
      assert float(value) == pytest.approx(error, rel=1e-3)
      assert error > 1e-3


def test_table_of_shuffle_errors(shuffled):
  cells = csv_rows.cells(shuffled.markdown)
  assert cells[0] == ['Encodings', 'T', 'A', 'fedavg-seed0', 'encoded']
  key = dict(mode='add', period='1', amplitude='0.4')
  errors = [r['error'] for r in shuffled.rows if key.items() <= r.items()]
  (line,) = [x for x in cells if x[:3] == ['additive', '1', '0.4']]
  assert line[3:] == [f'{float(error):.3g}' for error in errors]
  assert 'P_sf = 0.3;' in shuffled.markdown
  assert 'at most 500 test examples and 2 permutations' in shuffled.markdown


def test_accuracy_after_shuffling(fedavg, encoded, shuffled):
  data = tiny_runs.split().dataset
  x, y = data.x_test, data.y_test  # Fewer than 500.
  found = {
      (row['run'], row['shuffle_probability']): row
      for row in shuffled.rows
      if not row['mode']
  }
  (axes,) = shuffled.drawings['shuffled_accuracy'].axes
  cells = csv_rows.cells(shuffled.markdown)[-4:]
  assert cells[0] == ['P_sf', 'fedavg-seed0', 'encoded']
  assert len(found) == 4
  for column, (run, line) in enumerate(
      zip((fedavg, encoded), axes.get_lines(), strict=True), start=1
  ):
    model = tiny_runs.load(run)
    assert line.get_label() == run.name
    for number, probability in enumerate(('0', '0.9')):
      row = found[run.name, probability]
      accuracies, errors = [], []
      for seed in (5, 6):
        changed = position_aware.shuffle_units(model, float(probability), seed)
        accuracies.append(np.mean(np.argmax(changed(x), axis=1) == y))
        difference = changed(x).numpy() - model(x).numpy()
        errors.append(np.mean(np.linalg.norm(difference, axis=1)) / 10)
      accuracy = np.mean(accuracies)
      assert float(row['accuracy']) == pytest.approx(accuracy, abs=1e-6)
      assert float(row['error']) == pytest.approx(
          np.mean(errors), rel=1e-3, abs=1e-6
      )
      assert line.get_ydata()[number] == pytest.approx(100 * accuracy, abs=1e-3)
      assert cells[2 + number][column] == f'{100 * accuracy:.1f}'
  # Without encodings, permutations change nothing.
  assert (
      found[fedavg.name, '0']['accuracy']
      == found[fedavg.name, '0.9']['accuracy']
  )
  encoded_rows = (found['encoded', p]['accuracy'] for p in ('0', '0.9'))
  assert len(set(encoded_rows)) == 2


def test_gaussian_inputs(fedavg, tmp_path):
  result = tiny_runs.analyze(
      'shuffle_test',
      fedavg,
      *('--inputs=gaussian', '--amplitudes=0.75', '--periods=1'),
      *('--repeats=1', '--num_examples=4000', '--shuffle_probabilities=0'),
      folder=tmp_path,
  )
  model = position_encodings.add_position_encodings(
      tiny_runs.load(fedavg), 'multiply', 0.75, 1
  )
  # The error of independent inputs from the same distribution.
  x = np.random.default_rng(9).standard_normal((4000, 8, 8, 1))
  expected = position_aware.shuffle_error(model, x, 0.1, 0)
  assert float(result.rows[0]['error']) == pytest.approx(expected, rel=0.05)
  test_error = position_aware.shuffle_error(
      model, tiny_runs.split().dataset.x_test, 0.1, 0
  )
  assert expected != pytest.approx(test_error, rel=0.2)
  assert '4000 random inputs' in result.markdown


def test_number_of_examples_of_the_shuffle_test(fedavg, tmp_path):
  result = tiny_runs.analyze(
      'shuffle_test',
      fedavg,
      *('--amplitudes=0.3', '--periods=1', '--repeats=1', '--num_examples=3'),
      '--shuffle_probabilities=0',
      folder=tmp_path,
  )
  model = position_encodings.add_position_encodings(
      tiny_runs.load(fedavg), 'multiply', 0.3, 1
  )
  x, _ = tiny_runs.analyzed(fedavg).test_examples(3, 0)
  error = position_aware.shuffle_error(model, x, 0.1, 0)
  assert float(result.rows[0]['error']) == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize(
    ('name', 'pan'),
    [
        ('resnet20', 'add'),
        ('fbn_cnn', 'multiply'),
    ],
)
def test_without_encodings(name, pan):
  arguments = (name, (8, 8, 1), 10, 'batch', 'float32', None)
  model = models.build_model_fn(*arguments, pan, 0.4)()
  random_models.randomize(model)
  plain_model = models.build_model_fn(*arguments)()
  for layer in plain_model.layers:
    if layer.weights:
      layer.set_weights(model.get_layer(layer.name).get_weights())
  x = np.random.default_rng(0).random((4, 8, 8, 1), np.float32)
  expected = plain_model(x, training=False).numpy()
  found = shuffle_test_analysis.without_encodings(model)
  np.testing.assert_allclose(found(x, training=False), expected, rtol=1e-5)
  assert not np.allclose(model(x, training=False), expected, rtol=1e-2)
  # The copy has its own weights, which can be permuted.
  shuffled = position_aware.shuffle_units(found, 1.0, 0)
  np.testing.assert_allclose(
      shuffled(x, training=False), expected, rtol=1e-3, atol=1e-5
  )
  found.set_weights([0 * w for w in found.get_weights()])
  assert not np.allclose(model(x, training=False), 0)


def test_kept_shares(tmp_path):
  result = tiny_runs.analyze(
      'kept_share',
      None,
      '--num_units=40,90',
      '--shuffle_probabilities=0.7,0.2,0',
      '--shuffle_probability=0.5',
      '--num_shuffles=2,0.5',
      '--num_steps=2',
      '--repeats=30',
      folder=tmp_path,
  )
  columns = ['num_units', 'shuffle_probability', 'num_shuffles', 'num_steps']
  assert list(result.rows[0]) == [*columns, 'kept_share']
  keys = [tuple(row[c] for c in columns) for row in result.rows]
  assert keys == [
      *(
          (size, p, '', '')
          for size in ('40', '90')
          for p in ('0.7', '0.2', '0')
      ),
      *((size, '0.5', n, '2') for size in ('40', '90') for n in ('2', '0.5')),
  ]
  shares = {}
  for key, row in zip(keys, result.rows):
    size, probability, num_shuffles, num_steps = key
    shares[key] = float(row['kept_share'])
    training = dict(num_shuffles=float(num_shuffles or 0), num_steps=2)
    expected = position_aware.mean_kept_share(
        int(size),
        float(probability),
        repeats=30,
        **(training if num_steps else {}),
    )
    assert shares[key] == pytest.approx(expected, rel=1e-6)
  assert shares['40', '0', '', ''] == 1
  # Tables.
  cells = csv_rows.cells(result.markdown)
  assert cells[0] == ['P_sf', 'R_kept, 40 units', 'R_kept, 90 units']
  assert [line[0] for line in cells[2:5]] == ['0', '0.2', '0.7']
  assert cells[4][2] == f'{shares["90", "0.7", "", ""]:.3f}'
  assert cells[5][0] == 'N_sf'
  assert [line[0] for line in cells[7:]] == ['0.5', '2']
  assert cells[8][1] == f'{shares["40", "0.5", "2", "2"]:.3f}'
  assert 'P_sf = 0.5.' in result.markdown
  assert 'Number of local steps: 2.' in result.markdown
  # The figure.
  left, right = result.drawings['kept_share'].axes
  for axes, x, keys in (
      (left, [0, 0.2, 0.7], [(p, '', '') for p in ('0', '0.2', '0.7')]),
      (right, [0.5, 2], [('0.5', n, '2') for n in ('0.5', '2')]),
  ):
    for line, size in zip(axes.get_lines(), ('40', '90'), strict=True):
      assert line.get_label() == f'{size} units'
      np.testing.assert_allclose(line.get_xdata(), x)
      y = [shares[size, *key] for key in keys]
      np.testing.assert_allclose(line.get_ydata(), y, 1e-6)


def test_defaults_of_kept_share(tmp_path):
  """The paper reports 0.80 to 0.86 for P_sf = 0.1 in figure 2."""
  result = tiny_runs.analyze('kept_share', None, '--repeats=5', folder=tmp_path)
  assert {row['num_units'] for row in result.rows} == {'1024'}
  first = {
      row['shuffle_probability']: float(row['kept_share'])
      for row in result.rows
      if not row['num_steps']
  }
  assert 0.8 < first['0.1'] < 0.86
  assert first['0'] == 1
  assert first['1'] < 0.01
  training = [row for row in result.rows if row['num_steps']]
  assert {row['num_steps'] for row in training} == {'100'}
  assert [float(row['num_shuffles']) for row in training] == [
      *(0, 0.1, 0.2, 0.5, 1, 2, 5, 10)
  ]


@pytest.mark.parametrize(
    ('flags', 'num_steps', 'largest'),
    [
        ({}, 1, 1),
        (dict(local_steps=3), 3, 2),
        # 1437 training examples of 4 clients: 2 · 359.25 / 160 = 4.49.
        (dict(local_steps=None, local_epochs=2, batch_size=160), 5, 5),
    ],
)
def test_units_and_steps_of_a_run(fedavg, tmp_path, flags, num_steps, largest):
  run = tiny_runs.with_flags(fedavg, tmp_path / 'run', **flags)
  rows = tiny_runs.analyze('kept_share', run, '--repeats=2').rows
  assert {row['num_units'] for row in rows} == {'30'}
  training = [row for row in rows if row['num_steps']]
  assert {row['num_steps'] for row in training} == {str(num_steps)}
  # The default values of N_sf up to the number of steps.
  assert max(float(row['num_shuffles']) for row in training) == largest
