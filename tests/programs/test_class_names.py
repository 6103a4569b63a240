"""Tests that programs match classes by name, and show the names."""

import shutil

import csv_rows
import numpy as np
from PIL import Image
import pytest

from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.results import plots
from tff_bn.programs.runs import finished_run
from tff_bn.programs.runs import run_folder
from tff_bn.training import finished

# The color of the pictures of each class, in all folders.
_COLORS = {
    'benign': (250, 20, 20),
    'cyst': (20, 250, 20),
    'malignant': (20, 20, 250),
    'normal': (240, 240, 20),
    'other': (20, 240, 240),
}
_ALL = ['benign', 'cyst', 'malignant', 'normal']


def _write(folder, **classes):
  """Writes noisy pictures of each class into each split."""
  rng = np.random.default_rng(len(str(folder)))
  for split, labels in classes.items():
    for label in labels:
      path = folder / split / label
      path.mkdir(parents=True)
      for number in range(6):
        x = np.array(_COLORS[label]) + rng.integers(-60, 60, (6, 5, 3))
        image = Image.fromarray(np.clip(x, 0, 255).astype(np.uint8))
        image.save(path / f'{number}.png')


def _pictures(folder, split):
  """Returns raw pictures of a split and the names of their classes."""
  files = sorted((folder / split).glob('*/*.png'))
  return [np.array(Image.open(file)) for file in files], [
      file.parent.name for file in files
  ]


@pytest.fixture(scope='module')
def clinics(tmp_path_factory):
  folder = tmp_path_factory.mktemp('clinics')
  _write(
      folder / 'rome',
      train=['benign', 'malignant', 'normal'],
      test=['malignant', 'normal'],
  )
  _write(
      folder / 'wien',
      train=['benign', 'cyst', 'normal'],
      test=['benign', 'cyst', 'normal'],
  )
  _write(folder / 'oslo', train=['cyst'], test=['cyst', 'normal'])
  _write(folder / 'bonn', train=['cyst', 'other'], test=['cyst'])
  return folder


def _flags(clinics):
  """Returns the flags of the run."""
  return [
      f'--dataset=domains:rome=folder:{clinics}/rome,wien=folder:{clinics}/wien',
      *('--model=mlp3', '--rounds=4', '--local_steps=6', '--batch_size=8'),
      *('--client_learning_rate=0.3', '--image_size=4x5'),
      '--pixel_scaling=standardized',
  ]


@pytest.fixture(scope='module')
def run(clinics, tmp_path_factory):
  """Returns the folder of a run."""
  folder = tmp_path_factory.mktemp('run') / 'run'
  arguments = [*_flags(clinics), '--algorithm=fedavg', f'--output_dir={folder}']
  assert train.run(arguments) == 0
  return folder


def _evaluated(run, folder, *arguments):
  """Evaluates a run; returns the accuracy on the whole test set."""
  assert (
      evaluate.run([f'--run={run}', f'--output_dir={folder}', *arguments]) == 0
  )
  rows = csv_rows.read(folder / 'evaluation.csv')
  (accuracy,) = (row['accuracy'] for row in rows if not row['client'])
  return float(accuracy)


def _code(output):
  """Returns the code in the lines after `Model:`."""
  lines = output.split('Model:   ')[1].split('\n')
  return [lines[0], *(line[9:] for line in lines[1:] if line[:9].isspace())]


@pytest.mark.slow
def test_run_knows_the_names(run):
  texts = run_folder.read_flags(run)
  assert texts['split'] == 'domains' and 'num_clients' not in texts
  manifest = finished.read_models_manifest(run / 'model')
  assert manifest['class_names'] == _ALL and manifest['num_classes'] == 4
  page = (run / 'report.html').read_text(encoding='utf-8')
  assert ', '.join(_ALL) in page
  assert '"client": "rome", "count": 6, "label": "benign"' in page


