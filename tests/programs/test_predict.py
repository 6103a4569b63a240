"""Tests of `tff-bn-evaluate --predict`."""

import json

import csv_rows
import keras
import numpy as np
from PIL import Image
import pytest
import tiny_runs

from tff_bn.programs import evaluate
from tff_bn.programs import train

_FLAGS = (
    '--model=mlp3',
    '--rounds=1',
    '--local_steps=2',
    '--batch_size=4',
    '--client_learning_rate=0.5',
)
_RNG = np.random.default_rng(0)
_PICTURES = _RNG.integers(0, 256, (3, 9, 7, 3), dtype=np.uint8)


@pytest.fixture(name='pictures', scope='module')
def fixture_pictures(tmp_path_factory):
  """A run on pictures of two clients, and the folder of three pictures."""
  folder = tmp_path_factory.mktemp('pictures')
  for client in ('a', 'b'):
    for part in ('train', 'test'):
      for label in ('cat', 'dog'):
        path = folder / 'data' / client / part / label
        path.mkdir(parents=True)
        for number in range(4):
          array = _RNG.integers(0, 256, (9, 7, 3), dtype=np.uint8)
          Image.fromarray(array).save(path / f'{number}.png')
  for number, array in enumerate(_PICTURES):
    Image.fromarray(array).save(folder / f'{number}.png')
  arguments = [
      *_FLAGS,
      f'--dataset=folder:{folder / "data"}',
      '--image_size=6x5',
      '--pixel_scaling=standardized',
      '--algorithm=fedbn',
      '--save_client_models=all',
      f'--output_dir={folder / "run"}',
  ]
  assert train.run(arguments) == 0
  return folder / 'run', folder


def _shares(path, manifest):
  """The probabilities of the pictures, in plain Keras."""
  x = keras.ops.image.resize(
      _PICTURES.astype(np.float32), (6, 5), antialias=True
  )
  x = np.rint(keras.ops.convert_to_numpy(x)) / 255
  scaling = manifest['pixel_scaling']
  x = (x - np.array(scaling['mean'])) / np.array(scaling['deviation'])
  saved = keras.models.load_model(path)
  outputs = tiny_runs.alone(saved).predict(x, verbose=0)
  # The file takes the raw pictures.
  np.testing.assert_allclose(
      saved.predict(_PICTURES, verbose=0), outputs, rtol=1e-4, atol=1e-5
  )
  return keras.ops.convert_to_numpy(keras.ops.softmax(outputs))


@pytest.mark.parametrize('client', [None, 'b'])
def test_pictures(pictures, client, tmp_path, capsys):
  run, folder = pictures
  files = [str(folder / f'{n}.png') for n in range(3)]
  arguments = [
      f'--run={run}',
      f'--predict={",".join(files)}',
      f'--output_dir={tmp_path}',
  ]
  model = run / 'model/model.keras'
  if client is not None:
    arguments.append(f'--client={client}')
    (model,) = (run / 'model').glob('**/b*.keras')
  assert evaluate.run(arguments) == 0
  rows = csv_rows.read(tmp_path / 'predictions.csv')
  expected = _shares(
      model, json.loads((run / 'model/manifest.json').read_bytes())
  )
  assert [row['file'] for row in rows] == files
  np.testing.assert_allclose(
      [
          [float(row[f'probability of {name}']) for name in ('cat', 'dog')]
          for row in rows
      ],
      expected,
      rtol=1e-4,
      atol=1e-6,
  )
  names = [('cat', 'dog')[n] for n in expected.argmax(axis=1)]
  assert [row['predicted'] for row in rows] == names
  assert f'{files[0]}: {names[0]}\n' in capsys.readouterr().out


def test_arrays(pictures, tmp_path):
  run, folder = pictures
  np.save(tmp_path / 'x.npy', _PICTURES)
  for name, paths in (('a', [tmp_path / 'x.npy']), ('b', folder.glob('*.png'))):
    assert (
        evaluate.run(
            [
                f'--run={run}',
                f'--predict={",".join(map(str, sorted(paths)))}',
                f'--output_dir={tmp_path / name}',
            ]
        )
        == 0
    )
  found, expected = (
      csv_rows.read(tmp_path / name / 'predictions.csv') for name in 'ab'
  )
  assert [row.pop('row') for row in found] == ['1', '2', '3']
  assert [row.pop('row') for row in expected] == [''] * 3
  for row, other in zip(found, expected, strict=True):
    assert row.pop('file') != other.pop('file')
    assert row == other


def test_long_outputs_are_cut(pictures, tmp_path, capsys):
  run, _ = pictures
  np.save(tmp_path / 'x.npy', np.resize(_PICTURES, (102, 9, 7, 3)))
  arguments = [f'--predict={tmp_path / "x.npy"}', f'--output_dir={tmp_path}']
  assert evaluate.run([f'--run={run}', *arguments]) == 0
  output = capsys.readouterr().out
  assert f'{tmp_path / "x.npy"}, row 100: ' in output
  assert 'row 101' not in output
  assert '\n… and 2 more in the table.\n' in output
  assert len(csv_rows.read(tmp_path / 'predictions.csv')) == 102


def test_refused(pictures, tmp_path, capsys):
  run, folder = pictures
  picture = folder / '0.png'
  text = tmp_path / 'text.png'
  text.write_text('No picture.')
  np.save(tmp_path / 'x.npy', np.zeros((2, 5)))
  for flags, message in (
      ([f'--predict={picture}', '--client=c'], '--client=c: the run has no mo'),
      (['--client=a'], '--client=a has an effect with --predict only'),
      (['--predict=none.png'], '--predict=none.png: there is no such file'),
      ([f'--predict={folder}'], f'--predict={folder}: this is a folder'),
      ([f'--predict={text}'], 'is no readable PNG or JPEG image'),
      ([f'--predict={tmp_path}/x.npy'], 'has the shape (2, 5); it must be'),
      (
          [f'--predict={picture}', '--export_client=a'],
          'exclude each other',
      ),
      (
          [f'--predict={picture}', '--split=iid'],
          '--split=iid has no effect with --predict',
      ),
  ):
    assert evaluate.run([f'--run={run}', *flags]) == 2
    assert message in capsys.readouterr().err
  assert not (run / 'predictions.csv').exists()
