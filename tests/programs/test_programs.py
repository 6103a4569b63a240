"""Tests that run the programs: what they write, refuse and leave behind."""

import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import sys

import csv_rows
import ended_programs
import flag_cases
import in_jax
import keras
import numpy as np
import printed
import pytest
import tensorflow as tf
import tiny_runs

from tff_bn import data as tff_bn_data
from tff_bn import runtime
from tff_bn.imports import dependencies
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings
from tff_bn.programs.runs import jobs
from tff_bn.training import folder_lock
from tff_bn.training import manifests
from tff_bn.training import saved_models

_PRESETS = pathlib.Path(train.__file__).parent / 'presets'
# Three rounds of a small model, evaluated after each.
_SMALL = (
    '--model=mlp3',
    '--rounds=3',
    '--evaluate_every=1',
    '--local_steps=2',
    '--num_clients=5',
    '--classes_per_client=2',
)


def _file_times(folder):
  return {
      path: path.stat().st_mtime_ns
      for path in sorted(folder.rglob('*'))
      if path.is_file()
  }


def _can_be_read(folder):
  """Whether another program can read a run."""

  def read():
    with folder_lock.hold(folder, shared=True):
      pass

  # For the lock, another thread is like another program.
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    return pool.submit(read).exception() is None


@pytest.fixture(scope='module')
def comparison(tmp_path_factory):
  """The folder of a comparison, and what the program has printed."""
  folder = tmp_path_factory.mktemp('comparison') / 'new' / 'folder'
  arguments = [
      '--algorithms=centralized,fedavg,fedbn',
      '--seeds=0,1',
      '--average_last=2',
      *_SMALL,
      f'--output_dir={folder}',
  ]
  train_one = jobs.train_one
  readable, numbers = [], []

  def train_and_look(job, hook):
    runs = [folder / 'runs' / f'{n}-seed0' for n in ('centralized', 'fedavg')]
    readable.append([_can_be_read(run) for run in runs])
    train_one(job, hook)

  with open(folder.parent.parent / 'out', 'w+', encoding='utf-8') as out:
    with pytest.MonkeyPatch.context() as monkeypatch:
      monkeypatch.setattr(sys, 'stdout', out)
      monkeypatch.setattr(jobs, 'train_one', train_and_look)
      monkeypatch.setattr(
          runtime, 'divide_cores', lambda number, **_: numbers.append(number)
      )
      assert compare.run(arguments) == 0
    # A finished run can be read while the next one is trained.
    assert readable[:2] == [[False, False], [True, False]]
    assert numbers == [5]
    out.seek(0)
    return folder, arguments, out.read()


@pytest.fixture
def copied(comparison, tmp_path):
  """A copy of the comparison, which a test may change, and its command."""
  folder, arguments, _ = comparison
  copy = tmp_path / 'copy'
  shutil.copytree(folder, copy)
  return copy, [*arguments[:-1], f'--output_dir={copy}']


def test_comparison_has_all_files(comparison):
  folder, _, _ = comparison
  assert {path.name for path in folder.iterdir()} == {
      'flags.txt',
      'results.csv',
      'results.md',
      'report.html',
      'plots',
      'runs',
  }
  assert {path.name for path in (folder / 'plots').iterdir()} == {
      'accuracy.png',
      'accuracy_by_exchanges.png',
      'accuracy_by_megabytes.png',
      'loss.png',
      'label_distribution.png',
  }
  assert {path.name for path in (folder / 'runs').iterdir()} == {
      f'{algorithm}-seed{seed}'
      for algorithm in ('centralized', 'fedavg', 'fedbn')
      for seed in (0, 1)
  }


