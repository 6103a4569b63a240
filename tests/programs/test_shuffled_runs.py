"""Tests of runs whose clients permute their hidden units."""

import tiny_runs

from tff_bn.programs import train


def test_a_continued_run_has_the_same_permutations(tmp_path):
  arguments = [*tiny_runs.FLAGS, '--shuffle_times=1', '--evaluate_every=1']
  texts = []
  for name, rounds in (('at_once', [2]), ('stopped', [1, 2]), ('off', [2])):
    folder = tmp_path / name
    more = ['--shuffle_times=0'] if name == 'off' else []
    for number in rounds:
      assert (
          train.run(
              [
                  *arguments,
                  *more,
                  f'--rounds={number}',
                  f'--output_dir={folder}',
              ]
          )
          == 0
      )
    model = tiny_runs.load(folder)
    texts.append(b''.join(w.tobytes() for w in model.get_weights()))
  assert texts[0] == texts[1] != texts[2]
