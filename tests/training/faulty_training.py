"""Trains many times, each time with another disk fault.

Run it as a program under LD_PRELOAD=file_faults.so, with a folder and a JSON
list of `[kind, count, step]`. The program trains without faults, then with
`count` successive faults from each `step`th file operation on, and each time
again without faults. file_faults.c lists the kinds. Every training runs in a
child process, so that TensorFlow is imported once. The program prints JSON
objects with the exit status, the error message and the number of operations.
"""

import ctypes
import json
import os
import sys
import traceback

import training_fakes

from tff_bn import training

CONFIG = training.TrainingConfig(
    rounds=3,
    batch_size=4,
    local_steps=1,
    clients_per_round=2,
    evaluate_every=2,
    checkpoint_every=1,
    save_client_models='all',
)


def in_child(run_dir, kind, number, count):
  """Trains in a child process with a fault."""
  reading, writing = os.pipe()
  child = os.fork()
  if not child:
    os.close(reading)
    text, faults = '', ctypes.CDLL(None)
    faults.file_faults_arm(os.fsencode(run_dir), kind, number, count)
    try:
      model = training_fakes.build_model()
      training_fakes.train(model, run_dir, CONFIG, stateful=True)
    except Exception as error:
      text = f'{type(error).__name__}: {error}'
      traceback.print_exc()
    made = faults.file_faults_count()
    with os.fdopen(writing, 'w') as pipe:
      json.dump(dict(text=text, operations=made), pipe)
    os._exit(bool(text))
  os.close(writing)
  with os.fdopen(reading) as pipe:
    said = pipe.read()
  _, status = os.waitpid(child, 0)
  result = json.loads(said) if said else dict(text='', operations=None)
  return dict(result, status=os.waitstatus_to_exitcode(status))


def main(folder, faults):
  whole = in_child(os.path.join(folder, 'whole'), 0, 1, 1)
  print(json.dumps(whole), flush=True)
  for kind, count, step in json.loads(faults):
    for number in range(1 + step // 2, whole['operations'], step):
      run_dir = os.path.join(folder, f'{kind} {count} {number}')
      pair = [in_child(run_dir, kind, number, count)]
      pair.append(in_child(run_dir, 0, 1, 1))
      print(json.dumps(dict(run_dir=run_dir, kind=kind, pair=pair)), flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
