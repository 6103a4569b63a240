"""Tests of permutations, the shuffle test, kept shares, and fusion."""

import re

import numpy as np
import pytest
import random_models
import tensorflow as tf
import tiny_runs

from tff_bn import models
from tff_bn import position_aware
from tff_bn.data import federated
from tff_bn.position_aware import position_encodings
from tff_bn.programs import train
from tff_bn.programs.analyses.position_aware import shuffle_test


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs') / 'plain'
  assert train.run([*tiny_runs.FLAGS, f'--output_dir={folder}']) == 0
  return folder


@pytest.fixture(scope='module')
def encoded(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs') / 'encoded'
  arguments = ['--pan=multiply', '--pan_amplitude=0.3', '--pan_period=3']
  arguments += [*tiny_runs.FLAGS, f'--output_dir={folder}']
  assert train.run(arguments) == 0
  return folder


def _without_encodings(run):
  """The run's weights in a model that never had encodings."""
  trained = tiny_runs.load(run)
  model = models.build_model_fn('mlp3', (8, 8, 1), 10)()
  for layer in model.layers:
    if layer.weights:
      layer.set_weights(trained.get_layer(layer.name).get_weights())
  return model


def _cells(markdown):
  lines = [line for line in markdown.splitlines() if line.startswith('|')]
  return [[c.strip() for c in line.strip('|').split('|')] for line in lines]


@pytest.fixture(scope='module')
def permuted(plain, encoded, tmp_path_factory):
  return tiny_runs.analyze(
      'permutation',
      [plain, encoded],
      '--shuffle_probability=0.5',
      '--num_examples=20',
      '--seed=3',
      folder=tmp_path_factory.mktemp('permuted'),
  )


def test_permutation(plain, encoded, permuted):
  columns = ['run', 'seed', 'group', 'units', 'weights', 'kept_share']
  assert list(permuted.rows[0]) == columns
  # Of the hidden layer, its batch normalization, and the output layer.
  assert [list(row.values())[:5] for row in permuted.rows] == [
      [run.name, '0', 'hidden', '30', '6'] for run in (plain, encoded)
  ]
  axes_of_runs = permuted.drawings['permutation'].axes
  changes = []
  for run, row, axes in zip(
      (plain, encoded), permuted.rows, axes_of_runs, strict=True
  ):
    positions, p = axes.collections[0].get_offsets().T.astype(int)
    assert list(positions) == list(range(30)) == sorted(p)
    kept = float(row['kept_share'])
    assert kept == pytest.approx(np.mean(p == positions), rel=1e-6)
    assert 0 < kept < 0.8
    assert axes.get_title() == f'hidden [{kept:.3f}]'

    model = tiny_runs.load(run)
    after = tiny_runs.load(run)
    for name, axis in (('hidden', -1), ('norm', 0), ('logits', 0)):
      layer = after.get_layer(name)
      layer.set_weights(
          [
              # The output layer's bias does not belong to hidden units.
              w if w.shape == (10,) else np.take(w, p, axis)
              for w in layer.get_weights()
          ]
      )
    x = tiny_runs.split().dataset.x_test
    difference = np.abs(after(x).numpy() - model(x).numpy()).max(axis=1)
    found = re.search(
        rf'{run.name}, seed 0: .* at most (\S+),', permuted.markdown
    )
    changes.append(float(found[1]))
    assert changes[-1] <= max(difference.max(), 1e-5) * 1.05
    if run == encoded:
      # The 20 examples are some of these.
      assert np.isclose(difference, changes[-1], rtol=0.06).any()
  assert changes[0] < 1e-5 < 1e-2 < changes[1]
  cells = _cells(permuted.markdown)
  assert cells[0] == ['Units of', 'Run', 'Seed', 'Units', 'Weights', 'Kept']
  assert [line[:5] for line in cells[2:]] == [
      ['hidden', run.name, '0', '30', '6'] for run in (plain, encoded)
  ]
  assert 'for 20 test examples' in permuted.markdown


@pytest.fixture(scope='module')
def shuffled(plain, encoded, tmp_path_factory):
  return tiny_runs.analyze(
      'shuffle_test',
      [plain, encoded],
      '--amplitudes=0.4,0,0.1',
      '--periods=2,1',
      '--repeats=2',
      '--seed=5',
      '--shuffle_probability=0.3',
      folder=tmp_path_factory.mktemp('shuffled'),
  )


def test_shuffle_errors(plain, encoded, shuffled):
  x = tiny_runs.split().dataset.x_test
  expected = []
  for run in (plain, encoded):
    model = _without_encodings(run)
    for mode in ('multiply', 'add'):
      for period in (2, 1):
        for amplitude in (0, 0.1, 0.4):
          new = position_encodings.add_position_encodings(
              model, mode, amplitude, period
          )
          error = np.mean(
              [
                  position_aware.shuffle_error(new, x, 0.3, seed)
                  for seed in (5, 6)
              ]
          )
          key = (run.name, '0', mode, str(amplitude), str(period))
          expected.append((key, error))
  columns = ['run', 'seed', 'mode', 'amplitude', 'period', 'error']
  assert list(shuffled.rows[0]) == columns
  for row, (key, error) in zip(shuffled.rows, expected, strict=True):
    *found, value = row.values()
    assert tuple(found) == key
    if key[3] == '0':
      # Rounding; logits are about 1.
      assert float(value) < 2e-7
    else:
      assert float(value) == pytest.approx(error, rel=1e-3)
      assert error > 1e-3


def test_tables_and_figure_of_shuffle_errors(shuffled):
  cells = _cells(shuffled.markdown)
  assert cells[0] == ['Encodings', 'T', 'A', 'plain', 'encoded']
  words = {'multiply': 'multiplicative', 'add': 'additive'}
  by_run = [[r for r in shuffled.rows if r['run'] == n] for n in cells[0][3:]]
  for line, *rows in zip(cells[2:], *by_run, strict=True):
    first = rows[0]
    assert line[:3] == [
        words[first['mode']],
        first['period'],
        first['amplitude'],
    ]
    for cell, row in zip(line[3:], rows, strict=True):
      assert float(cell) == pytest.approx(float(row['error']), rel=1e-2)
  assert 'P_sf = 0.3;' in shuffled.markdown
  assert 'at most 500 test examples and 2 permutations' in shuffled.markdown

  assert shuffled.drawings.keys() == {'shuffle_test'}
  panels = shuffled.drawings['shuffle_test'].axes
  assert [axes.get_title() for axes in panels] == [
      *('plain: multiplicative', 'plain: T = 2'),
      *('encoded: multiplicative', 'encoded: T = 2'),
  ]
  for number, axes in enumerate(panels):
    lines = {
        'T = 2': ('multiply', '2'),
        'T = 1': ('multiply', '1'),
    }
    if number % 2:
      lines = {'multiplicative': ('multiply', '2'), 'additive': ('add', '2')}
    assert [x.get_label() for x in axes.get_lines()] == list(lines)
    for line, (mode, period) in zip(axes.get_lines(), lines.values()):
      assert list(line.get_xdata()) == [0, 0.1, 0.4]
      np.testing.assert_allclose(
          line.get_ydata(),
          [
              float(row['error'])
              for row in by_run[number // 2]
              if (row['mode'], row['period']) == (mode, period)
          ],
          rtol=1e-6,
      )


def test_examples_of_the_shuffle_test(plain, tmp_path):
  """The mean is over as many examples as asked for; the seed draws them."""
  arguments = ['--amplitudes=0.3', '--periods=1', '--repeats=1']
  found = [
      float(
          tiny_runs.analyze(
              'shuffle_test', plain, *arguments, *more, folder=tmp_path
          ).rows[0]['error']
      )
      for more in (['--num_examples=3'], ['--num_examples=360'])
  ]
  data = tiny_runs.split()
  model = position_encodings.add_position_encodings(
      tiny_runs.load(plain), 'multiply', 0.3, 1
  )
  changed = position_aware.shuffle_units(model, 0.1, 0)
  x = data.dataset.x_test
  errors = np.linalg.norm(changed(x) - model(x), axis=1) / 10
  assert found[1] == pytest.approx(errors.mean(), rel=1e-4)
  assert found[0] != pytest.approx(found[1], rel=1e-3)
  # Each of them is of the test set.
  assert errors.min() <= found[0] <= errors.max()


@pytest.mark.parametrize(
    ('name', 'pan'), [('resnet20', 'add'), ('fbn_cnn', 'multiply')]
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
  found = shuffle_test.without_encodings(model)
  np.testing.assert_allclose(found(x, training=False), expected, rtol=1e-5)
  assert not np.allclose(model(x, training=False), expected, rtol=1e-2)
  # The copy's weights are its own, and can be permuted.
  shuffled = position_aware.shuffle_units(found, 1.0, 0)
  np.testing.assert_allclose(shuffled(x, training=False), expected, rtol=1e-3)
  found.set_weights([0 * w for w in found.get_weights()])
  assert not np.allclose(model(x, training=False), 0)


def _simulated(num_units, probability, rng):
  """Algorithm 1 on a list."""
  units = list(range(num_units))
  for row in range(num_units - 1):
    if rng.random() < probability:
      other = int(rng.integers(row + 1, num_units))
      units[row], units[other] = units[other], units[row]
  return units


def _simulated_share(num_units, probability, num_shuffles=1, num_steps=1):
  rng = np.random.default_rng(99)
  shares = []
  for _ in range(250):
    units = list(range(num_units))
    for _ in range(num_steps):
      if rng.random() < num_shuffles / num_steps:
        chosen = _simulated(num_units, probability, rng)
        units = [units[i] for i in chosen]
    shares.append(np.mean([i == u for i, u in enumerate(units)]))
  return np.mean(shares)


def test_kept_shares(tmp_path):
  result = tiny_runs.analyze(
      'kept_share',
      None,
      '--num_units=40,90',
      '--shuffle_probabilities=0.7,0.2,0',
      '--shuffle_probability=0.5',
      '--num_shuffles=2,0.5',
      '--num_steps=2',
      '--repeats=300',
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
    share = float(row['kept_share'])
    shares[key] = share
    expected = _simulated_share(
        int(size),
        float(probability),
        float(num_shuffles or 1),
        int(num_steps or 1),
    )
    # It is random how often the units are permuted, if it is not in all steps.
    tolerance = 0.08 if num_shuffles == '0.5' else 0.02
    assert share == pytest.approx(expected, abs=tolerance)
  assert shares['40', '0', '', ''] == 1
  # Tables.
  cells = _cells(result.markdown)
  assert cells[0] == ['P_sf', 'R_kept, 40 units', 'R_kept, 90 units']
  assert [line[0] for line in cells[2:5]] == ['0', '0.2', '0.7']
  assert cells[4][2] == f'{shares["90", "0.7", "", ""]:.3f}'
  assert cells[5][0] == 'N_sf'
  assert [line[0] for line in cells[7:]] == ['0.5', '2']
  assert cells[8][1] == f'{shares["40", "0.5", "2", "2"]:.3f}'
  assert 'P_sf = 0.5.' in result.markdown
  assert 'so many steps: 2.' in result.markdown
  # The figure.
  left, right = result.drawings['kept_share'].axes
  for axes, points in (
      (left, lambda s: {p: (s, p, '', '') for p in ('0', '0.2', '0.7')}),
      (right, lambda s: {n: (s, '0.5', n, '2') for n in ('0.5', '2')}),
  ):
    for line, size in zip(axes.get_lines(), ('40', '90'), strict=True):
      assert line.get_label() == f'{size} units'
      expected = points(size)
      np.testing.assert_allclose(line.get_xdata(), [float(x) for x in expected])
      np.testing.assert_allclose(
          line.get_ydata(), [shares[key] for key in expected.values()], 1e-6
      )


def test_defaults_of_kept_share(tmp_path):
  """Those of figure 2 of the paper, which says 0.80 to 0.86 for 0.1."""
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


def test_units_and_steps_of_a_run(plain, tmp_path):
  epochs = dict(local_steps=None, local_epochs=2, batch_size=160)
  for folder, flags, num_steps in (
      ('a', {}, 1),
      ('b', dict(local_steps=3), 3),
      # 1437 training examples of 4 clients: 2 · 359.25 / 160 = 4.49.
      ('c', epochs, 5),
  ):
    run = tiny_runs.with_flags(plain, tmp_path / folder, **flags)
    result = tiny_runs.analyze('kept_share', run, '--repeats=2')
    assert result.folder == run
    assert {row['num_units'] for row in result.rows} == {'30'}
    training = [row for row in result.rows if row['num_steps']]
    assert {row['num_steps'] for row in training} == {str(num_steps)}
    # As many of the defaults as these steps allow.
    assert max(float(row['num_shuffles']) for row in training) == (
        {1: 1, 3: 2, 5: 5}[num_steps]
    )


class _Fusion:
  """What a fusion works with, seen from outside."""

  def __init__(self, monkeypatch):
    self.models = None
    self.x = None
    self.halves = []
    self.batches = []
    self.lengths = []
    align = position_aware.align
    client_dataset = federated.FederatedData.client_dataset

    def spied_align(first, second, x):
      # The models themselves, as they are before anything is done to them.
      self.models, self.x = (first, second), x
      return align(first, second, x)

    def spied_dataset(data, client_ids, **length):
      dataset = client_dataset(data, client_ids, **length)
      if len(client_ids) == 1:
        self.halves.append(data.train_indices[client_ids[0]])
        self.batches.append(list(dataset))
        self.lengths.append(length)
      return dataset

    monkeypatch.setattr(position_aware, 'align', spied_align)
    monkeypatch.setattr(
        federated.FederatedData, 'client_dataset', spied_dataset
    )


_FUSION = ('--epochs=2', '--coefficients=1,0,0.3', '--num_examples=50')


def _fuse(run, monkeypatch, *arguments, folder):
  seen = _Fusion(monkeypatch)
  result = tiny_runs.analyze('fusion', run, *arguments, folder=folder)
  return seen, result


def _expected_fusion(seen, coefficients, change=lambda model: model):
  data = tiny_runs.split()
  first, second = seen.models
  others = dict(
      average=second, transport=position_aware.align(first, second, seen.x)
  )
  return {
      (method, coefficient): tiny_runs.evaluate(
          change(position_aware.interpolate(first, other, coefficient)), data
      )
      for method, other in others.items()
      for coefficient in coefficients
  }


def _fusion_values(rows, name):
  return {
      (row['method'], float(row['coefficient'])): (
          float(row['accuracy']),
          float(row['loss']),
      )
      for row in rows
      if row['run'] == name
  }


def _assert_same_results(found, expected):
  assert list(found) == list(expected)
  for key, (accuracy, loss) in expected.items():
    # An example may be on the border of two classes.
    assert found[key][0] == pytest.approx(accuracy, abs=1.5 / 360)
    assert found[key][1] == pytest.approx(loss, rel=1e-4)


def test_fusion(plain, tmp_path, monkeypatch):
  run = tiny_runs.with_flags(plain, tmp_path / 'plain', client_momentum=0.5)
  with monkeypatch.context() as context:
    seen, result = _fuse(run, context, *_FUSION, folder=tmp_path / 'out')
  columns = ['run', 'seed', 'method', 'coefficient', 'accuracy', 'loss']
  assert list(result.rows[0]) == columns
  found = _fusion_values(result.rows, 'plain')
  _assert_same_results(found, _expected_fusion(seen, (0, 0.3, 1)))
  # The ends are the models themselves; permuting units doesn't change one.
  assert found['average', 0] == found['transport', 0]
  accuracy, loss = found['average', 1]
  assert found['transport', 1][0] == pytest.approx(accuracy, abs=1.5 / 360)
  assert found['transport', 1][1] == pytest.approx(loss, rel=1e-4)
  # Between them it matters.
  assert found['average', 0.3][1] != pytest.approx(found['transport', 0.3][1])

  # The models are from two halves of the data, and from initial weights that
  # they have, all but exactly, after steps of no length.
  run = tiny_runs.with_flags(
      plain, tmp_path / 'start', client_learning_rate=1e-30
  )
  with monkeypatch.context() as context:
    start, _ = _fuse(run, context, *_FUSION, folder=tmp_path / 'out2')
  for seen_fusion in (start, seen):
    halves = seen_fusion.halves
    assert [len(half) for half in halves] == [719, 718]
    assert sorted(np.concatenate(halves)) == list(range(1437))
    # By chance, not by position.
    assert np.ptp(halves[0]) > 1400
  for length in seen.lengths:
    assert length['local_epochs'] == 2
    assert length['batch_size'] == 8
    assert length.get('local_steps') is None
  assert len(seen.x) == 50
  kernels = []
  for initial, batches in zip(start.models, seen.batches, strict=True):
    assert len(batches) == 2 * 90
    kernels.append(initial.get_layer('hidden').kernel.numpy())
    # Glorot's uniform initializer.
    assert np.abs(kernels[-1]).max() <= np.sqrt(6 / (64 + 30))
    assert kernels[-1].std() == pytest.approx(np.sqrt(2 / (64 + 30)), rel=0.1)
  assert np.abs(kernels[0] - kernels[1]).max() > 0.1


@pytest.mark.slow
def test_halves_are_trained_as_clients(plain, tmp_path, monkeypatch):
  """With one epoch of few batches, so that rounding can't grow."""
  flags = dict(batch_size=300, client_momentum=0.5)
  models_of = []
  for rate in (1e-30, 0.05):
    run = tiny_runs.with_flags(
        plain, tmp_path / str(rate), client_learning_rate=rate, **flags
    )
    with monkeypatch.context() as context:
      seen, _ = _fuse(
          run, context, '--epochs=1', '--coefficients=0', folder=tmp_path / 'x'
      )
    models_of.append(seen.models)
  for initial, trained, batches in zip(*models_of, seen.batches, strict=True):
    assert len(batches) == 3
    norm = initial.get_layer('norm')
    norm.moving_mean.assign(tf.zeros_like(norm.moving_mean))
    norm.moving_variance.assign(tf.ones_like(norm.moving_variance))
    tiny_runs.train(initial, batches, 0.05, 0.5)
    for weight, expected in zip(
        trained.get_weights(), initial.get_weights(), strict=True
    ):
      np.testing.assert_allclose(weight, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_seed_of_a_fusion(plain, tmp_path, monkeypatch):
  found = []
  for seed in (0, 1, 1):
    with monkeypatch.context() as context:
      seen, result = _fuse(
          plain,
          context,
          '--epochs=1',
          '--coefficients=0,1',
          f'--seed={seed}',
          folder=tmp_path,
      )
    found.append((seen.halves[0].tolist(), result.rows))
  assert found[0][0] != found[1][0]
  assert found[0][1] != found[1][1]
  assert found[1] == found[2]


def _with_statistics_of_all_data(model):
  x = tiny_runs.split().dataset.x_train
  z = model.get_layer('hidden')(x.reshape(len(x), -1)).numpy().astype(float)
  norm = model.get_layer('norm')
  norm.moving_mean.assign(z.mean(axis=0))
  norm.moving_variance.assign(z.var(axis=0))
  return model


def test_fusion_with_new_statistics(plain, tmp_path, monkeypatch):
  arguments = (*_FUSION[1:], '--epochs=1')
  with monkeypatch.context() as context:
    seen, result = _fuse(
        plain,
        context,
        *arguments,
        '--reestimate_statistics',
        folder=tmp_path / 'new',
    )
  expected = _expected_fusion(seen, (0, 0.3, 1), _with_statistics_of_all_data)
  _assert_same_results(_fusion_values(result.rows, 'plain'), expected)
  old = _expected_fusion(seen, (0, 0.3, 1))
  assert expected['average', 0.3][1] != pytest.approx(old['average', 0.3][1])
  assert 'computed anew for each model' in result.markdown


def test_tables_and_figure_of_fusion(plain, encoded, tmp_path):
  result = tiny_runs.analyze(
      'fusion',
      [plain, encoded],
      '--epochs=1',
      '--coefficients=0.5,0',
      folder=tmp_path,
  )
  cells = _cells(result.markdown)
  assert cells[0] == [
      'μ',
      *('plain: average', 'plain: optimal transport'),
      *('encoded: average', 'encoded: optimal transport'),
  ]
  (axes,) = result.drawings['fusion'].axes
  assert [line.get_label() for line in axes.get_lines()] == cells[0][1:]
  columns = [
      (name, method)
      for name in ('plain', 'encoded')
      for method in ('average', 'transport')
  ]
  for number, (name, method) in enumerate(columns):
    values = _fusion_values(result.rows, name)
    accuracies = [values[method, coefficient][0] for coefficient in (0, 0.5)]
    assert [line[0] for line in cells[2:]] == ['0', '0.5']
    assert [line[1 + number] for line in cells[2:]] == [
        f'{100 * accuracy:.1f}' for accuracy in accuracies
    ]
    line = axes.get_lines()[number]
    assert list(line.get_xdata()) == [0, 0.5]
    np.testing.assert_allclose(line.get_ydata(), accuracies, rtol=1e-6)
  assert 'for 1 epoch, each' in result.markdown
  assert 'interpolated as the weights' in result.markdown