def test_results_are_means_of_the_runs_metrics(comparison):
  folder, _, output = comparison
  results = csv_rows.read(folder / 'results.csv')
  assert len(results) == 6
  for result in results:
    run = folder / 'runs' / f'{result["algorithm"]}-seed{result["seed"]}'
    metrics = csv_rows.read(run / 'metrics.csv')
    assert [row['round'] for row in metrics] == ['0', '1', '2', '3']
    for column in ('test_accuracy', 'client_test_accuracy', 'train_loss'):
      expected = np.mean([float(row[column]) for row in metrics[-2:]])
      assert float(result[column]) == pytest.approx(expected, rel=1e-7)
    for column in ('exchanges', 'megabytes'):
      assert result[column] == metrics[-1][column]
    assert result['rounds'] == '3'
  # The printed table and results.md have the same means.
  fedbn = [
      100 * float(result['test_accuracy'])
      for result in results
      if result['algorithm'] == 'fedbn'
  ]
  cell = f'{np.mean(fedbn):.1f} ± {np.std(fedbn, ddof=1):.1f}'
  table = (folder / 'results.md').read_text(encoding='utf-8')
  assert re.search(rf'\| fedbn +\| +{cell} \|', table)
  assert table in output
  assert str(folder / 'results.md') in output
  assert (
      '\n- Accuracies and losses: mean over the last 2 evaluated rounds; mean'
      ' over 2 seeds ± standard deviation.'
  ) in table
  assert (
      '\n- Accuracy, %: centralized, fedavg: global model on the whole test'
      " set; fedbn: clients' own models on the whole test set (mean).\n"
  ) in table


def test_algorithms_of_a_seed_start_alike(comparison):
  folder, _, _ = comparison
  initial = {
      (algorithm, seed): csv_rows.read(
          folder / 'runs' / f'{algorithm}-seed{seed}' / 'metrics.csv'
      )[0]['test_loss']
      for algorithm in ('centralized', 'fedavg', 'fedbn')
      for seed in (0, 1)
  }
  assert initial['centralized', 0] == initial['fedavg', 0]
  assert initial['fedavg', 0] == initial['fedbn', 0]
  assert initial['fedavg', 1] == initial['fedbn', 1]
  assert initial['fedavg', 0] != initial['fedavg', 1]


def test_only_federated_algorithms_send(comparison):
  folder, _, _ = comparison
  results = {
      (result['algorithm'], result['seed']): result
      for result in csv_rows.read(folder / 'results.csv')
  }
  assert float(results['centralized', '0']['megabytes']) == 0
  # mlp3 on 8x8 images: 64·30 weights, two affine and two statistics values for
  # 30 neurons, 30·10 weights and 10 biases; of 4 bytes each, once down and five
  # times up, in three rounds. BN stays with the clients of fedbn.
  for algorithm, num_values in (('fedavg', 2350), ('fedbn', 2230)):
    megabytes = num_values * 4 * (1 + 5) * 3 / 2**20
    result = results[algorithm, '0']
    assert float(result['megabytes']) == pytest.approx(megabytes)
    assert result['exchanges'] == '3'


_PREDICT_WITH_JAX = """
path, x, logits = sys.argv[1:]
model = keras.models.load_model(path)
np.save(logits, model.predict(np.load(x), verbose=0))
"""


@pytest.mark.slow
def test_model_opens_without_this_package_and_tensorflow(comparison, tmp_path):
  run = comparison[0] / 'runs' / 'fedavg-seed0'
  path = run / 'model' / 'model.keras'
  x = np.random.default_rng(0).uniform(size=(5, 8, 8, 1)).astype(np.float32)
  np.save(tmp_path / 'x.npy', x)
  in_jax.run(
      *(_PREDICT_WITH_JAX, tmp_path, path),
      *(tmp_path / 'x.npy', tmp_path / 'logits.npy'),
  )
  np.testing.assert_allclose(
      np.load(tmp_path / 'logits.npy'),
      keras.models.load_model(path).predict(x, verbose=0),
      rtol=1e-4,
      atol=1e-5,
  )


def test_same_command_repeats_nothing(comparison, monkeypatch, capsys):
  folder, arguments, output = comparison
  before = _file_times(folder)
  with monkeypatch.context() as context:
    # It answers without TensorFlow.
    context.setattr(dependencies, 'require_tff', None)
    assert compare.run(arguments) == 0
  assert _file_times(folder) == before
  captured = capsys.readouterr()
  assert captured.err == 'All 6 runs are finished.\n'
  assert captured.out == output