def test_printed_code_predicts_the_names_of_raw_pictures(
    run, clinics, tmp_path, capsys
):
  arguments = [*_flags(clinics), '--algorithm=fedavg', f'--output_dir={run}']
  assert train.run(arguments) == 0  # It is finished.
  printed = capsys.readouterr()
  assert 'each client has data of one domain (--split=domains)' in printed.err
  code = _code(printed.out)
  right = []
  for domain in ('rome', 'wien'):
    pictures, names = _pictures(clinics / domain, 'test')
    found = {'x': pictures}
    exec('\n'.join(code), found)
    right += np.equal(found['predicted'], names).tolist()
  accuracy = _evaluated(run, tmp_path)
  assert np.mean(right) == pytest.approx(accuracy)
  assert accuracy > 0.9


def test_evaluation_matches_classes_by_name(run, clinics, tmp_path, capsys):
  # Its own first class is the model's second one.
  accuracy = _evaluated(
      run,
      tmp_path,
      f'--dataset=folder:{clinics}/oslo',
      *('--split=iid', '--num_clients=1'),
  )
  assert accuracy > 0.9
  capsys.readouterr()
  arguments = [f'--run={run}', f'--dataset=folder:{clinics}/bonn']
  arguments += ['--split=iid', '--num_clients=1', f'--output_dir={tmp_path}']
  assert evaluate.run(arguments) == 2
  error = capsys.readouterr().err
  assert (
      f'--dataset=folder:{clinics}/bonn has classes that the model does not'
      f' know: other. Its classes are {", ".join(_ALL)}.'
  ) in error


def test_comparison_knows_the_names(run, clinics, tmp_path, monkeypatch):
  shutil.copytree(run, tmp_path / 'runs' / 'fedavg-seed0')
  drawn = []
  draw = plots.label_distribution

  def keep(data, title):
    drawn.append(data)
    return draw(data, title)

  monkeypatch.setattr(plots, 'label_distribution', keep)
  arguments = [*_flags(clinics), '--algorithms=fedavg', '--seeds=0']
  flags = command_line.parse(compare.define_flags, arguments)
  texts = compare.comparison_flags(flags, compare.plan(flags))
  run_folder.begin(tmp_path, compare.PROGRAM.name, texts, overwrite=False)
  assert compare.run([*arguments, f'--output_dir={tmp_path}']) == 0
  (data,) = drawn
  np.testing.assert_array_equal(
      data.label_distribution(), [[6, 0, 6, 6], [6, 6, 0, 6]]
  )
  assert (*data.client_ids, *data.class_names) == ('rome', 'wien', *_ALL)
  page = (tmp_path / 'report.html').read_text(encoding='utf-8')
  assert ', '.join(_ALL) in page


@pytest.mark.parametrize(
    'arguments, is_announced',
    [
        (['--dataset=digits_domains'], True),
        (['--sweep=dataset=digits,digits_domains'], True),
        (['--dataset=digits_domains', '--split=domains'], False),
        (['--dataset=digits_domains', '--sweep=split=iid,domains'], False),
        ([], False),
    ],
)
def test_comparison_prints_the_split(arguments, is_announced, tmp_path, capsys):
  arguments = [*arguments, '--algorithms=fedavg', '--list']
  assert compare.run([*arguments, f'--output_dir={tmp_path}']) == 0
  error = capsys.readouterr().err
  assert ('each client has data of one domain' in error) == is_announced


def test_analyses_match_classes_by_name(run, clinics, tmp_path):
  # Without the first class, each label is less by 1.
  for domain in ('rome', 'wien'):
    shutil.copytree(
        clinics / domain,
        tmp_path / domain,
        ignore=shutil.ignore_patterns('benign'),
    )
  settings = finished_run.read_settings(
      run,
      dict(
          dataset=(
              f'domains:rome=folder:{tmp_path}/rome,'
              f'wien=folder:{tmp_path}/wien'
          )
      ),
  )
  (analyzed,) = analyzed_run.load({run: ('', settings)})
  assert analyzed.data.class_names == tuple(_ALL)
  np.testing.assert_array_equal(
      analyzed.data.label_distribution(), [[0, 0, 6, 6], [0, 6, 0, 6]]
  )
