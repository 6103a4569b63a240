"""Programs for `faults`, which write into the folder that they get."""

import contextlib
import io
import pathlib
import shutil

import numpy as np
import PIL.Image
import tiny_runs
import vl_convert

from tff_bn.papers import analyze as analyze_program
from tff_bn.programs import compare as compare_program
from tff_bn.programs import evaluate as evaluate_program
from tff_bn.programs import train as train_program

# To draw takes most of the time of these runs.
vl_convert.vegalite_to_png = lambda *_, **__: b'picture'


def _run(program, *arguments):
  """Runs a program; an exception has its error message."""
  errors = io.StringIO()
  with contextlib.redirect_stdout(None), contextlib.redirect_stderr(errors):
    code = program.run(arguments)
  if code:
    raise RuntimeError(errors.getvalue())


def train(run_dir):
  """Trains with all that a run can write."""
  _run(
      train_program,
      *tiny_runs.FLAGS,
      '--rounds=2',
      '--algorithm=fedbn',
      '--held_out_clients=client_3',
      '--validation_share=0.2',
      '--keep_best=accuracy',
      '--evaluate_every=1',
      '--checkpoint_every=1',
      '--client_metrics_over_time',
      '--save_client_models=all',
      f'--output_dir={run_dir}',
  )


def compare(run_dir):
  """Compares two algorithms."""
  _run(
      compare_program,
      *tiny_runs.FLAGS,
      '--algorithms=fedavg,fedbn',
      '--seeds=0',
      '--held_out_clients=client_3',
      f'--output_dir={run_dir}',
  )


def prepare_evaluate(run_dir):
  """Trains a run and makes a picture, once."""
  folder = pathlib.Path(run_dir).parent
  if not (folder / 'run').exists():
    train(folder / 'unfinished')
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(8, 8), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(folder / 'a.png')
    shutil.move(folder / 'unfinished', folder / 'run')


def evaluate(run_dir):
  """Evaluates, predicts, adapts and exports the models of a run."""
  folder = pathlib.Path(run_dir).parent
  for arguments in (
      ('--reestimate_statistics',),
      ('--export_client=client_1',),
      ('--adapt=statistics',),
      (f'--predict={folder / "a.png"}',),
  ):
    _run(
        evaluate_program,
        f'--run={folder / "run"}',
        f'--output_dir={run_dir}',
        *arguments,
    )


def messages(run_dir):
  """Lists the messages of an algorithm."""
  _run(
      analyze_program,
      'messages',
      '--model=mlp3',
      '--algorithm=silobn',
      f'--output_dir={run_dir}',
  )