def test_results_that_are_damaged_are_written_again(
    copied, monkeypatch, capsys
):
  folder, arguments = copied
  before = _file_times(folder / 'runs')
  damages = {
      'results.csv': pathlib.Path.unlink,
      'results.md': lambda path: path.write_bytes(b'\xff\xfe'),
      'report.html': pathlib.Path.unlink,
  }
  contents = {name: (folder / name).read_bytes() for name in damages}
  written = []
  for name, damage in damages.items():
    damage(folder / name)
    with monkeypatch.context() as context:
      context.setattr(compare, '_write_results', lambda *_: written.append(_))
      assert compare.run(arguments) == 0
    (folder / name).write_bytes(contents[name])
  assert len(written) == 3
  for name, damage in damages.items():
    damage(folder / name)
  capsys.readouterr()
  assert compare.run(arguments) == 0
  assert capsys.readouterr().err.count(': finished\n') == 6
  for name in ('results.csv', 'results.md'):
    assert (folder / name).read_bytes() == contents[name]
  assert (folder / 'report.html').exists()
  assert _file_times(folder / 'runs') == before


def test_other_comparison_is_refused(comparison, capsys):
  folder, arguments, _ = comparison
  before = _file_times(folder)
  assert compare.run([*arguments, '--rounds=2', '--seeds=0']) == 2
  error = capsys.readouterr().err
  assert '--rounds (3, now 2)' in error and '--seeds (0,1, now 0)' in error
  assert _file_times(folder) == before
  # The flags of a run were changed.
  flags = folder / 'runs' / 'fedavg-seed1' / 'flags.txt'
  text = flags.read_text(encoding='utf-8')
  flags.write_text(text.replace('--rounds=3', '--rounds=4'), encoding='utf-8')
  try:
    assert compare.run(arguments) == 2
  finally:
    flags.write_text(text, encoding='utf-8')
  error = capsys.readouterr().err
  assert 'fedavg-seed1' in error and '--rounds (4, now 3)' in error


@pytest.mark.slow
def test_run_is_repeated_by_its_flags(
    comparison, tmp_path, monkeypatch, capsys
):
  folder, _, _ = comparison
  numbers = []
  monkeypatch.setattr(
      runtime, 'divide_cores', lambda number, **_: numbers.append(number)
  )
  run = folder / 'runs' / 'fedbn-seed1'
  # A folder that holds another run.
  (tmp_path / 'flags.txt').write_text('--algorithm=single\n')
  (tmp_path / 'metrics.csv').write_text('old\n')
  (tmp_path / 'notes.txt').write_text('mine')
  arguments = [f'--flagfile={run}/flags.txt', f'--output_dir={tmp_path}']
  assert train.run(arguments) == 2
  assert '--algorithm (single, now fedbn)' in capsys.readouterr().err
  assert (tmp_path / 'metrics.csv').read_text() == 'old\n'

  assert train.run([*arguments, '--overwrite']) == 0
  assert numbers == [5]
  for name in ('metrics.csv', 'flags.txt'):
    assert (tmp_path / name).read_bytes() == (run / name).read_bytes()
  assert (tmp_path / 'notes.txt').exists()
  assert {path.name for path in (tmp_path / 'plots').iterdir()} == {
      'accuracy.png',
      'loss.png',
      'label_distribution.png',
  }
  output = capsys.readouterr().out
  model = keras.models.load_model(re.search(r"load_model\('(.*)'\)", output)[1])
  assert model.count_params() == 2350


def test_run_is_continued_wherever_it_is_computed(comparison, tmp_path, capsys):
  run = comparison[0] / 'runs' / 'fedavg-seed0'
  arguments = [*_SMALL, f'--output_dir={tmp_path}']
  assert train.run([*arguments, '--runtime=native']) == 0
  flags, expected = (
      (folder / 'flags.txt').read_text(encoding='utf-8')
      for folder in (tmp_path, run)
  )
  assert flags == expected and '--rounds=3' in flags
  losses, expected = (
      [float(row['test_loss']) for row in csv_rows.read(folder / 'metrics.csv')]
      for folder in (tmp_path, run)
  )
  np.testing.assert_allclose(losses, expected, rtol=1e-4)
  # A finished run is read by the other runtime.
  capsys.readouterr()
  assert train.run([*arguments, '--client_devices=cpu:0']) == 0
  assert 'This run is finished.' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ('precision', 'arguments'),
    [
        pytest.param(
            *('mixed_bfloat16', ['--model=small_cnn']), marks=pytest.mark.slow
        ),
        ('mixed_float16', []),
    ],
)
def test_model_in_mixed_precision(tmp_path, precision, arguments):
  arguments = [
      *_SMALL,
      *arguments,
      '--algorithm=fedbn',
      f'--precision={precision}',
      f'--output_dir={tmp_path}',
  ]
  assert train.run(arguments) == 0
  model = tiny_runs.load(tmp_path)
  for layer in model.layers:
    is_float32 = layer.name in ('image', 'input', 'logits')
    expected = 'float32' if is_float32 else precision
    assert layer.dtype_policy.name == expected
  assert {weight.dtype for weight in model.get_weights()} == {
      np.dtype(np.float32)
  }
  assert evaluate.run([f'--run={tmp_path}']) == 0
  _, clients = _evaluation(tmp_path)
  mean = np.mean([float(client['loss']) for client in clients])
  last = csv_rows.read(tmp_path / 'metrics.csv')[-1]
  assert mean == pytest.approx(float(last['client_test_loss']), rel=1e-3)
  assert keras.mixed_precision.global_policy().name == 'float32'


