"""The commands and the code of docs/hospitals.md, from top to bottom."""

import json
import pathlib
import re
import shlex

import csv_rows
import keras
import numpy as np
import pytest

from tff_bn.programs import evaluate
from tff_bn.programs import train

_PAGE = pathlib.Path(__file__).parents[1] / 'docs/hospitals.md'
_PROGRAMS = {'tff-bn-train': train.run, 'tff-bn-evaluate': evaluate.run}
# Fewer rounds than a reader has.
_REPLACED = [('--rounds=30', '--rounds=15')]


def _commands(block):
  for line in block.replace('\\\n', ' ').splitlines():
    yield shlex.split(line)


@pytest.mark.slow
def test_path_of_the_page(tmp_path, monkeypatch, capsys):
  text = _PAGE.read_text(encoding='utf-8')
  for old, new in _REPLACED:
    assert old in text
    text = text.replace(old, new)
  monkeypatch.chdir(tmp_path)
  namespace = {}
  printed = {}
  for language, block in re.findall(
      r'^```(python|sh)\n(.*?)^```', text, re.M | re.S
  ):
    if language == 'python':
      exec(block, namespace)
      continue
    for name, *arguments in _commands(block):
      # The names of pictures depend on the random split.
      arguments = [_existing(argument) for argument in arguments]
      capsys.readouterr()
      assert _PROGRAMS[name](arguments) == 0
      printed[' '.join(arguments)] = capsys.readouterr().out
  _check(tmp_path, namespace, printed)


def _existing(argument):
  """Returns an argument with the name of a picture that is there."""
  flag, _, value = argument.partition('=')
  if flag != '--predict':
    return argument
  return f'{flag}={min(pathlib.Path(value).parent.iterdir())}'


def _check(folder, namespace, printed):
  run = folder / 'runs/hospitals'
  # The exported model is right as often as the run says, on the raw files.
  manifest = json.loads((run / 'model/best/manifest.json').read_text())
  rows = [
      row
      for row in csv_rows.read(run / 'client_metrics.csv')
      if (int(row['round']), row['client']) == (manifest['round'], 'oslo')
  ]
  right = []
  for label, name in enumerate(manifest['class_names']):
    for path in (folder / 'hospitals/oslo/test' / name).iterdir():
      picture = keras.utils.img_to_array(keras.utils.load_img(path))
      outputs = namespace['model'].predict(picture[np.newaxis], verbose=0)
      right.append(outputs.argmax() == label)
  assert float(rows[0]['accuracy']) == pytest.approx(np.mean(right), abs=1e-6)
  # Its own batch normalization makes the model better for the new hospital.
  before, after = (
      [float(cell) for cell in csv_rows.cells(printed[command])[2][-2:]]
      for command in printed
      if '--adapt=' in command
  )
  assert before[0] == after[0] < 65
  assert min(before[1], after[1]) > before[0] + 15
  assert (folder / 'runs/paris/adapted_clients').is_dir()
  assert (run / 'predictions.csv').exists()