def _save_npz(path, **changes):
  arrays = dict(
      x_train=np.zeros((8, 8, 8, 1), np.float32),
      y_train=np.arange(8) % 2,
      x_test=np.zeros((4, 8, 8, 1), np.float32),
      y_test=np.arange(4) % 2,
  )
  arrays.update(changes)
  np.savez(path, **{k: v for k, v in arrays.items() if v is not None})


# Commands of tff-bn-train, or of tff-bn-compare if they have --algorithms, and
# parts of the error.
_WRONG_COMMANDS = """
--split=iid --num_clients=1438
    --num_clients=1438; 1437
--classes_per_client=11
    --classes_per_client=11
--split=domains
    --split=domains; --dataset=digits
--split=domains --dataset=digits_domains --clients_per_round=6
    --clients_per_round=6; 5
--dataset=missing.npz
    missing.npz
--dataset=no_x_test.npz
    no_x_test.npz; x_test
--model=missing_module:fn
    --model=missing_module:fn
--model=resnet20 --dataset=flat.npz --num_clients=2
    --model=resnet20
--model=wrong_logits:build
    must have the shape (10,)
--algorithm=fedtan_ii --normalization=none
    batch normalization
--algorithms=centralized,fedbn --normalization=none --model=mlp3
    fedbn; batch normalization
--runtime=native --client_devices=CPU:0
    --client_devices=CPU:0; --runtime=in_process
--runtime=native --jit_compile --algorithms=fedavg
    --jit_compile; --runtime=in_process
--client_devices=CPU:0,TPU:7
    --client_devices=CPU:0,TPU:7; no device 'TPU:7'; CPU:0
--client_devices=CPU:0,TPU:7 --algorithms=fedavg
    --client_devices=CPU:0,TPU:7; no device 'TPU:7'; CPU:0
--jobs=2 --runtime=ray --algorithms=fedavg
    --jobs=2 is impossible; --runtime=ray
"""


@flag_cases.parametrize(_WRONG_COMMANDS)
def test_wrong_commands(arguments, expected, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  _save_npz('no_x_test.npz', x_test=None)
  _save_npz(
      'flat.npz',
      x_train=np.zeros((8, 64), np.float32),
      x_test=np.zeros((4, 64), np.float32),
  )
  # A module in the working folder.
  pathlib.Path('wrong_logits.py').write_text(
      'from tff_bn import models\n'
      'def build(input_shape, num_classes):\n'
      "  return models.build_model_fn('mlp3', input_shape, num_classes + 1)()\n"
  )
  is_comparison = any(a.startswith('--algorithms') for a in arguments)
  program = compare if is_comparison else train
  assert program.run([*arguments, '--output_dir=run']) == 2
  captured = capsys.readouterr()
  error = printed.error(captured.err)
  assert error.startswith(f'{program.PROGRAM.name}: ')
  for words in expected.split('; '):
    assert words in error
  assert not captured.out
  assert not os.path.exists('run')


@pytest.mark.slow
def test_run_with_personal_position_encodings(tmp_path):
  arguments = [*_SMALL, '--pan=multiply', '--pan_personal_share=0.5']
  arguments += [f'--output_dir={tmp_path / "run"}']
  assert train.run(arguments) == 0
  assert evaluate.run([f'--run={tmp_path / "run"}']) == 0
  _, clients = _evaluation(tmp_path / 'run')
  assert [client['model'] for client in clients] == ['own'] * 5
  # The initial models differ, too.
  last = csv_rows.read(tmp_path / 'run' / 'metrics.csv')[-1]
  mean = np.mean([float(client['loss']) for client in clients])
  assert mean == pytest.approx(float(last['client_test_loss']), rel=1e-5)
  phases = set()
  for number in range(5):
    own = tiny_runs.load(tmp_path / 'run', f'client_{number}')
    layer = own.get_layer('hidden_position')
    phases.add(float(layer.personal_phase.numpy()))
  assert len(phases) == 5


@pytest.mark.parametrize('preset', sorted(_PRESETS.glob('*.flags')))
def test_presets_are_right(preset):
  arguments = [f'--flagfile={preset}']
  flags = command_line.parse(compare.PROGRAM.define_flags, arguments)
  settings.check(flags)
  if flags.dsgd_momentum is not None:  # fedavg has no such momentum.
    arguments.append('--algorithm=dsgd_fbn')
  settings.check(command_line.parse(train.PROGRAM.define_flags, arguments))


def _evaluation(folder):
  """Returns the rows of the last evaluation."""
  rows = csv_rows.read(folder / 'evaluation.csv')
  first = max(n for n, row in enumerate(rows) if not row['client'])
  assert rows[first]['model'] == 'global'
  return rows[first], rows[first + 1 :]


@pytest.mark.parametrize(
    ('algorithm', 'model'), [('fedavg', 'global'), ('fedbn', 'own')]
)
def test_evaluation(algorithm, model, comparison, tmp_path, capsys):
  folder, _, _ = comparison
  run, out = folder / 'runs' / f'{algorithm}-seed0', tmp_path / 'new' / 'folder'
  before = _file_times(run)
  assert evaluate.run([f'--run={run}', f'--output_dir={out}']) == 0
  assert _file_times(run) == before
  test, clients = _evaluation(out)
  last = csv_rows.read(run / 'metrics.csv')[-1]
  for measure in ('loss', 'accuracy'):
    if model == 'global':
      expected = float(last[f'test_{measure}'])
      assert float(test[measure]) == pytest.approx(expected, rel=1e-5)
    mean = np.mean([float(client[measure]) for client in clients])
    expected = float(last[f'client_test_{measure}'])
    assert mean == pytest.approx(expected, rel=1e-5)
  assert [client['client'] for client in clients] == [
      f'client_{i}' for i in range(5)
  ]
  assert {client['model'] for client in clients} == {model}
  sizes = [int(client['num_examples']) for client in clients]
  assert sum(sizes) == int(test['num_examples']) == 360
  accuracy = 100 * float(test['accuracy'])
  assert f'{accuracy:.1f}' in capsys.readouterr().out
  if model == 'own':
    return

  # On other data.
  own = csv_rows.read(out / 'evaluation.csv')
  arguments = [f'--run={run}', f'--output_dir={out}']
  assert evaluate.run([*arguments, '--split=iid', '--num_clients=3']) == 0
  output = capsys.readouterr().out
  assert 'after 3 rounds, on --dataset=digits --split=iid' in output
  assert '(other evaluations in it: 1)' in output
  rows = csv_rows.read(out / 'evaluation.csv')
  assert rows[: len(own)] == own
  test, *clients = rows[len(own) :]
  assert test['data_flags'] == '--split=iid --num_clients=3'
  assert len(clients) == 3
  assert float(test['loss']) == pytest.approx(float(last['test_loss']), 1e-5)


def test_evaluation_with_reestimated_statistics(comparison, tmp_path):
  folder, _, _ = comparison
  run = folder / 'runs' / 'fedbn-seed0'
  arguments = [f'--run={run}', f'--output_dir={tmp_path}']
  assert evaluate.run([*arguments, '--reestimate_statistics']) == 0
  test, clients = _evaluation(tmp_path)

  # mlp3 has one BN layer, whose input is that of the whole training data.
  dataset = tff_bn_data.load_dataset('digits')
  data = tff_bn_data.split_dataset(
      dataset, 'classes', 5, seed=0, classes_per_client=2
  )

  def expected_loss(client, train_indices, test_indices):
    model = tiny_runs.load(run, client)
    (batch_norm,) = [
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    inputs = keras.Model(model.input, batch_norm.input)(
        dataset.x_train[train_indices]
    ).numpy()
    batch_norm.moving_mean.assign(inputs.mean(axis=0))
    batch_norm.moving_variance.assign(inputs.var(axis=0))
    logits = model(dataset.x_test[test_indices], training=False)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        dataset.y_test[test_indices], logits
    )
    return losses.numpy().mean()

  everything = np.concatenate(list(data.train_indices.values()))
  assert float(test['loss']) == pytest.approx(
      expected_loss(None, everything, slice(None)),
      rel=1e-4,
  )
  for client in clients:
    name = client['client']
    assert float(client['loss']) == pytest.approx(
        expected_loss(
            name,
            data.train_indices[name],
            data.test_indices[name],
        ),
        rel=1e-4,
    )


def test_what_can_not_be_evaluated(comparison, tmp_path, capsys):
  folder, _, _ = comparison
  run = folder / 'runs' / 'fedavg-seed0'
  _save_npz(
      tmp_path / 'flat.npz',
      x_train=np.zeros((8, 5), np.float32),
      x_test=np.zeros((4, 5), np.float32),
  )
  unfinished = tmp_path / 'unfinished'
  unfinished.mkdir()
  (unfinished / 'flags.txt').write_bytes((run / 'flags.txt').read_bytes())
  for arguments, message in (
      ([], '--run=FOLDER is missing'),
      ([f'--run={tmp_path}'], 'holds no run'),
      ([f'--run={folder}'], 'is a comparison'),
      ([f'--run={unfinished}'], 'is not finished'),
      (
          [f'--run={run}', '--output_dir=/proc/nope'],
          '--output_dir=/proc/nope cannot be created',
      ),
      ([f'--run={run}', '--gamma=0.5'], '--gamma=0.5 is only for'),
      (
          [f'--run={run}', '--export_client=client_0'],
          f'--export_client=client_0 has no effect: the clients of --run={run}'
          f' have no own models. All use {run}/model/model.keras.',
      ),
      (
          [f'--run={run}', f'--dataset={tmp_path}/flat.npz', '--split=iid'],
          'samples of shape (5,)',
      ),
  ):
    assert evaluate.run(arguments) == 2
    captured = capsys.readouterr()
    error = printed.error(captured.err)
    assert error.startswith('tff-bn-evaluate: ')
    assert message in error
    assert not captured.out


@pytest.mark.parametrize(
    ('where', 'sent', 'code'),
    [
        ('in_process', signal.SIGINT, 130),
        pytest.param('in_process', signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param('in_process', signal.SIGKILL, -9, marks=pytest.mark.slow),
        pytest.param('native', signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param('ray', signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param('ray', signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_signal_ends_everything_and_the_same_command_goes_on(
    tmp_path, where, sent, code
):
  folder, temporary = tmp_path / 'run', tmp_path / 'temporary'
  temporary.mkdir()
  arguments = [
      '--algorithm=fedbn',
      '--model=mlp3',
      '--rounds=15',
      '--evaluate_every=1',
      '--checkpoint_every=100',
      '--num_clients=2',
      '--classes_per_client=5',
      f'--output_dir={folder}',
  ]
  errors = tmp_path / 'errors'
  found, commands = ended_programs.interrupt(
      train,
      [*arguments, f'--runtime={where}'],
      errors,
      sent,
      lambda text: 'round 1/' in text,
      TMPDIR=str(temporary),
  )
  assert found == code
  assert bool(commands) == (where != 'in_process')
  ray_folders = set(re.findall(r'/tmp/tff_bn_\w+', f'{commands}'))
  assert len(ray_folders) == (where == 'ray')
  assert not any(os.path.exists(folder) for folder in ray_folders)
  output = errors.read_text(encoding='utf-8')
  last = printed.error(output)
  saved = max(
      int(path.name.removeprefix('round_'))
      for path in (folder / 'checkpoints').iterdir()
  )
  if sent != signal.SIGKILL:
    ended = 'interrupted' if sent == signal.SIGINT else 'terminated'
    assert last == (
        f'tff-bn-train: {ended}. Round {saved} is saved; the same command'
        ' continues from there.'
    ), output
  if sent == signal.SIGKILL:
    assert saved == 0  # No other round was due.
  else:
    assert saved >= 1
  assert not (folder / 'model').exists()
  assert not list(temporary.iterdir())

  # The run goes on in the default runtime.
  assert train.run(arguments) == 0
  rounds = [int(row['round']) for row in csv_rows.read(folder / 'metrics.csv')]
  assert rounds == list(range(16))


def test_folder_in_use_is_left_alone(tmp_path, capsys):
  run, compared = tmp_path / 'run', tmp_path / 'compare'
  for folder in (run, compared, compared / 'runs' / 'fedbn-seed1'):
    folder.mkdir(parents=True)
    (folder / 'flags.txt').write_text('--algorithm=fedbn\n')
    (folder / 'metrics.csv').write_text('valuable')
  before = _file_times(tmp_path)
  arguments = [*_SMALL, '--overwrite']
  for program, folder, used in (
      (train, run, run),
      (compare, compared, compared),
      # This run is not part of the new comparison.
      (compare, compared, compared / 'runs' / 'fedbn-seed1'),
  ):
    extra = ['--algorithms=fedavg', '--seeds=0'] if program is compare else []
    with folder_lock.hold(used):
      assert program.run([*arguments, *extra, f'--output_dir={folder}']) == 2
    error = capsys.readouterr().err
    assert f'{used} is the folder of a run that is in progress' in error
    assert _file_times(tmp_path) == before
  assert train.run([*_SMALL, '--rounds=1', f'--output_dir={run}']) == 2


@pytest.mark.slow
def test_final_model_that_is_not_finite(tmp_path, capsys):
  arguments = [*_SMALL, '--client_learning_rate=1e23', '--local_steps=1']
  arguments += ['--rounds=1', f'--output_dir={tmp_path}']
  for _ in range(2):
    assert train.run(arguments) == 1
    error = capsys.readouterr().err
    assert 'The final model is not finite: its loss on the test data' in error
    assert 'not finite since round 1. It is not saved; metrics.csv' in error
    assert 'Likely causes: --client_learning_rate=1e+23, --server_' in error
    assert len(csv_rows.read(tmp_path / 'metrics.csv')) == 2
    assert not (tmp_path / 'model').exists()


def test_nothing_in_a_foreign_run_is_executed(copied, tmp_path, monkeypatch):
  """Checksums do not protect: the author of a run writes them, too."""
  run = copied[0] / 'runs' / 'fedavg-seed0'
  monkeypatch.chdir(tmp_path)
  evil = keras.Sequential(
      [
          keras.layers.Input([8, 8, 1]),
          keras.layers.Lambda(lambda x: [open('EXECUTED', 'w').close(), x][1]),
      ]
  )
  evil.save(tmp_path / 'evil.keras')
  evil.save(tmp_path / 'evil.h5')
  evil.export(tmp_path / 'evil', verbose=False)
  for name in ('evil.keras', 'evil.h5', 'evil'):
    (tmp_path / 'EXECUTED').unlink(missing_ok=True)
    path = run / 'model' / 'model.keras'
    if path.is_dir():
      shutil.rmtree(path)
    else:
      path.unlink()
    (tmp_path / name).rename(path)
    manifest = manifests.read(run / 'model', saved_models.FORMAT)
    manifest['files'] = dict(saved_models._checksums(run / 'model'))
    manifests.write(run / 'model', manifest)
    assert evaluate.run([f'--run={run}']) == 0
    assert not (tmp_path / 'EXECUTED').exists()


@pytest.mark.slow
def test_damaged_models_are_noticed_and_repaired(copied, tmp_path, capsys):
  folder, arguments = copied
  run = folder / 'runs' / 'fedbn-seed0'
  models, clients = run / 'model' / 'model.keras', run / 'model' / 'clients.npy'
  content = clients.read_bytes()
  for path in (clients, models):
    backup = path.rename(tmp_path / path.name)
    assert evaluate.run([f'--run={run}']) == 2
    assert f'{path} is missing' in capsys.readouterr().err
    path.write_bytes(backup.read_bytes()[:-9])
    assert evaluate.run([f'--run={run}']) == 2
    assert f'{path} was changed after the run' in capsys.readouterr().err
    if path == clients:
      backup.rename(path)
  clients.write_bytes(content[:-9])
  assert compare.run(arguments) == 0
  assert evaluate.run([f'--run={run}']) == 0
  assert clients.read_bytes() == content
